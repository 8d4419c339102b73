#include "dtensor/tensor/device_move.h"

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "dtensor/tensor/device.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

bool Idle(const Tensor& t) { return t.device() == DeviceType::kMeta || t.numel() == 0; }

RankDevice& DeviceOf(const Tensor& t) {
  return *ValueOrThrow(RankDevices::Current().Get(t.device()));
}

void CopyOnDevice(RankDevice& device, const Tensor& from, const Tensor& to) {
  const TensorRef source = from.ref(), target = to.ref();
  ThrowIfError(
      device.device()->Check(device.table().copy(device.stream(), &source, &target), "a copy"));
}

// Bytes travel contiguous and in the target's dtype; the device, or the CPU, spreads them.
void Upload(const Tensor& from, const Tensor& to) {
  RankDevice& device = DeviceOf(to);
  const Tensor dense = ValueOrThrow(ValueOrThrow(from.To(to.dtype())).Contiguous());
  if (to.is_contiguous()) return device.Upload(dense.data(), dense.nbytes(), to.data());
  const Tensor there = ValueOrThrow(Tensor::Empty(to.shape(), to.dtype(), to.device()));
  device.Upload(dense.data(), dense.nbytes(), there.data());
  CopyOnDevice(device, there, to);
}

void Download(const Tensor& from, const Tensor& to) {
  RankDevice& device = DeviceOf(from);
  const Tensor there = ValueOrThrow(from.Contiguous());
  const bool direct = to.is_contiguous() && to.dtype() == from.dtype();
  const Tensor here = direct ? to : ValueOrThrow(Tensor::Empty(to.shape(), from.dtype()));
  ThrowIfError(device.Download(there.data(), there.nbytes(), here.data()));
  if (!direct) Copy(here, to);
}

}  // namespace

void FillElsewhere(const Tensor& out, const void* value, DType value_dtype) {
  if (Idle(out)) return;
  RankDevice& device = DeviceOf(out);
  const TensorRef ref = out.ref();
  ThrowIfError(device.device()->Check(
      device.table().fill(device.stream(), &ref, value, value_dtype), "a fill"));
}

void CopyElsewhere(const Tensor& from, const Tensor& to) {
  if (Idle(from) || Idle(to)) return;
  if (from.device() == DeviceType::kCpu) return Upload(from, to);
  if (to.device() == DeviceType::kCpu) return Download(from, to);
  DT_CHECK(from.device() == to.device());
  CopyOnDevice(DeviceOf(to), from, to);
}

void ReduceElsewhere(const Tensor& acc, const Tensor& x, ReduceOp op) {
  ReduceOnDevice({acc, x}, {acc}, op == ReduceOp::kAvg ? ReduceOp::kSum : op);
}

void ReduceOnDevice(absl::Span<const Tensor> in, absl::Span<const Tensor> out, ReduceOp op) {
  if (Idle(out[0])) return;
  if (in.size() + out.size() > kMaxReduced) {
    Throw(absl::InvalidArgumentError(absl::StrCat(
        "a reduction of ", in.size(), " tensors into ", out.size(), " on one device takes ",
        kMaxReduced, " in all: at most ", kMaxReduced / 2, " ranks share a device")));
  }
  RankDevice& device = DeviceOf(out[0]);
  absl::InlinedVector<TensorRef, 8> from, to;
  for (const Tensor& t : in) from.push_back(t.ref());
  for (const Tensor& t : out) to.push_back(t.ref());
  ThrowIfError(device.device()->Check(
      device.table().reduce(device.stream(), static_cast<int>(from.size()), from.data(),
                            static_cast<int>(to.size()), to.data(), static_cast<int>(op)),
      "a reduction"));
}

}  // namespace dtensor
