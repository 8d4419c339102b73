#include "dtensor/mesh/process/rendezvous.h"

#include <limits.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "dtensor/mesh/flight.h"
#include "dtensor/mesh/process/build_id.h"
#include "dtensor/mesh/store/deadline.h"
#include "dtensor/mesh/store/frame.h"
#include "dtensor/tensor/file.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

constexpr int64_t kChannel = 0;
constexpr uint64_t kMagic = 0x3165657464;  // "dtee1"
constexpr int64_t kEnd = 0;                // a program's end, among numbers of worlds
constexpr absl::Duration kAnswerTime = absl::Seconds(1);    // for messages to go their way
constexpr absl::Duration kShort = absl::Milliseconds(150);  // where one may be gone
constexpr int64_t kMostBytes = 4096;  // of any build's messages; libraries send so much at once

// Never changes: by it builds know that they are others.
struct Head {
  uint64_t magic, bytes;
  char build[96];
};

// What a process comes for.
struct Coming {
  Head head;
  int64_t world, size;  // kEnd: its program ends
  int64_t waits;        // 0: it ends alone
  int64_t code;         // of what it ends with
  char loopback[96];    // alike where processes reach each other over 127.0.0.1
  char node[96];        // alike where ranks are on one node
  char host[72];
  char text[1024];
};

struct Answer {
  Head head;
  int64_t code, culprit;  // culprit -1: nobody
  int64_t first_channel;
  char address[64], token[store::kTokenBytes + 8];
  char text[2048];
};
static_assert(sizeof(Coming) < kMostBytes && sizeof(Answer) < kMostBytes);

template <size_t n>
void Put(char (&to)[n], absl::string_view text) {
  const size_t bytes = std::min(n - 1, text.size());
  std::copy_n(text.data(), bytes, to);
  std::memset(to + bytes, 0, n - bytes);
}

// Of what has no room the beginning.
template <size_t n>
void PutMessage(char (&to)[n], absl::string_view text) {
  Put(to, text.size() < n ? std::string(text) : absl::StrCat(text.substr(0, n - 4), "..."));
}

template <size_t n>
std::string Got(const char (&from)[n]) {
  return std::string(from, strnlen(from, n));
}

Head MyHead(uint64_t bytes) {
  Head head = {kMagic, bytes, ""};
  Put(head.build, BuildId());
  return head;
}

// A message as it came.
struct Received {
  alignas(8) char bytes[kMostBytes] = "";
  const Coming& coming() const { return *reinterpret_cast<const Coming*>(bytes); }
  const Answer& answer() const { return *reinterpret_cast<const Answer*>(bytes); }
};

// What is wrong with the build of `rank`; empty: it is ours.
std::string OtherBuild(const Head& head, uint64_t bytes, int64_t rank, int64_t me) {
  const Head mine = MyHead(bytes);
  if (head.magic == mine.magic && head.bytes == mine.bytes && Got(head.build) == Got(mine.build)) {
    return "";
  }
  const std::string theirs = head.magic == mine.magic ? Got(head.build) : "unknown";
  return absl::StrCat("rank ", rank, " runs another build of the program than rank ", me,
                      ": build id ", theirs, ", not ", Got(mine.build),
                      "; start the same files on all machines");
}

// The machine as far as its loopback goes: a boot of a kernel, and a network of it.
std::string Loopback() {
  char network[64] = "";
  (void)!readlink("/proc/self/ns/net", network, sizeof(network) - 1);
  std::string boot = ReadFile("/proc/sys/kernel/random/boot_id").value_or("");
  return absl::StrCat(boot.substr(0, boot.find('\n')), network);
}

std::string HostName() {
  char name[HOST_NAME_MAX + 1] = "?";
  (void)gethostname(name, sizeof(name) - 1);
  return name;
}

Coming ComingFor(const Endpoint& endpoint, int64_t size, const absl::Status& how, bool waits) {
  Coming coming = {};
  coming.head = MyHead(sizeof(Coming));
  coming.world = size == 0 ? kEnd : endpoint.worlds;
  coming.size = size;
  coming.waits = waits ? 1 : 0;
  coming.code = static_cast<int64_t>(how.code());
  const std::string loopback = Loopback(), &node = endpoint.place().node;
  Put(coming.loopback, loopback);
  Put(coming.node, node.empty() ? loopback : node);
  Put(coming.host, HostName());
  PutMessage(coming.text, how.message());
  return coming;
}

Answer AnswerOf(const absl::Status& status) {
  Answer answer = {};
  answer.head = MyHead(sizeof(Answer));
  answer.code = static_cast<int64_t>(status.code());
  answer.culprit = CulpritOf(status).value_or(-1);
  PutMessage(answer.text, status.message());
  return answer;
}

absl::Status StatusOf(const Answer& answer) {
  if (answer.code == 0) return absl::OkStatus();
  const absl::Status status(static_cast<absl::StatusCode>(answer.code), Got(answer.text));
  return RankLocal(answer.culprit < 0 ? status : WithCulprit(status, answer.culprit));
}

std::string Purpose(int64_t world, int64_t size) {
  if (world == kEnd) return "the end of the program";
  return absl::StrCat("world #", world, " of the program, of ", size, " ranks");
}

// How what `rank` comes for differs from what rank 0 does.
absl::Status Difference(const Coming& theirs, const Coming& mine, int64_t rank) {
  const std::string build = OtherBuild(theirs.head, sizeof(Coming), rank, 0);
  if (!build.empty()) return WithCulprit(absl::FailedPreconditionError(build), rank);
  const bool ends = theirs.world == kEnd;
  if (theirs.world == mine.world && theirs.size == mine.size && theirs.waits != 0) {
    return absl::OkStatus();
  }
  if (ends && theirs.code != 0) {
    return WithCulprit(absl::Status(static_cast<absl::StatusCode>(theirs.code),
                                    absl::StrCat("rank ", rank, ": ", Got(theirs.text))),
                       rank);
  }
  return WithCulprit(
      absl::FailedPreconditionError(absl::StrCat(
          "rank ", rank, " comes to ", Purpose(theirs.world, theirs.size), ", rank 0 to ",
          Purpose(mine.world, mine.size), ": all ranks run the same worlds in the same order")),
      rank);
}

// Until `over`, looking often at first. False at the deadline.
absl::StatusOr<bool> Until(Transfers& transfers, Deadline deadline,
                           absl::FunctionRef<bool(bool done)> over) {
  for (int64_t turn = 0;; ++turn) {
    DT_RETURN_IF_ERROR(transfers.Sweep());  // also what came behind one that is late
    DT_ASSIGN_OR_RETURN(const bool done, transfers.Done());
    if (over(done)) return true;
    if (deadline.passed()) return false;
    absl::SleepFor(absl::Microseconds(turn < 20000 ? 50 : 1000));
  }
}

// As rank 0.
class Host {
 public:
  Host(Endpoint& endpoint, const Coming& mine)
      : endpoint_(endpoint),
        mine_(mine),
        from_(std::make_shared<std::vector<Received>>(static_cast<size_t>(endpoint.size()))) {}

  // Until all have come for what rank 0 comes for, or one will not.
  absl::Status Gather(absl::Duration limit) {
    Transfers transfers(endpoint_, from_);
    for (int64_t r = 1; r < endpoint_.size(); ++r) {
      DT_RETURN_IF_ERROR(transfers.Recv(r, kChannel, &(*from_)[r], kMostBytes, true));
    }
    absl::Status wrong;
    std::vector<bool> looked(from_->size());
    const auto over = [&](bool done) {
      for (size_t r = 1; r < from_->size() && wrong.ok(); ++r) {
        if (looked[r] || !transfers.done(r - 1)) continue;
        looked[r] = true;
        wrong = Difference((*from_)[r].coming(), mine_, static_cast<int64_t>(r));
      }
      return done || !wrong.ok();
    };
    const absl::StatusOr<bool> in_time = Until(transfers, Deadline::In(limit), over);
    if (in_time.ok() && *in_time && wrong.ok()) return absl::OkStatus();
    std::vector<int64_t> absent;
    for (size_t r = 1; r < from_->size(); ++r) {
      if (!transfers.done(r - 1)) absent.push_back(static_cast<int64_t>(r));
    }
    if (!wrong.ok()) return wrong;
    DT_RETURN_IF_ERROR(in_time.status());
    const absl::Status late = absl::DeadlineExceededError(
        absl::StrCat(RankNames(absent), " did not come to ", Purpose(mine_.world, mine_.size),
                     " within ", absl::FormatDuration(limit)));
    return absent.size() == 1 ? WithCulprit(late, absent[0]) : late;
  }

  Machines Found() const {
    const auto ranks = static_cast<int64_t>(from_->size());
    const auto of = [&](int64_t r) -> const Coming& {
      return r == 0 ? mine_ : (*from_)[r].coming();
    };
    Machines found;
    int64_t begins = 0;  // the greatest divisor of all ranks with which another node begins
    for (int64_t r = 1; r < ranks; ++r) {
      if (Got(of(r).node) != Got(of(r - 1).node)) begins = std::gcd(begins, r);
      if (!found.far.empty() || Got(of(r).loopback) == Got(mine_.loopback)) continue;
      found.far = absl::StrCat("rank ", r, " on ", Got(of(r).host));
    }
    found.ranks_each = begins == 0 ? ranks : begins;
    return found;
  }

 private:
  Endpoint& endpoint_;
  const Coming mine_;
  const std::shared_ptr<std::vector<Received>> from_;  // by rank
};

// To all; who is not there any more does not matter.
void Tell(Endpoint& endpoint, const Answer& answer, absl::Duration limit) {
  const auto kept = std::make_shared<Answer>(answer);
  Transfers transfers(endpoint, kept);
  for (int64_t r = 1; r < endpoint.size(); ++r) {
    if (!transfers.Send(r, kChannel, kept.get(), sizeof(Answer), true).ok()) break;
  }
  (void)Until(transfers, Deadline::In(limit), [](bool done) { return done; }).ok();
}

// As another rank: says what it comes for and hears what rank 0 says.
absl::StatusOr<Answer> Come(Endpoint& endpoint, const Coming& mine, absl::Duration limit) {
  struct Both {
    Received from;
    Coming to;
  };
  const auto both = std::make_shared<Both>();
  both->to = mine;
  Transfers transfers(endpoint, both);
  DT_RETURN_IF_ERROR(transfers.Recv(0, kChannel, &both->from, kMostBytes, true));
  DT_RETURN_IF_ERROR(transfers.Send(0, kChannel, &both->to, sizeof(Coming), true));
  const absl::StatusOr<bool> in_time =
      Until(transfers, Deadline::In(limit), [&](bool) { return transfers.done(0); });
  DT_RETURN_IF_ERROR(in_time.status());
  if (!*in_time) {
    return WithCulprit(RankLocal(absl::DeadlineExceededError(
                           absl::StrCat("rank 0 did not come to ", Purpose(mine.world, mine.size),
                                        " within ", absl::FormatDuration(limit)))),
                       0);
  }
  const Answer& answer = both->from.answer();
  const std::string build = OtherBuild(answer.head, sizeof(Answer), 0, endpoint.rank());
  if (!build.empty()) return WithCulprit(absl::FailedPreconditionError(build), 0);
  return answer;
}

absl::StatusOr<Invitation> Invite(
    Endpoint& endpoint, const Coming& mine, absl::Duration limit,
    absl::FunctionRef<absl::StatusOr<Invitation>(const Machines& machines)> serve) {
  Host host(endpoint, mine);
  absl::StatusOr<Invitation> invitation = Invitation{};
  if (const absl::Status all = host.Gather(limit); !all.ok()) {
    invitation = all;
  } else if (invitation = serve(host.Found()); !invitation.ok()) {
    invitation = WithCulprit(Prefixed("rank 0", invitation.status()), 0);
  }
  Answer answer = AnswerOf(invitation.status());
  if (invitation.ok()) {
    answer.first_channel = invitation->first_channel;
    Put(answer.address, invitation->address);
    Put(answer.token, invitation->token);
  }
  Tell(endpoint, answer, kAnswerTime);
  return invitation;
}

}  // namespace

absl::StatusOr<Invitation> MeetForWorld(
    Endpoint& endpoint, int64_t size, absl::Duration limit,
    absl::FunctionRef<absl::StatusOr<Invitation>(const Machines& machines)> serve) {
  if (!endpoint.parted.ok()) {
    return absl::FailedPreconditionError(
        absl::StrCat("the processes of this launch have parted: ", endpoint.parted.message()));
  }
  ++endpoint.worlds;
  const Coming mine = ComingFor(endpoint, size, absl::OkStatus(), /*waits=*/true);
  absl::StatusOr<Invitation> invitation = Invitation{};
  if (endpoint.rank() == 0) {
    invitation = Invite(endpoint, mine, limit, serve);
  } else {
    // Rank 0, which may have come later, says who is missing.
    absl::StatusOr<Answer> answer = Come(endpoint, mine, limit + 2 * kAnswerTime);
    const absl::Status told = answer.ok() ? StatusOf(*answer) : answer.status();
    if (told.ok()) {
      invitation = Invitation{answer->first_channel, Got(answer->address), Got(answer->token)};
    } else {
      invitation = told;
    }
  }
  if (!invitation.ok()) {
    endpoint.parted = invitation.status();
    endpoint.MarkBroken();
  }
  return invitation;
}

bool MeetForEnd(Endpoint& endpoint) {
  const Coming mine = ComingFor(endpoint, 0, absl::OkStatus(), /*waits=*/true);
  if (endpoint.rank() != 0) {
    const absl::StatusOr<Answer> answer = Come(endpoint, mine, absl::InfiniteDuration());
    return answer.ok() && answer->code == 0;
  }
  const absl::Status all = Host(endpoint, mine).Gather(absl::InfiniteDuration());
  Tell(endpoint, AnswerOf(all), kAnswerTime);
  return all.ok();
}

void EndAlone(Endpoint& endpoint, const absl::Status& how) {
  const absl::Status why =
      how.ok() ? absl::AbortedError("it has ended its program after a failure") : how;
  if (endpoint.rank() == 0) {
    if (!endpoint.parted.ok()) return;  // all have been told
    return Tell(endpoint, AnswerOf(WithCulprit(Prefixed("rank 0", why), 0)), kShort);
  }
  const auto kept = std::make_shared<Coming>(ComingFor(endpoint, 0, why, /*waits=*/false));
  Transfers transfers(endpoint, kept);
  if (!transfers.Send(0, kChannel, kept.get(), sizeof(Coming), true).ok()) return;
  (void)Until(transfers, Deadline::In(kShort), [](bool done) { return done; }).ok();
}

}  // namespace dtensor
