// CollectiveCall: one collective as a rank asks for it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/types/span.h"
#include "dtensor/tensor/tensor.h"

namespace dtensor {

struct CallTag;
struct KeptTag;

enum class CollectiveKind : uint8_t {
  kAllReduce,
  kAllGather,
  kReduceScatter,
  kExchange,
  kBroadcast,
  kSend,
  kRecv,
  kBarrier,
  kHostExchange  // World::Exchange: of bytes, not of tensors; no communicator is asked for it
};
std::string_view Name(CollectiveKind kind);  // "all_reduce", ...

// What a communicator does, for whoever would use more than the least. The same on all its ranks.
struct CommCaps {
  bool peers = false;            // others take part; else calls end at once and bring nothing
  bool strided = false;          // takes tensors of any strides; else contiguous ones only
  bool many_pieces = false;      // an exchange has any number of pieces per peer; else one each way
  bool overlap = false;          // CommOptions::overlap: calls may go on after they have returned,
                                 // by themselves (a thread, a stream of their own)
  bool deferred_pull = false;    // ... but nobody works on them: who waits takes what it needs
  bool rank_order = false;       // reduces in rank order: the same bits every time
  bool same_bits = false;        // an all-reduce gives every rank the same bits
  bool graphs = false;           // calls can be parts of a graph of the device (DeviceGraph)
  bool graphs_together = false;  // ... if all its ranks capture that one together
};
std::string ToString(const CommCaps& caps);  // "peers, strided, ..."
// What both do.
CommCaps operator&(const CommCaps& a, const CommCaps& b);

struct CommOptions {
  // All-reduce, all-gather, reduce-scatter and exchange may return before they are done: other work
  // comes between. The same on every rank of a call. What the call reads may be written to again
  // after RankContext::TakeBack, what it writes after the Work is done. Where the communicator
  // cannot (CommCaps::overlap) the call is done when it returns.
  bool overlap = false;
};

// One piece of an Exchange: `view` (any strides) goes to or comes from group index `peer`.
struct Piece {
  int peer;
  Tensor view;
};

// Refers to the caller's tensors: a counted reference more on each would cost as much as the rest
// of a small call. `in` and `out` are null tensors where the kind has none. What outlives the call
// is a KeptCall.
struct CollectiveCall {
  CollectiveKind kind;
  const Tensor& in;
  const Tensor& out;
  std::vector<int64_t> counts = {};  // rows of dim 0 per rank; empty = even (not torch.chunk's)
  ReduceOp op = ReduceOp::kSum;
  int root = 0;
  std::vector<Piece> sends = {}, recvs = {};
  CommOptions options = {};
  // Set by the face.
  uint64_t sequence = 0;         // among the group's calls of its sort, overlapped or not; from 1
  uint64_t before = 0;           // calls of the other sort that came before it
  uint64_t fingerprint = 0;      // of all that must agree between ranks
  const CallTag* tag = nullptr;  // what for; valid during the call
};

// "all_reduce(sum, float32 [10]) for add(...)": how errors name a call. `ranks` are the group's
// world ranks.
std::string Describe(const CollectiveCall& call, absl::Span<const int64_t> ranks);
// The same of a call whose tag was kept.
std::string Describe(const CollectiveCall& call, const KeptTag& tag,
                     absl::Span<const int64_t> ranks);

// The bytes of CommEvent::bytes, of rank `me` of n.
int64_t ReceivedBytes(const CollectiveCall& call, int64_t n, int me);
// Bytes of the largest tensor that the rank hands to the call.
int64_t PayloadBytes(const CollectiveCall& call);

// What the call asks for that a communicator with these capabilities does not do; empty: nothing.
std::string Excess(const CollectiveCall& call, const CommCaps& caps);

}  // namespace dtensor
