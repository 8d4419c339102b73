#include "dtensor/mesh/reduce_ranks.h"

#include <cstring>
#include <type_traits>

#include "dtensor/tensor/cpu/kernels/element_ops.h"

#if defined(DT_LEVEL_V3) || defined(DT_LEVEL_V4)
#include <immintrin.h>
#endif

// Everything below but the entry has internal linkage: code of one level must not serve another.
namespace dtensor {
namespace DT_LEVEL_NS {
namespace {

// Elements of one block: inputs are read once, block by block, into an L1-resident accumulator.
constexpr int64_t kBlock = 1024;

// Acc: what terms are accumulated in. Load and Store convert.
template <class T, bool kIsNumber = std::is_arithmetic_v<T>>
struct Element {
  using Acc = T;
  static inline Acc Load(T v) { return v; }
  static inline T Store(Acc v) { return v; }
};
template <class T>
struct Element<T, false> {
  using Acc = float;
  static inline float Load(T v) { return ToFloat(v); }
  static inline T Store(float v) {
    T rounded;
    RoundTo(v, &rounded);
    return rounded;
  }
};
template <>
struct Element<Bool, false> {
  using Acc = Bool;
  static inline Bool Load(Bool v) { return Bool{v.value != 0}; }
  static inline Bool Store(Bool v) { return v; }
};

void StoreBlock(void* out, const void* block, int64_t bytes, bool bypass) {
#if defined(DT_LEVEL_V3) || defined(DT_LEVEL_V4)
  char* to = static_cast<char*>(out);
  if (bypass && bytes % 32 == 0 && reinterpret_cast<uintptr_t>(to) % 32 == 0) {
    const char* from = static_cast<const char*>(block);
    for (int64_t i = 0; i < bytes; i += 32) {
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i),
                          _mm256_load_si256(reinterpret_cast<const __m256i*>(from + i)));
    }
    return;
  }
#else
  (void)bypass;
#endif
  memcpy(out, block, bytes);
}

template <class T, ReduceOp kOp>
void Reduce(const ReduceRanksCall& call) {
  using E = Element<T>;
  using Acc = typename E::Acc;
  alignas(64) Acc acc[kBlock];
  alignas(64) T result[kBlock];
  for (int64_t at = 0; at < call.count; at += kBlock) {
    const int64_t n = call.count - at < kBlock ? call.count - at : kBlock;
    const T* first = static_cast<const T*>(call.in[0]) + at;
    int r = 1;
    if (call.inputs > 1) {  // the first two at once: one pass over acc less
      const T* second = static_cast<const T*>(call.in[r++]) + at;
      for (int64_t i = 0; i < n; ++i) {
        acc[i] = Reduced<kOp>(E::Load(first[i]), E::Load(second[i]));
      }
    } else {
      for (int64_t i = 0; i < n; ++i) acc[i] = E::Load(first[i]);
    }
    for (; r < call.inputs; ++r) {
      const T* x = static_cast<const T*>(call.in[r]) + at;
      for (int64_t i = 0; i < n; ++i) acc[i] = Reduced<kOp>(acc[i], E::Load(x[i]));
    }
    if constexpr (kOp == ReduceOp::kAvg && std::is_arithmetic_v<Acc>) {
      const auto terms = static_cast<Acc>(call.terms > 0 ? call.terms : call.inputs);
      for (int64_t i = 0; i < n; ++i) acc[i] = acc[i] / terms;
    }
    for (int64_t i = 0; i < n; ++i) result[i] = E::Store(acc[i]);
    for (int k = 0; k < call.outputs; ++k) {
      StoreBlock(static_cast<T*>(call.out[k]) + at, result, n * sizeof(T), call.bypass);
    }
  }
}

// 16 floats in registers of whatever width the level has, at any address.
typedef float Floats __attribute__((vector_size(64), aligned(4), may_alias));

// Sum of N float arrays, kept in registers between the inputs and the outputs; returns how many
// elements it did. All loads come before the stores, so an output may be an input.
template <int N>
int64_t SumChunks(const float* const* in, void* const* out, int outputs, int64_t count) {
  constexpr int64_t kLanes = 16, kVectors = 4, kChunk = kLanes * kVectors;
  int64_t at = 0;
  for (; at + kChunk <= count; at += kChunk) {
    Floats sum[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      sum[v] = *reinterpret_cast<const Floats*>(in[0] + at + v * kLanes);
#pragma GCC unroll 8
      for (int r = 1; r < N; ++r) {
        sum[v] += *reinterpret_cast<const Floats*>(in[r] + at + v * kLanes);
      }
    }
    for (int k = 0; k < outputs; ++k) {
      float* const to = static_cast<float*>(out[k]) + at;
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) *reinterpret_cast<Floats*>(to + v * kLanes) = sum[v];
    }
  }
  return at;
}

// Sum of N float arrays in one pass each over inputs and outputs.
template <int N>
void SumFloats(const ReduceRanksCall& call) {
  alignas(64) float sum[kBlock];
  const float* in[N];
  for (int r = 0; r < N; ++r) in[r] = static_cast<const float*>(call.in[r]);
  int64_t at = call.count <= kBlock ? SumChunks<N>(in, call.out, call.outputs, call.count) : 0;
  for (; at < call.count; at += kBlock) {
    const int64_t n = call.count - at < kBlock ? call.count - at : kBlock;
    for (int r = 0; r < N; ++r) in[r] = static_cast<const float*>(call.in[r]) + at;
    for (int64_t i = 0; i < n; ++i) {
      float v = in[0][i];
#pragma GCC unroll 8
      for (int r = 1; r < N; ++r) v += in[r][i];
      sum[i] = v;
    }
    for (int k = 0; k < call.outputs; ++k) {
      StoreBlock(static_cast<float*>(call.out[k]) + at, sum, n * sizeof(float), call.bypass);
    }
  }
}

bool FastSum(const ReduceRanksCall& call) {
  if (call.dtype != DType::kF32 || call.op != ReduceOp::kSum) return false;
  switch (call.inputs) {
    case 2:
      return SumFloats<2>(call), true;
    case 3:
      return SumFloats<3>(call), true;
    case 4:
      return SumFloats<4>(call), true;
    case 5:
      return SumFloats<5>(call), true;
    case 6:
      return SumFloats<6>(call), true;
    case 7:
      return SumFloats<7>(call), true;
    case 8:
      return SumFloats<8>(call), true;
    default:
      return false;
  }
}

template <class T>
void ByOp(const ReduceRanksCall& call) {
  switch (call.op) {
    case ReduceOp::kMax:
      return Reduce<T, ReduceOp::kMax>(call);
    case ReduceOp::kMin:
      return Reduce<T, ReduceOp::kMin>(call);
    case ReduceOp::kProd:
      return Reduce<T, ReduceOp::kProd>(call);
    case ReduceOp::kAvg:
      return Reduce<T, ReduceOp::kAvg>(call);
    default:
      return Reduce<T, ReduceOp::kSum>(call);
  }
}

}  // namespace

void ReduceRanks(const ReduceRanksCall& call) {
  if (FastSum(call)) return;
  VisitDType(call.dtype, [&](auto element) { ByOp<typename decltype(element)::type>(call); });
}

}  // namespace DT_LEVEL_NS
}  // namespace dtensor
