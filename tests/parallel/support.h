// Test support: meshes dp x tp, whole values, messages of exceptions.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "dtensor/mesh/launch.h"
#include "dtensor/parallel/module/module.h"
#include "tests/common/message.h"

namespace dtensor::testing {

// The meshes that training is tried on: even, and with three ranks uneven.
inline std::vector<std::pair<int64_t, int64_t>> DpTpMeshes() {
  return {{1, 1}, {2, 1}, {1, 2}, {2, 2}, {4, 2}, {2, 4}, {3, 1}, {1, 3}};
}
inline DeviceMesh DpTp(int64_t dp, int64_t tp) { return DeviceMesh({dp, tp}, {"dp", "tp"}); }

// Small whole numbers, different everywhere: sums of products of them are exact in float32.
inline std::vector<double> Integers(int64_t n, int64_t seed) {
  std::vector<double> v;
  for (int64_t i = 0; i < n; ++i)
    v.push_back(static_cast<double>((i * i * 3 + i * 5 + seed) % 7 - 3));
  return v;
}

using NamedValues = std::vector<std::pair<std::string, std::vector<double>>>;

// All parameters (or their gradients), gathered. All ranks must call it.
inline NamedValues Gather(const Module& module, bool gradients = false) {
  NamedValues all;
  for (const NamedParameter& p : module.NamedParameters()) {
    const DTensor t = gradients ? p.parameter->tensor().grad() : p.parameter->tensor().Detach();
    all.emplace_back(p.fqn, t.defined() ? t.ToVector<double>() : std::vector<double>());
  }
  return all;
}

}  // namespace dtensor::testing
