#include "dtensor/tensor/dtype.h"

namespace dtensor {
namespace {

constexpr std::string_view kNames[kNumDTypes] = {"float64", "float32", "bfloat16", "float16",
                                                 "int64",   "int32",   "uint8",    "bool"};
constexpr std::string_view kShortNames[kNumDTypes] = {"f64", "f32", "bf16", "f16",
                                                      "i64", "i32", "u8",   "bool"};

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
    const bool halves = a >= DType::kBF16 && b >= DType::kBF16;
    return halves ? DType::kF32 : (a < b ? a : b);
  }
  // i64 > i32 > u8 > bool; every pair of them fits the wider one.
  return a < b ? a : b;
}

}  // namespace dtensor
