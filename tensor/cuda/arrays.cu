#include "dtensor/tensor/convert.h"
#include "dtensor/tensor/cuda/arrays.h"
#include "dtensor/tensor/cuda/launch.h"
#include "dtensor/tensor/cuda/math.h"
#include "dtensor/tensor/device_table.h"

namespace dtensor::cuda {
namespace {

// --- copies -------------------------------------------------------------------------------------

template <class S, class D>
__global__ void ConvertStrided(const __grid_constant__ Strided<2> arrays, D* to, const S* from) {
  for (int64_t i = GridStart(); i < arrays.numel; i += GridStep()) {
    int32_t at[2];
    arrays.Offsets(static_cast<uint32_t>(i), at);
    FromNumber(AsNumber(from[at[1]]), &to[at[0]]);
  }
}
template <class S, class D, int V>
__global__ void ConvertRun(int64_t packs, Pack<D, V>* to, const Pack<S, V>* from) {
  for (int64_t i = GridStart(); i < packs; i += GridStep()) {
    const Pack<S, V> source = from[i];
    Pack<D, V> target;
    for (int k = 0; k < V; ++k) FromNumber(AsNumber(source.v[k]), &target.v[k]);
    to[i] = target;
  }
}
template <class T>
__global__ void MoveStrided(const __grid_constant__ Strided<2> arrays, T* to, const T* from) {
  for (int64_t i = GridStart(); i < arrays.numel; i += GridStep()) {
    int32_t at[2];
    arrays.Offsets(static_cast<uint32_t>(i), at);
    to[at[0]] = from[at[1]];
  }
}

template <class S, class D>
void Convert(cudaStream_t stream, const Arrays<2>& arrays) {
  constexpr int kPack = sizeof(S) == 8 || sizeof(D) == 8 ? 2 : 4;  // at most 16 bytes at a time
  arrays.ForEach([&](const Strided<2>& part, char* const* data) {
    const bool run = arrays.IsOneRun() && part.numel % kPack == 0 &&
                     IsAligned(data[0], kPack * sizeof(D)) && IsAligned(data[1], kPack * sizeof(S));
    if (run) {
      ConvertRun<S, D, kPack><<<BlocksFor(part.numel / kPack), kThreads, 0, stream>>>(
          part.numel / kPack, reinterpret_cast<Pack<D, kPack>*>(data[0]),
          reinterpret_cast<const Pack<S, kPack>*>(data[1]));
    } else {
      ConvertStrided<S, D><<<BlocksFor(part.numel), kThreads, 0, stream>>>(
          part, reinterpret_cast<D*>(data[0]), reinterpret_cast<const S*>(data[1]));
    }
    CheckLaunch();
  });
}

template <class T>
void MoveAll(cudaStream_t stream, const Arrays<2>& arrays) {
  if (arrays.IsOneRun()) {
    NoteError(cudaMemcpyAsync(arrays.data()[0], arrays.data()[1],
                              static_cast<size_t>(arrays.numel()) * sizeof(T),
                              cudaMemcpyDeviceToDevice, stream));
    return;
  }
  arrays.ForEach([&](const Strided<2>& part, char* const* data) {
    MoveStrided<T><<<BlocksFor(part.numel), kThreads, 0, stream>>>(
        part, reinterpret_cast<T*>(data[0]), reinterpret_cast<const T*>(data[1]));
    CheckLaunch();
  });
}

// Calls visit with the unsigned integer as wide as an element of 2^log_size bytes.
template <class Visit>
void VisitBits(int log_size, const Visit& visit) {
  switch (log_size) {
    case 0:
      return visit(uint8_t{});
    case 1:
      return visit(uint16_t{});
    case 2:
      return visit(uint32_t{});
    default:
      return visit(uint64_t{});
  }
}

// --- fills --------------------------------------------------------------------------------------

template <class T>
__global__ void FillStrided(const __grid_constant__ Strided<1> array, T* to, T value) {
  for (int64_t i = GridStart(); i < array.numel; i += GridStep()) {
    int32_t at[1];
    array.Offsets(static_cast<uint32_t>(i), at);
    to[at[0]] = value;
  }
}
// 16 bytes at a time, and what is left singly.
template <class T>
__global__ void FillRun(int64_t n, T* to, T value) {
  constexpr int kPack = 16 / sizeof(T);
  Pack<T, kPack> pack;
#pragma unroll
  for (int k = 0; k < kPack; ++k) pack.v[k] = value;
  const int64_t packs = n / kPack;
  for (int64_t i = GridStart(); i < packs; i += GridStep()) {
    reinterpret_cast<Pack<T, kPack>*>(to)[i] = pack;
  }
  for (int64_t i = packs * kPack + GridStart(); i < n; i += GridStep()) to[i] = value;
}

// --- reductions ---------------------------------------------------------------------------------

struct Reduced {
  int ins, arrays;  // inputs come first
  int ndim, op;     // op: a ReduceOp; as a byte it would cost registers
  int64_t numel;
  int64_t sizes[kMaxStridedDims];
  void* data[kMaxReduced];
  int64_t strides[kMaxReduced][kMaxStridedDims];
};

namespace dev = ::dtensor::device_code;

template <class A>
__device__ A Combine(int op, A a, A b) {
  switch (op) {
    case static_cast<int>(ReduceOp::kMax):
      return dev::Maximum(a, b);
    case static_cast<int>(ReduceOp::kMin):
      return dev::Minimum(a, b);
    case static_cast<int>(ReduceOp::kProd):
      return dev::Mul(a, b);
    default:
      return dev::Add(a, b);
  }
}

// In the order of the inputs, in float where the dtype is narrower, rounded once.
template <class T>
__global__ void Reduce(const __grid_constant__ Reduced r) {
  for (int64_t i = GridStart(); i < r.numel; i += GridStep()) {
    int64_t at[kMaxStridedDims];
    int64_t rest = i;
#pragma unroll
    for (int d = kMaxStridedDims - 1; d >= 0; --d) {
      at[d] = 0;
      if (d >= r.ndim) continue;
      at[d] = rest % r.sizes[d];
      rest /= r.sizes[d];
    }
    const auto element = [&](int k) {
      int64_t offset = 0;
#pragma unroll
      for (int d = 0; d < kMaxStridedDims; ++d) {
        if (d < r.ndim) offset += at[d] * r.strides[k][d];
      }
      return static_cast<T*>(r.data[k]) + offset;
    };
    auto sum = AsComputed(*element(0));
    for (int k = 1; k < r.ins; ++k) sum = Combine(r.op, sum, AsComputed(*element(k)));
    if (r.op == static_cast<int>(ReduceOp::kAvg)) sum = sum / static_cast<decltype(sum)>(r.ins);
    T result;
    FromNumber(sum, &result);
    for (int k = r.ins; k < r.arrays; ++k) *element(k) = result;
  }
}

// Dims that all arrays have as one are one. False where more are left than a kernel takes.
bool Collapse(int count, const TensorRef* const* refs, Reduced* r) {
  r->ndim = 0;
  r->numel = 1;
  for (int d = 0; d < refs[0]->ndim; ++d) {
    const int64_t size = refs[0]->sizes[d];
    r->numel *= size;
    if (size == 1) continue;
    bool merges = r->ndim > 0;
    for (int k = 0; merges && k < count; ++k) {
      merges = r->strides[k][r->ndim - 1] == refs[k]->strides[d] * size;
    }
    if (!merges && r->ndim == kMaxStridedDims) return false;
    if (!merges) r->sizes[r->ndim++] = 1;
    r->sizes[r->ndim - 1] *= size;
    for (int k = 0; k < count; ++k) r->strides[k][r->ndim - 1] = refs[k]->strides[d];
  }
  return true;
}

}  // namespace

int CopyArray(void* opaque, const TensorRef* from, const TensorRef* to) {
  const auto stream = static_cast<cudaStream_t>(opaque);
  const TensorRef* const refs[] = {to, from};
  const Arrays<2> arrays(refs);
  if (arrays.numel() == 0) return TakeError(cudaSuccess);
  if (from->dtype == to->dtype && from->dtype != DType::kBool) {  // a bool becomes 0 or 1
    VisitBits(LogSizeOf(from->dtype), [&](auto bits) { MoveAll<decltype(bits)>(stream, arrays); });
    return TakeError(cudaSuccess);
  }
  VisitDType(from->dtype, [&](auto source) {
    VisitDType(to->dtype, [&](auto target) {
      Convert<typename decltype(source)::type, typename decltype(target)::type>(stream, arrays);
    });
  });
  return TakeError(cudaSuccess);
}

int FillArray(void* opaque, const TensorRef* to, const void* value, DType value_dtype) {
  const auto stream = static_cast<cudaStream_t>(opaque);
  uint64_t bits = 0;
  VisitDType(value_dtype, [&](auto source) {
    VisitDType(to->dtype, [&](auto target) {
      typename decltype(source)::type from;
      typename decltype(target)::type as;
      std::memcpy(&from, value, sizeof(from));
      FromNumber(AsNumber(from), &as);
      std::memcpy(&bits, &as, sizeof(as));
    });
  });
  const TensorRef* const refs[] = {to};
  const Arrays<1> arrays(refs);
  VisitBits(LogSizeOf(to->dtype), [&](auto element) {
    using T = decltype(element);
    constexpr int kEach = 64 / sizeof(T);  // elements of a thread
    if (arrays.IsOneRun() && IsAligned(arrays.data()[0], 16)) {
      const int64_t n = arrays.numel();
      if (n == 0) return;
      FillRun<T><<<BlocksFor((n + kEach - 1) / kEach), kThreads, 0, stream>>>(
          n, reinterpret_cast<T*>(arrays.data()[0]), static_cast<T>(bits));
      return CheckLaunch();
    }
    arrays.ForEach([&](const Strided<1>& part, char* const* data) {
      FillStrided<T><<<BlocksFor(part.numel), kThreads, 0, stream>>>(
          part, reinterpret_cast<T*>(data[0]), static_cast<T>(bits));
      CheckLaunch();
    });
  });
  return TakeError(cudaSuccess);
}

int ReduceArrays(void* stream, int ins, const TensorRef* in, int outs, const TensorRef* out,
                 int op) {
  if (ins + outs > kMaxReduced) return TakeError(cudaErrorInvalidValue);
  Reduced r = {};
  const TensorRef* refs[kMaxReduced];
  for (int k = 0; k < ins; ++k) refs[k] = &in[k];
  for (int k = 0; k < outs; ++k) refs[ins + k] = &out[k];
  r.ins = ins;
  r.arrays = ins + outs;
  r.op = op;
  if (!Collapse(r.arrays, refs, &r)) return TakeError(cudaErrorInvalidValue);
  if (r.numel == 0) return TakeError(cudaSuccess);
  for (int k = 0; k < r.arrays; ++k) r.data[k] = refs[k]->data;
  VisitDType(in[0].dtype, [&](auto element) {
    Reduce<typename decltype(element)::type>
        <<<BlocksFor(r.numel), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(r);
  });
  CheckLaunch();
  return TakeError(cudaSuccess);
}

}  // namespace dtensor::cuda
