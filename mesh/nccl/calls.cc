#include "dtensor/mesh/nccl/calls.h"

#include <algorithm>

#include "dtensor/tensor/status.h"

namespace dtensor::nccl {
namespace {

// Contiguous elements of one dtype.
struct Elements {
  char* data;
  int64_t count, size;  // size: bytes of an element
  int type;
  explicit Elements(const Tensor& t)
      : data(t.defined() ? static_cast<char*>(t.data()) : nullptr),
        count(t.defined() ? t.numel() : 0),
        size(t.defined() ? SizeOf(t.dtype()) : 1),
        type(t.defined() ? TypeOf(t.dtype()) : 0) {}
  Elements Part(int64_t at, int64_t n) const {
    Elements part = *this;
    part.data += at * size;
    part.count = n;
    return part;
  }
};

class Queuer {
 public:
  Queuer(const Target& to, const CollectiveCall& call) : to_(to), call_(call) {}

  int Call() const {
    const Elements in(call_.in), out(call_.out);
    switch (call_.kind) {
      case CollectiveKind::kAllReduce:
        return AllReduce(in, out);
      case CollectiveKind::kAllGather:
        return AllGather(in, out);
      case CollectiveKind::kReduceScatter:
        return ReduceScatter(in, out);
      case CollectiveKind::kBroadcast:
        return Broadcast(in, out, call_.root);
      case CollectiveKind::kSend:
        return Send(in, 1 - to_.me);
      case CollectiveKind::kRecv:
        return Recv(out, 1 - to_.me);
      case CollectiveKind::kExchange:
        return Exchange();
      case CollectiveKind::kBarrier:
      case CollectiveKind::kHostExchange:
        break;
    }
    DT_CHECK_MSG(false, "a call that has no data");
    return kSuccess;
  }

  // Every rank's term of what each rank has: here `mine` elements.
  int Terms(const Elements& in, const Elements& terms, int64_t mine) const {
    const bool scatters = call_.kind == CollectiveKind::kReduceScatter;
    const auto one = [&](int r, int64_t at, int64_t n) {
      const int error = Send(in.Part(at, n), r);
      if (error != kSuccess && error != kInProgress) return error;
      return Recv(terms.Part(r * mine, mine), r);
    };
    if (scatters) return ByRank(in, one);
    for (int r = 0; r < to_.size; ++r) {
      const int error = one(r, 0, in.count);
      if (error != kSuccess && error != kInProgress) return error;
    }
    return kSuccess;
  }

 private:
  int Send(const Elements& in, int peer) const {
    return InPieces(in.count, [&](int64_t at, int64_t n) {
      const Elements p = in.Part(at, n);
      return to_.api.Send(p.data, Count(n), p.type, peer, to_.comm, to_.stream);
    });
  }
  int Recv(const Elements& out, int peer) const {
    return InPieces(out.count, [&](int64_t at, int64_t n) {
      const Elements p = out.Part(at, n);
      return to_.api.Recv(p.data, Count(n), p.type, peer, to_.comm, to_.stream);
    });
  }

  static size_t Count(int64_t n) { return static_cast<size_t>(n); }
  // piece(at, n) for pieces that are not too large; nothing for 0 elements.
  template <class Piece>
  int InPieces(int64_t count, const Piece& piece) const {
    for (int64_t at = 0; at < count; at += to_.most) {
      const int error = piece(at, std::min(to_.most, count - at));
      if (error != kSuccess && error != kInProgress) return error;
    }
    return kSuccess;
  }
  // part(r, elements before rank r's rows, elements of them), of `whole` cut by the call's counts.
  template <class Part>
  int ByRank(const Elements& whole, const Part& part) const {
    int64_t rows = 0, at = 0;
    for (const int64_t n : call_.counts) rows += n;
    for (int r = 0; r < to_.size && rows > 0; ++r) {
      const int64_t n = call_.counts[static_cast<size_t>(r)] * (whole.count / rows);
      const int error = part(r, at, n);
      if (error != kSuccess && error != kInProgress) return error;
      at += n;
    }
    return kSuccess;
  }
  // Whether one operation does it.
  bool Even(const Elements& part) const {
    return part.count <= to_.most && std::all_of(call_.counts.begin(), call_.counts.end(),
                                                 [&](int64_t n) { return n == call_.counts[0]; });
  }
  int op() const { return OpOf(call_.op, call_.in.dtype()); }

  int AllReduce(const Elements& in, const Elements& out) const {
    return InPieces(in.count, [&](int64_t at, int64_t n) {
      return to_.api.AllReduce(in.Part(at, n).data, out.Part(at, n).data, Count(n), in.type, op(),
                               to_.comm, to_.stream);
    });
  }
  int Broadcast(const Elements& in, const Elements& out, int root) const {
    return InPieces(out.count, [&](int64_t at, int64_t n) {
      return to_.api.Broadcast(in.Part(at, n).data, out.Part(at, n).data, Count(n), out.type, root,
                               to_.comm, to_.stream);
    });
  }
  int AllGather(const Elements& in, const Elements& out) const {
    if (Even(in)) {
      if (in.count == 0) return kSuccess;
      return to_.api.AllGather(in.data, out.data, Count(in.count), in.type, to_.comm, to_.stream);
    }
    return ByRank(out, [&](int r, int64_t at, int64_t n) {
      const Elements rows = out.Part(at, n);
      return Broadcast(r == to_.me ? in : rows, rows, r);
    });
  }
  int ReduceScatter(const Elements& in, const Elements& out) const {
    if (Even(out)) {
      if (out.count == 0) return kSuccess;
      return to_.api.ReduceScatter(in.data, out.data, Count(out.count), in.type, op(), to_.comm,
                                   to_.stream);
    }
    return ByRank(in, [&](int r, int64_t first, int64_t count) {
      return InPieces(count, [&](int64_t at, int64_t n) {
        void* const mine = r == to_.me ? out.Part(at, n).data : nullptr;
        return to_.api.Reduce(in.Part(first + at, n).data, mine, Count(n), in.type, op(), r,
                              to_.comm, to_.stream);
      });
    });
  }
  int Exchange() const {
    for (const Piece& piece : call_.sends) {
      const int error = Send(Elements(piece.view), piece.peer);
      if (error != kSuccess && error != kInProgress) return error;
    }
    for (const Piece& piece : call_.recvs) {
      const int error = Recv(Elements(piece.view), piece.peer);
      if (error != kSuccess && error != kInProgress) return error;
    }
    return kSuccess;
  }

  const Target& to_;
  const CollectiveCall& call_;
};

}  // namespace

int QueueCall(const Target& to, const CollectiveCall& call) { return Queuer(to, call).Call(); }

bool NeedsTerms(const CollectiveCall& call) {
  const bool reduces =
      call.kind == CollectiveKind::kAllReduce || call.kind == CollectiveKind::kReduceScatter;
  return reduces && (call.op == ReduceOp::kMax || call.op == ReduceOp::kMin) &&
         IsFloating(call.in.dtype());
}

int QueueTerms(const Target& to, const CollectiveCall& call, const Tensor& terms) {
  return Queuer(to, call).Terms(Elements(call.in), Elements(terms), call.out.numel());
}

}  // namespace dtensor::nccl
