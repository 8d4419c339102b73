#include "dtensor/rng/tracker.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

template <class Map>
std::string Keys(const Map& map) {
  return absl::StrJoin(map, ", ",
                       [](std::string* out, const auto& kv) { absl::StrAppend(out, kv.first); });
}

struct Mode {
  RngMode mode = RngMode::kThreadBased;
};

}  // namespace

int64_t RegionSeed(int64_t base, IntSpan sizes, IntSpan coordinate,
                   const std::vector<bool>& agree) {
  int64_t stride = 1, code = 0, own = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (agree[i]) {
      code += int64_t{1} << i;
    } else {
      own += coordinate[i] * stride;
    }
    stride *= sizes[i];
  }
  return base + code * stride + own;
}

std::shared_ptr<RngTracker::Streams> RngSnapshot::NewStreams() {
  const auto streams = std::make_shared<RngTracker::Streams>();
  auto& all = RankContext::Current().Slot<Live>().all;
  std::erase_if(all, [](const auto& s) { return s.expired(); });
  all.push_back(streams);
  return streams;
}

RngTracker::RngTracker() : streams_(RngSnapshot::NewStreams()) {}

RngSnapshot RngSnapshot::Take() {
  RngSnapshot snapshot;
  snapshot.default_ = DefaultGenerator();
  snapshot.mode_ = CurrentRngMode();
  for (const auto& live : RankContext::Current().Slot<Live>().all) {
    if (const auto streams = live.lock()) snapshot.streams_.emplace_back(live, *streams);
  }
  return snapshot;
}

void RngSnapshot::Restore() const {
  DefaultGenerator() = default_;
  RankContext::Current().Slot<Mode>().mode = mode_;
  for (const auto& [live, saved] : streams_) {
    const auto streams = live.lock();
    if (!streams) continue;
    streams->seeds = saved.seeds;
    streams->states = saved.states;
    std::erase_if(streams->generators,
                  [&saved = saved](const auto& s) { return !saved.generators.contains(s.first); });
    for (const auto& [name, generator] : saved.generators) {
      streams->generators.insert_or_assign(name, generator);
    }
  }
}

absl::Status RngTracker::Add(absl::string_view name, int64_t seed) {
  if (Has(name)) {
    return absl::AlreadyExistsError(absl::StrCat("random stream \"", name, "\" is there already"));
  }
  const auto [it, fresh] = streams_->seeds.emplace(seed, std::string(name));
  if (!fresh) {
    return absl::InvalidArgumentError(absl::StrCat("random stream \"", name, "\": seed ", seed,
                                                   " is that of \"", it->second, "\""));
  }
  streams_->generators.emplace(
      std::string(name), Generator(static_cast<uint64_t>(seed), DefaultGenerator().profile()));
  return absl::OkStatus();
}

std::map<std::string, GeneratorState> RngTracker::GetStates() const {
  std::map<std::string, GeneratorState> states;
  for (const auto& [name, generator] : streams_->generators) states[name] = generator.State();
  return states;
}

absl::Status RngTracker::SetStates(const std::map<std::string, GeneratorState>& states) {
  for (const auto& [name, state] : states) {
    if (!Has(name)) {
      return absl::InvalidArgumentError(absl::StrCat("states have a stream \"", name,
                                                     "\"; there are ", Keys(streams_->generators)));
    }
  }
  for (const auto& [name, generator] : streams_->generators) {
    if (!states.contains(name)) {
      return absl::InvalidArgumentError(absl::StrCat("states lack the stream \"", name, "\""));
    }
  }
  for (const auto& [name, state] : states) {
    Generator checked = streams_->generators.at(name);
    DT_RETURN_IF_ERROR(checked.SetState(state));
  }
  for (const auto& [name, state] : states)
    DT_RETURN_IF_ERROR(streams_->generators.at(name).SetState(state));
  return absl::OkStatus();
}

RngTracker::Fork::Fork(RngTracker& tracker, absl::string_view name)
    : streams_(tracker.streams_), name_(name), outer_(DefaultGenerator()) {
  const auto it = streams_->generators.find(name_);
  if (it == streams_->generators.end()) {
    ThrowIfError(absl::NotFoundError(
        absl::StrCat("no random stream \"", name, "\"; there are ", Keys(streams_->generators))));
  }
  DefaultGenerator() = it->second;
}

RngTracker::Fork::~Fork() {
  // A snapshot of before the stream was added takes it away.
  const auto it = streams_->generators.find(name_);
  if (it != streams_->generators.end()) it->second = DefaultGenerator();
  DefaultGenerator() = outer_;
}

absl::StatusOr<MultiDimRandomizer> MultiDimRandomizer::Create(const DeviceMesh& mesh,
                                                              std::vector<std::string> names,
                                                              int64_t base_seed) {
  if (!mesh.defined()) return absl::InvalidArgumentError("MultiDimRandomizer: the mesh is null");
  MultiDimRandomizer r;
  Dims coordinate;
  if (!mesh.Coordinate(RankContext::Current().rank(), &coordinate)) {
    return absl::FailedPreconditionError(
        absl::StrCat("rank ", RankContext::Current().rank(), " is not in mesh ", mesh.ToString()));
  }
  for (const std::string& name : names) {
    DT_ASSIGN_OR_RETURN(const int dim, mesh.DimIndex(name));
    r.sizes_.push_back(mesh.size(dim));
    r.coordinate_.push_back(coordinate[dim]);
  }
  r.names_ = std::move(names);
  r.base_ = base_seed;
  return r;
}

absl::StatusOr<std::vector<bool>> MultiDimRandomizer::Mask(
    const std::vector<std::string>& agree) const {
  std::vector<bool> mask(names_.size(), false);
  for (const std::string& name : agree) {
    const auto it = std::find(names_.begin(), names_.end(), name);
    if (it == names_.end()) {
      return absl::NotFoundError(
          absl::StrCat("no axis \"", name, "\"; there are ", absl::StrJoin(names_, ", ")));
    }
    mask[it - names_.begin()] = true;
  }
  return mask;
}

absl::StatusOr<int64_t> MultiDimRandomizer::SeedOf(const std::vector<std::string>& agree) const {
  DT_ASSIGN_OR_RETURN(const std::vector<bool> mask, Mask(agree));
  return RegionSeed(base_, sizes_, coordinate_, mask);
}

absl::StatusOr<std::string> MultiDimRandomizer::Region(const std::vector<std::string>& agree) {
  DT_ASSIGN_OR_RETURN(const std::vector<bool> mask, Mask(agree));
  std::vector<std::string> inside;
  for (size_t i = 0; i < mask.size(); ++i) {
    if (mask[i]) inside.push_back(names_[i]);
  }
  const std::string name = absl::StrCat("(", absl::StrJoin(inside, ","), ")");
  if (!tracker_.Has(name)) {
    DT_RETURN_IF_ERROR(tracker_.Add(name, RegionSeed(base_, sizes_, coordinate_, mask)));
  }
  return name;
}

RandomStates::RandomStates(std::map<std::string, GeneratorState> states)
    : streams_(RngSnapshot::NewStreams()) {
  streams_->states = std::move(states);
}

RandomStates& RandomStates::operator=(const RandomStates& o) {
  streams_->states = o.streams_->states;
  return *this;
}

absl::StatusOr<GeneratorState> RandomStates::Get(absl::string_view key) const {
  const std::map<std::string, GeneratorState>& states = streams_->states;
  const auto it = states.find(std::string(key));
  if (it != states.end()) return it->second;
  return absl::NotFoundError(absl::StrCat("no random state \"", key, "\"; there are ", Keys(states),
                                          ", and none can be added later"));
}

absl::Status RandomStates::Set(absl::string_view key, const GeneratorState& state) {
  DT_RETURN_IF_ERROR(Get(key).status());
  streams_->states[std::string(key)] = state;
  return absl::OkStatus();
}

RandomStates::Branch::Branch(RandomStates& states, absl::string_view key, bool enabled)
    : states_(states), key_(key), enabled_(enabled), outer_(DefaultGenerator().State()) {
  if (!enabled_) return;
  ThrowIfError(DefaultGenerator().SetState(ValueOrThrow(states_.Get(key_))));
}

RandomStates::Branch::~Branch() {
  if (!enabled_) return;
  (void)states_.Set(key_, DefaultGenerator().State());  // the key is there: the constructor saw it
  (void)DefaultGenerator().SetState(outer_);            // a state that a generator gave is valid
}

namespace {

// The states that the ranks of that group give, by group index.
absl::StatusOr<std::vector<GeneratorState>> StatesOf(absl::string_view what_for,
                                                     const GeneratorState& mine,
                                                     const DeviceMesh& mesh,
                                                     absl::Span<const int> mesh_dims) {
  DT_ASSIGN_OR_RETURN(const std::vector<std::string> bytes,
                      RankContext::Current().Exchange(
                          mesh, mesh_dims, what_for,
                          std::string(reinterpret_cast<const char*>(mine.data()), mine.size())));
  std::vector<GeneratorState> states(bytes.size());
  for (size_t r = 0; r < bytes.size(); ++r) {
    std::memcpy(states[r].data(), bytes[r].data(), states[r].size());
  }
  return states;
}

}  // namespace

absl::StatusOr<GeneratorState> SyncedRandomState(const GeneratorState& mine, const DeviceMesh& mesh,
                                                 int mesh_dim) {
  DT_ASSIGN_OR_RETURN(const std::vector<GeneratorState> states,
                      StatesOf("SyncedRandomState", mine, mesh, {mesh_dim}));
  return states[0];
}

absl::Status CheckGeneratorsAgree(const DeviceMesh& mesh) {
  if (!mesh.defined()) return absl::InvalidArgumentError("CheckGeneratorsAgree: the mesh is null");
  std::vector<int> dims(mesh.ndim());
  std::iota(dims.begin(), dims.end(), 0);
  DT_ASSIGN_OR_RETURN(const std::vector<GeneratorState> states,
                      StatesOf("CheckGeneratorsAgree", DefaultGenerator().State(), mesh, dims));
  const std::vector<int64_t> ranks = mesh.Ranks();  // by group index
  std::vector<int64_t> different;
  for (size_t r = 1; r < states.size(); ++r) {
    if (states[r] != states[0]) different.push_back(ranks[r]);
  }
  if (different.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("random generators have diverged: rank", different.size() > 1 ? "s " : " ",
                   absl::StrJoin(different, ", "), " differ from rank ", ranks[0],
                   " in seed or offset; call ManualSeed and random ops on every rank alike"));
}

RngMode CurrentRngMode() { return RankContext::Current().Slot<Mode>().mode; }
ScopedRngMode::ScopedRngMode(RngMode mode)
    : previous_(std::exchange(RankContext::Current().Slot<Mode>().mode, mode)) {}
ScopedRngMode::~ScopedRngMode() { RankContext::Current().Slot<Mode>().mode = previous_; }

namespace {

// How long the part of coordinate 0 of n is, the longest.
int64_t FirstPart(const Placement& p, int64_t size, int64_t n) {
  int64_t length = 0;
  for (const Segment& s : p.SegmentsOf(size, n)) {
    const int64_t units = (s.size + s.unit - 1) / s.unit;
    length += std::min(s.size, (units + n - 1) / n * s.unit);
  }
  return length;
}

}  // namespace

OffsetShift OffsetBasedShift(const Spec& spec) {
  // Shards in row-major order over the tensor's dims, each as long as the first. Of a dim that two
  // mesh dims cut, the first shard is as long as the later one alone would make it.
  Shape first = spec.shape();
  Dims index(spec.ndim(), 0), shards(spec.ndim(), 1);
  int64_t piece = 0, longest = 0;  // of flat pieces, which cut the whole
  for (int m = 0; m < spec.mesh().ndim(); ++m) {
    const Placement& p = spec.placement(m);
    const int64_t n = spec.mesh().size(m), mine = spec.in_mesh() ? spec.coordinate()[m] : 0;
    if (p.is_flat()) {
      piece = piece * n + mine;
      longest = *std::max_element(p.lengths().begin(), p.lengths().end());
    }
    if (!p.cuts_dim()) continue;
    index[p.dim()] = index[p.dim()] * n + mine;
    shards[p.dim()] *= n;
    first[p.dim()] = FirstPart(p, spec.shape()[p.dim()], n);
  }
  for (int d = 0; d < spec.ndim(); ++d) piece = piece * shards[d] + index[d];
  const auto up = [](int64_t n) { return static_cast<uint64_t>((n + 3) / 4 * 4); };
  return {up(piece * (longest > 0 ? longest : Numel(first))), up(spec.numel())};
}

absl::Status DrawOwnPart(const Spec& spec, const Tensor& part, DType dtype, Generator* generator,
                         absl::FunctionRef<absl::Status(const Spec& mine)> draw) {
  const uint64_t before = generator->offset();
  const bool by_offset = CurrentRngMode() == RngMode::kOffsetBased;
  const OffsetShift shift = by_offset ? OffsetBasedShift(spec) : OffsetShift();
  if (spec.in_mesh() && part.numel() > 0) {
    DT_ASSIGN_OR_RETURN(const SpecRef mine, RankContext::Current().specs().Intern(
                                                DeviceMesh::Self(), {}, part.shape(), dtype));
    if (by_offset) DT_RETURN_IF_ERROR(generator->SetOffset(before + shift.before));
    DT_RETURN_IF_ERROR(draw(*mine));
  }
  return by_offset ? generator->SetOffset(before + shift.after) : absl::OkStatus();
}

}  // namespace dtensor
