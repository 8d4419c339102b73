#include "dtensor/tensor/cpu/kernels/runs.h"

#include <immintrin.h>

#include <type_traits>

#include "dtensor/tensor/convert.h"
#include "dtensor/tensor/cpu/kernels/element_ops.h"
#include "dtensor/tensor/cpu/kernels/turn.h"

namespace dtensor {
namespace DT_LEVEL_NS {
namespace {

// A store past the caches.
#if defined(DT_LEVEL_V4)
using StreamVector = __m512i;
inline void Stream(char* to, StreamVector v) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), v);
}
#elif defined(DT_LEVEL_V3)
using StreamVector = __m256i;
inline void Stream(char* to, StreamVector v) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), v);
}
#else
using StreamVector = __m128i;
inline void Stream(char* to, StreamVector v) {
  _mm_stream_si128(reinterpret_cast<__m128i*>(to), v);
}
#endif
constexpr int64_t kStream = sizeof(StreamVector), kLine = 64;

// What was written first of so many bytes has left the caches before the last is: past them it
// takes a quarter less time (measured from 8 MiB on).
constexpr int64_t kPastCaches = 8 << 20;

// Elements that are converted together, the short way, if none of them is a rare one.
constexpr int64_t kBlock = 64;

// Float to integer: processors convert to 32 bits several at a time, to 64 only with AVX-512. NaN
// and what 32 bits do not hold are rare.
template <class S, class D>
inline bool IsRare(S v, const D*) {
  return !(v > S(-2147483648.0) && v < S(2147483648.0));
}
template <class S, class D>
inline void ConvertUsual(const S* s, D* d) {
  for (int64_t i = 0; i < kBlock; ++i) d[i] = static_cast<D>(static_cast<int32_t>(s[i]));
}

// A block with rare ones in it: one by one, or as usual and those mended.
template <class S, class D>
inline void ConvertRare(const S* s, D* d) {
  for (int64_t i = 0; i < kBlock; ++i) FromNumber(AsNumber(s[i]), &d[i]);
}
inline bool IsNan(uint32_t bits) { return (bits & 0x7FFFFFFFu) > 0x7F800000u; }
inline uint32_t Bits(float v) { return __builtin_bit_cast(uint32_t, v); }

// Float to bfloat16: rounded as if NaN did not exist.
inline bool IsRare(float v, const BFloat16*) { return v != v; }
inline void ConvertUsual(const float* s, BFloat16* d) {
  for (int64_t i = 0; i < kBlock; ++i) {
    const uint32_t u = Bits(s[i]);
    d[i].bits = static_cast<uint16_t>((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16);
  }
}
inline void ConvertRare(const float* s, BFloat16* d) {
  for (int64_t i = 0; i < kBlock; ++i) {
    const uint32_t u = Bits(s[i]), rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
    d[i].bits = static_cast<uint16_t>(IsNan(u) ? (u >> 16) | 0x40u : rounded);
  }
}

// Half to float and back: by the instruction, which gives NaN bits of its own.
#if defined(DT_LEVEL_V3) || defined(DT_LEVEL_V4)
constexpr bool kHalfInstructions = true;
inline bool IsRare(float v, const Half*) { return v != v; }
inline void ConvertUsual(const float* s, Half* d) {
  for (int64_t i = 0; i < kBlock; i += 8) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(d + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(s + i), _MM_FROUND_TO_NEAREST_INT));
  }
}
inline void ConvertRare(const float* s, Half* d) {
  ConvertUsual(s, d);
  for (int64_t i = 0; i < kBlock; ++i) {
    const uint32_t u = Bits(s[i]);
    d[i].bits = static_cast<uint16_t>(IsNan(u) ? ((u >> 16) & 0x8000u) | 0x7E00u : d[i].bits);
  }
}
inline bool IsRare(Half v, const float*) { return (v.bits & 0x7FFFu) > 0x7C00u; }
inline void ConvertUsual(const Half* s, float* d) {
  for (int64_t i = 0; i < kBlock; i += 8) {
    _mm256_storeu_ps(d + i,
                     _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(s + i))));
  }
}
inline void ConvertRare(const Half* s, float* d) {
  ConvertUsual(s, d);
  for (int64_t i = 0; i < kBlock; ++i) {
    const uint32_t h = s[i].bits, nan = (h & 0x8000u) << 16 | 0x7F800000u | (h & 0x3FFu) << 13;
    d[i] = __builtin_bit_cast(float, IsRare(s[i], d) ? nan : Bits(d[i]));
  }
}
#else
constexpr bool kHalfInstructions = false;
#endif

template <class S, class D>
constexpr bool kHasShortWay =
    (std::is_floating_point_v<S> && std::is_integral_v<D>) ||
    (std::is_same_v<S, float> && std::is_same_v<D, BFloat16>) ||
    (kHalfInstructions && ((std::is_same_v<S, float> && std::is_same_v<D, Half>) ||
                           (std::is_same_v<S, Half> && std::is_same_v<D, float>)));

// Other types and 16-bit floats become each other by way of float, as FromNumber has it.
template <class T>
constexpr bool kIsNarrow = std::is_same_v<T, Half> || std::is_same_v<T, BFloat16>;
template <class S, class D>
constexpr bool kByFloat = (kIsNarrow<S> || kIsNarrow<D>) && !kHasShortWay<S, D> &&
                          (kHasShortWay<S, float> || kHasShortWay<float, D>);

template <class S, class D>
inline void ConvertBlock(const S* s, D* d) {
  if constexpr (kByFloat<S, D>) {
    float f[kBlock];
    ConvertBlock(s, f);
    ConvertBlock(f, d);
  } else if constexpr (kHasShortWay<S, D>) {
    uint32_t rare = 0;
    for (int64_t i = 0; i < kBlock; ++i) rare |= IsRare(s[i], d) ? ~0u : 0;
    rare == 0 ? ConvertUsual(s, d) : ConvertRare(s, d);
  } else {
    for (int64_t i = 0; i < kBlock; ++i) FromNumber(AsNumber(s[i]), &d[i]);
  }
}

template <class S, class D>
void ConvertRun(void* dst, int64_t ds, const void* src, int64_t ss, int64_t n) {
  auto* d = static_cast<D*>(dst);
  const auto* s = static_cast<const S*>(src);
  if constexpr (kHasShortWay<S, D> || kByFloat<S, D>) {
    if (ds == 1 && ss == 1) {
      for (; n >= kBlock; n -= kBlock, s += kBlock, d += kBlock) ConvertBlock(s, d);
    }
    constexpr int64_t kFewest = 16;  // fewer do not pay for a block
    while (n >= kFewest) {
      const int64_t part = n < kBlock ? n : kBlock;
      S from[kBlock] = {};
      D to[kBlock];
      for (int64_t i = 0; i < part; ++i) from[i] = s[i * ss];
      ConvertBlock(from, to);
      for (int64_t i = 0; i < part; ++i) d[i * ds] = to[i];
      n -= part;
      s += part * ss;
      d += part * ds;
    }
  }
  if (ds == 1 && ss == 1) {  // the compiler finds vectors
    for (int64_t i = 0; i < n; ++i) FromNumber(AsNumber(s[i]), &d[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) FromNumber(AsNumber(s[i * ss]), &d[i * ds]);
  }
}

// n bytes, at least a line of the caches: lines that are not read into them first.
void StreamBytes(void* dst, const void* src, int64_t n) {
  auto* to = static_cast<char*>(dst);
  const auto* from = static_cast<const char*>(src);
  __builtin_memcpy(to, from, kLine);
  const int64_t skipped = -reinterpret_cast<intptr_t>(to) & (kLine - 1);
  for (int64_t i = skipped; i + kLine <= n; i += kLine) {
    for (int64_t k = 0; k < kLine; k += kStream) {
      StreamVector v;
      __builtin_memcpy(&v, from + i + k, kStream);
      Stream(to + i + k, v);
    }
  }
  _mm_sfence();
  __builtin_memcpy(to + n - kLine, from + n - kLine, kLine);
}

// Between whole lines of the caches the processor's "rep movsb", which memcpy takes for so many
// bytes, does not read what it overwrites: on Zen 5 it takes 0.7 to 0.8 of the time of a loop.
constexpr int64_t kLongLines = 64 << 10;
// On Zen 3 and 4 it takes up to fifteen times as long as one where only the source lies on a line,
// as in a roll by one (glibc bug 30994).
inline void CopyBytes(char* dst, const char* src, int64_t n) {
  const auto at = reinterpret_cast<uintptr_t>(dst) | reinterpret_cast<uintptr_t>(src);
  if (n < kLine || (n >= kLongLines && n < kPastCaches && at % kLine == 0)) {
    __builtin_memcpy(dst, src, static_cast<size_t>(n));
    return;
  }
  if (n >= kPastCaches) return StreamBytes(dst, src, n);
  for (int64_t i = 0; i + kLine <= n; i += kLine) __builtin_memcpy(dst + i, src + i, kLine);
  __builtin_memcpy(dst + n - kLine, src + n - kLine, kLine);
}

template <class T>
void SameRun(void* dst, int64_t ds, const void* src, int64_t ss, int64_t n) {
  auto* d = static_cast<T*>(dst);
  const auto* s = static_cast<const T*>(src);
  if (ds == 1 && ss == 1) {
    return CopyBytes(static_cast<char*>(dst), static_cast<const char*>(src),
                     n * static_cast<int64_t>(sizeof(T)));
  }
  if (ds == 1 && ss == -1) {
    for (int64_t i = 0; i < n; ++i) d[i] = s[-i];
    return;
  }
  for (int64_t i = 0; i < n; ++i) d[i * ds] = s[i * ss];
}

template <class T>
void FillRun(void* dst, int64_t stride, const void* value, int64_t n) {
  auto* d = static_cast<T*>(dst);
  const T v = *static_cast<const T*>(value);
  if (stride == 1) {
    for (int64_t i = 0; i < n; ++i) d[i] = v;
    return;
  }
  for (int64_t i = 0; i < n; ++i) d[i * stride] = v;
}

// By tiles, which are read along rows of the one and written along rows of the other: rows are
// often a power of two apart, and few such lines have room in the cache at a time.
template <class T>
void CopyPlane(void* dst, int64_t d0, int64_t d1, const void* src, int64_t s0, int64_t s1,
               int64_t n0, int64_t n1) {
  constexpr int64_t kSide = 128 / sizeof(T);  // two lines
  T tile[kSide][kSide];
  for (int64_t i = 0; i < n0; i += kSide) {
    const int64_t rows = n0 - i < kSide ? n0 - i : kSide;
    for (int64_t j = 0; j < n1; j += kSide) {
      const int64_t columns = n1 - j < kSide ? n1 - j : kSide;
      auto* d = static_cast<T*>(dst) + i * d0 + j * d1;
      const auto* s = static_cast<const T*>(src) + i * s0 + j * s1;
      if (s0 != 1 || d1 != 1 || rows < kSide || columns < kSide) {
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t c = 0; c < columns; ++c) d[r * d0 + c * d1] = s[r * s0 + c * s1];
        }
        continue;
      }
      for (int64_t c = 0; c < kSide; ++c) __builtin_memcpy(tile[c], s + c * s1, sizeof(tile[c]));
      for (int64_t r = 0; r < kSide; r += 4) {
        for (int64_t c = 0; c < kSide; c += 4) Turn4x4(&tile[c][r], kSide, d + r * d0 + c, d0);
      }
    }
  }
}

inline double Wide(double v) { return v; }
inline float Wide(float v) { return v; }
template <class T>
inline int64_t Wide(T v) {
  return static_cast<int64_t>(v);
}

template <class T, ReduceOp kOp>
void ReduceRun(void* acc, int64_t as, const void* x, int64_t xs, int64_t n) {
  auto* a = static_cast<T*>(acc);
  const auto* b = static_cast<const T*>(x);
  if (as == 1 && xs == 1) {
    for (int64_t i = 0; i < n; ++i) {
      FromNumber(Reduced<kOp>(Wide(AsNumber(a[i])), Wide(AsNumber(b[i]))), &a[i]);
    }
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    FromNumber(Reduced<kOp>(Wide(AsNumber(a[i * as])), Wide(AsNumber(b[i * xs]))), &a[i * as]);
  }
}

// The unsigned integer as wide as an element.
template <class T>
using BitsOf =
    std::conditional_t<sizeof(T) == 8, uint64_t,
                       std::conditional_t<sizeof(T) == 4, uint32_t,
                                          std::conditional_t<sizeof(T) == 2, uint16_t, uint8_t>>>;

template <class S, class D>
constexpr CopyRunFn CopyRun() {
  // A bool that is copied becomes 0 or 1.
  if constexpr (std::is_same_v<S, D> && !std::is_same_v<S, Bool>) return SameRun<BitsOf<S>>;
  return ConvertRun<S, D>;
}

template <class S>
void FillCopies(CopyRunFn* row) {
#define DT_COPY(name, type, ...) row[static_cast<int>(DType::name)] = CopyRun<S, type>();
  DT_DTYPES(DT_COPY)
#undef DT_COPY
}

template <ReduceOp kOp>
void FillReduces(RunTable* t) {
  ReduceRunFn* const row = t->reduce[static_cast<int>(kOp)];
#define DT_REDUCE(name, type, ...) row[static_cast<int>(DType::name)] = ReduceRun<type, kOp>;
  DT_DTYPES(DT_REDUCE)
#undef DT_REDUCE
}

RunTable MakeTable() {
  RunTable t{};
#define DT_COPIES(name, type, ...) FillCopies<type>(t.copy[static_cast<int>(DType::name)]);
  DT_DTYPES(DT_COPIES)
#undef DT_COPIES
  t.fill[0] = FillRun<uint8_t>;
  t.fill[1] = FillRun<uint16_t>;
  t.fill[2] = FillRun<uint32_t>;
  t.fill[3] = FillRun<uint64_t>;
  t.stream = StreamBytes;
  t.plane[0] = CopyPlane<uint8_t>;
  t.plane[1] = CopyPlane<uint16_t>;
  t.plane[2] = CopyPlane<uint32_t>;
  t.plane[3] = CopyPlane<uint64_t>;
  FillReduces<ReduceOp::kSum>(&t);
  FillReduces<ReduceOp::kMax>(&t);
  FillReduces<ReduceOp::kMin>(&t);
  FillReduces<ReduceOp::kProd>(&t);
  return t;
}

}  // namespace

const RunTable& TensorRuns() {
  static const RunTable table = MakeTable();
  return table;
}

}  // namespace DT_LEVEL_NS
}  // namespace dtensor
