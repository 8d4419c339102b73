#include "dtensor/tensor/tensor.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "dtensor/tensor/device.h"
#include "dtensor/tensor/rank_state.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

// A Tensor over memory that a std::vector owns needs a copy through the allocator either way.
template <class T>
absl::StatusOr<Tensor> CopyIn(const std::vector<T>& values, IntSpan shape) {
  DT_ASSIGN_OR_RETURN(const int64_t numel, CheckedNumel(shape));
  if (numel != static_cast<int64_t>(values.size())) {
    return absl::InvalidArgumentError(absl::StrCat(values.size(), " values for shape ",
                                                   ToString(shape), " of ", numel, " elements"));
  }
  DT_ASSIGN_OR_RETURN(Tensor t, Tensor::Empty(shape, DTypeOf<T>()));
  std::copy(values.begin(), values.end(), t.data_as<T>());
  return t;
}

}  // namespace

absl::Status NewMemory(DeviceType device, int64_t bytes, Buffer* buffer) {
  if (device == DeviceType::kCpu) return Buffer::AllocateInto(CurrentAllocator(), bytes, buffer);
  if (device != DeviceType::kMeta) {
    DT_ASSIGN_OR_RETURN(RankDevice* const rank, RankDevices::Current().Get(device));
    return Buffer::AllocateInto(rank->memory(), bytes, buffer);
  }
  const std::shared_ptr<Allocator>& counter = RankState::Current().meta_counter;
  if (counter != nullptr) return Buffer::AllocateInto(counter, bytes, buffer);
  *buffer = Buffer::Meta(bytes);
  return absl::OkStatus();
}

ScopedAllocator::ScopedAllocator(std::shared_ptr<Allocator> allocator)
    : state_(RankState::Current()),
      previous_(std::exchange(state_.allocator, std::move(allocator))) {}
ScopedAllocator::~ScopedAllocator() { state_.allocator = std::move(previous_); }
ScopedMetaCounter::ScopedMetaCounter(std::shared_ptr<Allocator> counter)
    : state_(RankState::Current()),
      previous_(std::exchange(state_.meta_counter, std::move(counter))) {}
ScopedMetaCounter::~ScopedMetaCounter() { state_.meta_counter = std::move(previous_); }

absl::Status CheckDevice(DeviceType device) {
  if (!IsRemote(device)) return absl::OkStatus();
  // A rank's is its own: to open another for a moment makes a context there, and closing it waits
  // for it, which no capture allows.
  RankDevices* const mine = RankState::Current().devices;
  if (mine != nullptr) return mine->Get(device).status();
  return PhysicalDevice::Open(device, 0).status();
}

absl::StatusOr<Tensor> Tensor::Empty(IntSpan shape, DType dtype, DeviceType device) {
  DT_RETURN_IF_ERROR(CheckDevice(device));
  DT_ASSIGN_OR_RETURN(const int64_t bytes, CheckedBytes(shape, dtype));
  Buffer buffer;
  DT_RETURN_IF_ERROR(NewMemory(device, bytes, &buffer));
  return Tensor(RowMajor(), std::move(buffer), Shape(shape.begin(), shape.end()),
                ContiguousStrides(shape), dtype, device);
}

absl::StatusOr<Tensor> Tensor::EmptyChecked(const Shape& shape, const Strides& strides, DType dtype,
                                            DeviceType device, int64_t bytes) {
  Buffer buffer;
  DT_RETURN_IF_ERROR(NewMemory(device, bytes, &buffer));
  return Tensor(std::move(buffer), shape, strides, dtype, device);
}

absl::StatusOr<Tensor> Tensor::Full(IntSpan shape, DType dtype, double value) {
  DT_ASSIGN_OR_RETURN(Tensor t, Empty(shape, dtype));
  Fill(t, value);
  return t;
}

template <class T>
absl::StatusOr<Tensor> Tensor::FromVector(const std::vector<T>& values, IntSpan shape,
                                          DType dtype) {
  DT_ASSIGN_OR_RETURN(Tensor t, CopyIn(values, shape));
  return t.To(dtype);
}
template <class T>
absl::StatusOr<Tensor> Tensor::FromVector(const std::vector<T>& values, IntSpan shape) {
  return CopyIn(values, shape);
}

void Tensor::ThrowNoData() const {
  if (!defined()) {
    Throw(
        absl::FailedPreconditionError("[values] the tensor is null: this rank has nothing of it"));
  }
  if (device_ != DeviceType::kMeta) {
    Throw(absl::FailedPreconditionError(
        absl::StrCat("[values] the host cannot read memory of device ", DeviceName(device_),
                     "; bring the tensor to the CPU with To(DeviceType::kCpu) or ToVector")));
  }
  Throw(
      NoValues(absl::StrCat("[values] a tensor on a meta mesh or in a rehearsal (Explain) has no "
                            "values: ",
                            ToString())));
}

Tensor Tensor::OnMeta(Buffer buffer) const {
  Tensor t = *this;
  t.buffer_ = std::move(buffer);
  t.device_ = DeviceType::kMeta;
  t.MoveTo(t.offset_);
  return t;
}

absl::StatusOr<Tensor> Tensor::Contiguous() const {
  if (is_contiguous()) return *this;
  return Clone();
}

absl::StatusOr<Tensor> Tensor::Clone() const {
  if (!defined()) return *this;
  DT_ASSIGN_OR_RETURN(Tensor copy, Empty(shape_, dtype_, device_));
  Copy(*this, copy);
  return copy;
}

absl::StatusOr<Tensor> Tensor::To(DType dtype) const {
  if (dtype == dtype_ || !defined()) return *this;
  DT_ASSIGN_OR_RETURN(Tensor copy, Empty(shape_, dtype, device_));
  Copy(*this, copy);
  return copy;
}

absl::StatusOr<Tensor> Tensor::ToHost() const {
  DT_ASSIGN_OR_RETURN(const Tensor near, To(DeviceType::kCpu));
  return near.Contiguous();
}

absl::StatusOr<Tensor> Tensor::To(DeviceType device) const {
  if (device == device_ || !defined()) return *this;
  if (device_ == DeviceType::kMeta || device == DeviceType::kMeta) {
    return absl::FailedPreconditionError(absl::StrCat("a tensor on ", DeviceName(device_),
                                                      " cannot be copied to ", DeviceName(device)));
  }
  DT_ASSIGN_OR_RETURN(Tensor copy, Empty(shape_, dtype_, device));
  try {
    Copy(*this, copy);
  } catch (const Error& error) {
    return error.status();
  }
  return copy;
}

template <class T>
std::vector<T> Tensor::ToVector() const {
  if (!has_data()) ThrowNoData();
  if (device_ != DeviceType::kCpu) return ValueOrThrow(To(DeviceType::kCpu)).ToVector<T>();
  std::vector<T> values(static_cast<size_t>(numel()));
  Tensor flat = ValueOrThrow(ValueOrThrow(To(DTypeOf<T>())).Contiguous());
  std::copy(flat.data_as<T>(), flat.data_as<T>() + values.size(), values.begin());
  return values;
}

std::string Tensor::ToString() const {
  if (!defined()) return "null";
  constexpr int64_t kShown = 64;
  std::string text = absl::StrCat(absl::string_view(Name(dtype_).data(), Name(dtype_).size()), " ",
                                  dtensor::ToString(shape_));
  if (device_ == DeviceType::kMeta) return text + " on meta";
  absl::StrAppend(&text, " {");
  const auto show = [&text](const auto& values) {
    int64_t shown = 0;
    for (const auto v : values) {
      if (shown == kShown) return absl::StrAppend(&text, ", ...");
      absl::StrAppend(&text, shown++ ? ", " : "", v);
    }
  };
  if (IsFloating(dtype_)) {
    show(ToVector<double>());
  } else {
    show(ToVector<int64_t>());
  }
  return text + "}";
}

#define DT_INSTANTIATE(T)                                                                    \
  template absl::StatusOr<Tensor> Tensor::FromVector(const std::vector<T>&, IntSpan, DType); \
  template absl::StatusOr<Tensor> Tensor::FromVector(const std::vector<T>&, IntSpan);        \
  template std::vector<T> Tensor::ToVector() const;
DT_INSTANTIATE(double)
DT_INSTANTIATE(float)
DT_INSTANTIATE(int64_t)
DT_INSTANTIATE(int32_t)
DT_INSTANTIATE(uint8_t)
#undef DT_INSTANTIATE

}  // namespace dtensor
