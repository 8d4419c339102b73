// Ranks that are started as torchrun starts them (torchrun_rank): where no launcher serves a store
// they meet at one of the ports after MASTER_PORT, with whoever else listens there.
#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "nlohmann/json.hpp"
#include "tests/common/run_program.h"
#include "tests/common/temp_folder.h"
#include "tests/common/thin.h"

namespace dtensor {
namespace {

using ::testing::AllOf;
using testing::Count;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::Outcome;

constexpr int kPorts = 8;  // at which they may meet

// A descriptor that listens there and never answers; -1: somebody else does.
int Listen(int port) {
  sockaddr_in at = {};
  at.sin_family = AF_INET;
  at.sin_port = htons(static_cast<uint16_t>(port));
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int on = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (bind(fd, reinterpret_cast<sockaddr*>(&at), sizeof(at)) == 0 && listen(fd, 16) == 0) return fd;
  close(fd);
  return -1;
}

// A MASTER_PORT after which more than eight ports are free: below those that the system gives out.
// The first `taken` of them are somebody else's as long as this is.
class MasterPort {
 public:
  explicit MasterPort(int taken = 0) {
    static int next = 12000 + getpid() % 1000 * 16;
    for (bool free = false; !free; next += 16) {
      Close();
      free = true;
      for (int i = 0; i <= kPorts + 1; ++i) {
        fds_.push_back(Listen(next + i));
        free = free && fds_.back() >= 0;
      }
      port_ = next;
    }
    for (int i = 0; i <= kPorts + 1; ++i) {
      if (i < 1 || i > taken) CloseOne(i);
    }
  }
  ~MasterPort() { Close(); }
  MasterPort(const MasterPort&) = delete;
  int operator+(int i) const { return port_ + i; }

 private:
  void CloseOne(int i) {
    int& fd = fds_[static_cast<size_t>(i)];
    if (fd >= 0) close(fd);
    fd = -1;
  }
  void Close() {
    for (size_t i = 0; i < fds_.size(); ++i) CloseOne(static_cast<int>(i));
    fds_.clear();
  }
  int port_ = 0;
  std::vector<int> fds_;
};

struct Rank {
  int rank = 0, size = 2;
  double late = 0;           // seconds
  std::string run = "none";  // as torchrun's without --rdzv-id
  int port = 0;              // MASTER_PORT; 0: that of all
  int nodes = 1;
};

Outcome Start(const MasterPort& port, const std::vector<Rank>& ranks,
              const std::string& environment = "",
              const std::string& program = DT_PROGRAM " none") {
  std::string script = environment.empty() ? "" : absl::StrCat("export ", environment, "; ");
  for (const Rank& r : ranks) {
    absl::StrAppend(&script, "{ sleep ", r.late, "; timeout -k 5 60 ", DT_TORCHRUN_RANK, " ",
                    r.rank, " ", r.size, " ", r.nodes, " ", r.port == 0 ? port + 0 : r.port, " ",
                    r.run, " ", program, "; } & ");
  }
  return testing::RunProgram("sh", absl::StrCat("-c '", script, "wait'"));
}

std::vector<Rank> Ranks(int size, int nodes = 1) {
  std::vector<Rank> ranks;
  for (int r = 0; r < size; ++r) ranks.push_back({.rank = r, .size = size, .nodes = nodes});
  return ranks;
}

TEST(Torchrun, RanksMeet) {
  for (const int size : {2, 4}) {
    const Outcome o = Start(MasterPort(), Ranks(size));
    EXPECT_EQ(Count(o.text, absl::StrCat(" of ", size, " is done\n")), size) << o.text;
    EXPECT_EQ(Count(o.text, "] exit code 0\n"), size) << o.text;
    EXPECT_THAT(o.text, HasSubstr(absl::StrCat("processes: rank 0 of ", size, ", 0 of ", size,
                                               " on this machine, by torchrun (WORLD_SIZE), "
                                               "messages by gloo")));
  }
}

TEST(Torchrun, RanksOfTwoNodesMeet) {
  const Outcome o = Start(MasterPort(), Ranks(4, /*nodes=*/2));
  EXPECT_EQ(Count(o.text, " of 4 is done\n"), 4) << o.text;
  EXPECT_THAT(o.text, HasSubstr("processes: rank 0 of 4, 0 of 2 on this machine, by torchrun"));
}

// Who is refused is told why, and not that nobody was found.
TEST(Torchrun, AnotherProcessOfTheSameRankIsRefusedAtOnce) {
  const Outcome o =
      Start(MasterPort(),
            {{.rank = 0, .size = 3}, {.rank = 1, .size = 3}, {.rank = 1, .size = 3, .late = 1}},
            "DTENSOR_TIMEOUT_S=6");
  EXPECT_THAT(o.text, HasSubstr("rank 1 is another process already"));
  EXPECT_THAT(o.text, Not(HasSubstr("Connection refused")));
  EXPECT_THAT(o.text, Not(HasSubstr("no more are logged")));
}
TEST(Torchrun, ALaunchWithAnotherTokenIsNamed) {
  const Outcome o =
      Start(MasterPort(), {{.rank = 0}, {.rank = 1, .run = "other"}}, "DTENSOR_TIMEOUT_S=4");
  EXPECT_THAT(o.text, HasSubstr("with another token"));
  EXPECT_THAT(o.text, Not(HasSubstr("no more are logged")));
}

TEST(Torchrun, ATrainingHasTheLossesOfThreads) {
  const testing::TempFolder folder;
  const std::string text = folder.Write("text", testing::LearnableText());
  for (const auto& [ranks, mesh] : {std::pair<int, std::string>{2, "tp=2"}, {4, "dp=2,tp=2"}}) {
    const auto command = [&](const std::string& name) {
      return absl::StrCat(DT_TRAIN_GPT " --data ", text,
                          " --hidden 16 --heads 2 --seq 12 --batch 4 --steps 10 --mesh ", mesh,
                          " --summary ", folder.Path(name));
    };
    const auto losses = [&](const std::string& name, const Outcome& o) {
      const auto summary = nlohmann::json::parse(folder.Read(name), nullptr, false);
      EXPECT_TRUE(summary.is_object()) << o.text;
      return summary.is_object() ? summary.at("losses").get<std::vector<double>>()
                                 : std::vector<double>();
    };
    const auto threads = losses("threads", testing::RunProgram(command("threads"), ""));
    EXPECT_EQ(threads.size(), 10u);
    const Outcome o = Start(MasterPort(), Ranks(ranks), "", command("processes"));
    EXPECT_EQ(losses("processes", o), threads) << mesh;
  }
}

TEST(Torchrun, AnAbsentRankIsNamedAtTheDeadline) {
  const absl::Time start = absl::Now();
  Outcome o =
      Start(MasterPort(), {{.rank = 0, .size = 3}, {.rank = 2, .size = 3}}, "DTENSOR_TIMEOUT_S=1");
  EXPECT_EQ(
      Count(o.text, "] error: rank 1 did not come to the launch of 3 processes at 127.0.0.1:"), 2)
      << o.text;
  o = Start(MasterPort(), {{.rank = 1}}, "DTENSOR_TIMEOUT_S=1");
  EXPECT_THAT(o.text, AllOf(HasSubstr("[1] error: rank 1 found no store of this launch at 127.0.0"),
                            HasSubstr("where rank 0 is"), Not(HasSubstr("exit code 0"))));
  EXPECT_LT(absl::Now() - start, absl::Seconds(15));
}

TEST(Torchrun, OtherWorldSizesAreRefusedByNamingBoth) {
  Outcome o = Start(MasterPort(), {{.rank = 0, .size = 2}, {.rank = 1, .size = 3}});
  EXPECT_EQ(Count(o.text, "] error: rank 1 is of 3 processes, rank 0 of 2\n"), 2) << o.text;
  // All that are there are told, also those whose own number of processes is right.
  o = Start(MasterPort(),
            {{.rank = 0, .size = 3}, {.rank = 1, .size = 2, .late = 1.5}, {.rank = 2, .size = 3}},
            "DTENSOR_TIMEOUT_S=20");
  EXPECT_EQ(Count(o.text, "] error: rank 1 is of 2 processes, rank 0 of 3\n"), 3) << o.text;
  // Those who do without it go on.
  o = Start(MasterPort(),
            {{.rank = 0, .size = 2}, {.rank = 1, .size = 2, .late = 1.5}, {.rank = 2, .size = 3}},
            "DTENSOR_TIMEOUT_S=20");
  EXPECT_EQ(Count(o.text, " of 2 is done\n"), 2) << o.text;
  EXPECT_THAT(o.text, HasSubstr("[2] error: rank 2 is of 3 processes, rank 0 of 2\n"));
}

// Whoever listens at a port and says nothing costs the others, who must ask there, two seconds.
TEST(Torchrun, PortsThatSomebodyElseHasAreLeftToHim) {
  const Outcome o = Start(MasterPort(/*taken=*/testing::Thorough() ? kPorts - 1 : 1), Ranks(2));
  EXPECT_EQ(Count(o.text, " of 2 is done\n"), 2) << o.text;
}

TEST(Torchrun, WhereNoPortIsFreeAllAreToldInTime) {
  const MasterPort port(/*taken=*/kPorts);
  const absl::Time start = absl::Now();
  const Outcome o = Start(port, Ranks(2), "DTENSOR_TIMEOUT_S=1");
  EXPECT_LT(absl::Now() - start, absl::Seconds(8)) << o.text;
  const std::string ports = absl::StrCat(" at 127.0.0.1, ports ", port + 1, " to ", port + kPorts);
  EXPECT_THAT(o.text,
              AllOf(HasSubstr(absl::StrCat("[0] error: rank 0 serves the launch's store", ports,
                                           "; none is free (DTENSOR_PORT names another): store: "
                                           "cannot listen on 127.0.0.1:",
                                           port + kPorts, ": Address already in use\n")),
                    HasSubstr("[1] error: rank 1 found no store of this launch" + ports)));
  EXPECT_EQ(Count(o.text, "exit code 1\n") + Count(o.text, "exit code 71\n"), 2) << o.text;
}

TEST(Torchrun, ALateRankZeroIsWaitedFor) {
  const Outcome o = Start(MasterPort(), {{.rank = 0, .late = 1}, {.rank = 1}});
  EXPECT_EQ(Count(o.text, " of 2 is done\n"), 2) << o.text;
}

// Where no port is known to all: rank 0 says in a folder where it serves.
TEST(Torchrun, RanksMeetInAFolder) {
  const testing::TempFolder folder;
  const std::string there = "DTENSOR_STORE=" + folder.Path("");
  for (const int nodes : {1, 2}) {
    for (const bool as_url : {false, true}) {
      const std::string url = "DTENSOR_STORE=file://" + folder.Path("");
      const Outcome o = Start(MasterPort(), Ranks(4, nodes), as_url ? url : there);
      EXPECT_EQ(Count(o.text, " of 4 is done\n"), 4) << o.text;
      EXPECT_EQ(Count(o.text, "] exit code 0\n"), 4) << o.text;
      EXPECT_TRUE(std::filesystem::is_empty(folder.Path(""))) << "what rank 0 wrote is gone";
    }
  }
}

TEST(Torchrun, WhatAnEarlierLaunchHasLeftInTheFolderIsPassedOver) {
  const testing::TempFolder folder;
  const std::string there = "DTENSOR_TIMEOUT_S=20 DTENSOR_STORE=" + folder.Path("");
  const MasterPort port;
  // Rank 0 alone, which is killed: its file stays.
  Outcome o = Start(port, {{.rank = 0}}, there, "timeout -s KILL 1 " DT_PROGRAM " none");
  ASSERT_FALSE(std::filesystem::is_empty(folder.Path(""))) << o.text;
  const std::filesystem::path left = *std::filesystem::directory_iterator(folder.Path(""));
  constexpr auto kOwn = std::filesystem::perms::owner_read | std::filesystem::perms::owner_write;
  EXPECT_EQ(std::filesystem::status(left).permissions(), kOwn);
  // Nor does a file that others may read get the next one's token.
  std::filesystem::permissions(left, std::filesystem::perms::all);
  Start(port, {{.rank = 0}}, there, "timeout -s KILL 1 " DT_PROGRAM " none");
  EXPECT_EQ(std::filesystem::status(left).permissions(), kOwn);
  o = Start(port, {{.rank = 0, .late = 1}, {.rank = 1}}, there);
  EXPECT_EQ(Count(o.text, " of 2 is done\n"), 2) << o.text;
  EXPECT_FALSE(std::filesystem::exists(left));
}

TEST(Torchrun, WhoFindsNobodyInTheFolderSaysWhere) {
  const testing::TempFolder folder;
  const std::string path = folder.Path("");
  Outcome o = Start(MasterPort(), {{.rank = 1}}, "DTENSOR_TIMEOUT_S=1 DTENSOR_STORE=" + path);
  EXPECT_THAT(o.text, AllOf(HasSubstr("[1] error: rank 1 found no store of this launch at the "
                                      "address in " +
                                      path),
                            HasSubstr(", which rank 0 writes")));
  o = Start(MasterPort(), {{.rank = 0}}, "DTENSOR_STORE=/no/such/folder");
  EXPECT_THAT(o.text, HasSubstr("[0] error: /no/such/folder/dtensor-"));
  EXPECT_THAT(o.text, HasSubstr(": No such file or directory; DTENSOR_STORE names a folder that "
                                "all ranks see"));
}

// Of the second job rank 0 comes first, where rank 1 of the first one looks for its own: two jobs
// of one port that torchrun gave run ids, and two of neighbouring ports without any.
TEST(Torchrun, TwoJobsAtOnceDoNotMix) {
  for (const bool one_port : {true, false}) {
    const MasterPort port;
    const std::string first = one_port ? "a" : "none", second = one_port ? "b" : "none";
    const int other = port + (one_port ? 0 : 1);
    const Outcome o = Start(port,
                            {{.rank = 0, .run = second, .port = other},
                             {.rank = 1, .late = 0.5, .run = first},
                             {.rank = 0, .late = 1, .run = first},
                             {.rank = 1, .late = 1, .run = second, .port = other}},
                            "DTENSOR_TIMEOUT_S=20");
    EXPECT_EQ(Count(o.text, " of 2 is done\n"), 4) << o.text;
    EXPECT_EQ(Count(o.text, "] exit code 0\n"), 4) << o.text;
  }
}

}  // namespace
}  // namespace dtensor
