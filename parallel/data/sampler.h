// TokenSampler: batches of a token file in an order that does not depend on the mesh.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "dtensor/distribute.h"
#include "dtensor/parallel/data/token_file.h"

namespace dtensor {

// [batch, seq] int64; targets are the ids one place later.
struct TokenBatch {
  DTensor ids, targets;
};

// The file is cut into windows of `seq` tokens and the one after them; every epoch takes each
// window once, in an order that follows from seed and epoch. Samples are numbered over all epochs
// and all ranks, and a batch is the next of these numbers: which of its rows a rank reads follows
// from the placements alone. Belongs to one rank; all move alike.
class TokenSampler {
 public:
  struct Options {
    int64_t seq = 0;
    uint64_t seed = 0;
    bool shuffle = true;  // else in the order of the file
  };
  // Where it stands, with what it has to be the same for: part of a checkpoint.
  struct State {
    int64_t samples = 0;  // given so far
    uint64_t seed = 0;
    int64_t seq = 0, tokens = 0;
    bool shuffle = true;
    std::string data = {};         // a hash of the file's first and last window
    std::string ToString() const;  // JSON
    // Errors: InvalidArgument for text that ToString did not write.
    static absl::StatusOr<State> Parse(absl::string_view text);
  };

  // Errors: InvalidArgument for a file without seq + 1 tokens, and seq < 1; those of
  // TokenFile::Read.
  static absl::StatusOr<TokenSampler> Create(TokenFile file, const Options& options);

  int64_t windows() const { return windows_; }  // per epoch
  int64_t samples() const { return samples_; }
  int64_t epoch() const { return samples_ / windows_; }
  // Which window is sample number `sample`.
  int64_t WindowOf(int64_t sample) const;
  // The next batch, on a mesh in placements of [batch, seq] that cut dims (no flat pieces), or on
  // Self with none. A rank reads its own rows. Errors: those of TokenFile::Read, of which peers are
  // told; InvalidArgument for placements that do not fit.
  absl::StatusOr<TokenBatch> Next(int64_t batch, const DeviceMesh& mesh, PlacementSpan placements);

  State state() const;
  // Goes on from there. Errors: InvalidArgument for the state of another file, seq, seed or order,
  // naming both; nothing is changed.
  absl::Status SetState(const State& state);
  absl::Status CheckState(const State& state) const;

 private:
  TokenFile file_;
  Options options_;
  int64_t windows_ = 0, samples_ = 0;
  std::string data_;  // State::data
};

}  // namespace dtensor
