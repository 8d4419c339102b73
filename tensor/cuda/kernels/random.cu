// Random fills: the samplers of rng/ on the device, the same bits as on the CPU. A run of
// neighbours computes every Philox block once; other boxes compute one per element.
#include "dtensor/rng/draw.h"
#include "dtensor/tensor/cuda/kernels/fill_words.h"

namespace dtensor::cuda {
namespace {

// Elements first_g + sum(i_d * g_stride_d) at local_offset + sum(i_d * local_stride_d).
struct FillBox {
  struct Dim {
    int64_t size, g_stride, local_stride;
  };
  int64_t first_g, local_offset;
  int ndim;
  Dim dims[kMaxDims];

  explicit FillBox(FillWords* in)
      : first_g(in->Next<int64_t>()), local_offset(in->Next<int64_t>()) {
    ndim = static_cast<int>(in->Next<size_t>());
    for (int d = 0; d < ndim; ++d) dims[d] = in->Next<Dim>();
  }
  int64_t numel() const {
    int64_t n = 1;
    for (int d = 0; d < ndim; ++d) n *= dims[d].size;
    return n;
  }
  bool IsRun() const { return ndim == 1 && dims[0].local_stride == 1; }
  __device__ void Locate(int64_t i, int64_t* g, int64_t* at) const {
    *g = first_g;
    *at = local_offset;
    for (int d = ndim - 1; d >= 0; --d) {
      const int64_t rest = i / dims[d].size, k = i - rest * dims[d].size;
      *g += k * dims[d].g_stride;
      *at += k * dims[d].local_stride;
      i = rest;
    }
  }
};

// A row of the grid has the segment's threads, or those that draw anything, and makes their calls
// one after the other: divisions of 64 bits took longer than the draws.
template <class Sampler, class T>
__global__ void __launch_bounds__(kThreads)
    DrawRun(IntervalJob<T> job, Sampler sampler, int64_t first_call, int calls,
            const uint64_t* shift) {
  const int64_t thread = GridStart();
  if (thread >= job.segment.threads) return;
  job.segment.block = Shifted(job.segment.block, shift);
  IntervalRun(job, sampler, thread, first_call, static_cast<int>(blockIdx.y), calls, gridDim.y);
}
// What of the box lies in elements [segment.first, end) of the whole.
template <class Sampler, class T>
__global__ void __launch_bounds__(kThreads)
    DrawBox(DeviceSegment segment, int64_t end, FillBox box, Sampler sampler, T* out, int64_t n,
            const uint64_t* shift) {
  segment.block = Shifted(segment.block, shift);
  constexpr int kCount = kResults<Sampler>;
  for (int64_t i = GridStart(); i < n; i += GridStep()) {
    int64_t g, at;
    box.Locate(i, &g, &at);
    if (g < segment.first || g >= end) continue;
    const int64_t q = (g - segment.first) / segment.threads, call = q / kCount;
    T results[kCount];
    DrawBlock(segment, sampler, (g - segment.first) % segment.threads, call, results);
#pragma unroll
    for (int c = 0; c < kCount; ++c) {
      if (c == q % kCount) out[at] = results[c];
    }
  }
}

// Groups of neighbours, each of one or two blocks. Four that are there and lie well are written at
// once.
__global__ void __launch_bounds__(kThreads)
    MaskRun(KeepMask keep, int64_t begin, int64_t end, bool* out) {
  const int64_t first = begin / keep.vec, last = (end - 1) / keep.vec;
  const uint64_t block = Shifted(keep.block, keep.shift);
  for (int64_t j = first + GridStart(); j <= last; j += GridStep()) {
    const int64_t call = j / keep.threads, thread = j - call * keep.threads;
#pragma unroll 1
    for (int c = 0; c < keep.vec; c += 4) {
      const PhiloxWords w =
          CurandBlock(keep.keys, block + static_cast<uint64_t>(call * keep.blocks + c / 4),
                      static_cast<uint64_t>(thread));
      const uint32_t words[4] = {w.x, w.y, w.z, w.w};
      uint32_t kept = 0;  // a byte for each, the first lowest
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        kept |= static_cast<uint32_t>(UniformFloat(words[k]) < keep.keep) << (8 * k);
      }
      const int64_t g = j * keep.vec + c;
      bool* const to = out + (g - begin);
      if (keep.vec >= 4 && g >= begin && g + 4 <= end && reinterpret_cast<uintptr_t>(to) % 4 == 0) {
        *reinterpret_cast<uint32_t*>(to) = kept;
        continue;
      }
#pragma unroll 1
      for (int k = 0; k < 4; ++k, kept >>= 8) {
        if (c + k < keep.vec && g + k >= begin && g + k < end) to[k] = (kept & 1) != 0;
      }
    }
  }
}
__global__ void __launch_bounds__(kThreads)
    MaskBox(KeepMask keep, FillBox box, bool* out, int64_t n) {
  for (int64_t i = GridStart(); i < n; i += GridStep()) {
    int64_t g, at;
    box.Locate(i, &g, &at);
    out[at] = keep(g);
  }
}

// What dropout computes in.
template <class T>
using Scale = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <class T>
__global__ void __launch_bounds__(kThreads)
    DropoutRun(DropoutJob<T, Scale<T>> job, const uint64_t* shift) {
  job.segment.block = Shifted(job.segment.block, shift);
  const int64_t n = DropoutThreads(job);
  for (int64_t i = GridStart(); i < n; i += GridStep()) DropoutThread(job, i);
}
template <class T>
__global__ void __launch_bounds__(kThreads) DropoutBox(KeepMask keep, FillBox box, Scale<T> scale,
                                                       const T* x, T* y, bool* mask, int64_t n) {
  for (int64_t i = GridStart(); i < n; i += GridStep()) {
    int64_t g, at;
    box.Locate(i, &g, &at);
    const bool stays = keep(g);
    mask[at] = stays;
    y[at] = Dropped(x[at], stays, scale);
  }
}

// 1 where u <= p; u of element g is word g % 4 of the block of group g / 4.
__global__ void __launch_bounds__(kThreads)
    ChanceBox(DeviceSegment segment, FillBox box, const double* chance, bool* out, int64_t n,
              ErrorSlot slot, const uint64_t* shift) {
  segment.block = Shifted(segment.block, shift);
  for (int64_t i = GridStart(); i < n; i += GridStep()) {
    int64_t g, at;
    box.Locate(i, &g, &at);
    const double p = chance[at];
    if (!(p >= 0 && p <= 1)) Complaint(slot) << "a probability is outside of [0, 1]";
    const int64_t group = g / 4, word = g % 4, call = group / segment.threads;
    const PhiloxWords w = CurandBlock(segment.keys, segment.block + static_cast<uint64_t>(call),
                                      static_cast<uint64_t>(group - call * segment.threads));
    const uint32_t x = word == 0 ? w.x : word == 1 ? w.y : word == 2 ? w.z : w.w;
    out[at] = static_cast<double>(UniformFloat(x)) <= p;
  }
}

// One box of one segment, on `stream`.
struct Draw {
  DeviceSegment segment;
  int64_t end;
  const FillBox* box;
  DrawParams params;
  void* out;
  cudaStream_t stream;
  const uint64_t* shift;

  template <class Sampler, class T>
  void Run() const {
    const Sampler sampler(params);
    const int64_t n = box->numel();
    // By elements, too, a run so short that most of the segment's threads would have nothing to do.
    if (!box->IsRun() || n < segment.threads / 4) {
      DrawBox<<<BlocksFor(n), kThreads, 0, stream>>>(segment, end, *box, sampler,
                                                     static_cast<T*>(out), n, shift);
      return CheckLaunch();
    }
    const int64_t first = box->first_g, last = first + box->dims[0].size;
    const int64_t begin = first > segment.first ? first : segment.first;
    const int64_t stop = last < end ? last : end;
    if (begin >= stop) return;
    const IntervalJob<T> job = {segment, begin, stop,
                                static_cast<T*>(out) + box->local_offset + (begin - first)};
    // Blocks that keep a device busy; what a thread computes before its first call is a third.
    constexpr unsigned kBusy = 8192;
    constexpr int64_t kMostCalls = int64_t{1} << 30;
    const int64_t calls = IntervalCalls<Sampler>(job), used = stop - segment.first;
    const int64_t threads = used < segment.threads ? used : segment.threads;
    for (int64_t c = 0; c < calls; c += kMostCalls) {
      const int64_t here = calls - c < kMostCalls ? calls - c : kMostCalls;
      const unsigned blocks = BlocksFor(threads), rows = blocks < kBusy ? kBusy / blocks : 1;
      const dim3 grid(blocks, static_cast<unsigned>(here < rows ? here : rows));
      DrawRun<<<grid, kThreads, 0, stream>>>(job, sampler, FirstCall<Sampler>(job) + c,
                                             static_cast<int>(here), shift);
      CheckLaunch();
    }
  }

  template <template <class> class Sampler>
  bool OfFloats(DType dtype) const {
    switch (dtype) {
      case DType::kF64:
        return Run<Sampler<double>, double>(), true;
      case DType::kF32:
        return Run<Sampler<float>, float>(), true;
      case DType::kBF16:
        return Run<Sampler<BFloat16>, BFloat16>(), true;
      case DType::kF16:
        return Run<Sampler<Half>, Half>(), true;
      default:
        return false;
    }
  }
  template <template <class> class Sampler>
  bool OfAny(DType dtype) const {
    switch (dtype) {
      case DType::kI64:
        return Run<Sampler<int64_t>, int64_t>(), true;
      case DType::kI32:
        return Run<Sampler<int32_t>, int32_t>(), true;
      case DType::kU8:
        return Run<Sampler<uint8_t>, uint8_t>(), true;
      case DType::kBool:
        return Run<Sampler<bool>, bool>(), true;
      default:
        return OfFloats<Sampler>(dtype);
    }
  }
  // False where the kind has no such dtype.
  bool Of(RandomKind kind, DType dtype) const {
    switch (kind) {
      case RandomKind::kUniform:
        return OfFloats<Uniform>(dtype);
      case RandomKind::kNormal:
        return OfFloats<Normal>(dtype);
      case RandomKind::kWords32:
        return OfAny<Words32>(dtype);
      case RandomKind::kWords64:
        return OfAny<Words64>(dtype);
      case RandomKind::kBernoulli:
        return OfAny<Bernoulli>(dtype);
      case RandomKind::kExponential:
        return OfFloats<Exponential>(dtype);
      case RandomKind::kCauchy:
        return OfFloats<Cauchy>(dtype);
      case RandomKind::kLogNormal:
        return OfFloats<LogNormal>(dtype);
      case RandomKind::kGeometric:
        return OfAny<Geometric>(dtype);
    }
    return false;
  }
};

void RunMask(const KernelCall& c, const FillHead& head, const FillSegment& segment,
             const FillBox& box) {
  const KeepMask keep(head, segment);
  bool* const out = Out<bool>(c, 0);
  const int64_t n = box.numel();
  if (box.IsRun() && head.vec > 1) {
    MaskRun<<<BlocksFor(n / head.vec + 1), kThreads, 0, StreamOf(c)>>>(
        keep, box.first_g, box.first_g + n, out + box.local_offset);
  } else {
    MaskBox<<<BlocksFor(n), kThreads, 0, StreamOf(c)>>>(keep, box, out, n);
  }
  CheckLaunch();
}

// The words of a FillTask; p, where chances are given -> out
void FillKernel(const KernelCall& c) {
  constexpr uint8_t kDraw = 0, kMask = 1;  // FillTask::Kind
  constexpr size_t kSegmentWords = sizeof(FillSegment) / 8;
  FillWords words(c.attrs[0].ints);
  const FillHead head(&words);
  FillWords segments = words;
  for (size_t s = 0; s < head.segments * kSegmentWords; ++s) words.Next<int64_t>();
  for (size_t b = 0; b < head.boxes; ++b) {
    const FillBox box(&words);
    FillWords of_box = segments;
    for (size_t s = 0; s < head.segments; ++s) {
      const auto segment = of_box.Next<FillSegment>();
      const DeviceSegment on_device = {MakePhiloxKeys(head.seed), segment.offset / 4, segment.first,
                                       segment.threads};
      if (head.kind == kDraw) {
        const Draw draw = {
            on_device, segment.first + segment.count, &box, head.params, c.out[0].data, StreamOf(c),
            head.shift};
        if (!draw.Of(static_cast<RandomKind>(head.op), head.dtype)) {
          return NoteError(cudaErrorInvalidValue);  // checked before (rng/check.cc)
        }
      } else if (head.kind == kMask) {
        RunMask(c, head, segment, box);
      } else {
        const int64_t n = box.numel();
        ChanceBox<<<BlocksFor(n), kThreads, 0, StreamOf(c)>>>(
            on_device, box, In<double>(c, 0), Out<bool>(c, 0), n, ErrorSlotOf(c), head.shift);
        CheckLaunch();
      }
    }
  }
}

// x; the words of a FillTask of a mask, what is kept is multiplied by -> y, mask
void DropoutKernel(const KernelCall& c) {
  FillWords words(c.attrs[0].ints);
  const FillHead head(&words);
  const KeepMask keep(head, words.Next<FillSegment>());
  VisitFloat(c.in[0].dtype, [&](auto element) {
    using T = decltype(element);
    const auto scale = static_cast<Scale<T>>(c.attrs[1].d);
    const T* const x = In<T>(c, 0);
    T* const y = Out<T>(c, 0);
    bool* const mask = Out<bool>(c, 1);
    for (size_t b = 0; b < head.boxes; ++b) {
      const FillBox box(&words);
      const int64_t n = box.numel(), at = box.local_offset;
      if (box.IsRun() && head.vec == kDropoutVec<T>) {
        const DropoutJob<T, Scale<T>> job = {{keep.keys, keep.block, 0, keep.threads},
                                             box.first_g,
                                             box.first_g + n,
                                             keep.keep,
                                             scale,
                                             x + at,
                                             y + at,
                                             mask + at};
        DropoutRun<T>
            <<<BlocksFor(DropoutThreads(job)), kThreads, 0, StreamOf(c)>>>(job, keep.shift);
      } else {
        DropoutBox<T><<<BlocksFor(n), kThreads, 0, StreamOf(c)>>>(keep, box, scale, x, y, mask, n);
      }
      CheckLaunch();
    }
  });
}

}  // namespace

void AddRandomKernels(AddKernelFn add) {
  add("random_dropout", DropoutKernel, kFloatDTypes, KernelLayout::kContiguous);
  add("random_fill", FillKernel, ~0u, KernelLayout::kStrided);
}

}  // namespace dtensor::cuda
