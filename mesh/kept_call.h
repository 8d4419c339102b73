// KeptCall: a collective that goes on after its Start has returned.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "dtensor/mesh/call_tag.h"
#include "dtensor/mesh/comm_call.h"

namespace dtensor {

// Owns the tensors and what the tag says; stays where it is, for its call refers to it.
class KeptCall {
 public:
  explicit KeptCall(const CollectiveCall& call);
  KeptCall(const KeptCall&) = delete;
  KeptCall& operator=(const KeptCall&) = delete;

  const CollectiveCall& operator*() const { return call_; }
  const CollectiveCall* operator->() const { return &call_; }
  std::string Describe(absl::Span<const int64_t> ranks) const {
    return dtensor::Describe(call_, tag_, ranks);
  }
  // Whether the call reads that memory.
  bool Reads(const Buffer& buffer) const;
  // Calls visit(tensor) for all that it reads or writes.
  template <class Visit>
  void ForEachTensor(Visit visit) const {
    for (const Tensor* t : {&in_, &out_}) {
      if (t->defined()) visit(*t);
    }
    for (const Piece& piece : call_.sends) visit(piece.view);
    for (const Piece& piece : call_.recvs) visit(piece.view);
  }
  // Puts copies in place of what the call reads: the originals may be written to.
  //   Errors: ResourceExhausted, and some are not copied then.
  absl::Status CopyInputs();

 private:
  Tensor in_, out_;
  KeptTag tag_;          // of the call itself it ends with Start
  CollectiveCall call_;  // on in_ and out_
};

}  // namespace dtensor
