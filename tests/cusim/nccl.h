// Communicators of the NCCL stand-in: ranks are threads of one process, or one thread that groups.
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

// Where the calls of several ranks meet: a collective, or a message between two.
struct Meeting {
  struct Arrival {
    std::shared_ptr<Launch> launch;
    Call call;
  };
  std::vector<int> ranks;           // who must come; of a message the sender, then the receiver
  std::map<int, Arrival> arrivals;  // by place in `ranks`
  std::string name;
  bool done = false;
};
struct Part {
  std::shared_ptr<Meeting> meeting;
};

// The ranks that share a unique id, or a color of a split.
struct Clique {
  std::string name;
  int size = 0;
  std::vector<ncclComm*> members;  // by rank; null: has not come
  std::map<uint64_t, std::weak_ptr<Meeting>> collectives;
  std::map<std::tuple<int, int, uint64_t>, std::weak_ptr<Meeting>> messages;
  struct Split {
    struct Wish {
      int color, key;
      ncclComm* child;
    };
    std::map<int, Wish> wishes;  // by rank
    bool made = false;
  };
  std::map<uint64_t, std::shared_ptr<Split>> splits;
  bool complete() const;
};

}  // namespace cusim::nccl

struct ncclComm {
  std::shared_ptr<cusim::nccl::Clique> clique;
  int rank = -1, device = 0;
  bool blocking = true, aborted = false, destroyed = false;
  int thread = 0;  // which used it last
  ncclResult_t error = ncclSuccess;
  std::string last;  // text of the last error
  uint64_t collectives = 0, splits = 0;
  std::map<std::pair<bool, int>, uint64_t> messages;  // sent or received, by peer
  std::vector<std::weak_ptr<cusim::nccl::Launch>> launches;
  std::map<int, cusim::nccl::PreMul> operators;
  int next_operator = ncclNumOps;
};

namespace cusim::nccl {

// Gives the launch its places in its communicator's order.
void Post(Runtime& r, const std::shared_ptr<Launch>& launch, const std::vector<Call>& calls);
// Does what can be done of it; whether all is done.
bool Progress(Runtime& r, Launch* launch);

}  // namespace cusim::nccl
