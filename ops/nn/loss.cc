// nll_loss and cross_entropy. Both work on rows: logits [n, v], targets [n]. With sharded classes
// cross_entropy communicates tensors of n elements only, those of class indices in forward only.
#include <algorithm>
#include <memory>

#include "absl/strings/str_cat.h"
#include "dtensor/ops/nn/common.h"
#include "dtensor/ops/nn/cross_entropy.h"

namespace dtensor {
namespace {

absl::Status IntegerTarget(const OpCall& call, int input) {
  const DType t = call.dtype(input);
  if (t == DType::kI64 || t == DType::kI32) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("target must be int64 or int32, is ", TypeName(t)));
}

absl::StatusOr<FactorText> PickBackwardFactors(const OpCall& call) {
  return FactorText{"n, n -> n v", {{"v", call.Int("num_classes")}}};
}

void NllPickVjp(VjpCall& c) {
  static const OpDef& op = GetOp("nll_pick_backward");
  const DTensor &dy = c.grad(), &t = c.in(1);
  DispatchOptions options;
  options.like = &c.in_spec(0);
  c.set(0, Call1(op, {&dy, &t}, {IntAttr(c.in_spec(0).shape()[1]), IntAttr(c.Int("ignore_index"))},
                 options));
}

// -x[i, t[i]], 0 where t[i] is ignored.
DTensor NllPick(const DTensor& x, const DTensor& t, int64_t ignore_index) {
  static const OpDef& op = GetOp("nll_pick");
  return Call1(op, {&x, &t}, {IntAttr(ignore_index)});
}

DTensor SumExp(const DTensor& x, const DTensor& m) {
  static const OpDef& op = GetOp("sum_exp");
  return Call1(op, {&x, &m});
}

// What a loss of rows is made from, whatever the number of dims of the call.
struct LossRows {
  DTensor x;       // [n, v]
  DTensor target;  // [n], or [n, v] for probabilities
  DTensor weight;  // [v] or null
  Shape shape;     // of the unreduced loss
};

// x with the class dim moved last and the others flattened.
DTensor ClassesLast(const DTensor& x) {
  if (x.ndim() == 1) return unsqueeze(x, 0);
  if (x.ndim() == 2) return x;
  Dims order = {0};
  for (int d = 2; d < x.ndim(); ++d) order.push_back(d);
  order.push_back(1);
  return flatten(permute(x, order), 0, -2);
}

LossRows RowsOf(absl::string_view op, const DTensor& x, const DTensor& target,
                const DTensor& weight) {
  if (x.ndim() == 0) ThrowInvalid(op, "the input needs a class dim");
  RequireFloating(op, x);
  const int class_dim = x.ndim() == 1 ? 0 : 1;
  LossRows rows;
  rows.shape = x.shape();
  rows.shape.erase(rows.shape.begin() + class_dim);
  const bool probabilities = IsFloating(target.dtype());
  const Shape& want = probabilities ? x.shape() : rows.shape;
  if (target.shape() != want) {
    ThrowInvalid(op,
                 absl::StrCat("target must be ", ToString(want), " for an input of ",
                              ToString(x.shape()), ", is ", ToString(target.shape())),
                 {{"input", x}, {"target", target}});
  }
  if (weight.defined()) {
    if (weight.ndim() != 1 || weight.size(0) != x.size(class_dim)) {
      ThrowInvalid(op, absl::StrCat("weight must be [", x.size(class_dim), "], is ",
                                    ToString(weight.shape())));
    }
    rows.weight = probabilities ? weight : weight.Detach();  // as in PyTorch
  }
  rows.x = ClassesLast(x);
  rows.target = probabilities ? ClassesLast(target) : reshape(target, {target.numel()});
  return rows;
}

// What each row counts in a mean: its class's weight, 0 where ignored.
DTensor RowWeights(const LossRows& rows, int64_t ignore_index) {
  const DTensor ignored = eq(rows.target, ignore_index);
  const DTensor safe = masked_fill(rows.target, ignored, 0);
  const DTensor w = squeeze(embedding(safe, unsqueeze(rows.weight, 1)), {-1});
  return masked_fill(w, ignored, 0);
}

// Sum of what the rows count: the denominator of a mean.
DTensor TotalWeight(const LossRows& rows, const DTensor& row_weights, int64_t ignore_index) {
  if (row_weights.defined()) return sum(Wide(row_weights));
  return to(Settled(sum(ne(rows.target, ignore_index))), ComputeType(rows.x.dtype()));
}

// losses [n]; `total` is read for kMean only.
DTensor Reduced(const DTensor& losses, const LossRows& rows, const DTensor& total,
                Reduction reduction) {
  RequireReduction(reduction);
  const DType dtype = rows.x.dtype();
  if (reduction == Reduction::kNone) return reshape(to(losses, dtype), rows.shape);
  const DTensor all = sum(Wide(losses));
  return to(reduction == Reduction::kSum ? all : div(all, total), dtype);
}

DTensor NllOfRows(const LossRows& rows, int64_t ignore_index, Reduction reduction) {
  DTensor losses = NllPick(rows.x, rows.target, ignore_index), row_weights, total;
  if (rows.weight.defined()) {
    // Of a pending loss the terms are multiplied: an infinite one of several, not what others lack.
    row_weights = Settled(RowWeights(rows, ignore_index));
    losses = mul(losses, row_weights);
  }
  if (reduction == Reduction::kMean) total = TotalWeight(rows, row_weights, ignore_index);
  return Reduced(losses, rows, total, reduction);
}

bool HasWholeRows(const DTensor& x) {
  const absl::Span<const Placement> all = x.placements();
  return x.size(1) > 0 && std::none_of(all.begin(), all.end(), [](const Placement& p) {
           return p.is_flat() || (p.cuts_dim() && p.dim() == 1);
         });
}

// What the rows of logits are asked for, beside the loss of their targets.
struct Wanted {
  bool spread = false, log_sum = false;
};

// Numbers per row [n], 0 where the target is ignored; L = log(sum(exp(x))).
struct RowLosses {
  DTensor nll;      // L - x[t]
  DTensor spread;   // sum(w (L - x)) over classes of weights w; null if not wanted
  DTensor log_sum;  // L; null if not wanted
};

// The classes' weights, or that there are none: all 1.
struct ClassWeights {
  DTensor each, sum;  // null: 1, and their number
  double number;

  DTensor TimesSum(const DTensor& x) const { return sum.defined() ? mul(x, sum) : mul(x, number); }
  DTensor Weighted(const DTensor& x) const { return each.defined() ? mul(x, each) : x; }
};

// The parts of L = top + log_sum, apart: in their sum, the logarithm would lose what large logits
// leave of it.
struct Normalizer {
  DTensor top, log_sum;
};

// sum(w (top - x)) per row.
DTensor SpreadBelow(const DTensor& x, const DTensor& top, const ClassWeights& weights) {
  return sum(weights.Weighted(sub(unsqueeze(top, 1), Wide(x))), {1});
}

// Without an [n, v] intermediate, but for the spread's. Rows whose classes are cut are read twice,
// since the largest element is asked for from all ranks between; backward asks for nothing, since
// what a gradient has of all classes is in the rows' normalizers.
RowLosses FusedLosses(const LossRows& rows, int64_t ignore_index, const Wanted& wanted = {}) {
  const DTensor x = rows.x.Detach(), t = rows.target;
  const auto kept = std::make_shared<Normalizer>();
  ClassWeights weights = {{}, {}, static_cast<double>(x.size(1))};
  if (wanted.spread && rows.weight.defined()) {
    weights.each = Wide(rows.weight);
    weights.sum = Settled(sum(weights.each));
  }
  const auto forward = [&]() -> Values {
    DTensor nll, spread;
    if (HasWholeRows(x)) {
      static const OpDef& op = GetOp("cross_entropy_rows");
      const Values made = Call(op, {&x, &t}, {IntAttr(ignore_index)});
      nll = made[0];
      *kept = {made[1], made[2]};
      if (wanted.spread) spread = SpreadBelow(x, kept->top, weights);
    } else {
      const DTensor m = Settled(amax(x, {1})), top = Wide(m);
      Values parts = {SumExp(x, m), Wide(NllPick(x, t, ignore_index))};
      if (wanted.spread) parts.push_back(SpreadBelow(x, top, weights));
      if (parts[0].spec().has_partial()) {  // one reduction for all
        const DTensor all = Settled(stack(parts));
        for (size_t i = 0; i < parts.size(); ++i) parts[i] = select(all, 0, static_cast<int>(i));
      }
      *kept = {top, log(parts[0])};
      // (max - x[t]) + log_sum: the large terms cancel first.
      nll = masked_fill(add(add(parts[1], top), kept->log_sum), eq(t, ignore_index), 0);
      if (wanted.spread) spread = parts[2];
    }
    Values made = {nll};
    const auto counted = [&](const DTensor& y) {
      made.push_back(masked_fill(y, eq(t, ignore_index), 0));
    };
    if (wanted.spread) counted(add(spread, weights.TimesSum(kept->log_sum)));
    if (wanted.log_sum) counted(add(kept->top, kept->log_sum));
    return made;
  };
  // Of p = softmax(x): nll has p - onehot, L has p, and spread has sum(w) p - w.
  const auto backward = [x, t, kept, weights, wanted, ignore_index](const Values& given) -> Values {
    static const OpDef &of_rows = GetOp("cross_entropy_backward"),
                       &of_pick = GetOp("nll_pick_backward");
    DispatchOptions options;
    options.like = &x.spec();
    DTensor all = given[0], spread;
    if (wanted.spread) {
      spread = masked_fill(given[1], eq(t, ignore_index), 0);
      all = add(all, weights.TimesSum(spread));
    }
    if (wanted.log_sum) all = add(all, given.back());
    const DTensor dy = to(all, x.dtype());
    DTensor dx =
        Call1(of_rows, {&dy, &x, &kept->top, &kept->log_sum, &t}, {IntAttr(ignore_index)}, options);
    if (!wanted.spread && !wanted.log_sum) return {dx};
    const DTensor surplus = to(sub(given[0], all), x.dtype());  // what onehot has of dy too much
    dx = add(dx,
             Call1(of_pick, {&surplus, &t}, {IntAttr(x.size(1)), IntAttr(ignore_index)}, options));
    if (!wanted.spread) return {dx};
    const DTensor per_row = unsqueeze(to(spread, x.dtype()), 1);
    if (!weights.each.defined()) return {sub(dx, per_row)};
    return {addcmul(dx, per_row, to(weights.each, x.dtype()), -1)};
  };
  Values saves = {x, t};
  if (weights.each.defined()) saves.push_back(rows.weight);
  const Values made = CustomFunction("cross_entropy", {rows.x}, forward, backward, saves);
  return {made[0], wanted.spread ? made[1] : DTensor(), wanted.log_sum ? made.back() : DTensor()};
}

// Targets of class indices: part of the mass may be spread over all classes, and z_loss times the
// square of log(sum(exp(x))) be added.
DTensor IndexLoss(const LossRows& rows, int64_t ignore_index, Reduction reduction, double smoothing,
                  double z_loss) {
  const RowLosses of =
      FusedLosses(rows, ignore_index, {.spread = smoothing > 0, .log_sum = z_loss > 0});
  DTensor losses = of.nll, row_weights, total;
  if (rows.weight.defined()) {
    row_weights = Settled(RowWeights(rows, ignore_index));
    losses = mul(losses, row_weights);
  }
  if (smoothing > 0) {
    const double each = smoothing / static_cast<double>(rows.x.size(1));
    losses = add(mul(losses, 1 - smoothing), mul(of.spread, each));
  }
  const bool mean = reduction == Reduction::kMean;
  if (mean) total = TotalWeight(rows, row_weights, ignore_index);
  const DTensor loss = Reduced(losses, rows, total, reduction);
  if (z_loss == 0) return loss;
  if (mean && row_weights.defined()) total = TotalWeight(rows, {}, ignore_index);
  const DTensor squares = mul(mul(of.log_sum, of.log_sum), z_loss);
  return add(loss, Reduced(squares, rows, total, reduction));
}

// Targets of class probabilities.
DTensor ProbabilityLoss(const LossRows& rows, Reduction reduction, double smoothing) {
  const double classes = static_cast<double>(rows.x.size(1));
  DTensor target = rows.target;
  if (smoothing > 0) target = add(mul(target, 1 - smoothing), smoothing / classes);
  DTensor product = mul(log_softmax(rows.x, 1), target);
  if (rows.weight.defined()) product = mul(product, rows.weight);
  const DTensor losses = neg(sum(product, {1}));
  // The mean is over rows, whatever the weights.
  const DTensor count = full({}, static_cast<double>(rows.x.size(0)),
                             {ComputeType(rows.x.dtype()), rows.x.mesh(), {}});
  return Reduced(losses, rows, count, reduction);
}

}  // namespace

void RegisterLossOps() {
  Op("nll_pick(logp, t; ignore_index)")
      .Factors("n v, n -> n")
      .Linear("logp(t)")
      .Decreasing("logp")
      .NeedsOffset("v")
      .Check([](const OpCall& c) { return IntegerTarget(c, 1); })
      .Vjp(NllPickVjp, "t");
  Op("nll_pick_backward(dy, t; num_classes, ignore_index)")
      .Factors(PickBackwardFactors)
      .Linear("dy(t)")
      .Decreasing("dy")
      .NeedsOffset("v");
  Op("sum_exp(x, m)")
      .Factors("n v, n -> n")
      .Linear("(x, m)")
      .Check([](const OpCall& c) { return SameComputeTypes(c, 2); })
      .OutDType(
          [](const OpCall& c, int) -> absl::StatusOr<DType> { return ComputeType(c.dtype(0)); });
  Op("cross_entropy_rows(x, t; ignore_index) -> losses, top, log_sum")
      .Factors("n [v], n -> n, n, n")
      .Check([](const OpCall& c) { return IntegerTarget(c, 1); })
      .OutDType(
          [](const OpCall& c, int) -> absl::StatusOr<DType> { return ComputeType(c.dtype(0)); });
  Op("cross_entropy_backward(dy, x, top, log_sum, t; ignore_index)")
      .Factors("n, n v, n, n, n -> n v")
      .Linear("dy(x, top, log_sum, t)")
      .Check([](const OpCall& c) { return SameComputeTypes(c, 4); })
      .NeedsOffset("v")
      .OutDType([](const OpCall& c, int) -> absl::StatusOr<DType> { return c.dtype(1); });
}

DTensor nll_loss(const DTensor& logp, const DTensor& target, const DTensor& weight,
                 int64_t ignore_index, Reduction reduction) {
  return AsOp("nll_loss", {{"logp", logp}, {"target", target}, {"weight", weight, true}}, [&] {
    if (IsFloating(target.dtype())) ThrowInvalid("nll_loss", "target must hold class indices");
    return NllOfRows(RowsOf("nll_loss", logp, target, weight), ignore_index, reduction);
  });
}

namespace internal {

DTensor CrossEntropy(const DTensor& logits, const DTensor& target, const DTensor& weight,
                     int64_t ignore_index, Reduction reduction, double label_smoothing,
                     double z_loss) {
  if (!(label_smoothing >= 0 && label_smoothing <= 1)) {
    ThrowInvalid("cross_entropy",
                 absl::StrCat("label_smoothing must be in [0, 1], is ", label_smoothing));
  }
  const LossRows rows = RowsOf("cross_entropy", logits, target, weight);
  if (IsFloating(target.dtype())) return ProbabilityLoss(rows, reduction, label_smoothing);
  return IndexLoss(rows, ignore_index, reduction, label_smoothing, z_loss);
}

}  // namespace internal

DTensor cross_entropy(const DTensor& logits, const DTensor& target, const DTensor& weight,
                      int64_t ignore_index, Reduction reduction, double label_smoothing) {
  return AsOp("cross_entropy", {{"logits", logits}, {"target", target}, {"weight", weight, true}},
              [&] {
                return internal::CrossEntropy(logits, target, weight, ignore_index, reduction,
                                              label_smoothing, 0);
              });
}

}  // namespace dtensor
