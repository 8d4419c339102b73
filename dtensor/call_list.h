// CallList: calls of one op on a list of tensors, which a device may take whole.
//
// A launch on a device costs the same for ten elements as for a thousand, and an optimizer has a
// call for every parameter. Where a device has a kernel named ListKernelName(op) beside that of an
// op, calls that are made while a CallList is open are checked, planned and versioned as ever, but
// their kernels are kept back and given to that one together. It sees them as one call with the
// operands and the attributes of all, one after the other, and gives the bits of single calls.
//
// Everybody else still sees the order of the program: what was kept back runs before another op's
// kernel, a redistribution, or a call that reads or writes what a kept one writes.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "dtensor/op.h"
#include "dtensor/tensor/device.h"
#include "dtensor/tensor/device_graph.h"
#include "dtensor/tensor/tensor.h"

namespace dtensor {

// "adamw_[]" of "adamw_".
std::string ListKernelName(absl::string_view op);
// Whether it has a step or a learning rate, which are others at every launch of a graph.
bool HasChangingNumbers(const OpDef& op);

namespace internal {
struct EngineState;

// Disjoint ranges of addresses.
class AddressRanges {
 public:
  void Add(const Tensor& t);  // from its first byte to its last
  bool Meets(const Tensor& t) const;
  void Clear() { ranges_.clear(); }

 private:
  std::map<const char*, const char*> ranges_;  // begin, end
};

// Calls of one op, with all that they need to be run. No attribute is a list.
struct KeptCalls {
  const OpDef* op = nullptr;  // null: there are none
  Kernel list;
  RankDevice* device = nullptr;
  std::vector<Tensor> in, out;
  std::vector<Attr> attrs;

  absl::string_view AttrName(size_t i) const;
  std::vector<Attr> Changed(const DeviceGraph::Change& change) const;  // the attributes
  // With these instead of its attributes.
  void Run(const std::vector<Attr>& with, NumberBlock* numbers = nullptr) const;
};
}  // namespace internal

// For the thread of the rank that opens it. Scopes nest; an inner one takes what is called in it.
class CallList {
 public:
  CallList();
  ~CallList();  // runs what is left; to hear of errors, call Run before
  CallList(const CallList&) = delete;
  // Runs what was kept back. Throws Error as a call would.
  void Run();

  // --- for dispatch ---
  // Keeps a call back. The tensors are those that the kernel gets.
  void Keep(const OpDef& op, const Kernel& list, RankDevice& device, std::vector<Tensor> in,
            std::vector<Tensor> out, absl::Span<const Attr> attrs);

 private:
  internal::EngineState& state_;
  CallList* const outer_;
  internal::KeptCalls calls_;
  internal::AddressRanges read_, written_;
};

}  // namespace dtensor
