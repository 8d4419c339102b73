// dtensor-run as a user runs it: ranks over gloo have the numbers of threads, the first failure is
// told first, all end together, and a training goes on after one.
#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "nlohmann/json.hpp"
#include "tests/common/run_program.h"
#include "tests/common/temp_folder.h"
#include "tests/common/thin.h"

namespace dtensor {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using testing::Count;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::Not;
using testing::Outcome;

Outcome Launch(const std::string& flags, const std::string& command,
               const std::string& environment = "") {
  return testing::RunProgram(absl::StrCat(environment, " timeout -k 5 60 " DT_RUN " ", flags),
                             "-- " + command);
}

Outcome Fault(const std::string& how, int ranks = 3, const std::string& environment = "") {
  return Launch(absl::StrCat("--nproc-per-node ", ranks), DT_PROGRAM " " + how, environment);
}

// Whether somebody sleeps for so many seconds.
bool Sleeps(const std::string& seconds) {
  for (const auto& process : fs::directory_iterator("/proc")) {
    std::ifstream file(process.path() / "cmdline");
    const std::string command{std::istreambuf_iterator<char>(file), {}};
    if (command == absl::StrCat("sleep", std::string(1, '\0'), seconds, std::string(1, '\0'))) {
      return true;
    }
  }
  return false;
}

// A folder of this test's own.
class Folder : public ::testing::Test {
 protected:
  std::string Path(const std::string& name) const { return folder_.Path(name); }
  std::string Read(const std::string& name) const { return folder_.Read(name); }

  const testing::TempFolder folder_;
};
using DtensorRunFiles = Folder;

int FreePort() {
  sockaddr_in at = {};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(at);
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  EXPECT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&at), size), 0);
  EXPECT_EQ(getsockname(fd, reinterpret_cast<sockaddr*>(&at), &size), 0);
  close(fd);
  return ntohs(at.sin_port);
}

TEST(DtensorRun, RanksMeetOverGloo) {
  const Outcome o = Fault("none", 4);
  EXPECT_EQ(o.code, 0) << o.text;
  for (int r = 0; r < 4; ++r) {
    EXPECT_THAT(o.text, HasSubstr(absl::StrCat("[rank ", r, "] rank ", r, " of 4 is done\n")));
  }
  EXPECT_THAT(o.text, HasSubstr("by dtensor (DTENSOR_WORLD_SIZE), messages by gloo"));
}

TEST(DtensorRun, AKilledRankIsToldFirst) {
  const Outcome o = Fault("kill");
  EXPECT_EQ(o.code, 128 + 9) << o.text;
  const size_t told =
      o.text.find("dtensor-run: attempt 0 failed; first rank 1 (local rank 1, pid ");
  ASSERT_NE(told, std::string::npos) << o.text;
  EXPECT_THAT(o.text.substr(told), HasSubstr("killed by signal 9 (Killed)\n"));
  EXPECT_EQ(Count(o.text, "] error: rank 1: its process is gone"), 2) << o.text;
}

// gloo writes to peers that may be gone: no rank is ended by that without a word.
TEST(DtensorRun, AConnectionThatBreaksEndsNobodyByASignal) {
  const Outcome o = Fault("pipe");
  EXPECT_EQ(o.code, 0) << o.text;
  EXPECT_EQ(Count(o.text, " of 3 is done\n"), 3) << o.text;
}

// All ranks end at about the same time, and all blame one.
TEST(DtensorRun, WhoIsToBlameIsToldFirstWhoeverEndsFirst) {
  for (const auto& [how, lines] : std::vector<std::pair<std::string, std::string>>{
           {"throw", "    error: rank 1: boom\n"},
           {"error", "    error: rank 1: disk on fire\n"}}) {
    const Outcome o = Fault(how);
    EXPECT_NE(o.code, 0) << o.text;
    EXPECT_THAT(o.text, AllOf(HasSubstr("failed; first rank 1 "), HasSubstr(lines),
                              HasSubstr("dtensor-run: then rank ")))
        << o.text;
  }
  EXPECT_EQ(Fault("_exit").code, 3);
}

// It does not fail itself, and the others do because of it.
TEST(DtensorRun, ARankThatEndsWellBeforeTheOthersIsToldFirst) {
  const Outcome o = Launch("--nproc-per-node 3",
                           "sh -c '[ $RANK = 1 ] && exit 0; sleep 0.2; "
                           "echo {\\\"culprit\\\":1} > $DTENSOR_ERROR_FILE; exit 71'");
  EXPECT_EQ(o.code, 71) << o.text;
  EXPECT_THAT(o.text, AllOf(HasSubstr("attempt 0 failed; first rank 1 (local rank 1, pid "),
                            HasSubstr(": ended with exit code 0 before the others\n")));
  EXPECT_EQ(Count(o.text, "exit code 71"), 2) << o.text;
}

// After a failure the others are asked to end before they are killed.
TEST(DtensorRun, TheOthersAreAskedToEndFirst) {
  const Outcome o = Launch("--nproc-per-node 2",
                           "sh -c 'trap \"echo I end; exit 0\" TERM; [ $RANK = 0 ] && exit 3; "
                           "for i in 1 2 3 4 5 6 7 8 9; do sleep 1; done'");
  EXPECT_EQ(o.code, 3) << o.text;
  EXPECT_THAT(o.text, AllOf(HasSubstr("failed; first rank 0 "), HasSubstr("[rank 1] I end\n"),
                            Not(HasSubstr("did not end by itself"))));
}

// What a rank says of its error is read as it is: half a text is not the end of the launcher.
TEST(DtensorRun, AnErrorFileOfHalfATextIsLeftAside) {
  const Outcome o = Launch("--nproc-per-node 1", "sh -c 'echo { > $DTENSOR_ERROR_FILE; exit 3'");
  EXPECT_EQ(o.code, 3) << o.text;
  EXPECT_THAT(o.text, HasSubstr("failed; first rank 0 "));
}

TEST_F(DtensorRunFiles, AnErrorFileOfSomethingElseIsLeftAside) {
  const std::string deep(100000, '[');
  for (const std::string text :
       {"{\"culprit\":\"x\"}", "{\"culprit\":null}", "{\"culprit\":[1]}", "{\"culprit\":1e99}",
        "[1]", "\"culprit\"", "{\"culprit\":\"\xff\"}", "{\"culprit\":99999999999999999999}",
        deep.c_str()}) {
    folder_.Write("error", text);
    folder_.Write("rank.sh", absl::StrCat("cat ", Path("error"), " > $DTENSOR_ERROR_FILE; exit 3"));
    const Outcome o = Launch("--nproc-per-node 1", "sh " + Path("rank.sh"));
    EXPECT_EQ(o.code, 3) << text.substr(0, 80) << "\n" << o.text;
    EXPECT_THAT(o.text, HasSubstr("failed; first rank 0 "));
  }
}

TEST(DtensorRun, AStoppedRankIsKilled) {
  if (!testing::Thorough()) GTEST_SKIP() << "ten seconds of waiting: DT_THOROUGH=1 runs it";
  const Outcome o = Fault("'stop for good'", 3, "DTENSOR_TIMEOUT_S=1");
  EXPECT_EQ(o.code, 128 + 9) << o.text;
  EXPECT_THAT(o.text, AllOf(HasSubstr("rank 1 holds up the others"), HasSubstr("first rank 1 "),
                            HasSubstr("as it did not end by itself")));
}

TEST(DtensorRun, TheEnvironmentIsTorchrunsAndOurs) {
  const Outcome o =
      Launch("--nproc-per-node 2 --max-restarts 3",
             "sh -c 'echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $GROUP_RANK "
             "$GROUP_WORLD_SIZE $ROLE_RANK $ROLE_NAME $ROLE_WORLD_SIZE "
             "$TORCHELASTIC_RESTART_COUNT $TORCHELASTIC_MAX_RESTARTS $OMP_NUM_THREADS "
             "$MASTER_ADDR $DTENSOR_RANK'",
             "OMP_NUM_THREADS=7");
  EXPECT_EQ(o.code, 0) << o.text;
  EXPECT_THAT(o.text, AllOf(HasSubstr("[rank 0] 0 0 2 2 0 1 0 default 2 0 3 7 127.0.0.1 0\n"),
                            HasSubstr("[rank 1] 1 1 2 2 0 1 1 default 2 0 3 7 127.0.0.1 1\n")));
}

// The flag goes before the variable.
TEST(DtensorRun, AnAddressThatTheUserHasSetIsKept) {
  const std::string say = "sh -c 'echo at $DTENSOR_LOCAL_ADDRESS.'";
  const std::string set = "DTENSOR_LOCAL_ADDRESS=127.0.0.3";
  EXPECT_THAT(Launch("", say, set).text, HasSubstr("at 127.0.0.3.\n"));
  EXPECT_THAT(Launch("--local-addr 127.0.0.2", say, set).text, HasSubstr("at 127.0.0.2.\n"));
}

TEST(DtensorRun, WhatMakesNoSenseIsRefused) {
  const auto refused = [](const std::string& flags, const std::string& told) {
    const Outcome o = Launch(flags, "true");
    EXPECT_EQ(o.code, 1) << flags << o.text;
    EXPECT_THAT(o.text, HasSubstr(told)) << flags;
  };
  refused("--nproc-per-nod 2", "unknown flag --nproc-per-nod; nearest: --nproc_per_node");
  refused("--nproc-per-node 0", "--nproc-per-node is 0: give a number from 1");
  refused("--nproc-per-node many", "give a number, or auto");
  refused("--nnodes 2", "--rdzv-endpoint");
  refused("--nnodes 2 --node-rank 2 --rdzv-endpoint a:1", "--node-rank is 2: give a number from 0");
  refused("--rdzv-endpoint nowhere", "give a machine and a port");
  refused("--redirects 4 --log-dir /tmp", "--redirects is \"4\": give 0 (nothing)");
  refused("--tee 3", "--log-dir");
  refused("--nproc-per-node 2 --redirects 0:1,0:2 --log-dir /tmp",
          "--redirects is \"0:1,0:2\": local rank 0 is there twice: give each once");
  refused("--nproc-per-node 2 --tee 5:1 --log-dir /tmp",
          "--tee is \"5:1\": there is no local rank 5: give ranks from 0 to 1");
  for (const char* address : {"here", "192.0.2.1", "127.0.0.1.1"}) {
    refused(
        absl::StrCat("--local-addr ", address),
        absl::StrCat("--local-addr is \"", address, "\": give an IPv4 address of this machine"));
  }
  EXPECT_THAT(Launch("", "true", "DTENSOR_LOCAL_ADDRESS=192.0.2.1").text,
              HasSubstr("DTENSOR_LOCAL_ADDRESS is \"192.0.2.1\": give an IPv4 address"));
  EXPECT_THAT(Launch("--nproc-per-node 2", "/nowhere/program").text,
              HasSubstr("cannot run \"/nowhere/program\": No such file"));
  EXPECT_THAT(Launch("", "/dev/null").text,
              HasSubstr("cannot run \"/dev/null\": Permission denied"));
  EXPECT_THAT(Launch("", "").text, HasSubstr("no program"));
  const Outcome o = Launch("", "true", "TMPDIR=/nowhere");
  EXPECT_EQ(o.code, 1);
  EXPECT_THAT(o.text, HasSubstr("dtensor-run: TMPDIR /nowhere: No such file or directory\n"));
}

TEST(DtensorRun, ItKeepsNoDescriptorOfAnAttemptThatEnded) {
  const Outcome o = Launch("--nproc-per-node 1 --max-restarts 3",
                           "sh -c 'sleep 0.1; echo files $(ls /proc/$PPID/fd | wc -l).; exit 1'");
  std::vector<std::string> files;
  for (const absl::string_view line : absl::StrSplit(o.text, '\n')) {
    const size_t at = line.find("files ");
    if (at != absl::string_view::npos) files.emplace_back(line.substr(at));
  }
  ASSERT_EQ(files.size(), 4u) << o.text;
  EXPECT_THAT(files, Each(files[0]));
}

TEST_F(DtensorRunFiles, LogsGoWhereTheyAreSent) {
  const std::string say = "sh -c 'echo out $RANK; echo err $RANK >&2'";
  Outcome o = Launch(
      absl::StrCat("--nproc-per-node 2 --redirects 1 --tee 0:2 --log-dir ", Path("log")), say);
  EXPECT_EQ(o.code, 0) << o.text;
  EXPECT_THAT(o.text, AllOf(HasSubstr("[rank 0] err 0\n"), HasSubstr("[rank 1] err 1\n"),
                            Not(HasSubstr("out"))));
  EXPECT_EQ(Read("log/attempt_0/1/stdout.log"), "out 1\n");
  EXPECT_EQ(Read("log/attempt_0/0/stderr.log"), "err 0\n");
  EXPECT_FALSE(fs::exists(Path("log/attempt_0/1/stderr.log")));
}

// Zero bytes, lines that the console has in parts, and an end without a newline.
TEST_F(DtensorRunFiles, FilesHoldWhatWasPrintedByteForByte) {
  const std::string zero("a\0b\n", 4), line(200000, 'z');
  folder_.Write("out", zero + line);
  folder_.Write("rank.sh", absl::StrCat("cat ", Path("out"), "; printf 'c\\000d\\n' >&2; exit 3"));
  const Outcome o = Launch(absl::StrCat("--nproc-per-node 1 --tee 3 --log-dir ", Path("log")),
                           "sh " + Path("rank.sh"));
  EXPECT_EQ(o.code, 3);
  EXPECT_TRUE(Read("log/attempt_0/0/stdout.log") == zero + line);
  EXPECT_EQ(Read("log/attempt_0/0/stderr.log"), std::string("c\0d\n", 4));
  EXPECT_THAT(o.text, AllOf(HasSubstr("[rank 0] " + zero),
                            HasSubstr("[rank 0] " + std::string("c\0d\n", 4)),
                            HasSubstr("its last lines:\n    " + std::string("c\0d\n", 4))));
  EXPECT_EQ(std::count(o.text.begin(), o.text.end(), 'z'), std::ssize(line));
}

// Two launchers are two machines. `first` and `second` say what they are told of their own.
Outcome TwoNodes(const std::string& flags, const std::string& first, const std::string& second,
                 const std::string& command) {
  const std::string run = absl::StrCat("timeout 60 ", DT_RUN, " ", flags,
                                       " --nnodes 2 --rdzv-endpoint 127.0.0.1:", FreePort());
  return testing::RunProgram(
      "sh", absl::StrCat("-c '", run, " --node-rank 1 ", second, " -- ", command, " & ", run,
                         " --node-rank 0 ", first, " -- ", command,
                         "; first=$?; wait $!; echo codes $first $?'"));
}

TEST(DtensorRun, TwoNodes) {
  const std::string two = "--nproc-per-node 2";
  Outcome o = TwoNodes(two, "", "", DT_PROGRAM " none");
  EXPECT_EQ(Count(o.text, " of 4 is done\n"), 4) << o.text;
  EXPECT_THAT(o.text, AllOf(HasSubstr("[rank 3] rank 3 of 4"), HasSubstr("codes 0 0")));
  o = TwoNodes(two, "", "", DT_PROGRAM " kill 3");
  EXPECT_EQ(Count(o.text, "dtensor-run: attempt 0 failed; first rank 3 (local rank 1, pid "), 2)
      << o.text;
  EXPECT_THAT(o.text, HasSubstr("codes 137 137"));
}

TEST(DtensorRun, NodesThatAreStartedDifferentlyAreRefused) {
  const Outcome o = TwoNodes("", "--max-restarts 2", "--max-restarts 0", "true");
  EXPECT_THAT(o.text, AllOf(HasSubstr("--max-restarts is 2 here and 0 on node 1\n"),
                            HasSubstr("--max-restarts is 0 here and 2 on node 0\n"),
                            HasSubstr("codes 1 1")));
}

// Node 0 would wait ten minutes for node 2.
TEST(DtensorRun, ANodeThatGivesUpIsKnownToTheOthers) {
  const std::string run =
      absl::StrCat(DT_RUN " --nnodes 3 --rdzv-endpoint 127.0.0.1:", FreePort(), " --node-rank ");
  const Outcome o = testing::RunProgram(
      "sh", absl::StrCat("-c 'DTENSOR_TIMEOUT_S=3 ", run, "1 true & timeout 30 ", run, "0 true'"));
  EXPECT_EQ(o.code, 1);
  EXPECT_THAT(o.text, HasSubstr("dtensor-run: node 1 has given up: node 2 did not come to "));
}

// Nothing says by itself that a process is stopped. Node 0 ends what it has started, and waits for
// nobody who is silent.
TEST_F(DtensorRunFiles, AStoppedLauncherOfAnotherNodeIsNoticed) {
  std::vector<std::string> first = {"true"};  // what rank 0 does
  if (testing::Thorough()) first.emplace_back("exec sleep 50");
  for (const std::string& what : first) {
    fs::remove(Path("begun"));
    folder_.Write("rank.sh", absl::StrCat("if [ $RANK = 0 ]; then ", what, "; exit; fi\necho > ",
                                          Path("begun"), "\nexec sleep 50\n"));
    const std::string run =
        absl::StrCat(DT_RUN " --nnodes 2 --rdzv-endpoint 127.0.0.1:", FreePort(), " --node-rank ");
    folder_.Write(
        "nodes.sh",
        absl::StrCat("export DTENSOR_TIMEOUT_S=3\n", run, "1 sh ", Path("rank.sh"),
                     " &\nother=$!\ntimeout 30 ", run, "0 sh ", Path("rank.sh"), " > ",
                     Path("told"), " 2>&1 &\nfirst=$!\nuntil [ -e ", Path("begun"),
                     " ]; do sleep 0.02; done\nkill -STOP $other\n",
                     "for i in $(seq 300); do grep -q nothing ", Path("told"),
                     " && break; sleep 0.1; done\nkill -KILL $other\nwait $first\necho code $?\n"));
    const Outcome o = testing::RunProgram("timeout -k 5 60 sh", Path("nodes.sh"));
    EXPECT_THAT(o.text, HasSubstr("code 1\n"));
    EXPECT_THAT(Read("told"), HasSubstr("nothing was heard of the launcher of node 1 for 3s"));
  }
}

// Before the others are there, and when its own processes have ended and theirs have not.
TEST_F(DtensorRunFiles, ALauncherThatWaitsForOthersLeavesNoFolderWhenItIsEnded) {
  fs::create_directory(Path("tmp"));
  folder_.Write("rank.sh", absl::StrCat("if [ $RANK = 0 ]; then exit 0; fi\necho > ", Path("begun"),
                                        "\nexec sleep 50\n"));
  const std::string run =
      absl::StrCat(DT_RUN " --nnodes 2 --rdzv-endpoint 127.0.0.1:", FreePort(), " ");
  folder_.Write("nodes.sh",
                absl::StrCat("export TMPDIR=", Path("tmp"), "\n", run,
                             "true &\nsleep 0.5; kill -TERM $!; wait $!; echo alone $?\n", "ls ",
                             Path("tmp"), "\n", run, "sh ", Path("rank.sh"), " &\nfirst=$!\n", run,
                             "--node-rank 1 --log-dir ", Path("log"), " sh ", Path("rank.sh"),
                             " &\nother=$!\nuntil [ -e ", Path("begun"),
                             " ]; do sleep 0.02; done\nsleep 0.5\nkill -TERM $first; wait $first; "
                             "echo ended $?\nkill -TERM $other; wait $other; ls ",
                             Path("tmp"), "\n"));
  const Outcome o = testing::RunProgram("timeout -k 5 60 sh", Path("nodes.sh"));
  EXPECT_THAT(o.text, AllOf(HasSubstr("alone 143\n"), HasSubstr("ended 143\n"),
                            Not(HasSubstr("dtensor-run-"))));
}

// A name may be another address on node 0 than elsewhere: it says where it waits.
TEST(DtensorRun, AnAbsentNodeIsNamedAtTheDeadline) {
  const std::string endpoint = absl::StrCat("127.0.0.1:", FreePort());
  for (const auto& [node, told] : std::vector<std::pair<int, std::string>>{
           {0, "dtensor-run: node 1 did not come to the launch of 2 nodes at " + endpoint + "\n"},
           {1,
            "dtensor-run: --rdzv-endpoint: node 0 does not answer: store: node 1 and the store "
            "at " +
                endpoint + ": Connection refused\n"}}) {
    const Outcome o =
        Launch(absl::StrCat("--nnodes 2 --rdzv-endpoint ", endpoint, " --node-rank ", node), "true",
               "DTENSOR_TIMEOUT_S=0.5");
    EXPECT_EQ(o.code, 1);
    EXPECT_EQ(o.text, told);
  }
}

// Of one process and of two, at an address of its own. Rank 2 fails once.
TEST_F(DtensorRunFiles, TwoNodesStartAgainTogether) {
  folder_.Write(
      "rank.sh",
      absl::StrCat(
          "echo attempt $TORCHELASTIC_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS: rank $RANK of "
          "$WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE, group $GROUP_RANK of $GROUP_WORLD_SIZE, "
          "role "
          "$ROLE_RANK of $ROLE_WORLD_SIZE, at $DTENSOR_LOCAL_ADDRESS, run $TORCHELASTIC_RUN_ID.\n"
          "echo $MASTER_ADDR:$MASTER_PORT $DTENSOR_STORE $DTENSOR_TOKEN > ",
          Path("store"),
          "$TORCHELASTIC_RESTART_COUNT.$RANK\n"
          "if [ $TORCHELASTIC_RESTART_COUNT = 0 ]; then exec " DT_PROGRAM " kill 2; fi\n"
          "exec " DT_PROGRAM " none\n"));
  const Outcome o = TwoNodes("--max-restarts 1", "--nproc-per-node 1",
                             "--nproc-per-node 2 --local-addr 127.0.0.2", "sh " + Path("rank.sh"));
  EXPECT_THAT(o.text, HasSubstr("codes 0 0")) << o.text;
  EXPECT_EQ(Count(o.text, " of 3 is done\n"), 3) << o.text;
  EXPECT_EQ(Count(o.text, "attempt 0 failed; first rank 2 (local rank 1, pid "), 2) << o.text;
  EXPECT_EQ(Count(o.text, "restart 1 of 1\n"), 2) << o.text;
  for (const char* attempt : {"0", "1"}) {
    for (const char* rank : {"0 of 3, 0 of 1, group 0 of 2, role 0 of 3, at 127.0.0.1",
                             "1 of 3, 0 of 2, group 1 of 2, role 1 of 3, at 127.0.0.2",
                             "2 of 3, 1 of 2, group 1 of 2, role 2 of 3, at 127.0.0.2"}) {
      EXPECT_THAT(o.text, HasSubstr(absl::StrCat("attempt ", attempt, " of 1: rank ", rank,
                                                 ", run 127.0.0.1:")));
    }
    // All meet at one store, of the attempt's own and by its own token.
    const std::string store = Read(absl::StrCat("store", attempt, ".0"));
    EXPECT_THAT(store, MatchesRegex("127.0.0.1:([0-9]+) 127.0.0.1:[0-9]+ [0-9a-f]+\n"));
    for (const char* rank : {".1", ".2"})
      EXPECT_EQ(Read(absl::StrCat("store", attempt, rank)), store);
  }
  EXPECT_NE(Read("store0.0"), Read("store1.0"));
}

// The process that has the measurements writes what fits them; the others have none.
TEST_F(DtensorRunFiles, OneProcessCalibratesForAll) {
  const Outcome o = Launch("--nproc-per-node 2",
                           DT_CALIBRATE " --repeats 1 --most-bytes 64 --out " + Path("cost.json"));
  EXPECT_EQ(o.code, 0) << o.text;
  EXPECT_EQ(Count(o.text, "intra_node: "), 1) << o.text;
  EXPECT_THAT(o.text, Not(HasSubstr("nan")));
  EXPECT_GT(nlohmann::json::parse(Read("cost.json")).at("intra_node.latency_us"), 0);
}

TEST(DtensorRun, HelpListsItsFlagsAndALogFolderIsAskedAbout) {
  EXPECT_THAT(testing::RunProgram(DT_RUN, "--help").text,
              AllOf(HasSubstr("--rdzv_endpoint"), HasSubstr("--nproc_per_node")));
  const Outcome o = Launch("--log-dir /proc/x", "true");
  EXPECT_EQ(o.code, 1);
  EXPECT_THAT(o.text, HasSubstr("--log-dir: /proc/x cannot be written: /proc: "));
}

TEST_F(DtensorRunFiles, TheFlightReportIsNamed) {
  const Outcome o =
      Launch("--nproc-per-node 2 --log-dir " + Path("log"), DT_PROGRAM " leave --device=cpu");
  EXPECT_EQ(o.code, 71) << o.text;  // a peer is lost
  const std::string report = "log/attempt_0/1/flight_report.json.rank1";
  EXPECT_THAT(o.text, HasSubstr("dtensor-run: flight report: " + Path(report)));
  EXPECT_TRUE(nlohmann::json::accept(Read(report)));
  // Where the user wants it.
  const Outcome mine =
      testing::RunProgram("DTENSOR_FLIGHT_REPORT=" + Path("mine") + " " DT_RUN,
                          "--nproc-per-node 2 -- " DT_PROGRAM " leave --device=cpu");
  EXPECT_THAT(mine.text, HasSubstr("dtensor-run: flight report: " + Path("mine.rank1")));
  EXPECT_TRUE(nlohmann::json::accept(Read("mine.rank1")));
  // An old one tells nothing of this failure.
  const Outcome other = testing::RunProgram("DTENSOR_FLIGHT_REPORT=" + Path("mine") + " " DT_RUN,
                                            "--nproc-per-node 2 -- sh -c 'exit 3'");
  EXPECT_EQ(other.code, 3);
  EXPECT_THAT(other.text, Not(HasSubstr("flight report: ")));
}

// A program goes elsewhere, and a path of the launcher's stays where it was.
TEST_F(DtensorRunFiles, ARelativeLogFolderIsThatOfTheLauncher) {
  const Outcome o = testing::RunProgram(
      absl::StrCat("cd ", folder_.path(), "; " DT_RUN),
      "--nproc-per-node 2 --log-dir log -- sh -c 'cd /; exec " DT_PROGRAM " leave --device=cpu'");
  EXPECT_EQ(o.code, 71) << o.text;
  EXPECT_TRUE(nlohmann::json::accept(Read("log/attempt_0/1/flight_report.json.rank1")));
  EXPECT_TRUE(nlohmann::json::accept(Read("log/attempt_0/1/error.json")));
}

// Whoever reads of it in the log finds it, also where the program went on.
TEST_F(DtensorRunFiles, AFlightReportIsKeptHoweverAllEnds) {
  const std::string tmp = "TMPDIR=" + folder_.path();
  const Outcome mine = Launch("", "sh -c 'echo {} > $DTENSOR_FLIGHT_REPORT'",
                              absl::StrCat(tmp, " DTENSOR_FLIGHT_REPORT=", Path("mine")));
  EXPECT_THAT(mine.text, HasSubstr("flight report: " + Path("mine") + "\n"));
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_.path()), {}), 1);  // no folder for it
  for (const auto& [end, code] :
       {std::pair<std::string, int>{"exit 0", 0}, {"kill -INT $PPID; exec sleep 50", 128 + 2}}) {
    const Outcome o =
        Launch("--nproc-per-node 2",
               "sh -c 'echo {} > $DTENSOR_FLIGHT_REPORT.rank$RANK; sleep 0.3; " + end + "'", tmp);
    EXPECT_EQ(o.code, code) << o.text;
    ASSERT_EQ(Count(o.text, "dtensor-run: flight report: "), 1) << o.text;
    const size_t at = o.text.find("dtensor-run: flight report: ") + 28;
    EXPECT_TRUE(fs::exists(o.text.substr(at, o.text.find('\n', at) - at))) << o.text;
  }
}

// Of the script the system knows, of what it runs the launcher's guard.
TEST_F(DtensorRunFiles, WhatAScriptRunsEndsWithAKilledLauncher) {
  const std::string seconds = absl::StrCat("8", getpid());  // that no other sleeps
  folder_.Write("rank.sh",
                absl::StrCat("sleep ", seconds, " &\necho > ", Path("begun"), "\nwait\nexit $?\n"));
  const Outcome o = testing::RunProgram(
      "sh", folder_.Write("end.sh", absl::StrCat(DT_RUN " sh ", Path("rank.sh"),
                                                 " > /dev/null &\nuntil [ -e ", Path("begun"),
                                                 " ]; do sleep 0.02; done\nkill -KILL $!; "
                                                 "wait $!; echo code $?\n")));
  EXPECT_THAT(o.text, HasSubstr("code 137\n"));
  for (int i = 0; i < 100 && Sleeps(seconds); ++i) absl::SleepFor(absl::Milliseconds(20));
  EXPECT_FALSE(Sleeps(seconds));
}

TEST(DtensorRun, ItsGuardEndsWithIt) {
  const Outcome o = Launch("", "sh -c 'echo of $$: $(cat /proc/$PPID/task/$PPID/children)'");
  std::vector<std::string> children = absl::StrSplit(o.text, ' ');
  ASSERT_EQ(children.size(), 6u) << o.text;  // [rank 0] of 12: 11 12
  EXPECT_FALSE(fs::exists("/proc/" + children[4])) << o.text;
}

TEST_F(DtensorRunFiles, NothingOutlivesIt) {
  const std::string seconds = absl::StrCat("7", getpid());  // that no other sleeps
  // A process that left its group and its parent. (It has time to: the group is killed at the end.)
  Launch("--nproc-per-node 2",
         absl::StrCat("sh -c 'setsid sleep ", seconds, " & sleep 0.5; exit 0'"));
  EXPECT_FALSE(Sleeps(seconds));
  std::ofstream(folder_ / "rank.sh")
      << "echo > " << Path("begun") << "$RANK\nexec sleep " << seconds << "\n";
  std::ofstream(folder_ / "end.sh")
      << DT_RUN " --nproc-per-node 2 --log-dir " << Path("log") << " -- sh " << Path("rank.sh")
      << " &\nuntil [ -e " << Path("begun0") << " ] && [ -e " << Path("begun1")
      << " ]; do sleep 0.02; done\n"
      << "kill -$1 $!; wait $!; echo code $?\n";
  for (const auto& [signal, code] : std::vector<std::pair<std::string, int>>{
           {"INT", 130}, {"TERM", 143}, {"QUIT", 131}, {"KILL", 137}}) {
    const Outcome o = testing::RunProgram("sh", absl::StrCat(Path("end.sh"), " ", signal));
    EXPECT_THAT(o.text, HasSubstr(absl::StrCat("code ", code)));
    for (int i = 0; i < 100 && Sleeps(seconds); ++i) absl::SleepFor(absl::Milliseconds(20));
    EXPECT_FALSE(Sleeps(seconds)) << signal;
    for (const char* begun : {"begun0", "begun1"}) fs::remove(Path(begun));
  }
}

// A word to the processes, which may end by it or not.
TEST_F(DtensorRunFiles, SignalsOfTheUserAreTheProcesses) {
  folder_.Write("rank.sh", absl::StrCat("trap 'echo told 1' USR1\ntrap 'echo told 2; exit 0' USR2\n"
                                        "echo > ",
                                        Path("begun"), "$RANK\nwhile :; do sleep 0.05; done\n"));
  folder_.Write("end.sh",
                absl::StrCat("cd ", folder_.path(),
                             "\n" DT_RUN " --nproc-per-node 2 -- sh rank.sh > out 2>&1 &\n"
                             "until [ -e begun0 ] && [ -e begun1 ]; do sleep 0.02; done\n"
                             "kill -USR1 $!\nuntil [ $(grep -c 'told 1' out) = 2 ]; do "
                             "sleep 0.02; done\nkill -USR2 $!; wait $!; echo code $?\n"));
  const Outcome o = testing::RunProgram("timeout -k 5 60 sh", Path("end.sh"));
  EXPECT_THAT(o.text, HasSubstr("code 0\n"));
  EXPECT_EQ(Count(Read("out"), "told 2\n"), 2) << Read("out");
  EXPECT_THAT(Read("out"), Not(HasSubstr("dtensor-run: ")));
}

// The launcher and what it has started go on when their terminal is gone.
TEST_F(DtensorRunFiles, NohupHolds) {
  folder_.Write("rank.sh", absl::StrCat("kill -HUP $$\necho > ", Path("begun"), "\nuntil [ -e ",
                                        Path("sent"), " ]; do sleep 0.02; done\necho the end\n"));
  folder_.Write("end.sh", absl::StrCat("nohup " DT_RUN " sh ", Path("rank.sh"), " > ", Path("out"),
                                       " 2>&1 &\nuntil [ -e ", Path("begun"),
                                       " ]; do sleep 0.02; done\nkill -HUP $!; sleep 0.1; echo > ",
                                       Path("sent"), "; wait $!; echo code $?\n"));
  const Outcome o = testing::RunProgram("timeout -k 5 60 sh", Path("end.sh"));
  EXPECT_THAT(o.text, HasSubstr("code 0\n"));
  EXPECT_THAT(Read("out"), HasSubstr("[rank 0] the end\n"));
}

// A process that does not want to end has thirty seconds; who asks again does not wait for them.
TEST_F(DtensorRunFiles, ASecondSignalKills) {
  folder_.Write("rank.sh", absl::StrCat("trap 'echo > ", Path("told"), "' TERM\necho > ",
                                        Path("begun"), "\nwhile :; do sleep 0.05; done\n"));
  folder_.Write("end.sh",
                absl::StrCat(DT_RUN " --nproc-per-node 1 -- sh ", Path("rank.sh"),
                             " &\nuntil [ -e ", Path("begun"),
                             " ]; do sleep 0.02; done\nkill -TERM $!\nuntil [ -e ", Path("told"),
                             " ]; do sleep 0.02; done\nkill -TERM $!\nwait $!; echo code $?\n"));
  const absl::Time start = absl::Now();
  const Outcome o = testing::RunProgram("timeout -k 5 60 sh", Path("end.sh"));
  EXPECT_THAT(o.text, AllOf(HasSubstr("the processes are told to end; once more kills them\n"),
                            HasSubstr("the processes are killed\n"), HasSubstr("code 143\n")));
  EXPECT_LT(absl::Now() - start, absl::Seconds(15)) << o.text;
}

#ifdef DT_TRAIN_GPT
class DtensorRunTraining : public Folder {
 protected:
  void SetUp() override { folder_.Write("text", testing::LearnableText()); }
  std::string Command(const std::string& name, const std::string& more) const {
    return absl::StrCat(DT_TRAIN_GPT " --data ", Path("text"),
                        " --hidden 16 --heads 2 --seq 12 --batch 4 ", more, " --summary ",
                        Path(name));
  }
  std::vector<double> Losses(const std::string& name, const Outcome& o) const {
    EXPECT_EQ(o.code, 0) << o.text;
    return nlohmann::json::parse(Read(name)).at("losses").get<std::vector<double>>();
  }
};

TEST_F(DtensorRunTraining, HasTheLossesOfThreads) {
  for (const auto& [ranks, mesh] : {std::pair<int, std::string>{2, "tp=2"}, {4, "dp=2,tp=2"}}) {
    const std::string more = "--steps 10 --mesh " + mesh;
    const auto threads = Losses("threads", testing::RunProgram(Command("threads", more), ""));
    const auto processes = Losses(
        "processes", Launch(absl::StrCat("--nproc-per-node ", ranks), Command("processes", more)));
    ASSERT_EQ(threads.size(), 10u);
    EXPECT_EQ(threads, processes) << mesh;
  }
}

// As a batch system says that time is up. All went well.
TEST_F(DtensorRunTraining, SavesAndEndsAfterASignalOfTheUser) {
  const std::string train =
      Command("summary", absl::StrCat("--mesh dp=2 --steps 1000000000 --save ", Path("saved"),
                                      " --log ", Path("log")));
  folder_.Write(
      "send.sh",
      absl::StrCat(DT_RUN " --nproc-per-node 2 -- ", train, " &\nuntil [ -s ", Path("log"),
                   " ]; do kill -0 $! || exit 9; sleep 0.02; done\nkill -USR1 $!\n"
                   "wait $!; echo code $?\n"));
  const Outcome o = testing::RunProgram("timeout -k 5 60 sh", Path("send.sh"));
  EXPECT_THAT(o.text, AllOf(HasSubstr("stopped after step "), HasSubstr("code 0\n")));
  EXPECT_FALSE(fs::is_empty(Path("saved")));
}

// In the first attempt rank 1 is killed in the middle.
TEST_F(DtensorRunTraining, GoesOnFromTheLastCheckpointAfterARestart) {
  const std::string steps = "--steps 40 --mesh dp=2 ";
  const auto whole = Losses("whole", testing::RunProgram(Command("whole", steps), ""));
  const std::string train = Command(
      "parts",
      absl::StrCat(steps, "--save_every 4 --save ", Path("saved"), " --resume ", Path("saved")));
  std::ofstream(folder_ / "rank.sh")
      << "if [ $RANK = 1 ] && [ $TORCHELASTIC_RESTART_COUNT = 0 ]; then\n  " << train
      << " &\n  until ls " << Path("saved")
      << "/step-*[0-9]/checkpoint.json 2>/dev/null; do sleep 0.01; done\n"
      << "  kill -9 $!; wait $!; exit $?\nfi\nexec " << train << "\n";
  const Outcome o = Launch("--nproc-per-node 2 --max-restarts 2", "sh " + Path("rank.sh"));
  const auto parts = Losses("parts", o);
  EXPECT_THAT(o.text,
              AllOf(HasSubstr("beginning: nothing in "), HasSubstr("going on from "),
                    HasSubstr("first rank 1 (local rank 1, pid "), HasSubstr("restart 1 of 2")));
  ASSERT_LE(parts.size(), 40u - 4u) << o.text;  // it did not begin anew
  ASSERT_GE(parts.size(), 4u);
  EXPECT_EQ(parts, std::vector<double>(whole.end() - std::ssize(parts), whole.end()));
}

// A rank is killed while a checkpoint is written, in the first attempt the one that puts it in its
// place, then another one. It is stopped before it is killed, so that it is seen in the middle.
TEST_F(DtensorRunTraining, GoesOnFromTheLastCheckpointOfARankKilledWhileItSaves) {
  const std::string steps = "--steps 30 --mesh dp=2 ";
  const auto whole = Losses("whole", testing::RunProgram(Command("whole", steps), ""));
  const std::string train = Command(
      "parts",
      absl::StrCat(steps, "--save_every 1 --save ", Path("saved"), " --resume ", Path("saved")));
  folder_.Write(
      "rank.sh",
      absl::StrCat(
          "attempt=$TORCHELASTIC_RESTART_COUNT\n"
          "last() { ls ",
          Path("saved"),
          " | grep 'step-[0-9]*$' | tail -n 1; }\n"
          "partial() { set -- ",
          Path("saved"),
          "/*.partial; [ -d $1 ]; }\n"
          "mkdir -p ",
          Path("saved"),
          "\n"
          "if [ $RANK = 0 ]; then ls ",
          Path("saved"), " > ", Path("left"),
          "$attempt; fi\n"
          "if [ $RANK != $attempt ]; then exec ",
          train,
          "; fi\n"
          "before=$(last)\n",
          train,
          " &\n"
          "until [ \"$(last)\" != \"$before\" ]; do sleep 0.01; done\n"
          "while :; do\n"
          "  until partial; do kill -0 $! || exit 9; done\n"
          "  kill -STOP $!\n"
          "  until read stat < /proc/$!/stat && [ \"${stat#*) T}\" != \"$stat\" ]; do :; done\n"
          "  if partial; then break; fi\n"
          "  kill -CONT $!\n"
          "done\n"
          "kill -9 $!; wait $!; exit $?\n"));
  const Outcome o = Launch("--nproc-per-node 2 --max-restarts 2", "sh " + Path("rank.sh"));
  const auto parts = Losses("parts", o);
  EXPECT_THAT(Read("left1"), HasSubstr(".partial\n"));
  for (const char* left : {"left1", "left2"}) {
    std::string last;  // committed
    for (const absl::string_view name : absl::StrSplit(Read(left), '\n')) {
      if (!name.empty() && !absl::EndsWith(name, ".partial")) last = std::string(name);
    }
    EXPECT_THAT(o.text, HasSubstr(absl::StrCat("going on from ", Path("saved"), "/", last)));
  }
  EXPECT_THAT(o.text, AllOf(HasSubstr("attempt 0 failed; first rank 0 "),
                            HasSubstr("attempt 1 failed; first rank 1 ")));
  ASSERT_LT(parts.size(), whole.size()) << o.text;
  EXPECT_EQ(parts, std::vector<double>(whole.end() - std::ssize(parts), whole.end()));
  for (const auto& saved : fs::directory_iterator(Path("saved"))) {
    EXPECT_TRUE(fs::exists(saved.path() / "checkpoint.json")) << saved.path();
  }
}
#endif

}  // namespace
}  // namespace dtensor
