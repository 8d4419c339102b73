#include "dtensor/parallel/data/sampler.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "dtensor/errors.h"
#include "dtensor/mesh/hash.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/tensor/status.h"
#include "nlohmann/json.hpp"

namespace dtensor {
namespace {

// The place of `index` in a permutation of [0, size) that the key picks: a Feistel network of four
// rounds over the next power of four, walked until it comes back into the range. Takes no memory.
int64_t Permuted(int64_t index, int64_t size, uint64_t key) {
  int half = 1;
  while (int64_t{1} << 2 * half < size) ++half;
  const uint64_t mask = (uint64_t{1} << half) - 1;
  auto at = static_cast<uint64_t>(index);
  do {
    uint64_t left = at >> half, right = at & mask;
    for (uint64_t round = 0; round < 4; ++round) {
      left ^= Scramble(right + Scramble(key + round * 0x9E3779B97F4A7C15)) & mask;
      std::swap(left, right);
    }
    at = left << half | right;
  } while (at >= static_cast<uint64_t>(size));
  return static_cast<int64_t>(at);
}

std::vector<int64_t> Listed(const std::vector<Interval>& intervals) {
  std::vector<int64_t> all;
  for (const Interval& i : intervals) {
    for (int64_t k = i.start; k < i.end; ++k) all.push_back(k);
  }
  return all;
}

DTensor Placed(const Tensor& part, const DeviceMesh& mesh, PlacementSpan placements,
               const Shape& shape) {
  const DTensor local = OnSelf(ValueOrThrow(part.To(mesh.device())));
  return mesh.is_self() ? local : FromLocal(local, mesh, placements, {.shape = shape});
}

}  // namespace

absl::StatusOr<TokenSampler> TokenSampler::Create(TokenFile file, const Options& options) {
  if (options.seq < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("a sequence has at least one token, got ", options.seq));
  }
  if (file.size() <= options.seq) {
    return absl::InvalidArgumentError(
        absl::StrCat(file.path(), " has ", file.size(), file.is_bytes() ? " bytes" : " tokens",
                     ", needs at least ", options.seq + 1, " for sequences of ", options.seq));
  }
  TokenSampler sampler;
  sampler.windows_ = (file.size() - 1) / options.seq;
  uint64_t hash = 0;
  for (const int64_t start : {int64_t{0}, file.size() - options.seq - 1}) {
    std::vector<int64_t> window(static_cast<size_t>(options.seq) + 1);
    DT_RETURN_IF_ERROR(file.Read(start, absl::MakeSpan(window)));
    for (const int64_t token : window) hash = Scramble(hash + static_cast<uint64_t>(token) + 1);
  }
  sampler.data_ = absl::StrCat(absl::Hex(hash, absl::kZeroPad16));
  sampler.file_ = std::move(file);
  sampler.options_ = options;
  return sampler;
}

int64_t TokenSampler::WindowOf(int64_t sample) const {
  const int64_t within = sample % windows_;
  if (!options_.shuffle) return within;
  return Permuted(within, windows_,
                  Scramble(options_.seed) + Scramble(static_cast<uint64_t>(sample / windows_)));
}

absl::StatusOr<TokenBatch> TokenSampler::Next(int64_t batch, const DeviceMesh& mesh,
                                              PlacementSpan placements) {
  const Shape shape = {batch, options_.seq};
  DT_ASSIGN_OR_RETURN(const SpecRef spec,
                      RankContext::Current().specs().Intern(mesh, placements, shape, DType::kI64));
  for (const Placement& p : spec->placements()) {
    if (p.is_replicate() || p.cuts_dim()) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("[sampler] a batch cannot be ", spec->ToString()));
  }
  const int64_t first = samples_;
  samples_ += batch;
  if (!spec->in_mesh()) {
    const TensorOptions options = {DType::kI64, mesh, {placements.begin(), placements.end()}};
    return TokenBatch{empty(shape, options), empty(shape, options)};
  }
  const auto index = LocalIndex(*spec, spec->coordinate());
  const std::vector<int64_t> rows = Listed(index[0]), columns = Listed(index[1]);
  DT_ASSIGN_OR_RETURN(const Tensor ids, Tensor::Empty(spec->local_shape(), DType::kI64));
  DT_ASSIGN_OR_RETURN(const Tensor targets, Tensor::Empty(spec->local_shape(), DType::kI64));
  auto *id = ids.data_as<int64_t>(), *target = targets.data_as<int64_t>();
  std::vector<int64_t> window(static_cast<size_t>(options_.seq) + 1);
  for (const int64_t row : rows) {
    const absl::Status read =
        file_.Read(WindowOf(first + row) * options_.seq, absl::MakeSpan(window));
    if (!read.ok()) return TellPeers(mesh, read);
    for (const int64_t column : columns) {
      *id++ = window[static_cast<size_t>(column)];
      *target++ = window[static_cast<size_t>(column) + 1];
    }
  }
  return TokenBatch{Placed(ids, mesh, placements, shape), Placed(targets, mesh, placements, shape)};
}

TokenSampler::State TokenSampler::state() const {
  return {samples_, options_.seed, options_.seq, file_.size(), options_.shuffle, data_};
}

absl::Status TokenSampler::CheckState(const State& state) const {
  const auto differs = [](absl::string_view what, auto was, auto is) {
    return absl::InvalidArgumentError(
        absl::StrCat("[sampler] the state is of ", what, " ", was, ", here it is ", is));
  };
  if (state.tokens != file_.size()) {
    return differs("a file whose number of tokens is", state.tokens, file_.size());
  }
  if (state.seq != options_.seq) return differs("sequences of length", state.seq, options_.seq);
  if (state.seed != options_.seed) return differs("the seed", state.seed, options_.seed);
  const auto order = [](bool shuffle) { return shuffle ? "shuffled" : "in the file's order"; };
  if (state.shuffle != options_.shuffle) {
    return differs("windows that are", order(state.shuffle), order(options_.shuffle));
  }
  if (state.data != data_) return differs("a file whose tokens have the hash", state.data, data_);
  if (state.samples < 0) return differs("a number of samples that is", state.samples, samples_);
  return absl::OkStatus();
}

absl::Status TokenSampler::SetState(const State& state) {
  DT_RETURN_IF_ERROR(CheckState(state));
  samples_ = state.samples;
  return absl::OkStatus();
}

std::string TokenSampler::State::ToString() const {
  return nlohmann::json{{"samples", samples}, {"seed", seed},       {"seq", seq},
                        {"tokens", tokens},   {"shuffle", shuffle}, {"data", data}}
      .dump();
}

absl::StatusOr<TokenSampler::State> TokenSampler::State::Parse(absl::string_view text) {
  const nlohmann::json all = nlohmann::json::parse(text.begin(), text.end(), nullptr, false);
  const auto number = [&all](const char* key) -> int64_t {
    const auto found = all.find(key);
    const bool is = found != all.end() && found->is_number_integer();
    return is ? static_cast<int64_t>(found->get<uint64_t>()) : -1;
  };
  State state;
  if (all.is_object() && all.size() == 6 && all.contains("seed") && all.contains("shuffle") &&
      all.contains("data") && all["shuffle"].is_boolean() && all["data"].is_string()) {
    state.shuffle = all["shuffle"].get<bool>();
    state.data = all["data"].get<std::string>();
    state.samples = number("samples");
    state.seq = number("seq");
    state.tokens = number("tokens");
    if (state.samples >= 0 && state.seq > 0 && state.tokens > 0 &&
        all["seed"].is_number_integer()) {
      state.seed = all["seed"].get<uint64_t>();
      return state;
    }
  }
  return absl::InvalidArgumentError(
      absl::StrCat("[sampler] this is no state of a sampler: ", text.substr(0, 200)));
}

}  // namespace dtensor
