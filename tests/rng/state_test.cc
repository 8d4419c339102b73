// Profiles and generators.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "dtensor/mesh/launch.h"
#include "dtensor/rng/generator.h"
#include "dtensor/rng/profile.h"
#include "dtensor/tensor/status.h"

namespace dtensor::state_test {
namespace {

using ::testing::HasSubstr;

TEST(ProfileTest, KnownDevices) {
  std::ifstream in(DT_TEST_DATA "/rng-vectors.json");
  const auto vectors = nlohmann::json::parse(in);
  for (const auto& [name, p] : vectors["profiles"].items()) {
    const auto profile = FindProfile(name);
    ASSERT_TRUE(profile.ok()) << profile.status();
    EXPECT_EQ(profile->block_cap(), p["grid_cap"].get<int64_t>()) << name;
    EXPECT_EQ(profile->thread_cap(), p["threads_cap"].get<int64_t>()) << name;
  }
  for (const char* name : {"h200", "l4", "rtx4090", "a10g", "l40s", "v100", "h20", "h100-pcie"}) {
    EXPECT_TRUE(FindProfile(name).ok()) << name;
  }
  EXPECT_EQ(*FindProfile("H100"), Profile());
}

TEST(ProfileTest, CustomAndErrors) {
  const auto custom = FindProfile("custom:2x512");
  ASSERT_TRUE(custom.ok());
  EXPECT_EQ(custom->thread_cap(), 1024);
  EXPECT_EQ(custom->name, "custom:2x512");
  EXPECT_EQ(FindProfile("custom:2x1275")->thread_cap(), 2048);  // four blocks of 256, and no fifth
  const auto unknown = FindProfile("h1000");
  EXPECT_EQ(unknown.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(unknown.status().message(), HasSubstr("no random profile \"h1000\"; there are h100"));
  EXPECT_THAT(FindProfile("custom:2").status().message(), HasSubstr("SMSxTHREADS_PER_SM"));
  EXPECT_THAT(FindProfile("custom:0x512").status().message(), HasSubstr("[1, 32768]"));
  EXPECT_FALSE(CustomProfile(1, 255).ok());
}

TEST(GeneratorTest, SeedOffsetReserve) {
  Generator g;
  EXPECT_EQ(g.seed(), 67280421310721u);
  EXPECT_EQ(g.profile().name, "h100");
  EXPECT_EQ(g.Reserve(5).offset, 0u);
  const Generator::Reservation r = g.Reserve(4);
  EXPECT_EQ(r.seed, kDefaultSeed);
  EXPECT_EQ(r.offset, 8u);
  EXPECT_EQ(g.offset(), 12u);
  g.ManualSeed(3);
  EXPECT_EQ(g.seed(), 3u);
  EXPECT_EQ(g.offset(), 0u);
  EXPECT_TRUE(g.SetOffset(400).ok());
  const absl::Status refused = g.SetOffset(402);
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(refused.message(), HasSubstr("402: must be a multiple of 4"));
  EXPECT_EQ(g.offset(), 400u);
}

TEST(GeneratorTest, State) {
  Generator g(0x0102030405060708u);
  ASSERT_TRUE(g.SetOffset(0x1004).ok());
  const auto state = g.State();
  EXPECT_THAT(state, ::testing::ElementsAre(8, 7, 6, 5, 4, 3, 2, 1, 4, 16, 0, 0, 0, 0, 0, 0));
  Generator other;
  ASSERT_TRUE(other.SetState(state).ok());
  EXPECT_EQ(other.seed(), g.seed());
  EXPECT_EQ(other.offset(), g.offset());
  ASSERT_TRUE(other.SetState(absl::MakeConstSpan(state.data(), 8)).ok());
  EXPECT_EQ(other.offset(), 0u);
  EXPECT_THAT(other.SetState(absl::MakeConstSpan(state.data(), 7)).message(), HasSubstr("7 bytes"));
  auto odd = state;
  odd[8] = 5;
  odd[0] = 99;
  EXPECT_FALSE(other.SetState(odd).ok());
  EXPECT_EQ(other.seed(), g.seed());
}

TEST(GeneratorTest, OnePerRank) {
  const absl::Status status = RunSpmd(3, [](RankContext& context) -> absl::Status {
    if (DefaultGenerator().seed() != kDefaultSeed) return absl::InternalError("seed");
    ManualSeed(100 + context.rank());
    DefaultGenerator().Reserve(4 * context.rank());
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(DefaultGenerator().seed(), kDefaultSeed);
}

}  // namespace
}  // namespace dtensor::state_test
