// Tensor: a plain strided array on one device, without gradients: what kernels and files see.
//
// A cheap value handle: copies share the Buffer. View functions never copy. A default-constructed
// Tensor is null. Not thread-safe for writes; several threads may read one.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/attributes.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "dtensor/tensor/buffer.h"
#include "dtensor/tensor/dtype.h"
#include "dtensor/tensor/kernel.h"
#include "dtensor/tensor/rank_state.h"
#include "dtensor/tensor/shape.h"

namespace dtensor {

// Whether tensors can be made on a device. Errors: FailedPrecondition naming the step that failed.
absl::Status CheckDevice(DeviceType device);

class Tensor {
 public:
  Tensor() = default;
  // Over a buffer of the device, as sizes and strides say.
  Tensor(Buffer buffer, const Shape& shape, const Strides& strides, DType dtype, DeviceType device)
      : buffer_(std::move(buffer)),
        data_(static_cast<char*>(buffer_.data())),
        shape_(shape),
        strides_(strides),
        dtype_(dtype),
        device_(device) {}
  // The same, row-major.
  struct RowMajor {};
  ABSL_ATTRIBUTE_ALWAYS_INLINE Tensor(RowMajor, Buffer buffer, const Shape& shape,
                                      const Strides& strides, DType dtype, DeviceType device)
      : buffer_(std::move(buffer)),
        data_(static_cast<char*>(buffer_.data())),
        shape_(shape),
        strides_(strides),
        dtype_(dtype),
        device_(device),
        row_major_(true) {}
  // Uninitialised contiguous tensor from the calling thread's allocator (CurrentAllocator).
  // Errors: InvalidArgument for bad sizes, ResourceExhausted without memory, CheckDevice's.
  static absl::StatusOr<Tensor> Empty(IntSpan shape, DType dtype,
                                      DeviceType device = DeviceType::kCpu);
  // Same with sizes that were checked before (numel, bytes): the op path.
  static absl::StatusOr<Tensor> EmptyChecked(const Shape& shape, const Strides& strides,
                                             DType dtype, DeviceType device, int64_t bytes);
  static absl::StatusOr<Tensor> Full(IntSpan shape, DType dtype, double value);
  // Copies values in, converting to `dtype`.
  template <class T>
  static absl::StatusOr<Tensor> FromVector(const std::vector<T>& values, IntSpan shape,
                                           DType dtype);
  template <class T>
  static absl::StatusOr<Tensor> FromVector(const std::vector<T>& values, IntSpan shape);

  bool defined() const { return static_cast<bool>(buffer_); }
  // Whether there is memory behind it: not null, not on meta. Few places may ask; what is made of
  // tensors without it has none either.
  bool has_data() const { return defined() && device_ != DeviceType::kMeta; }
  const Shape& shape() const { return shape_; }
  const Strides& strides() const { return strides_; }
  int ndim() const { return static_cast<int>(shape_.size()); }
  int64_t size(int dim) const { return shape_[dim]; }
  int64_t numel() const { return Numel(shape_); }
  int64_t nbytes() const { return defined() ? numel() * SizeOf(dtype_) : 0; }  // of its elements
  DType dtype() const { return dtype_; }
  DeviceType device() const { return device_; }
  int64_t offset() const { return offset_; }  // in elements, from the buffer's start
  const Buffer& buffer() const { return buffer_; }
  // First element; null on meta. On a device the host may not read it.
  void* data() const { return data_; }
  // The same for a program that reads or writes elements. Throws FailedPrecondition unless they are
  // in CPU memory.
  template <class T>
  T* data_as() const {
    if (device_ != DeviceType::kCpu) ThrowNoData();
    return static_cast<T*>(data());
  }
  bool is_contiguous() const { return IsContiguous(shape_, strides_); }
  // Whether it was made row-major. Where that is false is_contiguous() may still be true.
  bool made_row_major() const { return row_major_; }
  // Valid while this Tensor lives and is not assigned to.
  TensorRef ref() const { return {data_, shape_.data(), strides_.data(), ndim(), dtype_}; }

  // --- views: share the buffer. `dim`s are already normalised and in range (DT_CHECK). ---
  Tensor Slice(int dim, int64_t start, int64_t length, int64_t step = 1) const;
  Tensor Select(int dim, int64_t index) const;
  Tensor Transpose(int a, int b) const;
  Tensor Permute(absl::Span<const int> order) const;
  Tensor Unsqueeze(int dim) const;
  Tensor Squeeze(int dim) const;       // size must be 1
  Tensor Expand(IntSpan shape) const;  // right-aligned; strides 0 where a 1 grows
  Tensor AsStrided(Shape shape, Strides strides, int64_t offset) const {
    return SeenAs(std::move(shape), std::move(strides), offset, /*row_major=*/false);
  }
  // A view of another shape if strides allow, else FailedPrecondition.
  absl::StatusOr<Tensor> View(IntSpan shape) const;
  // A view if possible, else a contiguous copy.
  absl::StatusOr<Tensor> Reshape(IntSpan shape) const;

  // The same layout over a buffer without memory, on meta.
  Tensor OnMeta(Buffer buffer) const;

  // --- copies ---
  absl::StatusOr<Tensor> Contiguous() const;  // itself if already contiguous
  absl::StatusOr<Tensor> Clone() const;       // contiguous copy
  absl::StatusOr<Tensor> To(DType dtype) const;
  // Itself if it is there. To a device the copy is queued; to the CPU it is waited for.
  //   Errors: FailedPrecondition on meta; those of the device.
  absl::StatusOr<Tensor> To(DeviceType device) const;
  // Contiguous and where the host reads: itself if it is that. Waits. Errors: those of To.
  absl::StatusOr<Tensor> ToHost() const;
  bool on_host() const { return device_ == DeviceType::kCpu; }  // the host may read data()
  // Row-major values converted to T (double, float, int64_t). Waits for a device. Throws
  // FailedPrecondition on meta, and what a kernel of the device has reported.
  template <class T>
  std::vector<T> ToVector() const;
  // "float32 [2, 3] {1, 2, ...}", at most 64 values.
  std::string ToString() const;

 private:
  [[noreturn]] void ThrowNoData() const;
  Tensor SeenAs(Shape&& shape, Strides&& strides, int64_t offset, bool row_major) const;
  void MoveTo(int64_t offset) {
    offset_ = offset;
    data_ = static_cast<char*>(buffer_.data());
    if (data_ != nullptr) data_ += offset * SizeOf(dtype_);
  }
  Buffer buffer_;
  char* data_ = nullptr;  // of the first element
  int64_t offset_ = 0;
  Shape shape_;
  Strides strides_;
  DType dtype_ = DType::kF32;
  DeviceType device_ = DeviceType::kCpu;
  bool row_major_ = false;  // see made_row_major
};

// The dtype that holds values of a C++ type as they are.
template <class T>
constexpr DType DTypeOf() {
  if constexpr (std::is_same_v<T, double>) return DType::kF64;
  if constexpr (std::is_same_v<T, float>) return DType::kF32;
  if constexpr (std::is_same_v<T, int64_t>) return DType::kI64;
  if constexpr (std::is_same_v<T, int32_t>) return DType::kI32;
  if constexpr (std::is_same_v<T, uint8_t>) return DType::kU8;
}

// --- the three kernels of the floor; every higher layer may use them -------------------------
// Any strides; no-ops on meta; they raise the version of what they write. Copy converts dtypes
// (float -> int truncates, -> bool is != 0) and may not read and write overlapping memory. Shapes
// must be equal (DT_CHECK). On a device they are queued on its current stream; only a Copy from a
// device to the CPU waits. They throw Error where a device refuses.
void Fill(const Tensor& out, double value);
void FillInt(const Tensor& out, int64_t value);  // exact for int64
void Copy(const Tensor& src, const Tensor& dst);
void CopyUnlessSame(const Tensor& src, const Tensor& dst);  // nothing where both are one
// Copy for kernels, on arrays of equal sizes.
void CopyRef(const TensorRef& src, const TensorRef& dst);
void AddInPlace(const Tensor& acc, const Tensor& x);  // acc += x, same dtype
// acc = op(acc, x) elementwise for reductions of collectives. bf16/f16 compute in f32.
void ReduceInPlace(const Tensor& acc, const Tensor& x, ReduceOp op);

// Memory for a new tensor: on meta none, counted where somebody counts.
absl::Status NewMemory(DeviceType device, int64_t bytes, Buffer* buffer);
// The allocator that Tensor::Empty uses: of the rank whose code runs (RankState), else of the
// thread.
ABSL_ATTRIBUTE_ALWAYS_INLINE inline const std::shared_ptr<Allocator>& CurrentAllocator() {
  std::shared_ptr<Allocator>& allocator = RankState::Current().allocator;
  if (!allocator) [[unlikely]]
    allocator = Allocator::Create();
  return allocator;
}
class ScopedAllocator {
 public:
  explicit ScopedAllocator(std::shared_ptr<Allocator> allocator);
  ~ScopedAllocator();
  ScopedAllocator(const ScopedAllocator&) = delete;

 private:
  RankState& state_;
  std::shared_ptr<Allocator> previous_;
};
// Meta tensors of this rank are counted by `counter` (Allocator::CreateCounting) for a scope.
class ScopedMetaCounter {
 public:
  explicit ScopedMetaCounter(std::shared_ptr<Allocator> counter);
  ~ScopedMetaCounter();
  ScopedMetaCounter(const ScopedMetaCounter&) = delete;

 private:
  RankState& state_;
  std::shared_ptr<Allocator> previous_;
};

}  // namespace dtensor
