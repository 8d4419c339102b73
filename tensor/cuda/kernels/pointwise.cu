// How a pointwise kernel is launched: once over runs where all arrays are such, else over strides.
#include "dtensor/tensor/common_run.h"
#include "dtensor/tensor/cuda/arrays.h"
#include "dtensor/tensor/cuda/kernels/pointwise.h"

namespace dtensor::cuda {
namespace {

inline void Launch(const void* kernel, int64_t work, void* args, const KernelCall& call) {
  void* pointers[] = {args};
  const cudaError_t error =
      cudaLaunchKernel(kernel, dim3(BlocksFor(work)), dim3(kThreads), pointers, 0, StreamOf(call));
  if (error != cudaSuccess) NoteError(error);
}

Numbers NumbersOf(const KernelCall& call) {
  Numbers numbers = {};
  for (int k = 0; k < call.device->num_attrs && k < 3; ++k) {
    numbers.d[k] = call.attrs[k].d;
    numbers.i[k] = call.attrs[k].i;
  }
  return numbers;
}

// The arrays of a call, all of the dtypes that the kernel reads and writes.
class Operands {
 public:
  Operands(const KernelCall& call, const PointwiseKind& kind) : call_(call) {
    count_ = 1 + kind.ins;
    dtype_ = call.in[kind.mask == 0 ? 1 : 0].dtype;
    refs_[0] = call.out[0];
    for (int k = 1; k < count_; ++k) refs_[k] = call.in[k - 1];
    for (int k = 0; k < count_; ++k) {
      const bool is_bool = k == 0 ? kind.bool_out : k - 1 == kind.mask;
      Convert(k, is_bool ? DType::kBool : dtype_);
    }
  }
  // After the launch: an output of another dtype is converted back.
  void Finish() const {
    if (refs_[0].data != call_.out[0].data) {
      NoteError(static_cast<cudaError_t>(CopyArray(call_.stream, &refs_[0], &call_.out[0])));
    }
  }
  int dtype() const { return static_cast<int>(dtype_); }
  const TensorRef& ref(int k) const { return refs_[k]; }

 private:
  void Convert(int k, DType to) {
    TensorRef& ref = refs_[k];
    if (ref.dtype == to) return;
    TensorRef dense = ref;
    int64_t stride = 1;
    for (int d = ref.ndim - 1; d >= 0; --d) {
      strides_[k][d] = stride;
      stride *= ref.sizes[d];
    }
    dense.strides = strides_[k];
    dense.dtype = to;
    dense.data = Scratch<char>(call_, stride * SizeOf(to));
    if (k > 0) NoteError(static_cast<cudaError_t>(CopyArray(call_.stream, &ref, &dense)));
    ref = dense;
  }

  const KernelCall& call_;
  int count_;
  DType dtype_;
  TensorRef refs_[1 + kMaxIns];
  int64_t strides_[1 + kMaxIns][kMaxDims];
};

template <int N>
void RunOn(const KernelCall& call, const PointwiseOp& op, const Operands& operands) {
  const TensorRef* refs[N];
  for (int k = 0; k < N; ++k) refs[k] = &operands.ref(k);
  const Arrays<N> arrays(refs);
  const Numbers numbers = NumbersOf(call);
  bool flat = arrays.IsOneRun();
  for (int k = 0; flat && k < N; ++k) flat = IsAligned(refs[k]->data, 16);
  if (flat && arrays.numel() > 0) {
    FlatArgs args = {arrays.numel(), {}, numbers};
    for (int k = 0; k < N; ++k) args.data[k] = refs[k]->data;
    const int pack = PackOf(static_cast<size_t>(SizeOf(static_cast<DType>(operands.dtype()))));
    return Launch(op.flat[operands.dtype()], arrays.numel() / pack + 1, &args, call);
  }
  arrays.ForEach([&](const Strided<N>& part, char* const* data) {
    StridedArgs<N> args = {part, {}, numbers};
    for (int k = 0; k < N; ++k) args.data[k] = data[k];
    Launch(op.strided[operands.dtype()], part.numel, &args, call);
  });
}

// Most calls: all operands are runs of the dtypes that the kernel takes. False where they are not.
inline bool RunFlat(const KernelCall& call, const PointwiseOp& op) {
  const TensorRef& out = call.out[0];
  const TensorRef* const in = call.in.data();
  const int mask = op.kind.mask;
  const DType dtype = in[mask == 0 ? 1 : 0].dtype;
  if (out.dtype != (op.kind.bool_out ? DType::kBool : dtype)) return false;
  FlatArgs args;
  args.n = CommonRun(out, call.in);
  args.data[0] = out.data;
  auto addresses = reinterpret_cast<uintptr_t>(out.data);
  for (size_t k = 0; k < call.in.size(); ++k) {
    if (in[k].dtype != (static_cast<int>(k) == mask ? DType::kBool : dtype)) return false;
    args.data[1 + k] = in[k].data;
    addresses |= reinterpret_cast<uintptr_t>(in[k].data);
  }
  if (args.n < 0 || addresses % 16 != 0) return false;
  if (args.n == 0) return true;
  args.numbers = NumbersOf(call);
  const int pack = PackOf(static_cast<size_t>(SizeOf(dtype)));
  Launch(op.flat[static_cast<int>(dtype)], args.n / pack + 1, &args, call);
  return true;
}

template <class T>
__global__ void FindZero(const __grid_constant__ Strided<1> array, const T* x,
                         const __grid_constant__ ErrorSlot error) {
  for (int64_t i = GridStart(); i < array.numel; i += GridStep()) {
    int32_t at[1];
    array.Offsets(static_cast<uint32_t>(i), at);
    if (AsNumber(x[at[0]]) == 0) {
      Complaint(error) << "a whole number is divided by 0; convert with to() for inf and nan";
    }
  }
}
void RefuseZeros(const KernelCall& call, const TensorRef& x) {
  if (IsFloating(x.dtype)) return;
  const TensorRef* const refs[] = {&x};
  Arrays<1>(refs).ForEach([&](const Strided<1>& part, char* const* data) {
    VisitDType(x.dtype, [&](auto element) {
      using T = typename decltype(element)::type;
      if constexpr (std::is_integral_v<T> || std::is_same_v<T, Bool>) {
        FindZero<T><<<BlocksFor(part.numel), kThreads, 0, StreamOf(call)>>>(
            part, reinterpret_cast<const T*>(data[0]), ErrorSlotOf(call));
      }
    });
    CheckLaunch();
  });
}

}  // namespace

void RunPointwise(const KernelCall& call, const PointwiseOp& op) {
  if (op.kind.quotient) RefuseZeros(call, call.in[1]);
  if (RunFlat(call, op)) return;
  const Operands operands(call, op.kind);
  switch (op.kind.ins) {
    case 1:
      RunOn<2>(call, op, operands);
      break;
    case 2:
      RunOn<3>(call, op, operands);
      break;
    default:
      RunOn<4>(call, op, operands);
  }
  operands.Finish();
}

void AddPointwiseKernels(AddKernelFn add) {
  AddElementwiseKernels(add);
  AddLogicKernels(add);
  AddActivationKernels(add);
  AddRealKernels(add);
}

}  // namespace dtensor::cuda
