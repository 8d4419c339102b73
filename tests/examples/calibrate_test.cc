// The program calibrate: what it writes is a cost model, and its table is the one of that model.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "dtensor/mesh/cost.h"
#include "dtensor/tensor/status.h"
#include "tests/common/run_program.h"

namespace dtensor::calibrate_test {
namespace {

using ::testing::HasSubstr;
using testing::Outcome;

Outcome Calibrate(const std::string& args) { return testing::RunProgram(DT_CALIBRATE, args); }

std::string Path(const std::string& name) {
  return (std::filesystem::temp_directory_path() /
          ("dtensor_calibrate_" + std::to_string(getpid()) + "_" + name))
      .string();
}

TEST(Calibrate, WritesTheModelOfItsTable) {
  const std::string base = Path("base.json"), out = Path("out.json");
  CostModel between;
  between.inter_node = {{17, 1234}};
  std::ofstream(base) << between.ToJson();
  const Outcome o =
      Calibrate("--ranks 3 --most_bytes 32768 --repeats 3 --base " + base + " --out " + out);
  ASSERT_EQ(o.code, 0) << o.text;
  const CostModel model = ValueOrThrow(CostModel::FromFile(out));
  EXPECT_EQ(model.ToJson(), ValueOrThrow(CostModel::FromJson(model.ToJson())).ToJson());
  EXPECT_EQ(model.ranks_per_node, 3);
  EXPECT_EQ(model.inter_node.latency_us, 17);
  EXPECT_EQ(model.inter_node.bytes_per_us, 1234);
  EXPECT_EQ(model.intra_node.measured.size(), 8u);  // every kind
  EXPECT_GT(model.intra_node.reduce_bytes_per_us, 0);
  // Each row: kind, bytes, measured, modelled, ratio; the model's column is the file's.
  int rows = 0;
  std::istringstream lines(o.text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream row(line);
    std::string name;
    double bytes, measured, modelled, ratio;
    if (!(row >> name >> bytes >> measured >> modelled >> ratio)) continue;
    ++rows;
    for (const auto& [kind, cost] : model.intra_node.measured) {
      if (name != std::string(Name(kind))) continue;
      EXPECT_NEAR(modelled, model.CollectiveUs(kind, static_cast<int64_t>(bytes), {0, 1, 2}), 0.006)
          << line;
    }
    EXPECT_GT(measured, 0) << line;
  }
  EXPECT_EQ(rows, 6 * 4 + 1);  // 64 bytes to 32 KiB; a barrier has no size
  std::filesystem::remove(base);
  std::filesystem::remove(out);
}

TEST(Calibrate, Errors) {
  EXPECT_THAT(Calibrate("--most-bytes 1 --out x").text, HasSubstr("--most_bytes must be from 64"));
  EXPECT_THAT(Calibrate("--repeat 1 --out x").text, HasSubstr("nearest: --repeats"));
  EXPECT_THAT(Calibrate("").text, HasSubstr("--out FILE.json is missing"));
  EXPECT_THAT(Calibrate("--ranks 1 --out x").text, HasSubstr("from 2 to 256, got 1"));
  EXPECT_THAT(Calibrate("--out /nowhere/at/all").text, HasSubstr("/nowhere/at/all"));
  EXPECT_THAT(Calibrate("--base /nowhere --out x").text, HasSubstr("/nowhere cannot be read"));
  EXPECT_EQ(Calibrate("extra --out x").code, 1);
}

}  // namespace
}  // namespace dtensor::calibrate_test
