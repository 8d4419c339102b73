// Scratch memory of one kernel call, and what the kernel finds wrong with its data.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "absl/container/inlined_vector.h"
#include "absl/strings/string_view.h"
#include "dtensor/tensor/buffer.h"
#include "dtensor/tensor/device.h"
#include "dtensor/tensor/kernel.h"
#include "dtensor/tensor/status.h"
#include "dtensor/tensor/tensor.h"

namespace dtensor::internal {

class CallWorkspace final : public Workspace {
 public:
  explicit CallWorkspace(RankDevice* device) : device_(device) {}  // null: the CPU
  void* Allocate(int64_t bytes) override {
    if (!used_) used_ = std::make_unique<Used>();
    const auto& allocator = device_ == nullptr ? CurrentAllocator() : device_->memory();
    used_->buffers.push_back(ValueOrThrow(Buffer::Allocate(allocator, bytes)));
    return used_->buffers.back().data();
  }
  void Fail(std::string_view message) override {
    if (!used_) used_ = std::make_unique<Used>();
    if (!used_->error.empty()) return;
    used_->error = message.empty() ? "the kernel failed, and does not say why" : message;
  }
  // Empty, but for a kernel that failed.
  absl::string_view error() const { return used_ ? absl::string_view(used_->error) : ""; }

 private:
  RankDevice* const device_;
  struct Used {  // by few kernels
    absl::InlinedVector<Buffer, 2> buffers;
    std::string error;
  };
  std::unique_ptr<Used> used_;
};

}  // namespace dtensor::internal
