// Comm: one group of ranks and its collectives. A non-virtual face (validates, numbers, traces,
// checks fingerprints) over a small virtual core (Start).
//
// Each rank has its own Comm object; calls must come in the same order on every rank of the group.
// A mismatch in (collective, dtype, counts, reduce op, root) or in what it is for (CallTag: op,
// specs, plan) is FailedPrecondition on every rank, naming both sides; an absent rank is
// DeadlineExceeded naming it; a failed rank aborts the group. Where ranks disagree or wait in vain,
// the message ends with the summary of a FlightReport.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "dtensor/mesh/comm_backend.h"
#include "dtensor/mesh/comm_call.h"
#include "dtensor/tensor/tensor.h"

namespace dtensor {

class FlightRecorder;
class RankContext;

class Comm {
 public:
  Comm(RankContext* context, std::unique_ptr<CommBackend> backend, std::vector<int64_t> ranks,
       int index, std::string label);
  ~Comm();

  int index() const { return index_; }  // of this rank in the group
  int size() const { return static_cast<int>(ranks_.size()); }
  absl::Span<const int64_t> ranks() const { return ranks_; }  // world ranks
  const std::string& label() const { return label_; }         // mesh dims: "tp", "dp,tp"

  // What the calls below take and promise. Tensors must be contiguous where it says so: that is
  // InvalidArgument, as is more than one piece for a peer.
  const CommCaps& caps() const { return caps_; }

  // in and out: same shape and dtype; may be the same tensor. Every rank gets the same bits: where
  // the backend alone would not give them (caps().same_bits), a reduce-scatter and an all-gather
  // are made of it. Work that goes on after the call has returned keeps the tensors alive.
  Work AllReduce(const Tensor& in, const Tensor& out, ReduceOp op, CommOptions options = {});
  // Rank r's `in` becomes rows [sum(counts[:r]), +counts[r]) of dim 0 of every `out`. `out` may be
  // strided (a transposed view gathers along another dim).
  Work AllGather(const Tensor& in, const Tensor& out, std::vector<int64_t> counts = {},
                 CommOptions options = {});
  // Rank r's `out` is the reduction of rows [sum(counts[:r]), +counts[r]) of every `in`. `in` may
  // be strided.
  Work ReduceScatter(const Tensor& in, const Tensor& out, std::vector<int64_t> counts, ReduceOp op,
                     CommOptions options = {});
  // Any boxes to any ranks. The k-th piece sent from a to b meets the k-th piece b receives from a;
  // their shapes and dtypes must agree (checked). A piece to oneself is a local copy.
  Work Exchange(std::vector<Piece> sends, std::vector<Piece> recvs, CommOptions options = {});
  Work Broadcast(const Tensor& tensor, int root);
  Work Send(const Tensor& tensor, int peer);
  Work Recv(const Tensor& tensor, int peer);
  // Nobody returns before all have called it. On a device the hosts do not wait for data: what any
  // rank queues after it comes after what all had queued before it on their current streams.
  Work Barrier();

  absl::Status Health();
  // Until nothing that was started goes on by itself. The first error of what went on and failed.
  absl::Status Quiesce();
  // Ends every present and later call of every rank of this group with `why` (code Aborted, this
  // rank named).
  void Abort(absl::Status why);
  // The last `count` calls, oldest first, one per line: number, call, what for, how it ended. 256
  // are kept.
  std::string FlightLog(int count = 64) const;

 private:
  Work Run(CollectiveCall&& call);
  absl::StatusOr<Work> AllReduceInTwo(CollectiveCall&& call);
  absl::Status Validate(CollectiveCall* call) const;
  absl::Status ValidateRows(const Tensor& whole, const Tensor& part, CollectiveCall* call) const;
  absl::Status ValidatePieces(const std::vector<Piece>& pieces) const;
  absl::Status Within(const CollectiveCall& call) const;  // the capabilities
  absl::Status MayBeCaptured() const;                     // by the graph that is being captured
  std::string Where(CollectiveKind kind) const;
  absl::Status Bad(CollectiveKind kind, const std::string& what) const;
  void Trace(const CollectiveCall& call) const;
  RankContext* context_;
  std::unique_ptr<CommBackend> backend_;
  std::vector<int64_t> ranks_;
  int index_;
  std::string label_;
  uint64_t label_hash_;
  const CommCaps caps_;    // of the backend
  const bool restricted_;  // it takes contiguous tensors only, or one piece per peer
  FlightRecorder& flight_;
  int flight_label_;  // in the recorder
};

}  // namespace dtensor
