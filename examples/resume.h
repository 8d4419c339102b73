// How programs that train go on from a checkpoint.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "dtensor/parallel/train/trainer.h"

namespace dtensor {

// Trainer::Resume from `folder`, told by rank 0; nothing where it is empty. Where it is the folder
// to save in and has no checkpoint yet, the training begins: a launcher starts the first attempt
// and those after it by the same command.
//   Errors: Trainer::Resume's.
absl::Status ResumeOrBegin(Trainer& trainer, const std::string& folder, const std::string& save);

}  // namespace dtensor
