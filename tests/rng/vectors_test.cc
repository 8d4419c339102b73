// Known answers of data/rng-vectors.json for uniform_ and normal_.
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "tests/rng/rng_test_util.h"

namespace dtensor::vectors_test {
namespace {

using nlohmann::json;

json Vectors() {
  std::ifstream in(DT_TEST_DATA "/rng-vectors.json");
  return json::parse(in);
}

DType DTypeOf(const json& v) {
  DType dtype;
  EXPECT_TRUE(ParseDType(v["dtype"].get<std::string>(), &dtype)) << v["dtype"];
  return dtype;
}

RandomOp OpOf(const json& v) {
  const json& p = v["params"];
  return v["op"] == "uniform_" ? UniformOp(p["from"], p["to"]) : NormalOp(p["mean"], p["std"]);
}

Generator GeneratorOf(const json& v) {
  Generator g(v["seed"].get<uint64_t>(), OrDie(FindProfile(v["profile"].get<std::string>())));
  EXPECT_TRUE(g.SetOffset(v["offset"].get<uint64_t>()).ok());
  return g;
}

void ExpectElement(const json& v, size_t i, uint64_t bits) {
  const DType dtype = DTypeOf(v);
  if (v["exact"].get<bool>()) {
    EXPECT_EQ(bits, std::stoull(v["bits"][i].get<std::string>(), nullptr, 16))
        << v["id"] << " element " << v["indices"][i];
  } else {
    EXPECT_NEAR(ValueOfBits(bits, dtype), v["values"][i].get<double>(), v["abs_tol"].get<double>())
        << v["id"] << " element " << v["indices"][i];
  }
}

int CheckVector(const json& v) {
  const int64_t numel = v["numel"].get<int64_t>();
  const uint64_t offset_after = v["offset_after"].get<uint64_t>();
  const DType dtype = DTypeOf(v);
  const auto& indices = v["indices"];
  for (size_t i = 0; i < indices.size(); ++i) {
    uint64_t after = 0;
    ExpectElement(v, i,
                  BitsAt(OpOf(v), numel, dtype, indices[i].get<int64_t>(), GeneratorOf(v), &after));
    EXPECT_EQ(after, offset_after) << v["id"];
  }
  if (numel <= 10000000) {  // small enough to make whole
    Generator g = GeneratorOf(v);
    const std::vector<uint64_t> whole =
        WholeBits(OpOf(v), v["shape"].get<std::vector<int64_t>>(), dtype, &g);
    for (size_t i = 0; i < indices.size(); ++i) ExpectElement(v, i, whole[indices[i]]);
    EXPECT_EQ(g.offset(), offset_after) << v["id"];
  }
  return static_cast<int>(indices.size());
}

TEST(VectorsTest, UniformAndNormal) {
  std::map<std::string, int> passed, left_out;
  int exact_values = 0, close_values = 0;
  const json vectors = Vectors();
  for (const json& v : vectors["vectors"]) {
    const std::string op = v["op"];
    if (op != "uniform_" && op != "normal_") {
      ++left_out[op];
      continue;
    }
    const int values = CheckVector(v);
    (v["exact"].get<bool>() ? exact_values : close_values) += values;
    ++passed[op];
  }
  EXPECT_EQ(passed["uniform_"], 13);
  EXPECT_EQ(passed["normal_"], 11);
  for (const auto& [op, n] : passed) std::printf("checked %d vectors of %s\n", n, op.c_str());
  std::printf("%d values bit for bit, %d within abs_tol\n", exact_values, close_values);
  for (const auto& [op, n] : left_out) {
    std::printf("left out %d vectors of %s: no kernel for this op here\n", n, op.c_str());
  }
}

TEST(VectorsTest, RandOfEightWithSeedZero) {
  Generator g(0);
  const std::vector<uint64_t> bits = WholeBits(UniformOp(), {8}, DType::kF32, &g);
  const double expected[] = {0.3990, 0.5167, 0.0249, 0.9401, 0.9459, 0.7967, 0.4150, 0.8203};
  for (int i = 0; i < 8; ++i) EXPECT_NEAR(ValueOfBits(bits[i], DType::kF32), expected[i], 5e-5);
}

TEST(VectorsTest, ShardedExample) {
  const json example = Vectors()["sharded"][0];
  for (const json& r : example["ranks"]) {
    FakeRank rank(r["rank"].get<int64_t>(), Generator(example["seed"].get<uint64_t>()));
    const SpecRef spec = rank.Intern(DeviceMesh({2, 2}), {Shard(0), Shard(1)},
                                     example["global_shape"].get<std::vector<int64_t>>());
    const Tensor t = OrDie(Tensor::Empty(spec->local_shape(), DType::kF32));
    ASSERT_TRUE(FillRandom(t, *spec, UniformOp(), &rank.generator).ok());
    EXPECT_EQ(rank.generator.offset(), example["offset_after"].get<uint64_t>());
    const std::vector<uint64_t> bits = BitsOfTensor(t);
    size_t i = 0;
    for (const json& row : r["values"]) {
      for (const json& value : row) {
        ASSERT_LT(i, bits.size());
        EXPECT_NEAR(ValueOfBits(bits[i++], DType::kF32), value.get<double>(), 1e-6);
      }
    }
    EXPECT_EQ(i, bits.size());
  }
}

}  // namespace
}  // namespace dtensor::vectors_test
