// How a pointwise kernel is launched: once over runs where all arrays are such, else over strides.
#include <algorithm>
#include <new>

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

constexpr int kMaxNumbers = 3;  // that Numbers holds
inline void SetNumbers(const Attr* attrs, int num_attrs, Numbers* numbers) {
  for (int k = 0; k < num_attrs; ++k) {
    numbers->d[k] = attrs[k].d;
    numbers->i[k] = attrs[k].i;
  }
}
Numbers NumbersOf(const KernelCall& call) {
  Numbers numbers = {};
  SetNumbers(call.attrs, std::min(call.device->num_attrs, kMaxNumbers), &numbers);
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

// Of a plan whose arguments hold FlatArgs.
void LaunchAgain(DeviceLaunch& launch, const Attr* attrs, StreamHandle stream) {
  auto* const args = reinterpret_cast<FlatArgs*>(launch.arguments);
  SetNumbers(attrs, launch.num_attrs, &args->numbers);
  void* pointers[] = {args};
  const cudaError_t error = cudaLaunchKernel(launch.kernel, dim3(launch.blocks), dim3(kThreads),
                                             pointers, 0, static_cast<cudaStream_t>(stream));
  if (error != cudaSuccess) NoteError(error);
}
void KeepLaunch(const void* kernel, unsigned blocks, const FlatArgs& args, const KernelCall& call) {
  static_assert(sizeof(args) <= sizeof(DeviceLaunch::arguments));
  DeviceLaunch& launch = *call.device->launch;
  auto* const kept = new (launch.arguments) FlatArgs(args);
  launch.addresses = kept->data;
  launch.kernel = kernel;
  launch.blocks = blocks;
  launch.num_attrs = std::min(call.device->num_attrs, kMaxNumbers);
  launch.run = LaunchAgain;
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
  const void* const kernel = op.flat[static_cast<int>(dtype)];
  const int64_t work = args.n / pack + 1;
  Launch(kernel, work, &args, call);
  const bool checks = op.kind.quotient && !IsFloating(dtype);  // RefuseZeros
  const DeviceLaunch* const kept = call.device->launch;
  if (kept != nullptr && kept->run == nullptr && !checks) {
    KeepLaunch(kernel, BlocksFor(work), args, call);
  }
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
