// DType: element types; ReduceOp: how elements become one. Plain enough to be included by `.cu`
// files and per-level kernel files.
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

// 16-bit floats as storage; arithmetic is done in float. Conversions round to nearest even.
struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};
// Any byte but 0 is true.
struct Bool {
  uint8_t value;
};

// Every dtype, once: what else the library knows of one follows from its line and, for floats
// that C++ has no type for, from ToFloat and RoundTo below. Within a list the wider come first.
//   X(enumerator, type of an element, PyTorch's name, short name)
// Ops compute in floats and integers. A storage float is copied, moved and converted only.
#define DT_FLOAT_DTYPES(X)               \
  X(kF64, double, "float64", "f64")      \
  X(kF32, float, "float32", "f32")       \
  X(kBF16, BFloat16, "bfloat16", "bf16") \
  X(kF16, Half, "float16", "f16")
#define DT_STORAGE_DTYPES(X)
#define DT_INTEGER_DTYPES(X)       \
  X(kI64, int64_t, "int64", "i64") \
  X(kI32, int32_t, "int32", "i32") \
  X(kU8, uint8_t, "uint8", "u8")   \
  X(kBool, Bool, "bool", "bool")
#define DT_DTYPES(X) DT_FLOAT_DTYPES(X) DT_STORAGE_DTYPES(X) DT_INTEGER_DTYPES(X)

#define DT_ENUMERATOR(name, ...) name,
enum class DType : uint8_t { DT_DTYPES(DT_ENUMERATOR) };
#undef DT_ENUMERATOR

#define DT_ONE(...) +1
inline constexpr int kNumDTypes = 0 DT_DTYPES(DT_ONE);
inline constexpr int kNumComputedFloats = 0 DT_FLOAT_DTYPES(DT_ONE);
inline constexpr int kNumFloats = kNumComputedFloats DT_STORAGE_DTYPES(DT_ONE);
#undef DT_ONE
static_assert(kNumDTypes <= 16);  // kLogSizes

// One hex digit per dtype, the first the lowest: the binary logarithm of its bytes.
#define DT_LOG_SIZE(name, type, ...)  \
  | uint64_t{sizeof(type) == 8   ? 3  \
             : sizeof(type) == 4 ? 2  \
             : sizeof(type) == 2 ? 1  \
                                 : 0} \
          << 4 * static_cast<int>(DType::name)
inline constexpr uint64_t kLogSizes = 0 DT_DTYPES(DT_LOG_SIZE);
#undef DT_LOG_SIZE

// Bytes of an element.
constexpr int LogSizeOf(DType t) {
  return static_cast<int>(kLogSizes >> 4 * static_cast<int>(t) & 3);
}
constexpr int64_t SizeOf(DType t) { return int64_t{1} << LogSizeOf(t); }
constexpr bool IsFloating(DType t) { return static_cast<int>(t) < kNumFloats; }
constexpr bool IsIntegral(DType t) { return !IsFloating(t); }  // bool counts as integral
// Floats narrower than f32, in which they are computed.
constexpr bool IsNarrow(DType t) { return IsFloating(t) && LogSizeOf(t) < 2; }
constexpr uint32_t DTypeBit(DType t) { return 1u << static_cast<int>(t); }
inline constexpr uint32_t kFloatDTypes = (1u << kNumComputedFloats) - 1;
inline constexpr uint32_t kStoredDTypes = (1u << kNumDTypes) - 1;  // what can be copied: every one
inline constexpr uint32_t kAllDTypes =                             // what ops compute in
    kFloatDTypes | (kStoredDTypes & ~((1u << kNumFloats) - 1));

// "float32", "bfloat16", ... (PyTorch's names).
std::string_view Name(DType t);
// Parses PyTorch's names and the short forms f64 f32 bf16 f16 i64 i32 u8 bool. False if unknown.
bool ParseDType(std::string_view name, DType* out);

// How the elements of several arrays become one; bf16 and f16 do in f32. kAvg: collectives only.
enum class ReduceOp : uint8_t { kSum, kMax, kMin, kProd, kAvg };
std::string_view Name(ReduceOp op);  // "sum", ...

// PyTorch's promotion of two tensors of equal category rank (source: torch.result_type):
// floating beats integral, integral beats bool; the wider wins; of two floats as wide, as bf16 and
// f16, f32 does.
DType PromoteTypes(DType a, DType b);

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

// Rounds into any of them.
DT_HOST_DEVICE static inline void RoundTo(float f, BFloat16* out) { *out = ToBFloat16(f); }
DT_HOST_DEVICE static inline void RoundTo(float f, Half* out) { *out = ToHalf(f); }

// visit(ElementType<T>{}) with the type of the dtype's elements. Static: code of one CPU level must
// not serve another.
template <class T>
struct ElementType {
  using type = T;
};
template <class Visit>
static inline void VisitDType(DType t, const Visit& visit) {
  switch (t) {
#define DT_CASE(name, type, ...) \
  case DType::name:              \
    return visit(ElementType<type>{});
    DT_DTYPES(DT_CASE)
#undef DT_CASE
  }
}

}  // namespace dtensor
