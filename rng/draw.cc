#include "rng/draw.h"

namespace dtensor {

namespace cpu_baseline {
DrawFn FindDraw(RandomKind kind, DType dtype);
DrawFn FindGroupDraw(GroupKind kind);
uint64_t BarePhilox(const PhiloxKeys& keys, int64_t blocks);
}  // namespace cpu_baseline
namespace cpu_v3 {
DrawFn FindDraw(RandomKind kind, DType dtype);
DrawFn FindGroupDraw(GroupKind kind);
uint64_t BarePhilox(const PhiloxKeys& keys, int64_t blocks);
}  // namespace cpu_v3
namespace cpu_v4 {
DrawFn FindDraw(RandomKind kind, DType dtype);
DrawFn FindGroupDraw(GroupKind kind);
uint64_t BarePhilox(const PhiloxKeys& keys, int64_t blocks);
}  // namespace cpu_v4

DrawFn FindDraw(RandomKind kind, DType dtype, CpuLevel level) {
  switch (level) {
    case CpuLevel::kV4:
      return cpu_v4::FindDraw(kind, dtype);
    case CpuLevel::kV3:
      return cpu_v3::FindDraw(kind, dtype);
    case CpuLevel::kBaseline:
      break;
  }
  return cpu_baseline::FindDraw(kind, dtype);
}

DrawFn FindGroupDraw(GroupKind kind, CpuLevel level) {
  switch (level) {
    case CpuLevel::kV4:
      return cpu_v4::FindGroupDraw(kind);
    case CpuLevel::kV3:
      return cpu_v3::FindGroupDraw(kind);
    case CpuLevel::kBaseline:
      break;
  }
  return cpu_baseline::FindGroupDraw(kind);
}

uint64_t BarePhilox(const PhiloxKeys& keys, int64_t blocks, CpuLevel level) {
  switch (level) {
    case CpuLevel::kV4:
      return cpu_v4::BarePhilox(keys, blocks);
    case CpuLevel::kV3:
      return cpu_v3::BarePhilox(keys, blocks);
    case CpuLevel::kBaseline:
      break;
  }
  return cpu_baseline::BarePhilox(keys, blocks);
}

}  // namespace dtensor
