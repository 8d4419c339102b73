// Processes of one machine that share a unique id of the NCCL stand-in: a socket between each two.
// Their addresses are names without files, so nothing is left of a process that was killed, and the
// end of a connection tells that it was.
#pragma once

#include <poll.h>

#include <functional>
#include <list>
#include <map>
#include <string>
#include <vector>

#include "tests/cusim/nccl.h"

namespace cusim::nccl {

// What one rank tells the others; all are the same program's bytes on one machine.
struct Note {
  enum What { kJoin, kCall, kData, kWish, kLeave };
  What what;
  int rank = 0;
  int device = 0, size = 0;  // of who joins
  int process = 0;           // its number in the system
  uint64_t token = 0;        // of the process: its numbers may be those of another namespace
  Place place{};             // of a call and its data; the number of a split
  Call call{};
  double scale = 1;
  int color = 0, key = 0;
  char left[48] = "";  // how it has, and whether it was with its process
  bool gone = false;
  size_t bytes = 0;  // that follow
};

// Not for several threads at once.
class Exchange {
 public:
  static constexpr int kAll = -1;
  // Of a note that has come. Of a process that is gone there is a kLeave for each of its ranks.
  using Hear = std::function<void(const Note& note, const char* data)>;

  explicit Exchange(std::string name) : name_(std::move(name)) {}
  ~Exchange();
  Exchange(const Exchange&) = delete;

  // Takes the address of a rank that is here; false: another process has it.
  bool Listen(int rank);
  // Where its process is not connected yet: tries to.
  void Seek(int rank);
  // To all processes, or to that of a rank. Processes that come later are told of who has joined.
  void Tell(Note note, const void* data = nullptr, int to = kAll);
  // Moves what can be moved now.
  void Pump(const Hear& hear);
  bool told() const;
  bool alone() const { return links_.empty(); }
  void AddTo(std::vector<pollfd>* polls) const;

 private:
  struct Link {
    int socket;
    int sought = -1;     // the rank whose address it was
    uint64_t token = 0;  // of the process at its end; 0: it has said nothing yet
    std::string in, out;
    size_t sent = 0;  // of `out`
  };
  void Begin(int socket, int sought);
  void Write(Link* link);
  bool Read(Link* link);  // false: it has ended
  void Take(Link* link, const Hear& hear);
  void Lose(uint64_t token, const Hear& hear);

  const std::string name_;
  std::map<int, int> listeners_;  // by rank
  std::list<Link> links_;
  std::map<uint64_t, Link*>
      ways_;                  // to each process the first link, so that notes keep their order
  std::vector<Note> joined_;  // who is here
  struct Peer {
    uint64_t token;
    int process;
  };
  std::map<int, Peer> peers_;  // that have not left, by rank
};

}  // namespace cusim::nccl
