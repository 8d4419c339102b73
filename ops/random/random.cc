// Random ops on DTensor: dropout and its kin, draws in place, permutations, samples; and Recompute,
// which runs a function again with the same numbers.
#include <algorithm>
#include <cmath>
#include <exception>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "dtensor/ops/ops.h"
#include "dtensor/ops/rows.h"
#include "dtensor/ops/rules.h"
#include "dtensor/rng/dropout.h"
#include "dtensor/rng/generator.h"
#include "dtensor/rng/sampling.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

TensorOptions Like(const DTensor& x, DType dtype) {
  return {.dtype = dtype, .mesh = x.mesh(), .placements = WithoutPending(x.placements())};
}

// What drops nothing takes integers, too.
// A call that is refused after it drew numbers draws none.
class DrawScope {
 public:
  DrawScope() = default;
  DrawScope(const DrawScope&) = delete;
  ~DrawScope() {
    if (std::uncaught_exceptions() > exceptions_) (void)generator_.SetOffset(before_);
  }

 private:
  Generator& generator_ = DefaultGenerator();
  const uint64_t before_ = generator_.offset();
  const int exceptions_ = std::uncaught_exceptions();
};

void CheckP(absl::string_view op, const DTensor& x, double p, bool drops = true) {
  RequireDefined(op, {{"x", x}});
  RequireOwn(op, {{"x", x}});
  if (drops) RequireFloating(op, x);
  if (p >= 0 && p <= 1) return;
  ThrowInvalid(op, absl::StrCat("p must be in [0, 1], got ", p), {{"x", x}});
}

void ThrowNamed(absl::string_view op, std::initializer_list<NamedInput> inputs,
                const absl::Status& status) {
  if (status.ok()) return;
  const std::optional<ErrorOrigin> origin = OriginOf(status);
  const absl::Status named = ExplainError(op, absl::MakeConstSpan(inputs.begin(), inputs.size()),
                                          origin ? origin->cause : status);
  Throw(inputs.size() == 0 ? named : TellPeers(inputs.begin()->value.mesh(), named));
}

// The tensor as it is, whole, on this rank.
Tensor WholeLocal(const DTensor& x) {
  const NoGrad no_grad;
  return x.Redistribute(Placements(x.mesh().ndim())).local();
}

}  // namespace

void random_(const DTensor& t, int64_t from, int64_t to) {
  random_fill_(t, RandomRangeOp(from, to));
}
void random_(const DTensor& t) { random_fill_(t, RandomFullOp()); }
void bernoulli_(const DTensor& t, double p) { random_fill_(t, BernoulliOp(p)); }
void exponential_(const DTensor& t, double lambda) { random_fill_(t, ExponentialOp(lambda)); }
void cauchy_(const DTensor& t, double median, double sigma) {
  random_fill_(t, CauchyOp(median, sigma));
}
void log_normal_(const DTensor& t, double mean, double std) {
  random_fill_(t, LogNormalOp(mean, std));
}
void geometric_(const DTensor& t, double p) { random_fill_(t, GeometricOp(p)); }

void bernoulli_(const DTensor& t, const DTensor& p) {
  RequireDefined("bernoulli_", {{"self", t}, {"p", p}});
  if (t.shape() != p.shape() || !(t.mesh() == p.mesh()) || !IsFloating(p.dtype())) {
    ThrowInvalid("bernoulli_", "p must be floating and have self's shape and mesh",
                 {{"self", t}, {"p", p}});
  }
  const DTensor placed = p.Detach().Redistribute(WithoutPending(t.placements()));
  if (t.spec().has_partial()) {
    ThrowInvalid("bernoulli_", "self must not be pending; redistribute it first", {{"self", t}});
  }
  const auto draw = [&](const DTensor& self) {
    return FillBernoulli(self.local(), placed.local(), placed.spec(), nullptr, MemoryStrides(self),
                         MemoryStrides(p));
  };
  random_fill_("bernoulli_", t, draw, {{"p", p}});
}

DTensor bernoulli(const DTensor& p) {
  RequireDefined("bernoulli", {{"p", p}});
  const DTensor out = empty(p.shape(), Like(p, p.dtype()));
  bernoulli_(out, p);
  return out;
}

DTensor randint(int64_t low, int64_t high, IntSpan shape, TensorOptions options) {
  if (!options.dtype) options.dtype = DType::kI64;
  const DTensor t = empty(shape, options);
  random_(t, low, high);
  return t;
}
DTensor rand_like(const DTensor& x) {
  const DTensor t = empty_like(x);
  uniform_(t);
  return t;
}
DTensor randn_like(const DTensor& x) {
  const DTensor t = empty_like(x);
  normal_(t);
  return t;
}
DTensor randint_like(const DTensor& x, int64_t low, int64_t high) {
  const DTensor t = empty_like(x);
  random_(t, low, high);
  return t;
}

DTensor randperm(int64_t n, const TensorOptions& options) {
  absl::StatusOr<Tensor> whole = RandomPermutation(n);
  ThrowNamed("randperm", {}, whole.status());
  Placements placements = options.placements;
  if (options.mesh.defined()) placements.resize(options.mesh.ndim());
  return DistributeTensor(ValueOrThrow(whole->To(options.dtype.value_or(DType::kI64))),
                          options.mesh, placements);
}

namespace {

Tensor NewTensor(IntSpan shape, DType dtype) { return ValueOrThrow(Tensor::Empty(shape, dtype)); }

// DoubleRows of a contiguous array.
struct DoubleRows {
  const double* data;
  int64_t count, length;
  const double* row(int64_t r) const { return data + r * length; }
};

// Per row the indices of the `samples` largest of p / q, q exponential: without replacement.
void LargestRatios(const DoubleRows& p, const DoubleRows& q, int64_t samples, int64_t* picked) {
  const Tensor scratch = NewTensor({p.length}, DType::kI64);
  auto* order = scratch.data_as<int64_t>();
  for (int64_t r = 0; r < p.count; ++r) {
    std::iota(order, order + p.length, 0);
    const auto ratio = [&](int64_t i) {
      return p.row(r)[i] > 0 ? p.row(r)[i] / q.row(r)[i] : 0;  // never 0 / 0
    };
    std::sort(order, order + p.length, [&](int64_t a, int64_t b) {
      const double x = ratio(a), y = ratio(b);
      return x > y || (x == y && a < b);
    });
    picked = std::copy(order, order + samples, picked);
  }
}

// Per row and uniform the first category whose running sum reaches it, back over impossible ones.
void SearchSums(const DoubleRows& p, const DoubleRows& u, int64_t* picked) {
  const int64_t k = p.length;
  const Tensor scratch = NewTensor({k}, DType::kF64);
  auto* sums = scratch.data_as<double>();
  for (int64_t r = 0; r < p.count; ++r) {
    std::partial_sum(p.row(r), p.row(r) + k, sums);
    for (int64_t s = 0; s < u.length; ++s) {
      const double wanted = u.row(r)[s] * sums[k - 1];
      int64_t i = std::lower_bound(sums, sums + k, wanted) - sums;
      i = std::min(i, k - 1);
      while (i > 0 && p.row(r)[i] == 0) --i;
      while (i < k - 1 && p.row(r)[i] == 0) ++i;
      *picked++ = i;
    }
  }
}

Tensor AsDoubles(const Tensor& t) {
  const Tensor here = IsRemote(t.device()) ? ValueOrThrow(t.To(DeviceType())) : t;
  return ValueOrThrow(ValueOrThrow(here.To(DType::kF64)).Contiguous());
}

void RequireChances(const DTensor& p, const DoubleRows& values) {
  for (int64_t r = 0; r < values.count; ++r) {
    double total = 0;
    for (int64_t i = 0; i < values.length; ++i) {
      const double v = values.row(r)[i];
      total += v >= 0 && std::isfinite(v) ? v : std::nan("");
    }
    if (total > 0) continue;
    ThrowInvalid("multinomial",
                 absl::StrCat("row ", r, " has a negative or infinite probability or sums to 0"),
                 {{"p", p}});
  }
}

}  // namespace

DTensor multinomial(const DTensor& p, int64_t samples, bool replacement) {
  RequireDefined("multinomial", {{"p", p}});
  RequireFloating("multinomial", p);
  const int64_t k = p.ndim() == 0 ? 0 : p.size(-1), rows = p.ndim() == 2 ? p.size(0) : 1;
  if (p.ndim() < 1 || p.ndim() > 2 || k == 0 || samples < 1 || (!replacement && samples > k)) {
    ThrowInvalid("multinomial",
                 absl::StrCat("needs p [k] or [n, k] and 1 to k samples (any number with "
                              "replacement), got ",
                              samples, " samples"),
                 {{"p", p}});
  }
  // A rank outside of the mesh has no values, and draws all the same: generators move alike.
  const bool here = p.mesh().is_self() || p.spec().in_mesh();
  Tensor whole;
  if (here) whole = AsDoubles(WholeLocal(p));
  const DoubleRows values{here ? whole.data_as<double>() : nullptr, here ? rows : 0, k};
  RequireChances(p, values);
  const Shape shape = p.ndim() == 1 ? Shape{samples} : Shape{rows, samples};
  const Tensor picked = NewTensor(shape, DType::kI64);
  if (replacement && samples > 1) {
    absl::StatusOr<Tensor> u = MultinomialUniforms(rows, samples);
    ThrowNamed("multinomial", {{"p", p}}, u.status());
    const Tensor uniforms = AsDoubles(*u);
    SearchSums(values, {uniforms.data_as<double>(), rows, samples}, picked.data_as<int64_t>());
  } else {
    const DTensor q = empty(p.shape(), {.dtype = p.dtype()});
    exponential_(q);
    const Tensor exponentials = AsDoubles(q.local());
    LargestRatios(values, {exponentials.data_as<double>(), rows, k}, samples,
                  picked.data_as<int64_t>());
  }
  return DistributeTensor(picked, p.mesh(), Placements(p.mesh().ndim()));
}

namespace {

// x with what is a pending maximum, minimum or product reduced: a mask of its terms has no meaning.
DTensor WithoutExtremes(const DTensor& x) {
  if (RefuseMaxAndMin(x.spec(), "").ok()) return x;
  return x.Redistribute(WithoutPending(x.placements()));
}

}  // namespace

namespace {

// Draws into `mask` and gives x * mask / (1 - p), in one pass over x.
DTensor DropInOnePass(const DTensor& x, const DTensor& mask, double p) {
  const auto forward = [&]() -> Values {
    return {OfParts(x.spec(), [&] {
      const Tensor& part = x.local();
      const Tensor y = ValueOrThrow(Tensor::Empty(part.shape(), part.dtype(), part.device()));
      ThrowNamed("dropout", {{"x", x}},
                 FillDropout(mask.local(), part, y, x.spec(), p, nullptr, MemoryStrides(x)));
      return y;
    })};
  };
  const double scale = 1 / KeepChance(x.dtype(), p);
  const auto backward = [mask, scale](const Values& g) -> Values {
    return {dropout_apply(g[0], mask, scale)};
  };
  return CustomFunction("dropout", {x}, forward, backward, {mask})[0];
}

}  // namespace

Values dropout_with_mask(const DTensor& given, double p) {
  CheckP("dropout", given, p);
  const DTensor x = WithoutExtremes(given);
  if (p == 1 || x.numel() == 0) {
    const DTensor none = zeros(x.shape(), Like(x, DType::kBool));
    return {dropout_apply(x, none, 0), none};
  }
  const DrawScope scope;
  const DTensor mask = empty(x.shape(), Like(x, DType::kBool));
  if (DropsInOnePass(x.local())) return {DropInOnePass(x, mask, p), mask};
  ThrowNamed("dropout", {{"x", x}},
             FillDropoutMask(mask.local(), x.spec(), p, nullptr, MemoryStrides(x)));
  return {dropout_apply(x, mask, 1.0 / KeepChance(x.dtype(), p)), mask};
}

DTensor dropout(const DTensor& x, double p, bool training) {
  CheckP("dropout", x, p, training && p > 0);
  return p == 0 || !training ? x : dropout_with_mask(x, p)[0];
}

namespace {

// bernoulli_(1 - p) of every element, in x's layout in memory, which is the order of drawing.
DTensor Noise(absl::string_view op, const DTensor& x, double p) {
  ThrowNamed(op, {{"x", x}}, RefuseMaxAndMin(x.spec(), "dropout"));
  const DTensor noise = empty_like(x);
  bernoulli_(noise, 1 - p);
  return noise;
}
// Of every feature, [n, c, 1, ...]: row-major however x lies.
DTensor FeatureNoise(absl::string_view op, const DTensor& x, double p) {
  ThrowNamed(op, {{"x", x}}, RefuseMaxAndMin(x.spec(), "dropout"));
  Shape shape(x.ndim(), 1);
  shape[0] = x.shape()[0];
  shape[1] = x.shape()[1];
  TensorOptions options = Like(x, x.dtype());
  for (Placement& placement : options.placements) {
    const bool stays = placement.is_flat() ? shape == x.shape()
                                           : placement.cuts_dim() && shape[placement.dim()] ==
                                                                         x.shape()[placement.dim()];
    if (!stays) placement = Replicate();
  }
  const DTensor noise = empty(shape, options);
  bernoulli_(noise, 1 - p);
  return noise;
}

}  // namespace

DTensor dropout_(const DTensor& x, double p, bool training) {
  CheckP("dropout_", x, p, training && p > 0);
  if (p == 0 || !training || x.numel() == 0) return x;
  if (p == 1) return mul_(x, 0.0);
  const DrawScope scope;
  const DTensor noise = Noise("dropout_", x, p);
  return mul_(x, div(noise, 1 - p));
}

DTensor feature_dropout(const DTensor& x, double p, bool training) {
  CheckP("feature_dropout", x, p, training && p > 0);
  if (x.ndim() < 2) ThrowInvalid("feature_dropout", "needs two dims or more", {{"x", x}});
  if (p == 0 || !training || x.numel() == 0) return x;
  if (p == 1) return mul(x, 0.0);
  const DTensor y = WithoutExtremes(x);
  const DrawScope scope;
  return mul(y, div(FeatureNoise("feature_dropout", y, p), 1 - p));
}

DTensor alpha_dropout(const DTensor& x, double p, bool training) {
  CheckP("alpha_dropout", x, p, training && p > 0);
  if (p == 0 || !training || x.numel() == 0) return x;
  if (p == 1) return mul(x, 0.0);
  constexpr double kAlpha = 1.7580993408473766;  // -lim selu(-inf)
  const DTensor y = WithoutExtremes(x);
  const DrawScope scope;
  const double a = 1 / std::sqrt((kAlpha * kAlpha * p + 1) * (1 - p));
  const DTensor noise = Noise("alpha_dropout", y, p);
  const DTensor b = add(mul(add(noise, -1.0), kAlpha * a), kAlpha * a * p);
  return add(mul(y, mul(noise, a)), b);
}

}  // namespace dtensor
