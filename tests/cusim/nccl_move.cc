// What NCCL's operations do: ranks' calls are matched, and their data moved when the streams of all
// have come to them. Each process does it for its own ranks, with what the others' have told.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "tests/cusim/nccl.h"
#include "tests/cusim/number.h"

namespace cusim::nccl {
namespace {

const char* NameOf(Kind kind) {
  constexpr const char* kNames[] = {"ncclAllReduce", "ncclReduce",        "ncclBroadcast",
                                    "ncclAllGather", "ncclReduceScatter", "ncclSend",
                                    "ncclRecv"};
  return kNames[static_cast<int>(kind)];
}
const char* NameOf(ncclDataType_t type) {
  constexpr const char* kNames[] = {"int8",   "uint8",   "int32",   "uint32",  "int64",
                                    "uint64", "float16", "float32", "float64", "bfloat16"};
  return SizeOf(type) == 0 ? "?" : kNames[type];
}
bool Reduces(Kind kind) {
  return kind == Kind::kAllReduce || kind == Kind::kReduce || kind == Kind::kReduceScatter;
}
bool IsMessage(Kind kind) { return kind == Kind::kSend || kind == Kind::kRecv; }

// f(T()) for the numbers of a type.
template <class F>
void ForType(ncclDataType_t type, F f) {
  switch (type) {
    case ncclInt8:
      return f(int8_t());
    case ncclUint8:
      return f(uint8_t());
    case ncclInt32:
      return f(int32_t());
    case ncclUint32:
      return f(uint32_t());
    case ncclInt64:
      return f(int64_t());
    case ncclUint64:
      return f(uint64_t());
    case ncclFloat16:
      return f(F16());
    case ncclFloat32:
      return f(float());
    case ncclFloat64:
      return f(double());
    case ncclBfloat16:
      return f(BF16());
    default:
      return;
  }
}

template <class T>
T Combine(ncclRedOp_t op, T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    using U = std::make_unsigned_t<T>;  // sums wrap
    switch (op) {
      case ncclProd:
        return static_cast<T>(static_cast<U>(uint64_t{static_cast<U>(a)} * static_cast<U>(b)));
      case ncclMax:
        return std::max(a, b);
      case ncclMin:
        return std::min(a, b);
      default:
        return static_cast<T>(static_cast<U>(static_cast<U>(a) + static_cast<U>(b)));
    }
  } else {
    switch (op) {
      case ncclProd:
        return Mul(a, b);
      case ncclMax:
        return Extreme(a, b, true, false);
      case ncclMin:
        return Extreme(a, b, false, false);
      default:
        return Add(a, b);
    }
  }
}

// One rank's elements before they are reduced: an average of real numbers, and PreMulSum, multiply.
template <class T>
T Scaled(T x, double by) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(x * static_cast<T>(by));
  } else {
    return Mul(x, FromReal<T>(by));
  }
}

// What a rank's call sends.
size_t SentBy(const Call& call, int rank, size_t ranks) {
  switch (call.kind) {
    case Kind::kRecv:
      return 0;
    case Kind::kBroadcast:
      return rank == call.root ? call.count : 0;
    case Kind::kReduceScatter:
      return call.count * ranks;
    default:
      return call.count;
  }
}

class Mover {
 public:
  Mover(Runtime& r, Meeting& m) : r_(r), m_(m) {}

  // Tells other processes what one rank's call has for them.
  void Give(int seat) {
    Arrival& a = m_.arrivals.at(seat);
    const ncclComm& comm = *a.launch->comm;
    const size_t count = SentBy(a.call, comm.rank, m_.ranks.size());
    const uint8_t* const in = count == 0 ? nullptr : In(a, count);
    const double scale = a.call.op >= ncclNumOps ? ScaleOf(a) : 1;
    const size_t bytes = in == nullptr ? 0 : count * SizeOf(a.call.type);
    TellData(comm, m_.place, a.call, scale, in, bytes);
  }

  void Run() {
    const Call& first = m_.arrivals.begin()->second.call;
    switch (first.kind) {
      case Kind::kAllReduce:
        return Reduce(first.count, [&](int) { return std::pair<size_t, size_t>(0, first.count); });
      case Kind::kReduce:
        return Reduce(first.count, [&](int rank) {
          return std::pair<size_t, size_t>(0, rank == first.root ? first.count : 0);
        });
      case Kind::kReduceScatter:
        return Reduce(first.count * m_.ranks.size(), [&](int rank) {
          return std::pair<size_t, size_t>(first.count * static_cast<size_t>(rank), first.count);
        });
      case Kind::kAllGather:
        return Gather();
      case Kind::kBroadcast:
        return Spread(m_.arrivals.at(first.root));
      default:
        return Message();
    }
  }

 private:
  using Arrival = Meeting::Arrival;
  std::string NameIn(const Arrival& a, const char* buffer) const {
    return std::string(NameOf(a.call.kind)) + " of rank " + std::to_string(a.launch->comm->rank) +
           ": " + buffer;
  }
  const uint8_t* In(Arrival& a, size_t count) {
    if (a.launch == nullptr) {  // shorter: that process could not read it, and has said so
      return a.data.size() == count * SizeOf(a.call.type) ? a.data.data() : nullptr;
    }
    return r_.Use(NameIn(a, "sendbuff"), a.launch->comm->device, a.call.send,
                  count * SizeOf(a.call.type), Access::kRead, &a.launch->ranges);
  }
  // Writes elements to a rank's result.
  void Out(Arrival& a, size_t offset, const uint8_t* from, size_t count) {
    if (a.launch == nullptr) return;  // its process does
    const size_t size = SizeOf(a.call.type);
    uint8_t* const to = r_.Use(NameIn(a, "recvbuff"), a.launch->comm->device,
                               static_cast<uint8_t*>(a.call.recv) + offset * size, count * size,
                               Access::kWrite, &a.launch->ranges);
    if (to != nullptr) std::memcpy(to, from, count * size);
  }

  double ScaleOf(Arrival& a) {
    const ncclRedOp_t op = a.call.op;
    if (op == ncclAvg) return 1.0 / static_cast<double>(m_.ranks.size());
    if (a.launch == nullptr) return a.scale;
    const PreMul& p = a.call.premul;
    if (!p.device) return p.value;
    const uint8_t* const at = r_.Use(NameIn(a, "scalar"), a.launch->comm->device, p.scalar,
                                     SizeOf(p.type), Access::kRead, &a.launch->ranges);
    return at == nullptr ? 0 : ScalarOf(p.type, at);
  }

  // All ranks' `count` elements in rank order; `part` gives what of the result a rank gets.
  template <class Get>
  void Reduce(size_t count, Get part) {
    const ncclDataType_t type = m_.arrivals.begin()->second.call.type;
    ForType(type, [&]<class T>(T) {
      std::vector<T> sum(count);
      bool first = true;
      for (auto& [rank, a] : m_.arrivals) {
        const uint8_t* const in = In(a, count);
        if (in == nullptr) return;
        const bool averages = a.call.op == ncclAvg && std::is_integral_v<T>;
        const bool scales = a.call.op >= ncclAvg && !averages;
        const double by = scales ? ScaleOf(a) : 1;
        for (size_t i = 0; i < count; ++i) {
          T x;
          std::memcpy(&x, in + i * sizeof x, sizeof x);
          if (scales) x = Scaled(x, by);
          sum[i] = first ? x : Combine(a.call.op, sum[i], x);
        }
        first = false;
      }
      if constexpr (std::is_integral_v<T>) {
        if (m_.arrivals.begin()->second.call.op == ncclAvg) {
          for (T& x : sum) x = static_cast<T>(x / static_cast<T>(m_.ranks.size()));
        }
      }
      for (auto& [rank, a] : m_.arrivals) {
        const auto [from, n] = part(rank);
        if (n != 0) Out(a, 0, reinterpret_cast<const uint8_t*>(sum.data() + from), n);
      }
    });
  }

  void Gather() {
    std::vector<uint8_t> all;
    for (auto& [rank, a] : m_.arrivals) {
      const uint8_t* const in = In(a, a.call.count);
      if (in == nullptr) return;
      all.insert(all.end(), in, in + a.call.count * SizeOf(a.call.type));
    }
    for (auto& [rank, a] : m_.arrivals) Out(a, 0, all.data(), a.call.count * m_.ranks.size());
  }

  void Spread(Arrival& root) {
    const uint8_t* const in = In(root, root.call.count);
    if (in == nullptr) return;
    const std::vector<uint8_t> copy(in, in + root.call.count * SizeOf(root.call.type));
    for (auto& [rank, a] : m_.arrivals) Out(a, 0, copy.data(), a.call.count);
  }

  void Message() {
    Arrival *from = nullptr, *to = nullptr;
    for (auto& [seat, a] : m_.arrivals) (a.call.kind == Kind::kSend ? from : to) = &a;
    if (from->call.count == 0) return;
    const uint8_t* const in = In(*from, from->call.count);
    if (in == nullptr) return;
    const std::vector<uint8_t> copy(in, in + from->call.count * SizeOf(from->call.type));
    Out(*to, 0, copy.data(), to->call.count);
  }

  Runtime& r_;
  Meeting& m_;
};

// Whether the calls fit each other; what does not is said once.
bool Fit(Runtime& r, Meeting& m) {
  const Call& a = m.arrivals.begin()->second.call;
  for (const auto& [seat, other] : m.arrivals) {
    const Call& b = other.call;
    const bool fits = a.count == b.count && a.type == b.type &&
                      (IsMessage(a.kind) || (a.kind == b.kind && a.root == b.root)) &&
                      (!Reduces(a.kind) || a.op == b.op);
    if (fits) continue;
    const std::string text = m.name + ": rank " + std::to_string(m.ranks[0]) + " calls " +
                             Describe(a) + ", rank " +
                             std::to_string(m.ranks[static_cast<size_t>(seat)]) + " " + Describe(b);
    r.Say("nccl mismatch", text);
    for (const auto& [who, arrival] : m.arrivals) {
      if (arrival.launch == nullptr) continue;
      arrival.launch->comm->error = ncclInvalidUsage;
      arrival.launch->comm->last = text;
    }
    return false;
  }
  return true;
}

void Order(Runtime& r, const Meeting& m) {
  Runtime::Places all, from, to;
  for (const auto& [rank, a] : m.arrivals) {
    if (a.launch == nullptr) continue;
    const std::pair<Stream*, uint64_t> place{a.launch->stream, a.launch->position};
    const bool root = rank == a.call.root;
    all.push_back(place);
    if (a.call.kind == Kind::kSend || (a.call.kind == Kind::kBroadcast && root)) {
      from.push_back(place);
    } else if (a.call.kind == Kind::kRecv || a.call.kind == Kind::kBroadcast) {
      to.push_back(place);
    } else if (a.call.kind == Kind::kReduce) {
      from.push_back(place);
      if (root) to.push_back(place);
    }
  }
  from.empty() ? r.Rendezvous(all, all) : r.Rendezvous(from, to);
}

// The stream of a launch has come to it: other processes are given what it has for them.
void Reach(Runtime& r, Launch* launch) {
  if (std::exchange(launch->reached, true)) return;
  const Clique& clique = *launch->comm->clique;
  for (const Part& part : launch->parts) {
    Meeting& m = *part.meeting;
    const bool others =
        std::any_of(m.ranks.begin(), m.ranks.end(), [&](int rank) { return clique.remote(rank); });
    if (others && !m.done) Mover(r, m).Give(part.seat);
  }
}

bool Meet(Runtime& r, Meeting& m, const ncclComm& mine) {
  std::string missing;
  std::vector<int> threads;
  for (size_t seat = 0; seat < m.ranks.size(); ++seat) {
    const int rank = m.ranks[seat];
    const Clique::Member& other = mine.clique->members[static_cast<size_t>(rank)];
    const auto arrival = m.arrivals.find(static_cast<int>(seat));
    // What has left takes with it what it had not done, of this process also what it had.
    if (arrival != m.arrivals.end() &&
        (other.comm != nullptr ? !other.comm->aborted
                               : arrival->second.there || other.left.empty())) {
      continue;
    }
    missing += (missing.empty() ? "rank " : ", rank ") + std::to_string(rank);
    if (!other.left.empty()) {
      missing += " (" + other.left + ")";
    } else if (other.comm != nullptr) {
      threads.push_back(other.comm->thread);
    }
  }
  if (!missing.empty()) {
    if (OthersMayCome()) threads.clear();
    r.Block(m.name + " of rank " + std::to_string(mine.rank) + " waits for " + missing, threads);
    return false;
  }
  for (auto& [seat, a] : m.arrivals) {
    if (a.reached()) continue;
    const int rank = m.ranks[static_cast<size_t>(seat)];
    r.Block(m.name + " of rank " + std::to_string(mine.rank) + ", for which rank " +
                std::to_string(rank) + " has not finished what it queued before",
            {});
    if (a.launch == nullptr || !r.Force(a.launch->stream, a.launch->position - 1)) return false;
    Reach(r, a.launch.get());
  }
  if (m.done) return true;  // by what was forced
  m.done = true;
  if (Fit(r, m)) {
    Mover(r, m).Run();
    Order(r, m);
  }
  m.arrivals.clear();  // launches name their meetings too
  mine.clique->meetings.erase(m.place);
  r.Notify();
  return true;
}

}  // namespace

size_t SizeOf(ncclDataType_t type) {
  size_t size = 0;
  ForType(type, [&]<class T>(T) { size = sizeof(T); });
  return size;
}

double ScalarOf(ncclDataType_t type, const void* p) {
  double v = 0;
  ForType(type, [&]<class T>(T x) {
    std::memcpy(&x, p, sizeof x);
    if constexpr (std::is_integral_v<T>) v = static_cast<double>(x);
    if constexpr (!std::is_integral_v<T>) v = static_cast<double>(Real(x));
  });
  return v;
}

std::string Describe(const Call& c) {
  constexpr const char* kOps[] = {"sum", "prod", "max", "min", "avg"};
  std::string text =
      std::string(NameOf(c.kind)) + "(" + std::to_string(c.count) + " x " + NameOf(c.type);
  if (Reduces(c.kind)) text += std::string(", ") + (c.op < ncclNumOps ? kOps[c.op] : "premulsum");
  if (c.kind == Kind::kReduce || c.kind == Kind::kBroadcast) {
    text += ", root " + std::to_string(c.root);
  }
  if (IsMessage(c.kind)) text += ", peer " + std::to_string(c.root);
  return text + ")";
}

std::shared_ptr<Meeting> Clique::MeetingOf(const Place& place, Kind kind) {
  std::shared_ptr<Meeting>& meeting = meetings[place];
  if (meeting != nullptr) return meeting;
  meeting = std::make_shared<Meeting>();
  meeting->place = place;
  const std::string number = std::to_string(place.number + 1);
  if (place.from < 0) {
    for (int i = 0; i < size; ++i) meeting->ranks.push_back(i);
    meeting->name = std::string(NameOf(kind)) + ", call " + number + " in " + name;
  } else {
    meeting->ranks = {place.from, place.to};
    meeting->name = "message " + number + " from rank " + std::to_string(place.from) + " to rank " +
                    std::to_string(place.to) + " in " + name;
  }
  return meeting;
}

int SeatOf(const Call& call, int rank) {
  return call.kind == Kind::kSend ? 0 : call.kind == Kind::kRecv ? 1 : rank;
}

void Post(Runtime& r, const std::shared_ptr<Launch>& launch, const std::vector<Call>& calls) {
  ncclComm& comm = *launch->comm;
  for (const Call& call : calls) {
    Place place;
    if (IsMessage(call.kind)) {
      const bool sends = call.kind == Kind::kSend;
      place = {sends ? comm.rank : call.root, sends ? call.root : comm.rank,
               comm.messages[{sends, call.root}]++};
    } else {
      place.number = comm.collectives++;
    }
    const std::shared_ptr<Meeting> meeting = comm.clique->MeetingOf(place, call.kind);
    const int seat = SeatOf(call, comm.rank);
    meeting->arrivals[seat] = {launch, call};
    launch->parts.push_back({meeting, seat});
    TellCall(comm, place, call);
  }
  std::erase_if(comm.launches, [](const auto& old) { return old.expired(); });
  comm.launches.push_back(launch);
  r.Notify();
}

bool Progress(Runtime& r, Launch* launch) {
  if (launch->comm->aborted) return true;
  Reach(r, launch);
  bool all = true;
  for (const Part& part : launch->parts) {
    Meeting& m = *part.meeting;
    all = (m.done || Meet(r, m, *launch->comm)) && all;
  }
  return all;
}

}  // namespace cusim::nccl
