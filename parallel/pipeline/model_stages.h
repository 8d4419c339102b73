// A Llama or a GPT2 as stages of a pipeline, for training.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "dtensor/parallel/models/gpt2.h"
#include "dtensor/parallel/models/llama.h"
#include "dtensor/parallel/pipeline/pipeline.h"

namespace dtensor {

// Runs of the model's blocks, the embedding in the first, norm and head in the last; embedding and
// head count as a block each. A head that is tied to the embedding borrows its table. From ids
// [batch, seq] to logits [batch, seq, vocab], of rows without padding. To be placed by
// ParallelizeStages.
//   Errors: InvalidArgument for more stages than blocks and ends; Unimplemented for positions of
//   type "dynamic" or "longrope".
absl::StatusOr<std::vector<PipelineStage>> LlamaStages(Llama& model, int stages);
absl::StatusOr<std::vector<PipelineStage>> GPT2Stages(GPT2& model, int stages);

}  // namespace dtensor
