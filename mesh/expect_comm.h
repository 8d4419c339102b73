// EXPECT_COMM: a test's budget of communication.
//
//   CommTrace trace;
//   Step(model);
//   EXPECT_COMM(trace, {.kind = CollectiveKind::kAllReduce, .mesh_dims = "tp", .count = 4},
//               {.phase = CommPhase::kBackward, .mesh_dims = "dp", .max_bytes = 1 << 20});
//   EXPECT_COMM(other);  // nothing at all
//
// The macro needs GoogleTest where it is used; the rest of this header does not.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "dtensor/mesh/comm_trace.h"

namespace dtensor {

struct CommExpectation {
  // Which events: those that agree with everything that is given.
  std::optional<CollectiveKind> kind = {};
  std::optional<std::string> mesh_dims = {};  // "tp", "dp,tp"
  std::optional<CommPhase> phase = {};
  // Shell wildcards, dot by dot; what lies below is included: "blocks.*.mlp" takes
  // "blocks.0.mlp.up".
  std::optional<std::string> module = {};
  std::optional<std::string> op = {};
  std::optional<bool> implicit = {};
  // What they come to. None of the three: any number of them is allowed.
  std::optional<int64_t> count = {}, bytes = {}, max_bytes = {};
};

// What is wrong, with the table of the trace; "" if nothing is. Every event counts for the first
// expectation that it agrees with, and there must be one.
std::string CommMismatch(const CommTrace& trace, const std::vector<CommExpectation>& expected);

}  // namespace dtensor

#define EXPECT_COMM(trace, ...)                                                                   \
  switch (0)                                                                                      \
  case 0:                                                                                         \
  default:                                                                                        \
    if (const std::string dt_why = ::dtensor::CommMismatch(trace, {__VA_ARGS__}); dt_why.empty()) \
      ;                                                                                           \
    else                                                                                          \
      ADD_FAILURE() << dt_why
