#include "dtensor/rng/draw.h"

namespace dtensor {

DT_AT_EACH_CPU_LEVEL(DrawFn FindDraw(RandomKind kind, DType dtype);
                     DrawFn FindGroupDraw(GroupKind kind);
                     uint64_t BarePhilox(const PhiloxKeys& keys, int64_t blocks);)

DrawFn FindDraw(RandomKind kind, DType dtype, CpuLevel level) {
  return DT_AT_CPU_LEVEL(level, FindDraw(kind, dtype));
}

DrawFn FindGroupDraw(GroupKind kind, CpuLevel level) {
  return DT_AT_CPU_LEVEL(level, FindGroupDraw(kind));
}

uint64_t BarePhilox(const PhiloxKeys& keys, int64_t blocks, CpuLevel level) {
  return DT_AT_CPU_LEVEL(level, BarePhilox(keys, blocks));
}

}  // namespace dtensor
