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
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "mesh/mesh.h"
#include "tensor/tensor.h"

namespace dtensor {

class Loan;
class FlightRecorder;
class RankContext;
struct CallTag;

// On the CPU work runs inline on the rank's thread; the handle is for CUDA.
struct Stream {
  StreamHandle handle = nullptr;
  // CPU: all-reduce, all-gather, reduce-scatter and exchange may return before they are done. They
  // wait for nobody then; what they take from peers is taken when the Work is waited for. The same
  // on every rank of a call. What the call reads may be written to again after
  // RankContext::TakeBack, what it writes after the Work is done.
  bool deferred = false;
};

enum class CollectiveKind : uint8_t {
  kAllReduce,
  kAllGather,
  kReduceScatter,
  kExchange,
  kBroadcast,
  kSend,
  kRecv,
  kBarrier
};
std::string_view Name(CollectiveKind kind);  // "all_reduce", ...

// A started collective. A deferred one that is dropped before it is done does not bring its result
// to this rank; peers get theirs. [[nodiscard]].
class [[nodiscard]] Work {
 public:
  Work() = default;                                                   // done, OK
  explicit Work(absl::Status status) : status_(std::move(status)) {}  // done with this status
  bool Done() const { return !state_ || StateDone(); }
  // Later work on `stream` sees the result. May block on the CPU, never on CUDA. Returns the
  // collective's status on the CPU.
  absl::Status OrderBefore(Stream stream);
  // Blocks until done. Errors: DeadlineExceeded, Aborted, FailedPrecondition as above.
  absl::Status Wait(absl::Duration timeout = absl::InfiniteDuration()) {
    return state_ ? StateWait(timeout) : status_;
  }
  // What peers may still read of this rank's memory; null: nothing. Belongs to the RankContext.
  std::shared_ptr<Loan> TheLoan() const;

  struct State;
  explicit Work(std::shared_ptr<State> state);

 private:
  bool StateDone() const;
  absl::Status StateWait(absl::Duration timeout);
  std::shared_ptr<State> state_;
  absl::Status status_;
};

// One piece of an Exchange: `view` (any strides) goes to or comes from group index `peer`.
struct Piece {
  int peer;
  Tensor view;
};

// Refers to the caller's tensors: a counted reference more on each would cost as much as the rest
// of a small call. `in` and `out` are null tensors where the kind has none.
struct CollectiveCall {
  CollectiveKind kind;
  const Tensor& in;
  const Tensor& out;
  std::vector<int64_t> counts = {};  // rows of dim 0 per rank; empty = even (not torch.chunk's)
  ReduceOp op = ReduceOp::kSum;
  int root = 0;
  std::vector<Piece> sends = {}, recvs = {};
  bool deferred = false;
  // Set by the face.
  uint64_t sequence = 0;         // among the group's calls of its sort, deferred or not; from 1
  uint64_t before = 0;           // calls of the other sort that came before it
  uint64_t fingerprint = 0;      // of all that must agree between ranks
  const CallTag* tag = nullptr;  // what for; valid during the call
};

// What a backend implements.
class CommBackend {
 public:
  virtual ~CommBackend() = default;
  // Writes the call into the flight recorder.
  using Record = absl::FunctionRef<void()>;
  // Calls record() once, before it waits for anybody and where that costs least.
  virtual Work Start(const CollectiveCall& call, Record record) = 0;
  virtual absl::Status Health() = 0;
  virtual void Abort(absl::Status why) = 0;
  // Sets the call's `sequence` and `before`; the face asks once per collective. Backends that serve
  // several Comms of one group count in the group.
  virtual void Number(CollectiveCall* call) {
    call->sequence = ++sequence_[call->deferred];
    call->before = sequence_[!call->deferred];
  }
  // Where this rank's calls on the group are recorded.
  virtual FlightRecorder& flight() = 0;

 private:
  uint64_t sequence_[2] = {};
};

// "all_reduce(sum, float32 [10]) for add(...)": how errors name a call. `ranks` are the group's
// world ranks.
std::string Describe(const CollectiveCall& call, absl::Span<const int64_t> ranks);
// The same of a call whose tag was kept.
struct KeptTag;
std::string Describe(const CollectiveCall& call, const KeptTag& tag,
                     absl::Span<const int64_t> ranks);

class Comm {
 public:
  Comm(RankContext* context, std::unique_ptr<CommBackend> backend, std::vector<int64_t> ranks,
       int index, std::string label);
  ~Comm();

  int index() const { return index_; }  // of this rank in the group
  int size() const { return static_cast<int>(ranks_.size()); }
  absl::Span<const int64_t> ranks() const { return ranks_; }  // world ranks
  const std::string& label() const { return label_; }         // mesh dims: "tp", "dp,tp"

  // in and out: same shape and dtype, any strides on the local backend; may be the same tensor.
  // Reduction runs in rank order, so the bits are the same every time and on every rank. Work that
  // goes on after the call has returned keeps the tensors alive.
  Work AllReduce(const Tensor& in, const Tensor& out, ReduceOp op, Stream stream = {});
  // Rank r's `in` becomes rows [sum(counts[:r]), +counts[r]) of dim 0 of every `out`. `out` may be
  // strided (a transposed view gathers along another dim).
  Work AllGather(const Tensor& in, const Tensor& out, std::vector<int64_t> counts = {},
                 Stream stream = {});
  // Rank r's `out` is the reduction of rows [sum(counts[:r]), +counts[r]) of every `in`. `in` may
  // be strided.
  Work ReduceScatter(const Tensor& in, const Tensor& out, std::vector<int64_t> counts, ReduceOp op,
                     Stream stream = {});
  // Any boxes to any ranks. The k-th piece sent from a to b meets the k-th piece b receives from a;
  // their shapes and dtypes must agree (checked). A piece to oneself is a local copy.
  Work Exchange(std::vector<Piece> sends, std::vector<Piece> recvs, Stream stream = {});
  Work Broadcast(const Tensor& tensor, int root, Stream stream = {});
  Work Send(const Tensor& tensor, int peer, Stream stream = {});
  Work Recv(const Tensor& tensor, int peer, Stream stream = {});
  Work Barrier();

  absl::Status Health();
  // Ends every present and later call of every rank of this group with `why` (code Aborted, this
  // rank named).
  void Abort(absl::Status why);
  // The last `count` calls, oldest first, one per line: number, call, what for, how it ended. 256
  // are kept.
  std::string FlightLog(int count = 64) const;

 private:
  Work Run(CollectiveCall&& call);
  absl::Status Validate(CollectiveCall* call) const;
  absl::Status ValidateRows(const Tensor& whole, const Tensor& part, CollectiveCall* call) const;
  absl::Status ValidatePieces(const std::vector<Piece>& pieces) const;
  absl::Status Bad(CollectiveKind kind, const std::string& what) const;
  void Trace(const CollectiveCall& call) const;
  RankContext* context_;
  std::unique_ptr<CommBackend> backend_;
  std::vector<int64_t> ranks_;
  int index_;
  std::string label_;
  uint64_t label_hash_;
  bool has_peers_;  // not of RunFake
  FlightRecorder& flight_;
  int flight_label_;  // in the recorder
};

}  // namespace dtensor
