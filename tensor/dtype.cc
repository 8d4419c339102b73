#include "dtensor/tensor/dtype.h"

namespace dtensor {
namespace {

#define DT_NAME(enumerator, type, name, short_name) name,
#define DT_SHORT_NAME(enumerator, type, name, short_name) short_name,
constexpr std::string_view kNames[] = {DT_DTYPES(DT_NAME)};
constexpr std::string_view kShortNames[] = {DT_DTYPES(DT_SHORT_NAME)};

}  // namespace

std::string_view Name(DType t) { return kNames[static_cast<int>(t)]; }

bool ParseDType(std::string_view name, DType* out) {
  for (int i = 0; i < kNumDTypes; ++i) {
    if (name == kNames[i] || name == kShortNames[i]) {
      *out = static_cast<DType>(i);
      return true;
    }
  }
  return false;
}

DType PromoteTypes(DType a, DType b) {
  if (a == b) return a;
  if (IsFloating(a) != IsFloating(b)) return IsFloating(a) ? a : b;
  if (IsFloating(a)) {
    return SizeOf(a) == SizeOf(b) ? DType::kF32 : (a < b ? a : b);
  }
  // i64 > i32 > u8 > bool; every pair of them fits the wider one.
  return a < b ? a : b;
}

}  // namespace dtensor
