#include "dtensor/parallel/io/checkpoint_parts.h"

#include <algorithm>
#include <cstring>
#include <system_error>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "dtensor/parallel/io/json.h"
#include "dtensor/tensor/status.h"
#include "nlohmann/json.hpp"

namespace dtensor::internal {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr int kVersion = 1;

// The number of a step's folder; nothing for other names.
std::optional<int64_t> StepOf(const std::string& name) {
  int64_t step = 0;
  absl::string_view digits = name;
  if (!absl::ConsumePrefix(&digits, "step-") || !absl::SimpleAtoi(digits, &step)) return {};
  return name == StepName(step) ? std::optional<int64_t>(step) : std::nullopt;
}

uint64_t SumOf(const std::string& text) {
  return ElementSum(text.data(), 0, static_cast<int64_t>(text.size()), 1);
}

absl::StatusOr<FileLayout> LayoutOf(const json& file) {
  std::vector<FileTensor> tensors;
  for (const json& t : file.at("tensors")) {
    const auto shape = t.at("shape").get<std::vector<int64_t>>();
    FileTensor tensor = {.name = t.at("name"), .shape = Shape(shape.begin(), shape.end())};
    if (!ParseDType(t.at("dtype").get<std::string>(), &tensor.dtype) ||
        !absl::SimpleHexAtoi(t.at("sum").get<std::string>(), &tensor.sum)) {
      return absl::DataLossError(absl::StrCat("tensor ", tensor.name, " is described wrongly"));
    }
    tensors.push_back(std::move(tensor));
  }
  DT_ASSIGN_OR_RETURN(FileLayout layout,
                      LayOut(file.at("file").get<std::string>(), std::move(tensors)));
  if (layout.bytes == file.at("bytes").get<int64_t>()) return layout;
  return absl::DataLossError(
      absl::StrCat("the size of ", layout.file, " does not fit its tensors"));
}

}  // namespace

std::string StepName(int64_t step) { return absl::StrFormat("step-%08d", step); }

CheckpointListing ListCheckpoints(const fs::path& dir) {
  CheckpointListing all;
  std::error_code error, other;
  for (fs::directory_iterator at(dir, error), end; !error && at != end; at.increment(error)) {
    const std::string name = at->path().filename().string();
    const std::optional<int64_t> step = StepOf(name);
    if (step && fs::exists(at->path() / kManifest, other)) {
      all.steps.emplace_back(*step, at->path());
    } else if (step || (absl::StartsWith(name, "step-") && absl::EndsWith(name, kPartial))) {
      all.others.push_back(name);
    }
  }
  std::sort(all.steps.begin(), all.steps.end());
  std::sort(all.others.begin(), all.others.end());
  return all;
}

StateDict TensorsOf(const Module& model) {
  StateDict state;
  for (const NamedParameter& p : model.NamedTensors()) {
    if (p.parameter->persistent()) state.emplace_back(p.fqn, p.parameter->tensor().Detach());
  }
  return state;
}

std::string Hex(uint64_t value) { return absl::StrFormat("%016x", value); }

std::string ToText(const Manifest& manifest) {
  json files = json::array();
  for (const FileLayout& layout : manifest.files) {
    json tensors = json::array();
    for (const FileTensor& t : layout.tensors) {
      tensors.push_back({{"name", t.name},
                         {"dtype", std::string(Name(t.dtype))},
                         {"shape", std::vector<int64_t>(t.shape.begin(), t.shape.end())},
                         {"sum", Hex(t.sum)}});
    }
    files.push_back({{"file", layout.file}, {"bytes", layout.bytes}, {"tensors", tensors}});
  }
  const json body = {{"version", kVersion},
                     {"step", manifest.info.step},
                     {"notes", manifest.info.notes},
                     {"generator", absl::BytesToHexString(manifest.generator)},
                     {"files", files}};
  const json all = {{"dtensor_checkpoint", body}, {"sum", Hex(SumOf(body.dump()))}};
  return all.dump(1) + "\n";
}

absl::StatusOr<Manifest> ParseManifest(const std::string& text) {
  const absl::Status foreign = absl::DataLossError("it is not as it was written, or no manifest");
  const absl::StatusOr<json> parsed = ParseJsonObject(text, "it", /*most_depth=*/8);
  if (!parsed.ok()) return foreign;
  json all = *parsed;
  if (!all.contains("dtensor_checkpoint") || !all.contains("sum") ||
      all["sum"] != Hex(SumOf(all["dtensor_checkpoint"].dump()))) {
    return foreign;
  }
  const json& body = all["dtensor_checkpoint"];
  try {
    if (body.at("version") != kVersion) {
      return absl::DataLossError(
          absl::StrCat("version ", body.at("version").dump(), ", this program reads ", kVersion));
    }
    Manifest manifest = {
        .info = {body.at("step"), body.at("notes")},
        .generator = absl::HexStringToBytes(body.at("generator").get<std::string>())};
    if (manifest.info.step < 0) return foreign;
    for (const json& file : body.at("files")) {
      DT_ASSIGN_OR_RETURN(FileLayout layout, LayoutOf(file));
      manifest.files.push_back(std::move(layout));
    }
    return manifest;
  } catch (const json::exception&) {
    return foreign;
  }
}

absl::StatusOr<std::vector<std::string>> AgreeAll(absl::string_view what,
                                                  const absl::Status& status,
                                                  absl::string_view mine) {
  RankContext& rank = RankContext::Current();
  std::string said(1, static_cast<char>(status.code()));
  absl::StrAppend(&said, status.ok() ? mine : status.message());
  const DeviceMesh world({rank.world_size()}, {"world"});
  DT_ASSIGN_OR_RETURN(std::vector<std::string> all, rank.Exchange(world, {0}, what, said));
  for (size_t r = 0; r < all.size(); ++r) {
    const auto code = static_cast<absl::StatusCode>(all[r].at(0));
    if (code == absl::StatusCode::kOk) continue;
    const std::string who = all.size() == 1 ? "" : absl::StrCat("rank ", r, ": ");
    return WithCulprit(absl::Status(code, absl::StrCat(who, all[r].substr(1))),
                       static_cast<int64_t>(r));
  }
  for (std::string& a : all) a.erase(0, 1);
  return all;
}

absl::StatusOr<std::vector<uint64_t>> AddUp(absl::string_view what,
                                            const absl::StatusOr<std::vector<uint64_t>>& mine) {
  std::string bytes;
  if (mine.ok()) {
    bytes.assign(reinterpret_cast<const char*>(mine->data()), mine->size() * sizeof(uint64_t));
  }
  DT_ASSIGN_OR_RETURN(const std::vector<std::string> all, AgreeAll(what, mine.status(), bytes));
  std::vector<uint64_t> sums(bytes.size() / sizeof(uint64_t), 0);
  for (const std::string& theirs : all) {
    if (theirs.size() != bytes.size()) {
      return absl::FailedPreconditionError(
          "[checkpoint] ranks have different numbers of tensors: all need the same model");
    }
    for (size_t i = 0; i < sums.size(); ++i) {
      uint64_t sum;
      std::memcpy(&sum, theirs.data() + i * sizeof(sum), sizeof(sum));
      sums[i] += sum;
    }
  }
  return sums;
}

}  // namespace dtensor::internal
