#include "dtensor/parallel/module/init.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "absl/strings/str_cat.h"
#include "dtensor/distribute.h"
#include "dtensor/ops/ops.h"
#include "dtensor/ops/optim/optim.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

struct Fans {
  double in, out;
};
Fans FansOf(const char* name, const DTensor& w) {
  if (!w.defined() || w.ndim() < 2) {
    ThrowIfError(absl::InvalidArgumentError(
        absl::StrCat("[", name, "] needs a weight of two dims or more, got ",
                     w.defined() ? ToString(w.shape()) : std::string("null"))));
  }
  double field = 1;
  for (int d = 2; d < w.ndim(); ++d) field *= static_cast<double>(w.shape()[d]);
  return {static_cast<double>(w.shape()[1]) * field, static_cast<double>(w.shape()[0]) * field};
}

double GainOf(Gain gain, double a) {
  switch (gain) {
    case Gain::kLinear:
      return 1;
    case Gain::kTanh:
      return 5.0 / 3;
    case Gain::kRelu:
      return std::sqrt(2.0);
    case Gain::kLeakyRelu:
      return std::sqrt(2 / (1 + a * a));
  }
  return 1;
}

double KaimingStd(const char* name, const DTensor& w, double a, FanMode mode, Gain gain) {
  const Fans fans = FansOf(name, w);
  const double fan = mode == FanMode::kIn ? fans.in : fans.out;
  return fan > 0 ? GainOf(gain, a) / std::sqrt(fan) : 0;
}

double XavierStd(const char* name, const DTensor& w, double gain) {
  const Fans fans = FansOf(name, w);
  const double both = fans.in + fans.out;
  return both > 0 ? gain * std::sqrt(2 / both) : 0;
}

double NormalCdf(double x) { return (1 + std::erf(x / std::sqrt(2.0))) / 2; }

}  // namespace

void kaiming_uniform_(const DTensor& weight, double a, FanMode mode, Gain gain) {
  const double bound = std::sqrt(3.0) * KaimingStd("kaiming_uniform_", weight, a, mode, gain);
  uniform_(weight, -bound, bound);
}
void kaiming_normal_(const DTensor& weight, double a, FanMode mode, Gain gain) {
  normal_(weight, 0, KaimingStd("kaiming_normal_", weight, a, mode, gain));
}
void xavier_uniform_(const DTensor& weight, double gain) {
  const double bound = XavierStd("xavier_uniform_", weight, gain) * std::sqrt(3.0);
  uniform_(weight, -bound, bound);
}
void xavier_normal_(const DTensor& weight, double gain) {
  normal_(weight, 0, XavierStd("xavier_normal_", weight, gain));
}

void trunc_normal_(const DTensor& t, double mean, double std, double a, double b) {
  if (!(a < b) || !(std > 0)) {
    ThrowIfError(absl::InvalidArgumentError(absl::StrCat(
        "[trunc_normal_] needs a < b and std > 0, got a ", a, ", b ", b, ", std ", std)));
  }
  uniform_(t, 2 * NormalCdf((a - mean) / std) - 1, 2 * NormalCdf((b - mean) / std) - 1);
  const NoGrad no_grad;
  truncated_normal_from_uniform_(t, mean, std, a, b);
}

namespace {

// Q of the QR decomposition of a [rows, cols] with rows >= cols, R's diagonal positive: orthogonal
// columns by Gram-Schmidt, twice for the last bits.
std::vector<double> OrthonormalColumns(std::vector<double> a, int64_t rows, int64_t cols) {
  const auto dot = [&](int64_t i, int64_t j) {
    double sum = 0;
    for (int64_t r = 0; r < rows; ++r) sum += a[r * cols + i] * a[r * cols + j];
    return sum;
  };
  for (int64_t j = 0; j < cols; ++j) {
    for (int pass = 0; pass < 2; ++pass) {
      for (int64_t i = 0; i < j; ++i) {
        const double along = dot(i, j);
        for (int64_t r = 0; r < rows; ++r) a[r * cols + j] -= along * a[r * cols + i];
      }
    }
    const double norm = std::sqrt(dot(j, j));
    for (int64_t r = 0; r < rows; ++r) a[r * cols + j] /= norm;
  }
  return a;
}

}  // namespace

void orthogonal_(const DTensor& weight, double gain) {
  const Fans fans = FansOf("orthogonal_", weight);
  const int64_t rows = weight.shape()[0], cols = static_cast<int64_t>(fans.in);
  const bool wide = rows < cols;
  if (weight.mesh().device() == DeviceType::kMeta) {  // only the generator moves
    normal_(weight);
    return;
  }
  const DTensor drawn = randn({rows, cols}, {.dtype = weight.dtype()});
  std::vector<double> flat = drawn.ToVector<double>();
  std::vector<double> tall = flat;
  if (wide) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) tall[c * rows + r] = flat[r * cols + c];
    }
  }
  const int64_t n = std::max(rows, cols), k = std::min(rows, cols);
  tall = OrthonormalColumns(std::move(tall), n, k);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      flat[r * cols + c] = gain * (wide ? tall[c * k + r] : tall[r * k + c]);
    }
  }
  const Tensor whole = ValueOrThrow(Tensor::FromVector(flat, weight.shape(), weight.dtype()));
  const NoGrad no_grad;
  copy_(weight, DistributeTensor(whole, weight.mesh(), weight.placements()));
}

}  // namespace dtensor
