// Which process this is, from what launchers say.
#include "dtensor/mesh/process/launcher.h"

#include <map>
#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "dtensor/mesh/process/meeting.h"
#include "gmock/gmock.h"

namespace dtensor::launcher_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

using Variables = std::map<std::string, std::string>;

Environment Of(const Variables& variables) {
  return [&](const char* name) -> const char* {
    const auto it = variables.find(name);
    return it == variables.end() ? nullptr : it->second.c_str();
  };
}

absl::StatusOr<std::optional<ProcessPlace>> Find(const Variables& variables) {
  return FindPlace(Of(variables));
}

std::string Found(const Variables& variables) {
  const auto place = Find(variables);
  if (!place.ok()) return std::string(place.status().message());
  return *place ? (*place)->ToString() : "none";
}

TEST(Launcher, EachIsFoundByItsVariables) {
  EXPECT_EQ(Found({}), "none");
  EXPECT_EQ(
      Found({{"RANK", "2"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "0"}, {"LOCAL_WORLD_SIZE", "2"}}),
      "rank 2 of 4, 0 of 2 on this machine, by torchrun (WORLD_SIZE)");
  EXPECT_EQ(Found({{"OMPI_COMM_WORLD_RANK", "1"},
                   {"OMPI_COMM_WORLD_SIZE", "3"},
                   {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                   {"OMPI_COMM_WORLD_LOCAL_SIZE", "3"}}),
            "rank 1 of 3, 1 of 3 on this machine, by Open MPI (OMPI_COMM_WORLD_SIZE)");
  EXPECT_EQ(Found({{"PMI_RANK", "5"},
                   {"PMI_SIZE", "8"},
                   {"MPI_LOCALRANKID", "1"},
                   {"MPI_LOCALNRANKS", "4"}}),
            "rank 5 of 8, 1 of 4 on this machine, by PMI (PMI_SIZE)");
  EXPECT_EQ(Found({{"MV2_COMM_WORLD_RANK", "0"}, {"MV2_COMM_WORLD_SIZE", "2"}}),
            "rank 0 of 2, by MVAPICH (MV2_COMM_WORLD_SIZE)");
  EXPECT_EQ(Found({{"SLURM_PROCID", "3"}, {"SLURM_STEP_NUM_TASKS", "6"}, {"SLURM_LOCALID", "1"}}),
            "rank 3 of 6, by srun (SLURM_STEP_NUM_TASKS)");
  EXPECT_EQ(Found({{"DTENSOR_RANK", "1"}, {"DTENSOR_WORLD_SIZE", "2"}}),
            "rank 1 of 2, by dtensor (DTENSOR_WORLD_SIZE)");
}

TEST(Launcher, ANodeMayHaveAName) {
  Variables variables = {{"DTENSOR_RANK", "1"}, {"DTENSOR_WORLD_SIZE", "2"}};
  EXPECT_EQ((*Find(variables))->node, "");
  variables["DTENSOR_NODE"] = "rack 7";
  EXPECT_EQ((*Find(variables))->node, "rack 7");
  variables["DTENSOR_NODE"] = std::string(96, 'a');  // it would be taken for another as long
  EXPECT_EQ(Found(variables), "DTENSOR_NODE is a name of 96 characters: at most 95");
}

// srun says how many tasks each node has, as a list.
TEST(Launcher, SrunOnSeveralNodes) {
  const auto found = [](const char* nodes, const char* list, const char* node) {
    return Found({{"SLURM_PROCID", "3"},
                  {"SLURM_STEP_NUM_TASKS", "7"},
                  {"SLURM_LOCALID", "0"},
                  {"SLURM_STEP_NUM_NODES", nodes},
                  {"SLURM_STEP_TASKS_PER_NODE", list},
                  {"SLURM_NODEID", node}});
  };
  const std::string by = "by srun (SLURM_STEP_NUM_TASKS)";
  EXPECT_EQ(found("1", "7", "0"), "rank 3 of 7, 0 of 7 on this machine, " + by);
  EXPECT_EQ(found("4", "2(x3),1", "0"), "rank 3 of 7, 0 of 2 on this machine, " + by);
  EXPECT_EQ(found("4", "2(x3),1", "2"), "rank 3 of 7, 0 of 2 on this machine, " + by);
  EXPECT_EQ(found("4", "2(x3),1", "3"), "rank 3 of 7, 0 of 1 on this machine, " + by);
  for (const char* list : {"", "x", "2(x", "2(xx),1"}) {
    EXPECT_EQ(found("4", list, "3"), "rank 3 of 7, " + by) << list;
  }
  EXPECT_EQ(found("4", "2", "1"), "rank 3 of 7, " + by);
}

TEST(Launcher, ARankOnThisMachineIsOneOfThose) {
  EXPECT_THAT(
      Found({{"PMI_RANK", "0"},
             {"PMI_SIZE", "4"},
             {"MPI_LOCALRANKID", "2"},
             {"MPI_LOCALNRANKS", "2"}}),
      HasSubstr("MPI_LOCALRANKID is 2: of the processes on this machine there are 2, from 0"));
  EXPECT_THAT(Found({{"PMI_RANK", "0"},
                     {"PMI_SIZE", "4"},
                     {"MPI_LOCALRANKID", "0"},
                     {"MPI_LOCALNRANKS", "5"}}),
              HasSubstr("MPI_LOCALNRANKS is 5, more than PMI_SIZE, which is 4"));
}

TEST(Launcher, WhatOthersMeanByTheNameIsNone) {
  EXPECT_EQ(Found({{"WORLD_SIZE", "4"}}), "none");
  EXPECT_EQ(Found({{"SLURM_PROCID", "0"}}), "none");  // in the script of a batch job
}

// mpirun starts its helpers with srun, one on each machine; the processes see the variables of
// both.
TEST(Launcher, MpirunGoesBeforeSrun) {
  EXPECT_THAT(Found({{"OMPI_COMM_WORLD_RANK", "3"},
                     {"OMPI_COMM_WORLD_SIZE", "4"},
                     {"SLURM_PROCID", "0"},
                     {"SLURM_STEP_NUM_TASKS", "2"}}),
              HasSubstr("rank 3 of 4"));
  EXPECT_THAT(Found({{"OMPI_COMM_WORLD_RANK", "0"},
                     {"OMPI_COMM_WORLD_SIZE", "1"},
                     {"SLURM_PROCID", "1"},
                     {"SLURM_STEP_NUM_TASKS", "2"}}),
              HasSubstr("rank 0 of 1"));
}

TEST(Launcher, OneProcessOfOneLauncherAmongSeveralOfAnother) {
  EXPECT_THAT(Found({{"OMPI_COMM_WORLD_RANK", "0"},
                     {"OMPI_COMM_WORLD_SIZE", "1"},
                     {"RANK", "1"},
                     {"WORLD_SIZE", "2"}}),
              HasSubstr("rank 1 of 2"));
}

TEST(Launcher, ContradictionsNameBothVariables) {
  for (const char* rank : {"0", "1"}) {
    EXPECT_THAT(Found({{"OMPI_COMM_WORLD_RANK", "1"},
                       {"OMPI_COMM_WORLD_SIZE", "4"},
                       {"RANK", rank},
                       {"WORLD_SIZE", rank == std::string("0") ? "4" : "2"}}),
                AllOf(HasSubstr("contradict"), HasSubstr("OMPI_COMM_WORLD_SIZE"),
                      HasSubstr("unset OMPI_COMM_WORLD_SIZE or WORLD_SIZE")));
  }
  EXPECT_THAT(Found({{"OMPI_COMM_WORLD_RANK", "1"},
                     {"OMPI_COMM_WORLD_SIZE", "4"},
                     {"RANK", "1"},
                     {"WORLD_SIZE", "4"}}),
              HasSubstr("rank 1 of 4"));
  // Of one machine, too.
  for (const char* local : {"0", "1"}) {
    EXPECT_THAT(Found({{"DTENSOR_RANK", "1"},
                       {"DTENSOR_WORLD_SIZE", "4"},
                       {"DTENSOR_LOCAL_RANK", local},
                       {"DTENSOR_LOCAL_WORLD_SIZE", "2"},
                       {"RANK", "1"},
                       {"WORLD_SIZE", "4"},
                       {"LOCAL_RANK", "1"},
                       {"LOCAL_WORLD_SIZE", "2"}}),
                HasSubstr(local == std::string("1") ? "rank 1 of 4" : "contradict"));
  }
}

TEST(Launcher, ValuesThatMakeNoSense) {
  for (const char* bad : {"", "x", "0", "-1", "99999999999999999999"}) {
    EXPECT_THAT(Found({{"PMI_RANK", "0"}, {"PMI_SIZE", bad}}),
                HasSubstr("PMI_SIZE is \"" + std::string(bad) + "\": give a number of at least 1"));
  }
  EXPECT_THAT(Found({{"PMI_RANK", "-1"}, {"PMI_SIZE", "2"}}), HasSubstr("PMI_RANK is \"-1\""));
  EXPECT_THAT(Found({{"PMI_RANK", "2"}, {"PMI_SIZE", "2"}}),
              AllOf(HasSubstr("PMI_RANK is 2"), HasSubstr("from 0 to 1")));
  EXPECT_THAT(Found({{"OMPI_COMM_WORLD_SIZE", "2"}}), HasSubstr("OMPI_COMM_WORLD_RANK is not set"));
  EXPECT_THAT(Found({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "a"}}),
              HasSubstr("LOCAL_RANK is \"a\""));
  EXPECT_EQ(Found({{"DTENSOR_RANK", "1"}}),
            "DTENSOR_RANK is set and DTENSOR_WORLD_SIZE is not: give both, or none");
  EXPECT_EQ(Found({{"RANK", "1"}}), "RANK is set and WORLD_SIZE is not: give both, or none");
  EXPECT_THAT(Found({{"PMI_RANK", "1"}}), HasSubstr("PMI_SIZE is not"));
  EXPECT_THAT(Found({{"RANK", "1"}, {"PMI_RANK", "0"}, {"PMI_SIZE", "2"}}),
              HasSubstr("rank 0 of 2"));  // somebody's own variable
  EXPECT_THAT(Found({{"DTENSOR_RANK", "5"}, {"DTENSOR_WORLD_SIZE", "1"}}),
              AllOf(HasSubstr("DTENSOR_RANK is 5"), HasSubstr("from 0 to 0")));
}

// Where processes meet that do not find each other by themselves.
struct Met {
  absl::StatusOr<MeetingPlace> where;
  std::string text;  // where, or what is wrong
};
Met MeetBy(int64_t local_size, const Variables& variables) {
  ProcessPlace place{"torchrun", "WORLD_SIZE", 0, 4, 0, local_size};
  Met met{FindMeeting(place, Of(variables)), ""};
  if (!met.where.ok()) {
    met.text = std::string(met.where.status().message());
  } else {
    met.text = absl::StrCat(met.where->host, ":", met.where->ports.front(), "-",
                            met.where->ports.back(), met.where->served ? " served" : "");
  }
  return met;
}

TEST(Meeting, IsAfterTheLaunchersPortOrWhereItSays) {
  const Variables far = {{"MASTER_ADDR", "node1"}, {"MASTER_PORT", "29500"}};
  EXPECT_EQ(MeetBy(2, far).text, "node1:29501-29508");
  EXPECT_EQ(MeetBy(4, far).text, "127.0.0.1:29501-29508");  // all on one machine
  Variables named = far;
  named["DTENSOR_ADDRESS"] = "10.0.0.1";
  named["DTENSOR_PORT"] = "7000";
  EXPECT_EQ(MeetBy(2, named).text, "10.0.0.1:7000-7000");
  named["DTENSOR_STORE"] = "10.0.0.2:4711";
  EXPECT_EQ(MeetBy(2, named).text, "10.0.0.2:4711-4711 served");
}

// A file of the launch and the attempt; the token is rank 0's.
TEST(Meeting, MayBeInAFolder) {
  std::set<std::string> files;
  const auto add = [&](Variables more, const std::string& host) {
    more.try_emplace("DTENSOR_STORE", "/shared/job");
    const MeetingPlace where = MeetBy(2, more).where.value();
    EXPECT_THAT(where.file, ::testing::StartsWith("/shared/job/dtensor-"));
    EXPECT_TRUE(files.insert(where.file).second) << where.file;
    EXPECT_EQ(where.host, host);
    EXPECT_EQ(where.token, "");
    EXPECT_FALSE(where.served);
  };
  add({}, "");
  add({{"DTENSOR_STORE", "file:///shared/job"}, {"MASTER_PORT", "1"}}, "");
  add({{"MASTER_PORT", "2"}, {"DTENSOR_ADDRESS", "10.0.0.1"}}, "10.0.0.1");
  add({{"TORCHELASTIC_RUN_ID", "job"}}, "");
  add({{"TORCHELASTIC_RUN_ID", "job"}, {"TORCHELASTIC_RESTART_COUNT", "1"}}, "");
  EXPECT_EQ(MeetBy(4, {{"DTENSOR_STORE", "/shared/job"}}).where->host, "127.0.0.1");
}

TEST(Meeting, WhatIsMissingOrMakesNoSenseIsNamed) {
  EXPECT_THAT(MeetBy(2, {{"MASTER_PORT", "1"}}).text, HasSubstr("MASTER_ADDR is not set"));
  EXPECT_THAT(MeetBy(2, {{"MASTER_ADDR", "a"}}).text, HasSubstr("MASTER_PORT is not set"));
  for (const char* port : {"x", "0", "65530", "-3"}) {
    EXPECT_THAT(MeetBy(2, {{"MASTER_ADDR", "a"}, {"MASTER_PORT", port}}).text,
                HasSubstr(absl::StrCat("MASTER_PORT is \"", port, "\": give a port from 1")));
  }
  EXPECT_THAT(MeetBy(2, {{"DTENSOR_STORE", "host"}}).text, HasSubstr("DTENSOR_STORE"));
  for (const char* limit : {"soon", "0", "-1", "nan"}) {
    EXPECT_THAT(MeetBy(2, {{"DTENSOR_STORE", "a:1"}, {"DTENSOR_TIMEOUT_S", limit}}).text,
                HasSubstr(absl::StrCat("DTENSOR_TIMEOUT_S is \"", limit, "\": give a number")));
  }
}

TEST(Meeting, EachLaunchAndAttemptHasATokenOfItsOwn) {
  std::set<std::string> tokens;
  const auto add = [&](Variables more) {
    more["MASTER_ADDR"] = "a";
    more.try_emplace("MASTER_PORT", "1");
    const std::string token = MeetBy(2, more).where.value().token;
    EXPECT_EQ(token.size(), 32u);
    EXPECT_TRUE(tokens.insert(token).second) << token;
  };
  add({});
  add({{"MASTER_PORT", "2"}});
  add({{"TORCHELASTIC_RUN_ID", "job"}});
  add({{"TORCHELASTIC_RUN_ID", "job"}, {"TORCHELASTIC_RESTART_COUNT", "1"}});
  add({{"TORCHELASTIC_RUN_ID", "other"}});
  add({{"TORCHELASTIC_RUN_ID", "other"}, {"MASTER_PORT", "2"}});
  add({{"TORCHELASTIC_RUN_ID", "job"}, {"DTENSOR_TOKEN", "secret"}});
  add({{"TORCHELASTIC_RUN_ID", "job"}, {"DTENSOR_TOKEN", "secret"}, {"MASTER_PORT", "2"}});
}

// A launcher of ours knows nothing of MASTER_PORT.
TEST(Meeting, ThePortIsNoPartOfTheTokenWhereALauncherServes) {
  const auto token = [](const char* port) {
    return MeetBy(2, {{"DTENSOR_STORE", "a:1"}, {"DTENSOR_TOKEN", "secret"}, {"MASTER_PORT", port}})
        .where.value()
        .token;
  };
  EXPECT_EQ(token("1"), token("2"));
  EXPECT_EQ(token("1"), LaunchToken("secret", ""));
}

}  // namespace
}  // namespace dtensor::launcher_test
