#include "dtensor/mesh/local/move.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "dtensor/mesh/hash.h"
#include "dtensor/mesh/local/group.h"
#include "dtensor/mesh/strided.h"
#include "dtensor/tensor/cpu/level.h"
#include "dtensor/tensor/device_move.h"
#include "dtensor/tensor/next_index.h"
#include "dtensor/tensor/text.h"

namespace dtensor {
namespace {

using Calls = absl::Span<const CollectiveCall* const>;

// Outputs of more bytes than this do not stay in a core's cache anyway.
constexpr int64_t kBypassBytes = 8 << 20;
constexpr int64_t kBlockBytes = 4096;  // of strided tensors, on the stack
constexpr int kMaxStack = 16;          // ranks

// Whether outputs are written around the cache: only where their lines were not read for the sum.
bool Bypasses(int64_t bytes, const void* in, const void* out) {
  return bytes >= kBypassBytes && in != out;
}

// A range of a tensor's elements in row-major order.
struct Range {
  const Tensor* tensor;
  int64_t start;
  bool contiguous;
  char* data(int64_t i) const {
    return static_cast<char*>(tensor->data()) + (start + i) * SizeOf(tensor->dtype());
  }
};

using Ranges = absl::InlinedVector<Range, kMaxStack>;

Range MakeRange(const Tensor& tensor, int64_t start) {
  return {&tensor, start, tensor.is_contiguous()};
}

// Elements [0, count) of every output range = the reduction of the input ranges, in their order.
void ReduceRanges(const Ranges& in, const Ranges& out, int64_t count, ReduceOp op) {
  auto contiguous = [](const Range& r) { return r.contiguous; };
  const DType dtype = in[0].tensor->dtype();
  const int64_t size = SizeOf(dtype);
  const bool direct = std::all_of(in.begin(), in.end(), contiguous) &&
                      std::all_of(out.begin(), out.end(), contiguous);
  const int64_t step = direct ? count : kBlockBytes / size;
  const int n = static_cast<int>(in.size());
  std::vector<char> packed(direct ? 0 : (n + 1) * kBlockBytes);
  absl::InlinedVector<const void*, kMaxStack> from(in.size());
  absl::InlinedVector<void*, kMaxStack> to(direct ? out.size() : 1);
  const bool bypass = direct && Bypasses(count * size * static_cast<int64_t>(out.size()),
                                         in[0].data(0), out[0].data(0));
  for (int64_t at = 0; at < count; at += step) {
    const int64_t k = std::min(step, count - at);
    for (int r = 0; r < n; ++r) {
      from[r] = direct ? in[r].data(at) : packed.data() + r * kBlockBytes;
      if (!direct) Pack(*in[r].tensor, in[r].start + at, k, packed.data() + r * kBlockBytes);
    }
    if (!direct) to[0] = packed.data() + n * kBlockBytes;
    for (size_t o = 0; direct && o < out.size(); ++o) to[o] = out[o].data(at);
    ReduceContiguous(
        {from.data(), n, to.data(), static_cast<int>(to.size()), k, dtype, op, bypass});
    for (size_t o = 0; !direct && o < out.size(); ++o) {
      Unpack(to[0], out[o].start + at, k, *out[o].tensor);
    }
  }
}

// out = the reduction of the inputs, all of one shape, run by run in the order of out's memory: a
// part of a matrix's columns is runs of rows, not single elements. False where no dim has stride 1
// in all of them; nothing is done then.
bool ReduceRuns(absl::Span<const Tensor> in, const Tensor& out, ReduceOp op) {
  absl::InlinedVector<int, 6> dims;  // those that count, out's largest stride first
  for (int d = 0; d < out.ndim(); ++d) {
    if (out.size(d) > 1) dims.push_back(d);
  }
  std::stable_sort(dims.begin(), dims.end(),
                   [&](int a, int b) { return out.strides()[a] > out.strides()[b]; });
  if (dims.empty()) return false;
  const int last = dims.back();
  const auto runs = [&](const Tensor& t) { return t.strides()[last] == 1; };
  if (!runs(out) || !std::all_of(in.begin(), in.end(), runs)) return false;
  dims.pop_back();
  const int64_t size = SizeOf(out.dtype()), count = out.size(last);
  absl::InlinedVector<const char*, kMaxStack> from;
  for (const Tensor& t : in) from.push_back(static_cast<const char*>(t.data()));
  char* to = static_cast<char*>(out.data());
  const bool bypass = Bypasses(out.numel() * size, from[0], to);
  Dims at(dims.size(), 0);
  const auto moved = [&](size_t k, int64_t by) {
    for (size_t r = 0; r < from.size(); ++r) from[r] += by * in[r].strides()[dims[k]] * size;
    to += by * out.strides()[dims[k]] * size;
  };
  do {
    absl::InlinedVector<const void*, kMaxStack> run(from.begin(), from.end());
    void* target = to;
    ReduceContiguous(
        {run.data(), static_cast<int>(run.size()), &target, 1, count, out.dtype(), op, bypass});
  } while (NextIndex(at, [&](size_t k) { return out.size(dims[k]); }, moved));
  return true;
}

int64_t RowSize(const Tensor& tensor) {
  int64_t size = 1;
  for (int d = 1; d < tensor.ndim(); ++d) size *= tensor.size(d);
  return size;
}

int64_t RowsBefore(const CollectiveCall& call, int rank) {
  int64_t rows = 0;
  for (int r = 0; r < rank; ++r) rows += call.counts[r];
  return rows;
}

// Every rank reduces its slice of all inputs and writes it to all outputs: nobody else touches that
// slice, so inputs may be outputs.
void AllReduce(Calls calls, int me) {
  const CollectiveCall& call = *calls[me];
  const ReducedPart cut = PartOfAllReduce(call.in, static_cast<int64_t>(calls.size()), me);
  if (cut.count == 0) return;
  Ranges in, out;
  for (const CollectiveCall* peer : calls) {
    in.push_back(MakeRange(peer->in, cut.start));
    out.push_back(MakeRange(peer->out, cut.start));
  }
  ReduceRanges(in, out, cut.count, call.op);
}

void ReduceScatter(Calls calls, int me) {
  const CollectiveCall& call = *calls[me];
  const int64_t start = RowsBefore(call, me) * RowSize(call.in);
  if (call.out.numel() == 0) return;
  if (!call.out.is_contiguous() || !call.in.is_contiguous()) {
    absl::InlinedVector<Tensor, kMaxStack> parts;
    for (const CollectiveCall* peer : calls) {
      parts.push_back(peer->in.Slice(0, RowsBefore(call, me), call.counts[me]));
    }
    if (ReduceRuns(parts, call.out, call.op)) return;
  }
  Ranges in;
  for (const CollectiveCall* peer : calls) in.push_back(MakeRange(peer->in, start));
  ReduceRanges(in, {MakeRange(call.out, 0)}, call.out.numel(), call.op);
}

void AllGather(Calls calls, int me) {
  const CollectiveCall& call = *calls[me];
  const int n = static_cast<int>(calls.size());
  for (int i = 0; i < n; ++i) {
    int r = (me + i) % n;  // ranks start at different peers
    if (call.counts[r] == 0) continue;
    CopyUnlessSame(calls[r]->in, call.out.Slice(0, RowsBefore(call, r), call.counts[r]));
  }
}

// Calls visit(k, sent, received) for the k-th pieces from `from` to `to`, null where one is
// missing.
template <class Visit>
void MatchPieces(const CollectiveCall& from, int from_index, const CollectiveCall& to, int to_index,
                 Visit visit) {
  auto s = from.sends.begin();
  auto r = to.recvs.begin();
  for (int k = 0;; ++k, ++s, ++r) {
    while (s != from.sends.end() && s->peer != to_index) ++s;
    while (r != to.recvs.end() && r->peer != from_index) ++r;
    const Tensor* sent = s == from.sends.end() ? nullptr : &s->view;
    const Tensor* received = r == to.recvs.end() ? nullptr : &r->view;
    if (!sent && !received) return;
    visit(k, sent, received);
    if (!sent || !received) return;
  }
}

void Exchange(Calls calls, int me) {
  const int n = static_cast<int>(calls.size());
  for (int i = 0; i < n; ++i) {
    int peer = (me + i) % n;
    MatchPieces(*calls[peer], peer, *calls[me], me, [](int, const Tensor* from, const Tensor* to) {
      if (from && to) CopyUnlessSame(*from, *to);
    });
  }
}

std::string PieceName(const Tensor* piece) {
  return piece ? absl::StrCat(View(Name(piece->dtype())), " ", ToString(piece->shape()))
               : "nothing";
}

uint64_t PieceHash(int from, int to, int64_t k, const Tensor& piece) {
  uint64_t h = HashMix(HashMix(static_cast<uint64_t>(from), static_cast<uint64_t>(to)),
                       static_cast<uint64_t>(k));
  return HashRange(HashMix(h, static_cast<uint64_t>(piece.dtype())), piece.shape());
}

}  // namespace

void ReduceContiguous(const ReduceRanksCall& call) {
  DT_AT_CPU_LEVEL(ActiveCpuLevel(), ReduceRanks(call));
}

bool IsStaged(const CollectiveCall& call, int64_t most) {
  switch (call.kind) {
    case CollectiveKind::kBarrier:
    case CollectiveKind::kHostExchange:  // its bytes are in the slots
      return true;
    case CollectiveKind::kAllReduce:
    case CollectiveKind::kReduceScatter:
    case CollectiveKind::kBroadcast:
      return call.in.nbytes() <= most;
    case CollectiveKind::kAllGather:
      return call.out.nbytes() <= most;
    default:
      return false;
  }
}

void WriteStage(const CollectiveCall& call, int me, char* stage) {
  if (!call.in.defined()) return;
  if (call.kind == CollectiveKind::kBroadcast && call.root != me) return;
  Pack(call.in, 0, call.in.numel(), stage);
}

int64_t ScatterStartBytes(const CollectiveCall& call, int r) {
  return RowsBefore(call, r) * RowSize(call.in) * SizeOf(call.in.dtype());
}

void ReadStages(const CollectiveCall& call, int me, absl::Span<const char* const> stages,
                bool cut) {
  if (!call.out.defined() || call.out.numel() == 0) return;
  if (call.kind == CollectiveKind::kBroadcast) {
    if (call.root != me) Unpack(stages[call.root], 0, call.out.numel(), call.out);
    return;
  }
  if (call.kind == CollectiveKind::kAllGather) {
    int64_t start = 0;
    for (size_t r = 0; r < stages.size(); ++r) {
      int64_t count = call.counts[r] * RowSize(call.out);
      Unpack(stages[r], start, count, call.out);
      start += count;
    }
    return;
  }
  const bool scatter = call.kind == CollectiveKind::kReduceScatter && !cut;
  const int64_t start = scatter ? ScatterStartBytes(call, me) : 0;
  absl::InlinedVector<const void*, kMaxStack> in;
  for (const char* stage : stages) in.push_back(stage + start);
  const bool direct = call.out.is_contiguous();
  alignas(64) char packed[kStageBytes];
  void* out = direct ? call.out.data() : packed;
  ReduceContiguous({in.data(), static_cast<int>(in.size()), &out, 1, call.out.numel(),
                    call.in.dtype(), call.op, false});
  if (!direct) Unpack(packed, 0, call.out.numel(), call.out);
}

void MoveData(Calls calls, int me) {
  switch (calls[me]->kind) {
    case CollectiveKind::kAllReduce:
      return AllReduce(calls, me);
    case CollectiveKind::kReduceScatter:
      return ReduceScatter(calls, me);
    case CollectiveKind::kAllGather:
      return AllGather(calls, me);
    case CollectiveKind::kBroadcast:
      return CopyUnlessSame(calls[calls[me]->root]->in, calls[me]->out);
    case CollectiveKind::kExchange:
      return Exchange(calls, me);
    default:
      return;
  }
}

void QueueData(Calls calls) {
  const CollectiveCall& call = *calls[0];
  const int n = static_cast<int>(calls.size());
  absl::InlinedVector<Tensor, kMaxStack> in, out;
  if (call.kind == CollectiveKind::kAllReduce) {
    for (const CollectiveCall* peer : calls) {
      in.push_back(peer->in);
      out.push_back(peer->out);
    }
    return ReduceOnDevice(in, out, call.op);
  }
  for (int r = 0; r < n; ++r) {
    if (call.kind != CollectiveKind::kReduceScatter) {
      MoveData(calls, r);
      continue;
    }
    in.clear();
    for (const CollectiveCall* peer : calls) {
      in.push_back(peer->in.Slice(0, RowsBefore(call, r), call.counts[r]));
    }
    ReduceOnDevice(in, {calls[r]->out}, call.op);
  }
}

ReducedPart PartOfAllReduce(const Tensor& tensor, int64_t n, int me) {
  const int64_t numel = tensor.numel(), line = 64 >> LogSizeOf(tensor.dtype());
  const int64_t slice = ((numel + n - 1) / n + line - 1) & -line;
  const int64_t start = std::min(numel, me * slice);
  return {start, std::min(slice, numel - start)};
}

void AllReduceData(const CollectiveCall& call, int64_t count, absl::Span<const void* const> in,
                   absl::Span<void* const> out) {
  if (count == 0) return;
  const int64_t bytes = count * SizeOf(call.in.dtype()) * static_cast<int64_t>(out.size());
  ReduceContiguous({in.data(), static_cast<int>(in.size()), out.data(),
                    static_cast<int>(out.size()), count, call.in.dtype(), call.op,
                    Bypasses(bytes, in[0], out[0])});
}

std::string ExchangeMismatch(Calls calls, int me, absl::Span<const int64_t> ranks) {
  std::string text;
  for (int peer = 0; peer < static_cast<int>(calls.size()) && text.empty(); ++peer) {
    MatchPieces(*calls[peer], peer, *calls[me], me,
                [&](int k, const Tensor* sent, const Tensor* received) {
                  if (!text.empty() || (sent && received && sent->dtype() == received->dtype() &&
                                        sent->shape() == received->shape())) {
                    return;
                  }
                  text = absl::StrCat("piece ", k, " from rank ", ranks[peer], " to rank ",
                                      ranks[me], ": rank ", ranks[peer], " sends ", PieceName(sent),
                                      ", rank ", ranks[me], " expects ", PieceName(received));
                });
  }
  return text;
}

uint64_t ExchangeBalance(const CollectiveCall& call, int me) {
  absl::flat_hash_map<int, int64_t> sent, received;
  uint64_t balance = 0;
  for (const Piece& p : call.sends) balance += PieceHash(me, p.peer, sent[p.peer]++, p.view);
  for (const Piece& p : call.recvs) balance -= PieceHash(p.peer, me, received[p.peer]++, p.view);
  return balance;
}

}  // namespace dtensor
