// The words, their conversions and the portable functions.
#include "dtensor/rng/philox.h"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <vector>

#include "dtensor/rng/draw.h"

namespace dtensor::philox_test {
namespace {

nlohmann::json Vectors() {
  std::ifstream in(DT_TEST_DATA "/rng-vectors.json");
  return nlohmann::json::parse(in);
}
uint32_t Hex(const nlohmann::json& j) {
  return static_cast<uint32_t>(std::stoul(j.get<std::string>(), nullptr, 16));
}

TEST(PhiloxTest, KnownAnswers) {
  int count = 0;
  const nlohmann::json vectors = Vectors();
  for (const auto& v : vectors["philox_kat"]) {
    const uint64_t seed = Hex(v["key"][0]) | static_cast<uint64_t>(Hex(v["key"][1])) << 32;
    const auto& c = v["counter"];
    const PhiloxWords w =
        Philox4x32(MakePhiloxKeys(seed), {Hex(c[0]), Hex(c[1]), Hex(c[2]), Hex(c[3])});
    EXPECT_EQ(w.x, Hex(v["out"][0]));
    EXPECT_EQ(w.y, Hex(v["out"][1]));
    EXPECT_EQ(w.z, Hex(v["out"][2]));
    EXPECT_EQ(w.w, Hex(v["out"][3]));
    ++count;
  }
  EXPECT_EQ(count, 3);
}

TEST(PhiloxTest, CurandInitWords) {
  int count = 0;
  const nlohmann::json vectors = Vectors();
  for (const auto& v : vectors["curand_init_words"]) {
    const PhiloxKeys keys = MakePhiloxKeys(v["seed"].get<uint64_t>());
    const uint64_t offset = v["offset"].get<uint64_t>();
    const auto& words = v["words"];
    for (size_t i = 0; i < words.size(); ++i) {
      const uint64_t position = offset % 4 + i;  // from the first block on
      const PhiloxWords w =
          CurandBlock(keys, offset / 4 + position / 4, v["subsequence"].get<uint64_t>());
      const uint32_t all[4] = {w.x, w.y, w.z, w.w};
      EXPECT_EQ(all[position % 4], Hex(words[i])) << v;
    }
    ++count;
  }
  EXPECT_EQ(count, 10);
}

TEST(PhiloxTest, UniformEdges) {
  EXPECT_EQ(UniformFloat(0), 0x1p-33f);
  EXPECT_LT(UniformFloat(0xFFFFFF7Fu), 1.0f);
  EXPECT_EQ(UniformFloat(0xFFFFFF80u), 1.0f);
  EXPECT_EQ(UniformFloat(0xFFFFFFFFu), 1.0f);
  EXPECT_EQ(UniformDouble(0, 0), 0x1p-54);
  EXPECT_EQ(UniformDouble(0, 0xFFFFFFFFu), 1.0 - 0x1p-32 + 0x1p-54);
  EXPECT_EQ(UniformDouble(0x001FFFFFu, 0xFFFFFFFFu), 1.0);
}

TEST(PhiloxTest, WordConversionsRoundOnce) {
  std::mt19937 random(1);
  for (int i = 0; i < 200000; ++i) {
    const uint32_t x = random() >> (i % 32), y = random();
    EXPECT_EQ(FloatOfWord(x), static_cast<float>(x));
    EXPECT_EQ(DoubleOfWord53(Word53(x, y)), static_cast<double>(Word53(x, y)));
  }
}

// 0.864 ulp over all inputs; here a sample against the double logarithm.
TEST(PortableMathTest, LogF) {
  std::mt19937 random(2);
  double worst = 0;
  for (int i = 0; i < 300000; ++i) {
    const float u = UniformFloat(random() >> (i % 32));
    const double exact = std::log(static_cast<double>(u));
    const float ours = LogF(u);
    if (exact == 0) {
      EXPECT_EQ(ours, 0.0f);
      continue;
    }
    const double ulp = std::ldexp(1.0, std::ilogb(exact) - 23);
    worst = std::max(worst, std::abs(ours - exact) / ulp);
  }
  EXPECT_LT(worst, 0.9);
}

// The sum of both stays below the tolerance of the vectors for a CPU: s * (error + 2^-20.5) < 6e-6.
TEST(PortableMathTest, NormalPairFIsBoxMullerOfTheRoundedAngle) {
  std::mt19937 random(3);
  double worst = 0;
  for (int i = 0; i < 300000; ++i) {
    const uint32_t a = random();
    const uint32_t near_octant = 0x20000000u * (random() % 8) + random() % 4096 - 2048;
    const uint32_t b = i % 4 ? random() : near_octant;
    float first, second;
    NormalPairF(a, b, &first, &second);
    const double v = std::fma(static_cast<float>(b), FloatOf(0x30C90FDBu), FloatOf(0x30490FDBu));
    const double s = std::sqrt(-2 * std::log(static_cast<double>(UniformFloat(a))));
    if (s == 0) continue;
    worst = std::max(worst, std::abs(first - s * std::sin(v)) / s);
    worst = std::max(worst, std::abs(second - s * std::cos(v)) / s);
  }
  EXPECT_LT(worst, 2e-7);
  EXPECT_LT(6.77 * (worst + std::exp2(-20.5)), 6e-6);
}

TEST(PortableMathTest, DoubleFunctions) {
  std::mt19937_64 random(4);
  long double worst_log = 0, worst_angle = 0;
  const long double pi = 3.14159265358979323846264338327950288L;
  for (int i = 0; i < 300000; ++i) {
    const uint64_t z = random() >> (11 + i % 53);
    const double u = (i % 3 ? z : (uint64_t{1} << 53) - 1 - z) * 0x1p-53 + 0x1p-54;
    const long double exact = logl(u);
    if (exact != 0) worst_log = std::max(worst_log, std::abs((LogD(u) - exact) / exact));
    const double v = (random() >> 11) * 0x1p-52 + 0x1p-53;
    double sine, cosine;
    SinCosPiD(v, &sine, &cosine);
    worst_angle = std::max(worst_angle, std::abs(sine - sinl(pi * v)));
    worst_angle = std::max(worst_angle, std::abs(cosine - cosl(pi * v)));
  }
  EXPECT_EQ(LogD(1.0), 0.0);
  EXPECT_LT(worst_log, 5e-16L);
  EXPECT_LT(worst_angle, 3e-16L);
}

// --- every CPU level gives the bits of the scalar functions' own level ---

std::vector<char> DrawAll(CpuLevel level, RandomKind kind, DType dtype, double a, double b,
                          const std::vector<uint32_t>* threads) {
  const int64_t n = threads ? threads->size() : 4001;
  std::vector<char> out(4 * n * SizeOf(dtype));
  DrawCall call;
  call.keys = MakePhiloxKeys(0x123456789ABCDEFull);
  call.block = 0x1FFFFFFFFull;
  call.first_thread = 0xFFFFF800u;  // wraps: threads are counted in 32 bits
  call.threads = threads ? threads->data() : nullptr;
  call.n = n;
  call.a = a;
  call.b = b;
  for (int c = 0; c < 4; ++c) call.out[c] = out.data() + c * n * SizeOf(dtype);
  FindDraw(kind, dtype, level)(call);
  return out;
}

TEST(LevelTest, SameBitsAtEveryLevel) {
  std::vector<uint32_t> threads(777);
  for (size_t i = 0; i < threads.size(); ++i) threads[i] = static_cast<uint32_t>(i * i * 977);
  int compared = 0;
  for (RandomKind kind : {RandomKind::kUniform, RandomKind::kNormal}) {
    for (DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16}) {
      for (const auto& [a, b] : {std::pair(0.0, 1.0), {-0.3, 0.7}, {-1.0, 0.0}, {5.0, 5.0}}) {
        for (const std::vector<uint32_t>* list :
             {(const std::vector<uint32_t>*)nullptr, (const std::vector<uint32_t>*)&threads}) {
          const auto base = DrawAll(CpuLevel::kBaseline, kind, dtype, a, b, list);
          for (CpuLevel level : {CpuLevel::kV3, CpuLevel::kV4}) {
            if (level > ActiveCpuLevel()) continue;
            EXPECT_EQ(DrawAll(level, kind, dtype, a, b, list), base)
                << Name(level) << " " << Name(dtype) << " kind " << static_cast<int>(kind);
            ++compared;
          }
        }
      }
    }
  }
  std::printf("%d comparisons up to level %s\n", compared, Name(ActiveCpuLevel()));
}

TEST(LevelTest, IntegerDTypesHaveNoKernel) {
  EXPECT_EQ(FindDraw(RandomKind::kUniform, DType::kI64, CpuLevel::kBaseline), nullptr);
}

// What the benchmarks compare draws with does the rounds of that many different blocks.
TEST(PhiloxTest, BareRoundsAreThoseOfTheBlocks) {
  const PhiloxKeys keys = MakePhiloxKeys(7);
  constexpr int64_t kBlocks = 96;  // of every level's vectors
  uint64_t want = 0;
  for (uint32_t i = 0; i < kBlocks; ++i) {
    const PhiloxWords w = Philox4x32(keys, {0, 0, i, 0});
    want ^= w.x ^ w.y ^ w.z ^ w.w;
  }
  for (int level = 0; level <= static_cast<int>(ActiveCpuLevel()); ++level) {
    const uint64_t got = BarePhilox(keys, kBlocks, static_cast<CpuLevel>(level));
    EXPECT_EQ(static_cast<uint32_t>(got), want) << level;  // the upper halves hold carries
  }
}

}  // namespace
}  // namespace dtensor::philox_test
