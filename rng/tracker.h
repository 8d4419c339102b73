// Streams besides the default one: named regions with their seed rules, as ATorch, Megatron-LM,
// nanotron and PyTorch's DTensor have them, and the modes in which random ops on a mesh draw.
//
// All of it is for code that wants ranks to differ, or another system's numbers. The default mode
// needs none: its numbers are one device's under any placement.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "dtensor/mesh/mesh.h"
#include "dtensor/mesh/spec.h"
#include "dtensor/rng/generator.h"

namespace dtensor {

using GeneratorState = std::array<uint8_t, 16>;  // Generator::State

// --- seeds
// ----------------------------------------------------------------------------------------

// ATorch's region seed: axes i have sizes n_i and this rank's coordinates r_i, M_0 = 1, M_{i+1} =
// M_i n_i; seed = base + (sum over agreeing axes of 2^i) * M_k + sum over the others of r_i M_i.
// Ranks get the same seed iff their coordinates on the other axes are equal; regions never collide.
//   Source: ATorch MultiDimParallelRandomizer.
int64_t RegionSeed(int64_t base, IntSpan sizes, IntSpan coordinate, const std::vector<bool>& agree);
// Megatron-LM's model-parallel seed: seed + 2718 + tp rank; also PyTorch's
// TensorParallelRNGTracker.
inline int64_t TensorParallelSeed(int64_t seed, int64_t tp_rank) { return seed + 2718 + tp_rank; }
// Megatron-LM's expert-parallel seed.
inline int64_t ExpertParallelSeed(int64_t seed, int64_t ep_rank, int64_t tp_rank) {
  return seed + 1024 + 100 * ep_rank + tp_rank;
}

// --- named streams
// --------------------------------------------------------------------------------

// Streams of one rank by name. Inside of a Fork the rank's default generator is the stream's;
// leaving it, also by an exception, keeps the stream where it got to and brings the outer one back.
class RngTracker {
  struct Streams {
    std::map<std::string, Generator> generators;
    std::map<int64_t, std::string> seeds;
    std::map<std::string, GeneratorState> states;  // of RandomStates
  };

 public:
  RngTracker();
  // Errors: AlreadyExists for a name, InvalidArgument for a seed, that is there already
  // (Megatron-LM).
  absl::Status Add(absl::string_view name, int64_t seed);
  bool Has(absl::string_view name) const {
    return streams_->generators.contains(std::string(name));
  }
  std::map<std::string, GeneratorState> GetStates() const;
  // Errors: InvalidArgument naming a stream that is missing or unknown; nothing is changed.
  absl::Status SetStates(const std::map<std::string, GeneratorState>& states);

  // Throws Error(NotFound) naming the streams there are. Where a snapshot of before the stream was
  // added is restored inside, what was drawn is forgotten with it.
  class Fork {
   public:
    Fork(RngTracker& tracker, absl::string_view name);
    ~Fork();
    Fork(const Fork&) = delete;

   private:
    const std::shared_ptr<Streams> streams_;
    const std::string name_;
    const Generator outer_;
  };

 private:
  friend class RngSnapshot;
  friend class RandomStates;
  std::shared_ptr<Streams> streams_;
};

enum class RngMode : uint8_t;

// The default generator, the mode and every stream of the rank's trackers and RandomStates, to be
// brought back later: what Recompute saves. Streams that were added since are gone again.
class RngSnapshot {
 public:
  static RngSnapshot Take();
  void Restore() const;

 private:
  friend class RngTracker;
  friend class RandomStates;
  struct Live {
    std::vector<std::weak_ptr<RngTracker::Streams>> all;
  };
  static std::shared_ptr<RngTracker::Streams> NewStreams();  // that snapshots know
  Generator default_;
  RngMode mode_;
  std::vector<std::pair<std::weak_ptr<RngTracker::Streams>, RngTracker::Streams>> streams_;
};

// Streams by the set of mesh dims on which ranks agree, made on first use with RegionSeed (axes in
// the order of `names`, the first varying fastest).
//   Source: ATorch MultiDimParallelRandomizer, get_randomizer.
class MultiDimRandomizer {
 public:
  // Errors: NotFound for a name that is no dim of the mesh; FailedPrecondition outside of the mesh.
  static absl::StatusOr<MultiDimRandomizer> Create(const DeviceMesh& mesh,
                                                   std::vector<std::string> names,
                                                   int64_t base_seed = 1234);
  // The name of the stream on whose draws ranks that differ in `agree` only agree.
  //   Errors: NotFound naming the axes there are.
  absl::StatusOr<std::string> Region(const std::vector<std::string>& agree);
  absl::StatusOr<int64_t> SeedOf(const std::vector<std::string>& agree) const;
  RngTracker& tracker() { return tracker_; }

 private:
  MultiDimRandomizer() = default;
  absl::StatusOr<std::vector<bool>> Mask(const std::vector<std::string>& agree) const;
  std::vector<std::string> names_;
  Dims sizes_, coordinate_;
  int64_t base_ = 0;
  RngTracker tracker_;
};

// nanotron's RandomStates: a fixed set of keys. A copy has states of its own.
class RandomStates {
 public:
  explicit RandomStates(std::map<std::string, GeneratorState> states);
  RandomStates(const RandomStates& o) : RandomStates(o.streams_->states) {}
  RandomStates& operator=(const RandomStates& o);
  // Errors: NotFound naming the keys there are: none can be added later.
  absl::StatusOr<GeneratorState> Get(absl::string_view key) const;
  absl::Status Set(absl::string_view key, const GeneratorState& state);

  // branch_random_state: inside, the default generator has the state of `key` (if `enabled`).
  class Branch {
   public:
    Branch(RandomStates& states, absl::string_view key, bool enabled = true);
    ~Branch();
    Branch(const Branch&) = delete;

   private:
    RandomStates& states_;
    const std::string key_;
    const bool enabled_;
    GeneratorState outer_;
  };

 private:
  std::shared_ptr<RngTracker::Streams> streams_;
};

// get_synced_random_state: the state of coordinate 0 of `mesh_dim`, on all of its ranks.
//   Comm: one exchange of 16 host bytes.
absl::StatusOr<GeneratorState> SyncedRandomState(const GeneratorState& mine, const DeviceMesh& mesh,
                                                 int mesh_dim);
// Whether the default generators of all ranks of the mesh have one state.
//   Comm:   one exchange of 16 host bytes per rank.
//   Errors: FailedPrecondition naming the ranks that differ from the first.
absl::Status CheckGeneratorsAgree(const DeviceMesh& mesh);

// --- modes
// ----------------------------------------------------------------------------------------

enum class RngMode : uint8_t {
  kThreadBased,     // the numbers of one device (ThreadBasedRNGTracker): the default
  kOffsetBased,     // PyTorch's OffsetBasedRNGTracker: shards draw at offsets of their own
  kTensorParallel,  // every rank draws its part from its own generator (TensorParallelRNGTracker)
};
RngMode CurrentRngMode();  // of the calling rank
class ScopedRngMode {
 public:
  explicit ScopedRngMode(RngMode mode);
  ~ScopedRngMode();
  ScopedRngMode(const ScopedRngMode&) = delete;

 private:
  RngMode previous_;
};

// OffsetBasedRNGTracker: how far a rank's part lies behind the op's offset, and by how much all of
// them move: multiples of 4. Flat pieces, which PyTorch has not, lie as far apart as the longest is
// long.
//   Source: torch.distributed.tensor._random.OffsetBasedRNGTracker.
struct OffsetShift {
  uint64_t before = 0, after = 0;
};
OffsetShift OffsetBasedShift(const Spec& spec);
// A random op in a mode other than kThreadBased: this rank's part is a tensor of its own, which
// `draw` fills as one with the spec it is given (on Self, of `dtype`). For the ops in rng/.
absl::Status DrawOwnPart(const Spec& spec, const Tensor& part, DType dtype, Generator* generator,
                         absl::FunctionRef<absl::Status(const Spec& mine)> draw);

}  // namespace dtensor
