// The fuzzer without libFuzzer: calls drawn from a seed. DT_FUZZ_SEED repeats a run, DT_FUZZ_CALLS
// makes it longer, DT_FUZZ_TRACE names each call before it runs.
#include "tests/fuzz/ops_fuzz.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "tests/fuzz/fuzz_calls.h"

namespace dtensor::testing {
namespace {

uint64_t FromEnvironment(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

std::vector<uint8_t> DrawnBytes(uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<uint8_t> bytes(96);
  for (uint8_t& b : bytes) b = static_cast<uint8_t>(random());
  return bytes;
}

TEST(OpsFuzz, AnErrorOrTheAnswerOfOneRank) {
  const uint64_t seed = FromEnvironment("DT_FUZZ_SEED", 1);
  const uint64_t calls = FromEnvironment("DT_FUZZ_CALLS", 4000);
  const bool trace = std::getenv("DT_FUZZ_TRACE") != nullptr;
  std::printf("DT_FUZZ_SEED=%llu DT_FUZZ_CALLS=%llu, %zu functions\n",
              static_cast<unsigned long long>(seed), static_cast<unsigned long long>(calls),
              FuzzCalls().size());
  uint64_t answers = 0;
  for (uint64_t i = 0; i < calls; ++i) {
    const std::vector<uint8_t> bytes = DrawnBytes(seed * 1000003 + i);
    if (trace) {
      std::printf("call %llu: %s\n", static_cast<unsigned long long>(i),
                  DescribeFuzzCall(bytes.data(), bytes.size()).c_str());
      std::fflush(stdout);
    }
    const FuzzOutcome outcome = FuzzOneCall(bytes.data(), bytes.size());
    EXPECT_EQ(outcome.wrong, "") << "call " << i << " of seed " << seed << ": "
                                 << DescribeFuzzCall(bytes.data(), bytes.size());
    answers += outcome.error ? 0 : 1;
  }
  std::printf("%llu of %llu calls gave an answer\n", static_cast<unsigned long long>(answers),
              static_cast<unsigned long long>(calls));
  EXPECT_GT(answers * 4, calls) << "most calls are refused: the fuzzer tests error paths only";
}

TEST(OpsFuzz, NoBytesAreACallToo) { EXPECT_EQ(FuzzOneCall(nullptr, 0).wrong, ""); }

}  // namespace
}  // namespace dtensor::testing
