// Test support: the known answers of tests/data/hf, and models from there on meshes dp x tp.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "dtensor/ops/ops.h"
#include "dtensor/parallel/models/pretrained.h"
#include "dtensor/tensor/file.h"
#include "tests/common/temp_folder.h"
#include "tests/parallel/support.h"

namespace dtensor::testing {

inline std::string HfFolder(const std::string& model) {
  return absl::StrCat(DT_TEST_DATA, "/hf/", model);
}

inline std::string TextOf(const std::filesystem::path& path) {
  return ValueOrThrow(ReadFile(path.string()));
}

// golden.safetensors and golden.json of one model, as plain numbers.
struct Golden {
  explicit Golden(const std::string& model) {
    const std::string folder = HfFolder(model);
    auto file = TensorFolder::Open(folder + "/golden.safetensors");
    ThrowIfError(file.status());
    tensors = ValueOrThrow(ReadTensors(*file));
    json = nlohmann::json::parse(std::ifstream(folder + "/golden.json"));
  }
  std::vector<double> operator[](const std::string& name) const {
    return tensors.at(name).ToVector<double>();
  }
  std::map<std::string, Tensor> tensors;
  nlohmann::json json;
};

// max|x - golden| / max|golden|
inline double Off(const std::vector<double>& x, const std::vector<double>& golden) {
  if (x.size() != golden.size()) return INFINITY;
  double worst = 0, most = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    if (!std::isfinite(x[i])) return INFINITY;
    worst = std::max(worst, std::abs(x[i] - golden[i]));
    most = std::max(most, std::abs(golden[i]));
  }
  return most == 0 ? worst : worst / most;
}

// A model of tests/data/hf on a mesh, loaded under its plan.
inline absl::StatusOr<std::unique_ptr<CausalLM>> LoadOn(const DeviceMesh& mesh,
                                                        const std::string& folder, DType dtype,
                                                        const ModelPlanOptions& plan = {}) {
  DT_ASSIGN_OR_RETURN(const ModelConfig config, ReadModelConfig(folder));
  std::unique_ptr<CausalLM> model = MakeModel(config);
  SetDType(*model, dtype);
  DT_RETURN_IF_ERROR(ParallelizeModule(*model, mesh, PlanFor(config, plan), {.warn = false}));
  DT_RETURN_IF_ERROR(LoadPretrained(*model, folder));
  return model;
}

// int64 values on dp x tp, rows over dp.
inline DTensor Rows(const std::vector<int64_t>& values, IntSpan shape, const DeviceMesh& mesh) {
  return FromVector(values, shape, {.mesh = mesh, .placements = {Shard(0), Replicate()}});
}

// Labels moved by one, so that they stand where the logits are that they are for.
inline std::vector<int64_t> Targets(const std::vector<int64_t>& labels, int64_t seq) {
  std::vector<int64_t> out(labels.size(), -100);
  for (size_t i = 0; i + 1 < labels.size(); ++i) {
    if ((static_cast<int64_t>(i) + 1) % seq != 0) out[i] = labels[i + 1];
  }
  return out;
}

}  // namespace dtensor::testing
