// One fuzzed call: bytes decoded into an op, shapes, dtypes, placements, attributes and a mesh, run
// on one rank and on several.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace dtensor::testing {

struct FuzzOutcome {
  std::string call;    // "matmul(float64 [4, 6] [S(1)], ...) on 2"
  bool error = false;  // refused, with an error that says so
  std::string
      wrong;  // what must not happen: another answer than one rank's, a hang, an Internal error
};
// "matmul(float64 [4, 6] [S(1)], ...) on 2"
std::string DescribeFuzzCall(const uint8_t* data, size_t size);
// Any bytes are a call. Does not crash: that is the claim under test.
FuzzOutcome FuzzOneCall(const uint8_t* data, size_t size);

}  // namespace dtensor::testing
