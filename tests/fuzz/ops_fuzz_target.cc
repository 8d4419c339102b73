// libFuzzer's entry: any bytes are a call of an op; a wrong answer stops it as a crash does.
#include <cstdio>
#include <cstdlib>

#include "tests/fuzz/ops_fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const dtensor::testing::FuzzOutcome outcome = dtensor::testing::FuzzOneCall(data, size);
  if (outcome.wrong.empty()) return 0;
  std::fprintf(stderr, "%s: %s\n", dtensor::testing::DescribeFuzzCall(data, size).c_str(),
               outcome.wrong.c_str());
  std::abort();
}
