// Checkpoints: a model, its optimizer's state and where random numbers and data stand, as a folder
// that is there whole or not at all.
//
//   DIR/step-00000010/checkpoint.json         step, notes, generator; tensors and their checksums
//                     model.safetensors       parameters and persistent buffers by FQN
//                     optimizer.safetensors   "<fqn>/<state>", in the states' dtypes
//
// Tensors are logical ones: what a file holds does not depend on the mesh, and any mesh reads it.
// Every rank writes and reads its own parts of each file, at the offsets that they have there. A
// folder is written beside its place under a name that ends in ".partial", brought to the disk and
// renamed. One job at a time may save to DIR: another one takes what this one is writing for what
// was left of a job that ended, and removes it.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dtensor/parallel/module/module.h"
#include "dtensor/parallel/optim/optim.h"

namespace dtensor {

struct CheckpointInfo {
  int64_t step = 0;
  std::map<std::string, std::string> notes = {};  // the program's, in UTF-8: sampler, settings
};

struct SaveOptions {
  // This one and those of the steps next below it, so many together; those further below go once
  // it is there. Those of later steps stay.
  int keep = 2;
};
// Writes DIR/step-N and returns its path; one of the same step is replaced at once. All ranks of
// the world must call it, with the whole model: its parameters may be on several meshes.
//   Comm:   exchanges of host bytes: how it went on each rank, how often it has updated each
//           parameter, what it has, generators, checksums.
//   Errors: InvalidArgument for a note or a name that is not UTF-8, a negative step and a pending
//           sum; FailedPrecondition for a recipe, what is on meta, tensors that not all ranks
//           have, and a parameter that ranks which have it updated differently often; Unavailable
//           with the file, the system's reason and the rank, also where another program
//           is seen to save to DIR meanwhile. The same on every rank; nothing is left of it, and
//           what was saved before is as it was.
absl::StatusOr<std::string> SaveCheckpoint(const std::string& dir, const Module& model,
                                           const Optimizer& optimizer, const CheckpointInfo& info,
                                           const SaveOptions& options = {});

// Whether a training that begins at `step` may save in DIR: it has no checkpoints, or
// `resumed_from` (the path of one; empty for none) lies there and it has none of later steps. What
// it would save could else be taken for the other training's, and the other way round. Gives the
// step of the last checkpoint in DIR, -1 where there is none. All ranks of the world must call it.
//   Errors: FailedPrecondition naming the checkpoint, the same on every rank.
absl::StatusOr<int64_t> CheckSaveFolder(const std::string& dir, int64_t step,
                                        const std::string& resumed_from);

struct LoadedCheckpoint {
  CheckpointInfo info;
  std::string path;
  std::vector<std::string> ignored;  // folders of DIR that are no whole checkpoints
};
// Reads a checkpoint into a model that is materialised, its optimizer and the rank's default
// generator: `path` is a step's folder, or one of several, of which that of the highest step is
// taken. Where the generators of the ranks that saved differ (RngMode::kTensorParallel), each rank
// gets its own in a world of as many ranks, and the first one's in another. `accepts` may refuse
// what the notes say. A tied tensor may be there under any of its names. All ranks of the world
// must call it.
//   Comm:   as SaveCheckpoint.
//   Errors: NotFound where there is no checkpoint; InvalidArgument naming every tensor that is
//           missing, unexpected or of another shape or dtype; DataLoss naming the file, and the
//           tensor with both checksums, for files that were cut, changed or are of another
//           checkpoint. The same on every rank; nothing is changed then.
absl::StatusOr<LoadedCheckpoint> LoadCheckpoint(
    const std::string& path, Module& model, Optimizer& optimizer,
    const std::function<absl::Status(const CheckpointInfo&)>& accepts = nullptr);

}  // namespace dtensor
