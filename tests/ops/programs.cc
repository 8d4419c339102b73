#include "tests/ops/programs.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <memory>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "dtensor/intercept.h"
#include "dtensor/rng/generator.h"
#include "dtensor/tensor/device.h"
#include "dtensor/tensor/status.h"
#include "tests/common/random_layout.h"
#include "tests/ops/program_cases.h"
#include "tests/ops/program_ops.h"

namespace dtensor::testing {
namespace {

constexpr int64_t kMostElements = 240;
constexpr double kSmall = 1000;  // numbers that calls of case lines may take and give

DTensor MakeLeaf(const Step& step, const DeviceMesh& mesh, Args& args) {
  TensorOptions options{step.dtype, mesh, Placements(mesh.ndim())};
  DTensor t;
  if (IsFloating(step.dtype)) {
    std::vector<double> v;
    for (const int64_t bits : step.values) v.push_back(std::bit_cast<double>(bits));
    t = FromVector(v, step.shape, options);
  } else {
    t = FromVector(step.values, step.shape, options);
  }
  return MovedCopy(clone(t), args.Layout(step.shape, true)).Detach();
}

ValueBits BitsOf(const DTensor& t) {
  if (!IsFloating(t.dtype())) return t.ToVector<int64_t>();
  ValueBits bits;
  for (double v : t.ToVector<double>()) {
    if (std::isnan(v)) v = std::numeric_limits<double>::quiet_NaN();
    bits.push_back(std::bit_cast<int64_t>(v == 0 ? 0.0 : v));
  }
  return bits;
}

bool Share(const DTensor& a, const DTensor& b) {
  return a.defined() && b.defined() && a.local().buffer().SharesWith(b.local().buffer());
}

bool ShareAny(const Values& a, const std::vector<DTensor>& b) {
  return absl::c_any_of(a, [&](const DTensor& x) {
    return absl::c_any_of(b, [&](const DTensor& y) { return Share(x, y); });
  });
}

}  // namespace

Outcome Machine::Do(const Step& step, std::string* log) {
  Outcome outcome;
  try {
    Args args(step, mesh_, log);
    if (step.op == "leaf") {
      if (log != nullptr) absl::StrAppend(log, " ", ToString(step.shape));
      DTensor t = MakeLeaf(step, mesh_, args);
      if (GradEnabled() && step.dtype == DType::kF64) {
        t.RequiresGrad();
        leaves_.push_back(t);
      }
      values_.push_back(t);
      outcome.results = 1;
      return outcome;
    }
    std::vector<DTensor> in;
    for (const int i : step.in) in.push_back(values_[i]);
    const ProgramCase* line = FindProgramCase(step.op);
    const uint32_t is = line != nullptr ? line->entry.is & kWrites : ProgramOp(step.op).is;
    const auto run = [&](std::vector<DTensor> operands) {
      if (line != nullptr) return RunCase(*line, step, operands);
      Args drawn = args;
      operands.resize(3);
      return ProgramOp(step.op).run(drawn, operands[0], operands[1], operands[2]);
    };
    Values results;
    if (copies_ && !(is & (kView | kSnapshot))) {
      std::vector<DTensor> own = in;
      for (size_t i = is & kWrites ? 1 : 0; i < in.size(); ++i) own[i] = clone(in[i]);
      results = run(own);
      // positive(x) is x itself: a view, and not of a copy.
      if (!(is & kWrites) && ShareAny(results, own)) results = run(in);
    } else {
      results = run(in);
    }
    for (DTensor& result : results) {
      values_.push_back(std::move(result));
      ++outcome.results;
    }
  } catch (const Error& error) {
    outcome.error = error.status();
  }
  return outcome;
}

absl::StatusOr<ValueBits> Machine::Read(int value) const {
  if (!values_[value].defined()) return ValueBits();
  try {
    return BitsOf(values_[value]);
  } catch (const Error& error) {
    return error.status();
  }
}

absl::StatusOr<std::vector<ValueBits>> Machine::Backward() {
  std::vector<ValueBits> gradients;
  try {
    DTensor total;
    for (const DTensor& t : values_) {
      if (!t.defined() || !t.requires_grad()) continue;
      const DTensor part = sum(to(t, DType::kF64));
      total = total.defined() ? total + part : part;
    }
    if (!total.defined()) return gradients;
    total.Backward();
    for (const DTensor& leaf : leaves_) {
      const DTensor g = leaf.grad();
      gradients.push_back(g.defined() ? BitsOf(g) : ValueBits());
    }
  } catch (const Error& error) {
    return error.status();
  }
  return gradients;
}

// --- the reference: one rank, and what may be drawn ---------------------------------------------

namespace {

// Whole numbers up to here, and halves of them, are exact in the dtype.
double ExactLimit(DType t) {
  if (t == DType::kBF16) return 128;
  if (t == DType::kF16) return 1024;
  return t == DType::kF32 ? 0x1p23 : 0x1p40;
}

struct Facts {
  double largest = 0;  // of the finite elements
  bool whole = true, finite = true, nan = false;
};

// Of their last operand. The sign of a NaN is nobody's promise: of two NaN an instruction hands on
// the one that the compiler put first (IEEE 754 section 6.3 leaves it open).
bool ReadsSign(absl::string_view op) {
  return absl::StartsWith(op, "signbit") || absl::StartsWith(op, "copysign");
}

Facts FactsOf(const DTensor& t) {
  Facts f;
  if (!IsFloating(t.dtype())) {
    for (const double v : t.ToVector<double>()) f.largest = std::max(f.largest, std::fabs(v));
    return f;
  }
  for (const double v : t.ToVector<double>()) {
    if (!std::isfinite(v)) {
      f.finite = false;
      f.nan |= std::isnan(v);
      continue;
    }
    f.largest = std::max(f.largest, std::fabs(v));
    f.whole &= v == std::rint(v);
  }
  return f;
}

// A pending sum forgets the sign of zero, which 1 / x tells.
bool HasMinusZero(const DTensor& t) {
  if (!IsFloating(t.dtype())) return false;
  const std::vector<double> values = t.ToVector<double>();
  return std::any_of(values.begin(), values.end(),
                     [](double v) { return v == 0 && std::signbit(v); });
}

// What is known of a value beyond its elements on one rank.
struct Meta {
  bool pending = false;  // may be a pending sum on a mesh
  double bound = 0;      // then: no sum of some of its terms is larger
  bool maximum = false;  // may be a pending maximum, minimum or product
  DTensor snapshot_of;   // not to be written, and gone when this one is
};

class Runner {
 public:
  explicit Runner(bool grad) : machine_(DeviceMesh::Self()) {
    reference_.program.grad = grad;
    ManualSeed(1);
  }
  const std::vector<DTensor>& values() const { return machine_.values(); }

  // Runs the step if it is admissible.
  bool Try(const Step& step) {
    const ProgramCase* line = FindProgramCase(step.op);
    const OpEntry* op = step.op == "leaf" ? nullptr
                        : line != nullptr ? &line->entry
                                          : &ProgramOp(step.op);
    if (line != nullptr && !ExactlyKnown(*line, step)) return false;
    double bound = 0;
    if (op != nullptr && !Admissible(step, *op, &bound)) return false;
    std::vector<int> drops;
    if (op != nullptr && (op->is & kWrites)) drops = SnapshotsOf(values()[step.in[0]]);
    Outcome outcome = machine_.Do(step);
    if (!outcome.error.ok()) drops.clear();
    metas_.resize(values().size());
    for (int i = 0; i < outcome.results; ++i) {
      const int v = static_cast<int>(values().size()) - outcome.results + i;
      metas_[v] = MetaOf(step, op, bound, values()[v]);
      if (values()[v].numel() > kMostElements || (metas_[v].pending && HasMinusZero(values()[v]))) {
        drops.push_back(v);
      }
    }
    if (op != nullptr && (op->is & kWrites)) {
      const bool of_pending =
          std::any_of(step.in.begin(), step.in.end(), [&](int i) { return metas_[i].pending; });
      Written(step, bound);
      for (int v = 0; v < static_cast<int>(values().size()); ++v) {
        const bool forgets = (of_pending || metas_[v].pending) &&
                             Share(values()[v], values()[step.in[0]]) && HasMinusZero(values()[v]);
        if (forgets && std::find(drops.begin(), drops.end(), v) == drops.end()) drops.push_back(v);
      }
    }
    for (const int v : drops) machine_.Drop(v);
    reference_.program.steps.push_back(step);
    reference_.outcomes.push_back(std::move(outcome));
    reference_.drops.push_back(std::move(drops));
    return true;
  }

  Reference Finish() {
    bool finite = true;
    for (size_t v = 0; v < values().size(); ++v) {
      reference_.finals.push_back(machine_.Read(static_cast<int>(v)));
      if (values()[v].defined()) finite &= FactsOf(values()[v]).finite;
    }
    if (reference_.program.grad && finite) {
      reference_.gradients = machine_.Backward();
      reference_.compare_gradients = !reference_.gradients.ok() || Exact(*reference_.gradients);
      const absl::Status& status = reference_.gradients.status();
      if (absl::StrContains(status.message(), kChangedSince)) {
        reference_.gradients_of_copies = GradientsOfCopies();
      }
    }
    return std::move(reference_);
  }

 private:
  // Unless the program becomes another one with copies (of what it writes through a view).
  absl::StatusOr<std::vector<ValueBits>> GradientsOfCopies() const {
    const absl::Status another = absl::FailedPreconditionError("another program");
    Machine copies(DeviceMesh::Self(), /*copies=*/true);
    ManualSeed(1);
    for (size_t s = 0; s < reference_.program.steps.size(); ++s) {
      const Outcome got = copies.Do(reference_.program.steps[s]);
      const Outcome& want = reference_.outcomes[s];
      if (got.error.code() != want.error.code() || got.results != want.results) return another;
      for (const int v : reference_.drops[s]) copies.Drop(v);
    }
    for (size_t v = 0; v < values().size(); ++v) {
      const absl::StatusOr<ValueBits> got = copies.Read(static_cast<int>(v));
      const absl::StatusOr<ValueBits>& want = reference_.finals[v];
      if (got.ok() != want.ok() || (got.ok() && *got != *want)) return another;
    }
    absl::StatusOr<std::vector<ValueBits>> gradients = copies.Backward();
    if (gradients.ok() && !Exact(*gradients)) return another;
    return gradients;
  }

  static bool Exact(const std::vector<ValueBits>& gradients) {
    for (const ValueBits& bits : gradients) {
      for (const int64_t b : bits) {
        const double v = std::bit_cast<double>(b);
        if (!(std::fabs(v) <= 0x1p30) || v * 1024 != std::rint(v * 1024)) return false;
      }
    }
    return true;
  }

  // Tried on copies: whether a call of a case line takes and gives small whole numbers, in any
  // order of adding the same. Not by chance (a mean of what sums to zero): for operands that have
  // another first element, or others everywhere, too.
  bool ExactlyKnown(const ProgramCase& line, const Step& step) const {
    if (reference_.program.grad && line.shares) return false;
    for (const int i : step.in) {
      if (!values()[i].defined() || !IsSmall(values()[i])) return false;
      if (reference_.program.grad && values()[i].dtype() != DType::kF64) return false;
    }
    for (int other = -1; other < static_cast<int>(step.in.size()); ++other) {
      if (!GivesWhole(line, step, other, false) || !GivesWhole(line, step, other, true)) {
        return false;
      }
    }
    return !reference_.program.grad || GivesExactGradients(line, step);
  }
  // What 0.01 or a sixth is multiplied with in a backward is exact by chance only, and not of terms
  // that ranks add up later: so every number that the backward makes is looked at, also those that
  // cancel in the end. Of results that all have the gradient 1.
  bool GivesExactGradients(const ProgramCase& line, const Step& step) const {
    std::vector<DTensor> leaves, operands;
    for (const int i : step.in) {
      leaves.push_back(clone(values()[i].Detach()).RequiresGrad());
      operands.push_back(mul(leaves.back(), 1.0));  // a leaf could not be changed in place
    }
    try {
      DTensor total = zeros({}, {.dtype = DType::kF64});
      for (const DTensor& result : RunCase(line, step, operands)) {
        if (result.requires_grad()) total = total + sum(to(result, DType::kF64));
      }
      std::vector<ValueBits> gradients;
      const InterceptCalls look([&](InterceptedCall& call) {
        const Values made = call.Proceed();
        for (const DTensor& t : made) {
          if (IsFloating(t.dtype())) gradients.push_back(BitsOf(t));
        }
        return made;
      });
      if (total.requires_grad()) total.Backward();
      for (const DTensor& leaf : leaves) {
        if (leaf.grad().defined()) gradients.push_back(BitsOf(leaf.grad()));
      }
      return Exact(gradients);
    } catch (const Error& e) {
      return !IsRankLocal(e.status());  // refused: on a mesh, too
    }
  }
  static bool IsSmall(const DTensor& t) {
    const Facts f = FactsOf(t);
    return f.finite && f.whole && f.largest <= kSmall;
  }
  // With one more in the first element of operand `other`, or 0 to 2 more in all, if it is
  // floating.
  bool GivesWhole(const ProgramCase& line, const Step& step, int other, bool everywhere) const {
    const NoGrad no_grad;
    std::vector<DTensor> copies;
    for (size_t i = 0; i < step.in.size(); ++i) {
      copies.push_back(clone(values()[step.in[i]].Detach()));
      if (static_cast<int>(i) != other) continue;
      const int64_t n = copies[i].numel();
      if (!IsFloating(copies[i].dtype()) || n == 0) return true;
      std::vector<double> more(n, 0);
      more[0] = 1;
      for (int64_t k = 1; everywhere && k < n; ++k) more[k] = static_cast<double>((k + k / 3) % 3);
      add_(reshape(copies[i], {-1}), FromVector(more, {n}, {copies[i].dtype(), copies[i].mesh()}));
    }
    try {
      const Values results = RunCase(line, step, copies);
      // Now and not in another step: what a kernel on a device finds wrong with its data.
      ThrowIfError(RankDevices::Current().Synchronize());
      if ((line.entry.is & kWrites) && !IsSmall(copies[0])) return false;
      return std::all_of(results.begin(), results.end(), IsSmall);
    } catch (const Error& e) {
      return !IsRankLocal(e.status());  // refused: on a mesh, too
    }
  }

  // A gradient that passes through fewer bits than leaves have is rounded there, and what ranks add
  // up later is rounded otherwise.
  bool RecordsNarrow(const Step& step, const OpEntry& op) const {
    bool records = false, narrow = false, wide = false;
    for (const int i : step.in) {
      const DTensor& x = values()[i];
      if (!x.defined() || !IsFloating(x.dtype())) continue;
      const bool counts = op.is & kWrites ? i == step.in[0] : x.ndim() > 0;  // for the dtype
      records |= x.requires_grad();
      (x.dtype() == DType::kF64 ? wide : narrow) |= counts;
    }
    return records && narrow && !wide;
  }

  bool Admissible(const Step& step, const OpEntry& op, double* bound) const {
    if (reference_.program.grad && (op.is & (kInexact | kScales | kFills))) return false;
    if (reference_.program.grad && (step.op == "to" || RecordsNarrow(step, op))) return false;
    bool pending = false, whole = true, factors_pending = false;
    double limit = std::numeric_limits<double>::infinity();  // integers wrap around
    double sum = 0, product = 1, numel = 1;
    std::vector<Facts> facts;
    for (size_t i = 0; i < step.in.size(); ++i) {
      const DTensor& x = values()[step.in[i]];
      if (!x.defined()) return false;
      const Meta& meta = metas_[step.in[i]];
      facts.push_back(FactsOf(x));
      pending |= meta.pending;
      factors_pending |= meta.pending && i < 2;
      whole &= facts.back().whole;
      const double b =
          meta.pending ? std::max(meta.bound, facts.back().largest) : facts.back().largest;
      if (IsFloating(x.dtype())) limit = std::min(limit, ExactLimit(x.dtype()));
      sum += b;
      product *= std::max(b, 1.0);
      numel = std::max(numel, static_cast<double>(x.numel()));
    }
    if (!facts.empty() && facts.back().nan && ReadsSign(step.op)) return false;
    if ((op.is & kWrites) && metas_[step.in[0]].snapshot_of.defined()) return false;
    if ((op.is & kFills) && pending) return false;
    if ((op.is & kScales) && metas_[step.in[0]].maximum) return false;
    *bound = 4 * sum;
    if (op.is & kProduct) *bound = product;
    if (op.is & kSums) *bound = (op.is & kProduct ? product + sum : sum) * numel;
    if ((op.is & kSums) || ((op.is & kLinear) && pending)) {
      // A cast may narrow; it does not round what is small.
      if (!whole || *bound > (step.op == "to" ? 128 : limit)) return false;
    }
    // What is not finite times a term is not what it is times the sum.
    if ((op.is & kProduct) && factors_pending) {
      if (!facts[0].finite || !facts[1].finite) return false;
    }
    return true;
  }

  Meta MetaOf(const Step& step, const OpEntry* op, double bound, const DTensor& result) const {
    Meta meta;
    const bool otherwise = Args::MayReduceOtherwise(step);
    if (op == nullptr) return {true, FactsOf(result).largest, otherwise, {}};
    meta.pending = (op->is & (kSums | kMoves)) != 0;
    meta.bound = bound;
    for (const int i : step.in) {
      meta.pending |= (op->is & kLinear) && metas_[i].pending;
      meta.maximum |= metas_[i].maximum;
    }
    meta.maximum |= (op->is & kMoves) && otherwise;
    meta.maximum |= step.op == "amax" || FindProgramCase(step.op) != nullptr;
    if (op->is & kSettles) meta = {};
    if (op->is & kSnapshot) meta.snapshot_of = values()[step.in[0]];
    const Meta& from = metas_[step.in[0]];
    if ((op->is & (kView | kSnapshot)) && from.snapshot_of.defined()) {
      meta.snapshot_of = from.snapshot_of;
    }
    return meta;
  }

  void Written(const Step& step, double bound) {
    bool maximum = false;
    for (const int i : step.in) maximum |= metas_[i].maximum;
    for (size_t v = 0; v < values().size(); ++v) {
      if (!Share(values()[v], values()[step.in[0]])) continue;
      metas_[v].bound = std::max(metas_[v].bound, bound);
      metas_[v].maximum |= maximum;
    }
  }

  std::vector<int> SnapshotsOf(const DTensor& written) const {
    std::vector<int> all;
    for (size_t v = 0; v < values().size(); ++v) {
      if (Share(metas_[v].snapshot_of, written) && values()[v].defined()) {
        all.push_back(static_cast<int>(v));
      }
    }
    return all;
  }

  Machine machine_;
  std::vector<Meta> metas_;
  Reference reference_;
};

class Drawer {
 public:
  explicit Drawer(uint64_t seed) : dice_(seed), grad_(dice_.Chance(30)), runner_(grad_) {}

  Reference Draw() {
    std::unique_ptr<NoGrad> no_grad;
    if (!grad_) no_grad = std::make_unique<NoGrad>();
    for (int64_t i = dice_.Between(1, 3); i > 0; --i) {
      Leaf(RandomShape(dice_, 0), RandomType());
    }
    const int64_t steps = dice_.Between(5, 20);
    int64_t done = 0;
    for (int attempt = 0; attempt < 100 && done < steps; ++attempt) done += Next() ? 1 : 0;
    return runner_.Finish();
  }

 private:
  DType RandomType() {
    if (grad_ && dice_.Chance(70)) return DType::kF64;
    return static_cast<DType>(dice_.Below(kNumDTypes));
  }

  // Whole numbers; now and then what is not finite, or at the ends of an integer type.
  std::vector<int64_t> RandomValues(int64_t n, DType t) {
    const bool edges = !grad_ && dice_.Chance(25);
    std::vector<int64_t> values;
    for (int64_t i = 0; i < n; ++i) {
      const bool edge = edges && dice_.Chance(15);
      if (IsFloating(t)) {
        const double inf = std::numeric_limits<double>::infinity();
        const double odd[] = {inf, -inf, std::numeric_limits<double>::quiet_NaN()};
        const double v = edge ? odd[dice_.Below(3)] : static_cast<double>(dice_.Between(-3, 3));
        values.push_back(std::bit_cast<int64_t>(v));
      } else if (edge) {
        values.push_back(t == DType::kI64 ? std::numeric_limits<int64_t>::min() + dice_.Below(2)
                                          : std::numeric_limits<int32_t>::max() - dice_.Below(90));
      } else {
        const int64_t low = t == DType::kU8 || t == DType::kBool ? 0 : -3;
        values.push_back(dice_.Between(low, 3));
      }
    }
    return values;
  }

  int Leaf(const Shape& shape, DType dtype) {
    Step leaf{"leaf", {}, Raw(), RandomValues(Numel(shape), dtype), shape, dtype};
    runner_.Try(leaf);
    return static_cast<int>(runner_.values().size()) - 1;
  }

  std::vector<uint64_t> Raw() {
    std::vector<uint64_t> raw;
    for (int i = 0; i < 8; ++i) raw.push_back(static_cast<uint64_t>(dice_.Below(1 << 30)));
    return raw;
  }

  // An alive value, mostly a young one; -1 if there is none.
  int Any() {
    const int n = static_cast<int>(runner_.values().size());
    for (int attempt = 0; attempt < 20; ++attempt) {
      const int v =
          static_cast<int>(dice_.Chance(50) ? n - 1 - dice_.Below(std::min(n, 4)) : dice_.Below(n));
      if (runner_.values()[v].defined()) return v;
    }
    return -1;
  }

  const OpEntry& RandomOp() {
    const bool write = dice_.Chance(35);
    while (true) {
      const OpEntry& op = ProgramOps()[dice_.Below(static_cast<int64_t>(ProgramOps().size()))];
      if (!write || (op.is & kWrites)) return op;
    }
  }

  // A second operand for x: one that broadcasts with it, or a new leaf that does.
  int Partner(const DTensor& x) {
    const int v = Any();
    if (v >= 0 && dice_.Chance(60)) {
      const absl::StatusOr<Shape> both = BroadcastShapes(x.shape(), runner_.values()[v].shape());
      if (both.ok() && Numel(*both) <= kMostElements) return v;
    }
    Shape shape = x.shape();
    for (int64_t& size : shape) size = dice_.Chance(20) ? 1 : size;
    if (!shape.empty() && dice_.Chance(20)) shape.erase(shape.begin());
    return Leaf(shape, dice_.Chance(75) ? x.dtype() : RandomType());
  }

  // Whole numbers that the case line says its operand may have.
  int CaseLeaf(const CaseTensor& t) {
    std::vector<int64_t> values;
    const int64_t low = static_cast<int64_t>(std::ceil(t.low)),
                  high = std::max(low, static_cast<int64_t>(std::floor(t.high)));
    for (int64_t i = Numel(t.shape); i > 0; --i) {
      const int64_t v = t.below > 0               ? dice_.Below(t.below)
                        : t.dtype == DType::kBool ? dice_.Below(2)
                        : IsFloating(t.dtype)     ? dice_.Between(low, high)
                                                  : dice_.Below(4);
      values.push_back(IsFloating(t.dtype) ? std::bit_cast<int64_t>(static_cast<double>(v)) : v);
    }
    runner_.Try({"leaf", {}, Raw(), values, t.shape, t.dtype});
    return static_cast<int>(runner_.values().size()) - 1;
  }

  // A call of any case line, of values that are there where they fit.
  bool NextCase() {
    const auto& cases = ProgramCases();
    const ProgramCase& line = cases[dice_.Below(static_cast<int64_t>(cases.size()))];
    const int first = Any();
    if (first < 0) return false;
    const Shape like = runner_.values()[first].shape();
    Step step{line.entry.name, {}, Raw(), {}, {}, {}};
    for (size_t i = 0; i < line.pattern.letters().size(); ++i) {
      const bool known = !like.empty() && dice_.Chance(70);
      step.shape.push_back(known ? like[dice_.Below(static_cast<int64_t>(like.size()))]
                                 : dice_.Between(1, 4));
    }
    const CaseSample sample =
        SampleOf(line, step.shape, std::vector<Shape>(8, like));  // of no more operands
    if (sample.tensors.empty()) return false;
    for (const CaseTensor& t : sample.tensors) {
      if (Numel(t.shape) > kMostElements) return false;
      int at = -1;
      for (int attempt = 0; attempt < 8 && at < 0 && t.below == 0; ++attempt) {
        const int v = attempt == 0 && step.in.empty() ? first : Any();
        if (v >= 0 && runner_.values()[v].shape() == t.shape &&
            runner_.values()[v].dtype() == t.dtype) {
          at = v;
        }
      }
      step.in.push_back(at >= 0 ? at : CaseLeaf(t));
    }
    return runner_.Try(step);
  }

  bool Next() {
    if (dice_.Chance(25)) return NextCase();
    const OpEntry& op = RandomOp();
    const int first = Any();
    if (first < 0) return false;
    Step step{op.name, {first}, Raw(), {}, {}, {}};
    const DTensor x = runner_.values()[first];
    const int64_t last = x.ndim() > 0 ? x.shape()[x.ndim() - 1] : 1;
    if (step.op == "matmul") {
      step.in.push_back(Leaf({last, dice_.Between(0, 4)}, x.dtype()));
    } else if (step.op == "linear") {
      const int64_t n = dice_.Between(1, 4);
      step.in.push_back(Leaf({n, last}, x.dtype()));
      step.in.push_back(Leaf({n}, x.dtype()));
    } else if (step.op == "cat") {
      step.in.push_back(dice_.Chance(30) ? first : Leaf(x.shape(), x.dtype()));
    } else if (op.inputs == 2) {
      step.in.push_back(Partner(x));
    }
    return runner_.Try(step);
  }

  Dice dice_;
  bool grad_;
  Runner runner_;
};

}  // namespace

Reference DrawProgram(uint64_t seed) { return Drawer(seed).Draw(); }

absl::StatusOr<Reference> RunReference(const Program& program) {
  std::unique_ptr<NoGrad> no_grad;
  if (!program.grad) no_grad = std::make_unique<NoGrad>();
  Runner runner(program.grad);
  for (const Step& step : program.steps) {
    if (!runner.Try(step)) {
      return absl::FailedPreconditionError(absl::StrCat(step.op, " is not admissible"));
    }
  }
  return runner.Finish();
}

Program Without(const Program& program, const std::vector<Outcome>& outcomes, size_t step) {
  Program rest;
  rest.grad = program.grad;
  std::vector<int> number;  // of a value in the rest; -1: gone
  int next = 0;
  for (size_t s = 0; s < program.steps.size(); ++s) {
    Step copy = program.steps[s];
    bool gone = s == step;
    for (int& i : copy.in) {
      i = number[i];
      gone |= i < 0;
    }
    for (int r = 0; r < outcomes[s].results; ++r) number.push_back(gone ? -1 : next++);
    if (!gone) rest.steps.push_back(std::move(copy));
  }
  return rest;
}

}  // namespace dtensor::testing
