// Test support: PyTorch's known answers in tests/data/ops, or in the folder of the same format that
// DTENSOR_TORCH_SAMPLES names (its README.md describes it), and the rules by which an answer of
// ours is compared with them.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "dtensor/tensor/status.h"
#include "dtensor/tensor/tensor.h"
#include "nlohmann/json.hpp"

namespace dtensor::testing {

using Json = nlohmann::json;

inline std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream content;
  content << file.rdbuf();
  if (!file) ThrowIfError(absl::NotFoundError(absl::StrCat(path, " cannot be read")));
  return content.str();
}

inline DType DTypeOf(const std::string& name) {
  static const std::map<std::string, DType> kTypes = {
      {"F64", DType::kF64},     {"F32", DType::kF32},       {"BF16", DType::kBF16},
      {"F16", DType::kF16},     {"I64", DType::kI64},       {"I32", DType::kI32},
      {"U8", DType::kU8},       {"BOOL", DType::kBool},     {"float64", DType::kF64},
      {"float32", DType::kF32}, {"bfloat16", DType::kBF16}, {"float16", DType::kF16},
      {"int64", DType::kI64},   {"int32", DType::kI32},     {"uint8", DType::kU8},
      {"bool", DType::kBool}};
  const auto it = kTypes.find(name);
  if (it == kTypes.end()) ThrowIfError(absl::NotFoundError(absl::StrCat("dtype ", name)));
  return it->second;
}

// The tensors of a safetensors file, by key. Trusts the file: it is ours.
class TensorFile {
 public:
  explicit TensorFile(const std::string& path) : bytes_(ReadFile(path)) {
    uint64_t size;
    std::memcpy(&size, bytes_.data(), 8);
    header_ = Json::parse(bytes_.substr(8, size));
    data_ = 8 + size;
  }
  Tensor Get(const std::string& key) const {
    const Json& entry = header_.at(key);
    const auto sizes = entry.at("shape").get<std::vector<int64_t>>();
    const auto range = entry.at("data_offsets").get<std::vector<size_t>>();
    const Tensor t =
        ValueOrThrow(Tensor::Empty(sizes, DTypeOf(entry.at("dtype").get<std::string>())));
    if (range[1] > range[0]) {
      std::memcpy(t.data(), bytes_.data() + data_ + range[0], range[1] - range[0]);
    }
    return t;
  }

 private:
  std::string bytes_;
  Json header_;
  size_t data_ = 0;
};

// A collection: manifest.json and a file of tensors per group of ops, read when it is first needed.
class TorchSamples {
 public:
  static const TorchSamples& All() {
    static const char* const folder = std::getenv("DTENSOR_TORCH_SAMPLES");
    static const char* const data = std::getenv("DT_TEST_DATA");  // of scripts/gpu_bundle
    static const TorchSamples samples(folder != nullptr ? folder
                                      : data != nullptr ? absl::StrCat(data, "/ops")
                                                        : DT_TEST_DATA "/ops");
    return samples;
  }
  const Json& ops() const { return manifest_.at("ops"); }
  // Of one op; null if the collection has none.
  const Json& Of(const std::string& op) const {
    static const Json none;
    const auto it = by_name_.find(op);
    return it == by_name_.end() ? none : it->second->at("samples");
  }
  // Keys begin with the name of their op.
  Tensor Get(const std::string& key) const {
    const Json& op = *by_name_.at(key.substr(0, key.find('.')));
    const std::string group = op.at("group").get<std::string>();
    std::lock_guard<std::mutex> lock(mutex_);
    auto it = files_.find(group);
    if (it == files_.end()) {
      const auto& name = manifest_.at("groups").at(group).at("file");
      it = files_.emplace(group, TensorFile(folder_ + "/" + name.get<std::string>())).first;
    }
    return it->second.Get(key);
  }

 private:
  explicit TorchSamples(const std::string& folder)
      : folder_(folder), manifest_(Json::parse(ReadFile(folder + "/manifest.json"))) {
    for (const Json& op : ops()) by_name_[op.at("op").get<std::string>()] = &op;
  }
  const std::string folder_;
  const Json manifest_;
  std::map<std::string, const Json*> by_name_;
  mutable std::mutex mutex_;
  mutable std::map<std::string, TensorFile> files_;
};

// The same values with the given strides.
inline Tensor WithStrides(const Tensor& t, const std::vector<int64_t>& strides) {
  int64_t extent = 1;
  for (int d = 0; d < t.ndim(); ++d) {
    if (t.size(d) == 0) return t;
    extent += (t.size(d) - 1) * strides[d];
  }
  const Tensor storage = ValueOrThrow(Tensor::Empty({extent}, t.dtype()));
  const Tensor view = storage.AsStrided(t.shape(), Strides(strides.begin(), strides.end()), 0);
  Copy(t, view);
  return view;
}

inline bool AllFinite(const Tensor& t) {
  for (const double v : t.ToVector<double>()) {
    if (!std::isfinite(v)) return false;
  }
  return true;
}

// How one answer is judged; see the README of the collection ("Comparing").
struct MatchRule {
  bool exact = false;            // every bit, NaN equal to NaN
  bool any_zero = false;         // 0.0 equals -0.0
  bool special_values = false;   // each value against itself, not against the largest
  Tensor f64;                    // the float64 answer of a low-precision sample
  DType coarsest = DType::kF64;  // what the answer was computed from, where coarser than itself
};

inline double Relative(DType t) {
  switch (t) {
    case DType::kF64:
      return 1e-10;
    case DType::kF32:
      return 1e-5;
    default:
      return 0.0078125;  // 2^-7
  }
}

// "" or what differs.
inline std::string Differs(const Tensor& got, const Tensor& want, const MatchRule& rule) {
  if (got.dtype() != want.dtype() || got.shape() != want.shape()) {
    return absl::StrCat("is ", std::string(Name(got.dtype())), " ", ToString(got.shape()),
                        ", must be ", std::string(Name(want.dtype())), " ", ToString(want.shape()));
  }
  const auto element = [](size_t i, double g, double w) {
    return absl::StrCat("element ", i, " is ", absl::SixDigits(g), ", must be ", absl::SixDigits(w),
                        " (difference ", std::fabs(g - w), ")");
  };
  if (!IsFloating(want.dtype())) {
    const auto g = got.ToVector<int64_t>(), w = want.ToVector<int64_t>();
    for (size_t i = 0; i < g.size(); ++i) {
      if (g[i] != w[i]) return absl::StrCat("element ", i, " is ", g[i], ", must be ", w[i]);
    }
    return "";
  }
  const auto g = got.ToVector<double>(), w = want.ToVector<double>();
  double largest = 0;
  for (const double v : w) {
    if (std::isfinite(v)) largest = std::max(largest, std::fabs(v));
  }
  const double relative = std::max(Relative(want.dtype()), Relative(rule.coarsest));
  double allowed = relative * std::max(1.0, largest);
  std::vector<double> truth = w;
  if (rule.f64.defined()) {  // at most twice torch's own error
    truth = rule.f64.ToVector<double>();
    double torchs = 0, scale = 0;
    for (size_t i = 0; i < w.size(); ++i) {
      if (!std::isfinite(truth[i])) continue;
      torchs = std::max(torchs, std::fabs(w[i] - truth[i]));
      scale = std::max(scale, std::fabs(truth[i]));
    }
    allowed = 2 * torchs + 2 * (want.dtype() == DType::kF32 ? 0x1p-23 : 0x1p-7) * scale;
  }
  for (size_t i = 0; i < g.size(); ++i) {
    if (std::isnan(g[i]) && std::isnan(w[i])) continue;
    if (rule.exact && !rule.f64.defined()) {
      const bool zeros = rule.any_zero && g[i] == 0 && w[i] == 0;
      if (std::bit_cast<uint64_t>(g[i]) != std::bit_cast<uint64_t>(w[i]) && !zeros) {
        return absl::StrCat(element(i, g[i], w[i]), " exactly");
      }
      continue;
    }
    if (g[i] == w[i]) continue;
    const double room = rule.special_values ? relative * std::max(1.0, std::fabs(w[i])) : allowed;
    if (!(std::fabs(g[i] - truth[i]) <= room)) return element(i, g[i], truth[i]);
  }
  return "";
}

}  // namespace dtensor::testing
