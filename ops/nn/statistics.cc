#include "dtensor/ops/nn/statistics.h"

#include "dtensor/ops/nn/common.h"

namespace dtensor {

double CountOf(const DTensor& x, const DimList& dims) {
  double n = 1;
  for (const int64_t d : dims) n *= static_cast<double>(x.size(static_cast<int>(d)));
  return n;
}

Statistics StatisticsOf(const DTensor& x, const DimList& dims) {
  const double count = CountOf(x, dims);
  const DTensor mean = Settled(div(sum(x, dims, true), count));
  return {mean, Settled(div(sum(square(sub(x, mean)), dims, true), count))};
}

DTensor StandardizedGradient(const DTensor& dy, const DTensor& y, const DTensor& scale,
                             const DimList& dims) {
  const DTensor sums = Settled(stack({sum(dy, dims, true), sum(mul(dy, y), dims, true)}));
  const DTensor means = div(sums, CountOf(dy, dims));
  const DTensor centred = sub(dy, select(means, 0, 0));
  return mul(sub(centred, mul(y, select(means, 0, 1))), scale);
}

}  // namespace dtensor
