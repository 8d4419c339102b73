// DType: element types. Plain enough to be included by `.cu` files and per-level kernel files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

#ifdef __CUDACC__
#define DT_HOST_DEVICE __host__ __device__
#else
#define DT_HOST_DEVICE
#endif

namespace dtensor {

enum class DType : uint8_t { kF64, kF32, kBF16, kF16, kI64, kI32, kU8, kBool };
inline constexpr int kNumDTypes = 8;

// Bytes of an element. One hex digit per dtype, the first the lowest: its binary logarithm.
constexpr int LogSizeOf(DType t) { return 0x00231123 >> 4 * static_cast<int>(t) & 3; }
constexpr int64_t SizeOf(DType t) { return int64_t{1} << LogSizeOf(t); }
constexpr bool IsFloating(DType t) { return t <= DType::kF16; }
constexpr bool IsIntegral(DType t) { return t >= DType::kI64; }  // bool counts as integral
constexpr uint32_t DTypeBit(DType t) { return 1u << static_cast<int>(t); }
inline constexpr uint32_t kFloatDTypes = 0x0F;
inline constexpr uint32_t kAllDTypes = 0xFF;

// "float32", "bfloat16", ... (PyTorch's names).
std::string_view Name(DType t);
// Parses PyTorch's names and the short forms f64 f32 bf16 f16 i64 i32 u8 bool. False if unknown.
bool ParseDType(std::string_view name, DType* out);

// PyTorch's promotion of two tensors of equal category rank (source: torch.result_type):
// floating beats integral, integral beats bool; the wider wins; bf16 with f16 gives f32.
DType PromoteTypes(DType a, DType b);

// 16-bit floats as storage; arithmetic is done in float. Conversions round to nearest even.
struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

DT_HOST_DEVICE static inline float ToFloat(BFloat16 v) {
  uint32_t u = static_cast<uint32_t>(v.bits) << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
DT_HOST_DEVICE static inline BFloat16 ToBFloat16(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  if ((u & 0x7FFFFFFFu) > 0x7F800000u) return BFloat16{static_cast<uint16_t>((u >> 16) | 0x40)};
  return BFloat16{static_cast<uint16_t>((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16)};
}
DT_HOST_DEVICE static inline float ToFloat(Half v) {
  uint32_t sign = static_cast<uint32_t>(v.bits & 0x8000u) << 16;
  uint32_t exp = (v.bits >> 10) & 0x1Fu, man = v.bits & 0x3FFu, u;
  if (exp == 0x1Fu) {
    u = sign | 0x7F800000u | (man << 13);
  } else if (exp != 0) {
    u = sign | ((exp + 112u) << 23) | (man << 13);
  } else if (man == 0) {
    u = sign;
  } else {
    int shift = 0;
    while (!(man & 0x400u)) {
      man <<= 1;
      ++shift;
    }
    u = sign | ((113u - static_cast<uint32_t>(shift)) << 23) | ((man & 0x3FFu) << 13);
  }
  float f;
  memcpy(&f, &u, 4);
  return f;
}
DT_HOST_DEVICE static inline Half ToHalf(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  uint32_t sign = (u >> 16) & 0x8000u, a = u & 0x7FFFFFFFu;
  if (a > 0x7F800000u) return Half{static_cast<uint16_t>(sign | 0x7E00u)};
  if (a >= 0x477FF000u) return Half{static_cast<uint16_t>(sign | 0x7C00u)};
  if (a >= 0x38800000u) {
    uint32_t r = a - 0x38000000u;
    r = (r + 0xFFFu + ((r >> 13) & 1u)) >> 13;
    return Half{static_cast<uint16_t>(sign | r)};
  }
  if (a < 0x33000000u) return Half{static_cast<uint16_t>(sign)};
  uint32_t exp = a >> 23, man = (a & 0x7FFFFFu) | 0x800000u, shift = 126u - exp;
  uint32_t r = man >> shift, rest = man & ((1u << shift) - 1u), half = 1u << (shift - 1u);
  if (rest > half || (rest == half && (r & 1u))) ++r;
  return Half{static_cast<uint16_t>(sign | r)};
}

}  // namespace dtensor
