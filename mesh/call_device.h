// Where the tensors of a collective are. Private to mesh/.
#pragma once

#include <vector>

#include "dtensor/mesh/comm_call.h"

namespace dtensor {

// Whether they are in host memory, though the group's device may be another.
inline bool OnHost(const CollectiveCall& call) {
  const Tensor& t = call.in.defined() ? call.in : call.out;
  if (t.defined()) return IsHost(t.device());
  for (const std::vector<Piece>* pieces : {&call.sends, &call.recvs}) {
    if (!pieces->empty()) return IsHost((*pieces)[0].view.device());
  }
  return false;
}

inline bool IsMessage(const CollectiveCall& call) {
  return call.kind == CollectiveKind::kSend || call.kind == CollectiveKind::kRecv;
}

}  // namespace dtensor
