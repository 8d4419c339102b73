// Communicators of the NCCL stand-in: ranks are threads of this and of other processes, or one
// thread that groups.
#pragma once

#include <nccl.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/cusim/runtime.h"

namespace cusim::nccl {

enum class Kind { kAllReduce, kReduce, kBroadcast, kAllGather, kReduceScatter, kSend, kRecv };

struct Clique;
class Exchange;
// What an operator of ncclRedOpCreatePreMulSum multiplies by.
struct PreMul {
  ncclDataType_t type = ncclFloat32;
  bool device = false;
  const void* scalar = nullptr;  // of the device
  double value = 1;
};

struct Call {  // one operation of one rank, as it was asked for
  Kind kind;
  const void* send = nullptr;
  void* recv = nullptr;
  size_t count = 0;
  ncclDataType_t type = ncclFloat32;
  ncclRedOp_t op = ncclSum;
  int root = 0;     // or the peer of a message
  PreMul premul{};  // where `op` is one
};
std::string Describe(const Call& call);  // "ncclAllReduce(10 x float32, sum)"
int SeatOf(const Call& call, int rank);  // in the meeting
size_t SizeOf(ncclDataType_t type);      // bytes; 0: none that is known here
double ScalarOf(ncclDataType_t type, const void* p);

// The calls of a group that go to one stream: one work there, done when all of them are.
struct Launch {
  ncclComm* comm = nullptr;
  Stream* stream = nullptr;
  uint64_t position = 0;
  bool reached = false;  // all that is before it on its stream has run
  std::vector<struct Part> parts;
  std::vector<Range> ranges;  // what its calls have touched
};

// Which call of a communicator: a collective by its number, a message by its ranks and number.
struct Place {
  int from = -1, to = -1;  // -1: a collective
  uint64_t number = 0;
  auto operator<=>(const Place&) const = default;
};

// Where the calls of several ranks meet: a collective, or a message between two.
struct Meeting {
  struct Arrival {
    std::shared_ptr<Launch> launch;  // null: of another process
    Call call{};
    // Of another process, once its stream is there: what it sends, and its operator's factor.
    bool there = false;
    std::vector<uint8_t> data{};
    double scale = 1;
    bool reached() const { return launch != nullptr ? launch->reached : there; }
  };
  Place place;
  std::vector<int> ranks;           // who must come; of a message the sender, then the receiver
  std::map<int, Arrival> arrivals;  // by place in `ranks`
  std::string name;
  bool done = false;
};
struct Part {
  std::shared_ptr<Meeting> meeting;
  int seat;  // of its rank, in `ranks`
};

// The ranks that share a unique id, or a color of a split.
struct Clique {
  std::string name;
  std::string id;  // by which processes know it; empty: all its ranks are in this one
  int size = 0;
  struct Member {
    bool come = false;
    ncclComm* comm = nullptr;  // null: it has not come, or is in another process
    int device = 0, process = 0;
    std::string left;  // how it has: "has aborted"
  };
  std::vector<Member> members;                         // by rank
  std::map<Place, std::shared_ptr<Meeting>> meetings;  // that are not over
  struct Split {
    struct Wish {
      int color, key;
      ncclComm* child;  // null: of no color, or in another process
    };
    std::map<int, Wish> wishes;  // by rank
    bool made = false;
  };
  std::map<uint64_t, std::shared_ptr<Split>> splits;
  std::shared_ptr<Exchange> exchange;  // with other processes; null: there is no need
  bool complete() const;
  // Why two ranks that have come cannot be in one communicator; empty: they can.
  std::string Clash(size_t a, size_t b) const;
  bool remote(int rank) const { return members[static_cast<size_t>(rank)].comm == nullptr; }
  std::shared_ptr<Split>& SplitOf(uint64_t number);
  std::shared_ptr<Meeting> MeetingOf(const Place& place, Kind kind);
};

}  // namespace cusim::nccl

struct ncclComm {
  std::shared_ptr<cusim::nccl::Clique> clique;
  int rank = -1, device = 0;
  bool blocking = true, aborted = false, destroyed = false;
  int thread = 0;  // which used it last
  ncclResult_t error = ncclSuccess;
  std::string last;  // text of the last error
  // It never came to be, or a process of its ranks is gone.
  bool broken = false;
  uint64_t collectives = 0, splits = 0;
  std::map<std::pair<bool, int>, uint64_t> messages;  // sent or received, by peer
  std::vector<std::weak_ptr<cusim::nccl::Launch>> launches;
  std::map<int, cusim::nccl::PreMul> operators;
  int next_operator = ncclNumOps;
};

namespace cusim::nccl {

// Says it, and notes it for ncclGetLastError.
ncclResult_t Refuse(Runtime& r, ncclComm* comm, ncclResult_t error, const std::string& why);

// Gives the launch its places in its communicator's order.
void Post(Runtime& r, const std::shared_ptr<Launch>& launch, const std::vector<Call>& calls);
// Does what can be done of it; whether all is done.
bool Progress(Runtime& r, Launch* launch);

// ---- Ranks in other processes: nccl_remote.cc. ----

// A rank is here now: others may find it. False: another process has that rank.
bool Enter(Runtime& r, const std::shared_ptr<Clique>& clique, int rank);
// What a rank that is here does is told to the processes that have to know.
void TellCall(const ncclComm& comm, const Place& place, const Call& call);
void TellData(const ncclComm& comm, const Place& place, const Call& call, double scale,
              const void* data, size_t bytes);
void TellWish(const ncclComm& comm, uint64_t split, int color, int key);
void TellLeave(Runtime& r, const ncclComm& comm, const char* how);
bool AllTold(const Clique& clique);  // all that was said is on its way
// Whether other processes may free who waits here: nobody can say that nobody is left who could.
bool OthersMayCome();

}  // namespace cusim::nccl
