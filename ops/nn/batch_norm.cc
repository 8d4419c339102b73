// Norms whose statistics go over other dims than the last: over the batch, over the rest of each
// sample, over groups of channels. What is sharded stays so: mean and centred squares are sums,
// reduced over the ranks that share them, so the numbers are those of one rank.
#include <algorithm>
#include <memory>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "dtensor/autograd.h"
#include "dtensor/ops/nn/common.h"
#include "dtensor/ops/nn/statistics.h"

namespace dtensor {
namespace {

// (x - mean) / sqrt(variance + eps), x in the computing type, with its own statistics along `dims`.
DTensor Standardized(absl::string_view op, const DTensor& input, const DimList& dims, double eps,
                     Statistics* statistics) {
  struct Kept {
    DTensor mean, scale;
  };
  const auto kept = std::make_shared<Kept>();
  const DTensor x = Settled(input.Detach());
  const auto again = [x, kept] { return mul(sub(x, kept->mean), kept->scale); };
  const auto forward = [&]() -> Values {
    *statistics = StatisticsOf(x, dims);
    *kept = {statistics->mean, rsqrt(add(statistics->variance, eps))};
    return {again()};
  };
  const auto backward = [dims, kept, again](const Values& grads) -> Values {
    return {StandardizedGradient(grads[0], again(), kept->scale, dims)};
  };
  return CustomFunction(op, {input}, forward, backward, {x})[0];
}

// A value per channel as it broadcasts to x [n, c, ...]; null stays null.
DTensor PerChannel(const DTensor& value, const DTensor& x) {
  if (!value.defined()) return value;
  Shape shape(x.ndim() - 1, 1);
  shape[0] = value.size(0);
  return reshape(Wide(value), shape);
}

// y * weight + bias where they are, in x's dtype.
DTensor Scaled(DTensor y, const DTensor& weight, const DTensor& bias, const DTensor& x) {
  if (weight.defined()) y = mul(y, weight);
  if (bias.defined()) y = add(y, bias);
  return to(y, x.dtype());
}

// self = (1 - momentum) * self + momentum * now. To a pending sum the difference is added.
void MoveTowards(const DTensor& self, const DTensor& now, double momentum) {
  if (!self.defined()) return;
  const DTensor per_channel = reshape(now, self.shape()), was = Wide(self);
  if (self.spec().has_partial()) {
    add_(self, to(mul(sub(per_channel, was), momentum), self.dtype()));
  } else {
    copy_(self, to(add(mul(was, 1 - momentum), mul(per_channel, momentum)), self.dtype()));
  }
}

// Running statistics after a step: of the channel, the mean over the samples that have their own;
// the variance of all values that these are taken from.
void Remember(const Statistics& now, double count, double momentum, const DTensor& running_mean,
              const DTensor& running_var) {
  RunOnce([&] {
    MoveTowards(running_mean, mean(now.mean, {0}), momentum);
    MoveTowards(running_var, mul(mean(now.variance, {0}), count / (count - 1)), momentum);
  });
}

struct ChannelInput {
  absl::string_view name;
  const DTensor& value;
};

void CheckChannels(absl::string_view op, const DTensor& x,
                   std::initializer_list<ChannelInput> inputs) {
  RequireFloating(op, x);
  if (x.ndim() < 2) {
    ThrowInvalid(op, absl::StrCat("input needs dims [n, c, ...], is ", ToString(x.shape())));
  }
  for (const ChannelInput& in : inputs) {
    if (!in.value.defined() || (in.value.ndim() == 1 && in.value.size(0) == x.size(1))) continue;
    ThrowInvalid(op, absl::StrCat(in.name, " must be [", x.size(1), "], a value per channel, is ",
                                  ToString(in.value.shape())));
  }
}

DimList DimsFrom(int first, int end) {
  DimList dims;
  for (int d = first; d < end; ++d) dims.push_back(d);
  return dims;
}

// With given statistics: one product and one sum per element.
DTensor WithStatistics(const DTensor& x, const DTensor& mean, const DTensor& variance,
                       const DTensor& weight, const DTensor& bias, double eps) {
  DTensor scale = rsqrt(add(PerChannel(variance.Detach(), x), eps));
  if (weight.defined()) scale = mul(scale, PerChannel(weight, x));
  const DTensor shift = neg(mul(PerChannel(mean.Detach(), x), scale));
  return Scaled(Wide(x), scale, bias.defined() ? add(shift, PerChannel(bias, x)) : shift, x);
}

// What batch_norm and instance_norm are given; all but x may be null.
struct ChannelNorm {
  const DTensor &x, &running_mean, &running_var, &weight, &bias;
  bool own;  // statistics of x itself
  double momentum, eps;
};

// With statistics along dim 0, too (batch), or for each of its indices.
DTensor NormOf(const char* op, const ChannelNorm& n, bool batch) {
  const auto run = [&] {
    if (n.x.numel() == 0) return clone(n.x);
    CheckChannels(op, n.x,
                  {{"running_mean", n.running_mean},
                   {"running_var", n.running_var},
                   {"weight", n.weight},
                   {"bias", n.bias}});
    if (!n.own) {
      RequireDefined(op, {{"running_mean", n.running_mean}, {"running_var", n.running_var}});
      return WithStatistics(n.x, n.running_mean, n.running_var, n.weight, n.bias, n.eps);
    }
    DimList dims = DimsFrom(2, n.x.ndim());
    if (batch) dims.insert(dims.begin(), 0);
    const double count = CountOf(n.x, dims);
    if (count == 1) {
      ThrowInvalid(op, absl::StrCat("one value has no variance: input ", ToString(n.x.shape()),
                                    batch ? " has one per channel" : " has one per instance"));
    }
    Statistics now;
    const DTensor y = Standardized(op, Wide(n.x), dims, n.eps, &now);
    Remember(now, count, n.momentum, n.running_mean, n.running_var);
    return Scaled(y, PerChannel(n.weight, n.x), PerChannel(n.bias, n.x), n.x);
  };
  return AsOp(op,
              {{"input", n.x},
               {"running_mean", n.running_mean, true},
               {"running_var", n.running_var, true},
               {"weight", n.weight, true},
               {"bias", n.bias, true}},
              run);
}

}  // namespace

DTensor batch_norm(const DTensor& x, const DTensor& running_mean, const DTensor& running_var,
                   const DTensor& weight, const DTensor& bias, bool training, double momentum,
                   double eps) {
  return NormOf("batch_norm", {x, running_mean, running_var, weight, bias, training, momentum, eps},
                true);
}

DTensor instance_norm(const DTensor& x, const DTensor& running_mean, const DTensor& running_var,
                      const DTensor& weight, const DTensor& bias, bool use_input_stats,
                      double momentum, double eps) {
  return NormOf("instance_norm",
                {x, running_mean, running_var, weight, bias, use_input_stats, momentum, eps},
                false);
}

DTensor group_norm(const DTensor& x, int64_t num_groups, const DTensor& weight, const DTensor& bias,
                   double eps) {
  constexpr const char* kName = "group_norm";
  return AsOp(kName, {{"input", x}, {"weight", weight, true}, {"bias", bias, true}}, [&] {
    CheckChannels(kName, x, {{"weight", weight}, {"bias", bias}});
    if (num_groups < 1 || x.size(1) % num_groups != 0) {
      ThrowInvalid(kName,
                   absl::StrCat(x.size(1), " channels do not divide into ", num_groups, " groups"));
    }
    if (x.numel() == 0) return clone(x);
    if (x.numel() == num_groups) {
      ThrowInvalid(kName, absl::StrCat("one value has no variance: input ", ToString(x.shape()),
                                       " has one per group"));
    }
    const auto whole = [](const Placement& p) {
      return p.is_replicate() || (p.cuts_dim() && p.dim() == 0);
    };
    DTensor y;
    if (absl::c_all_of(x.placements(), whole)) {  // every group is a row somewhere
      const DTensor rows = reshape(Wide(x), {x.size(0), num_groups, -1});
      y = layer_norm(rows, {rows.size(2)}, {}, {}, eps);
    } else {
      const DTensor groups = unflatten(Wide(x), 1, {num_groups, x.size(1) / num_groups});
      Statistics now;
      y = Standardized(kName, groups, DimsFrom(2, groups.ndim()), eps, &now);
    }
    return Scaled(reshape(y, x.shape()), PerChannel(weight, x), PerChannel(bias, x), x);
  });
}

DTensor local_response_norm(const DTensor& x, int64_t size, double alpha, double beta, double k) {
  constexpr const char* kName = "local_response_norm";
  return AsOp(kName, {{"input", x}}, [&] {
    const bool whole = x.dtype() == DType::kI64;
    if (!whole) RequireFloating(kName, x);
    if (x.ndim() < 3) {
      ThrowInvalid(kName, absl::StrCat("input needs dims [n, c, ...], three or more, is ",
                                       ToString(x.shape())));
    }
    if (size < 1) ThrowInvalid(kName, absl::StrCat("size must be positive, is ", size));
    const DType dtype = whole ? DType::kF32 : x.dtype();
    if (x.numel() == 0) return clone(x);
    const DTensor wide = whole ? x : Wide(x), squares = square(wide);
    const int64_t channels = x.size(1);
    // Channels before and after that a window has, and where there are any at all.
    const int64_t before = std::min(size / 2, channels), after = std::min((size - 1) / 2, channels);
    const auto nothing = [&](int64_t n) {
      Shape shape = x.shape();
      shape[1] = n;
      return zeros(shape, {squares.dtype(), x.mesh(), {}});
    };
    const DTensor padded = cat({nothing(before), squares, nothing(after)}, 1);
    DTensor total = slice(padded, 1, 0, channels);
    for (int64_t i = 1; i <= before + after; ++i) {
      total = add(total, slice(padded, 1, i, i + channels));
    }
    // Means of integers are integers, which is what torch's pools make of them.
    const DTensor scaled = whole ? mul(to(div(total, size, "trunc"), dtype), alpha)
                                 : mul(total, alpha / static_cast<double>(size));
    return to(div(wide, pow(add(scaled, k), beta)), dtype);
  });
}

}  // namespace dtensor
