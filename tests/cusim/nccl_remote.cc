// Ranks of a communicator that are in other processes: what they are told and tell, and a thread of
// this process that listens to them and runs what they wait for, as a device would without its
// host.
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <thread>

#include "tests/cusim/nccl_exchange.h"

namespace cusim::nccl {
namespace {

class Service {
 public:
  static Service& Get() {
    static auto* const service = new Service;  // outlives its thread
    return *service;
  }
  // All but these two under the runtime's mutex.
  void Serve(Runtime& r);
  void Wake() {
    const uint64_t one = 1;
    if (write(wakes_, &one, sizeof one) < 0) return;  // it is awake
  }

  void Add(Runtime& r, const std::shared_ptr<Clique>& clique) {
    cliques_.push_back(clique);
    if (!std::exchange(runs_, true)) std::thread([this, &r] { Serve(r); }).detach();
    Wake();
  }
  bool OthersMayCome() const {
    return std::any_of(cliques_.begin(), cliques_.end(),
                       [](const auto& c) { return !c->exchange->alone(); });
  }

 private:
  // Milliseconds until it looks again of itself; -1: when something comes.
  int Look(Runtime& r);
  const int wakes_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  bool runs_ = false;
  std::vector<std::shared_ptr<Clique>> cliques_;  // that have an exchange
};

bool Lives(const Clique::Member& member) { return member.comm != nullptr && member.left.empty(); }

// Of the ranks that are here.
void Break(Runtime& r, Clique& clique, ncclResult_t error, const std::string& why) {
  for (const Clique::Member& member : clique.members) {
    if (!Lives(member) || member.comm->broken) continue;
    member.comm->broken = true;
    member.comm->error = error;
    member.comm->last = why;
    if (error != ncclRemoteError) Refuse(r, member.comm, error, why);
  }
}

// Two ranks of which one is in another process: each says it of its own.
void Judge(Runtime& r, Clique& clique, size_t here, size_t there) {
  const std::string why = clique.Clash(here, there);
  ncclComm* const comm = clique.members[here].comm;
  if (why.empty() || comm->broken) return;
  comm->broken = true;
  comm->error = Refuse(r, comm, ncclInvalidUsage, why);
}

void HearJoin(Runtime& r, Clique& clique, const Note& note) {
  if (note.size != clique.size) {
    return Break(r, clique, ncclInvalidArgument,
                 "one rank says " + std::to_string(clique.size) + " ranks, rank " +
                     std::to_string(note.rank) + " " + std::to_string(note.size));
  }
  const auto there = static_cast<size_t>(note.rank);
  Clique::Member& member = clique.members[there];
  if (member.come) return;  // heard on another connection
  member = {.come = true, .device = note.device, .process = note.process, .left = ""};
  for (size_t i = 0; i < clique.members.size(); ++i) {
    if (Lives(clique.members[i])) Judge(r, clique, i, there);
  }
}

void Hear(Runtime& r, Clique& clique, const Note& note, const char* data) {
  if (note.what == Note::kJoin) return HearJoin(r, clique, note);
  if (note.rank >= clique.size) return;  // of a rank that was refused
  switch (note.what) {
    case Note::kWish:
      clique.SplitOf(note.place.number)->wishes[note.rank] = {note.color, note.key, nullptr};
      return;
    case Note::kLeave:
      clique.members[static_cast<size_t>(note.rank)].left = note.left;
      if (note.gone)
        Break(r, clique, ncclRemoteError, "rank " + std::to_string(note.rank) + ": " + note.left);
      return;
    default:
      break;
  }
  Meeting::Arrival& arrival =
      clique.MeetingOf(note.place, note.call.kind)->arrivals[SeatOf(note.call, note.rank)];
  arrival.call = note.call;
  if (note.what == Note::kCall) return;
  arrival.there = true;
  arrival.scale = note.scale;
  arrival.data.assign(data, data + note.bytes);
}

// Runs what streams of this process have before calls for which others are there; whether some of
// it has to be tried again.
bool RunWhatOthersAwait(Runtime& r, const Clique& clique) {
  std::vector<std::shared_ptr<Launch>> awaited;
  for (const auto& [place, meeting] : clique.meetings) {
    const auto& all = meeting->arrivals;
    if (std::none_of(all.begin(), all.end(), [](const auto& a) { return a.second.there; }))
      continue;
    for (const auto& [seat, a] : all) {
      if (a.reached() || a.launch == nullptr || a.launch->comm->aborted) continue;
      awaited.push_back(a.launch);
    }
  }
  bool again = false;
  for (const auto& launch : awaited) {
    r.Force(launch->stream, launch->position);
    again |= !launch->reached;
  }
  if (!awaited.empty()) r.Notify();
  return again;
}

int Service::Look(Runtime& r) {
  int wait = -1;
  bool heard = false;
  for (const auto& clique : cliques_) {
    clique->exchange->Pump([&](const Note& note, const char* data) {
      heard = true;
      Hear(r, *clique, note, data);
    });
  }
  if (heard) r.Notify();
  for (const auto& clique : std::vector(cliques_)) {
    if (RunWhatOthersAwait(r, *clique)) wait = 2;
  }
  std::erase_if(cliques_, [](const auto& clique) {
    const auto& all = clique->members;
    const bool all_here = clique->exchange->alone() && clique->complete();
    const bool left = clique->exchange->told() && std::none_of(all.begin(), all.end(), Lives);
    const bool over = all_here || left;
    if (over) clique->exchange = nullptr;
    return over;
  });
  for (const auto& clique : cliques_) {
    for (int rank = 0; rank < clique->size; ++rank) {
      if (clique->members[static_cast<size_t>(rank)].come) continue;
      clique->exchange->Seek(rank);
      wait = 1;
    }
  }
  return wait;
}

void Service::Serve(Runtime& r) {
  for (;;) {
    std::vector<pollfd> polls = {{wakes_, POLLIN, 0}};
    int wait;
    {
      const std::lock_guard<std::recursive_mutex> lock(r.mutex);
      wait = Look(r);
      for (const auto& clique : cliques_) clique->exchange->AddTo(&polls);
    }
    poll(polls.data(), polls.size(), wait);
    uint64_t woken;
    if (read(wakes_, &woken, sizeof woken) < 0) continue;  // by something else
  }
}

void Tell(const ncclComm& comm, Note note, int to = Exchange::kAll, const void* data = nullptr) {
  if (comm.clique == nullptr || comm.clique->exchange == nullptr) return;
  note.rank = comm.rank;
  comm.clique->exchange->Tell(note, data, to);
  Service::Get().Wake();  // for what did not go at once, and for what others await already
}

int PeerIn(const Place& place, int rank) {
  return place.from < 0 ? Exchange::kAll : place.from == rank ? place.to : place.from;
}

}  // namespace

bool Enter(Runtime& r, const std::shared_ptr<Clique>& clique, int rank) {
  if (clique->id.empty()) return true;
  const bool first = clique->exchange == nullptr;
  if (first) clique->exchange = std::make_shared<Exchange>(clique->id);
  if (!clique->exchange->Listen(rank)) {
    if (first) clique->exchange = nullptr;
    return false;
  }
  if (first) Service::Get().Add(r, clique);
  const auto here = static_cast<size_t>(rank);
  const Clique::Member& me = clique->members[here];
  Note note{Note::kJoin};
  note.device = me.device;
  note.size = clique->size;
  note.process = me.process;
  Tell(*me.comm, note);
  for (size_t i = 0; i < clique->members.size(); ++i) {
    if (clique->members[i].come && clique->remote(static_cast<int>(i))) Judge(r, *clique, here, i);
  }
  return true;
}

void TellCall(const ncclComm& comm, const Place& place, const Call& call) {
  Note note{Note::kCall};
  note.place = place;
  note.call = call;
  Tell(comm, note, PeerIn(place, comm.rank));
}

void TellData(const ncclComm& comm, const Place& place, const Call& call, double scale,
              const void* data, size_t bytes) {
  Note note{Note::kData};
  note.place = place;
  note.call = call;
  note.scale = scale;
  note.bytes = bytes;
  Tell(comm, note, PeerIn(place, comm.rank), data);
}

void TellWish(const ncclComm& comm, uint64_t split, int color, int key) {
  Note note{Note::kWish};
  note.place.number = split;
  note.color = color;
  note.key = key;
  Tell(comm, note);
}

void TellLeave(Runtime& r, const ncclComm& comm, const char* how) {
  r.Notify();
  if (comm.clique == nullptr) return;
  comm.clique->members[static_cast<size_t>(comm.rank)].left = how;
  Note note{Note::kLeave};
  std::snprintf(note.left, sizeof note.left, "%s", how);
  Tell(comm, note);
}

bool AllTold(const Clique& clique) { return clique.exchange == nullptr || clique.exchange->told(); }

bool OthersMayCome() { return Service::Get().OthersMayCome(); }

}  // namespace cusim::nccl
