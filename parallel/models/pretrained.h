// Models from folders as Hugging Face lays them out, and back: config.json, generation_config.json,
// safetensors files, and the tokenizer's files as they are.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "dtensor/parallel/io/tensor_folder.h"
#include "dtensor/parallel/models/causal_lm.h"
#include "dtensor/parallel/models/gpt2.h"
#include "dtensor/parallel/models/llama.h"
#include "dtensor/parallel/models/model_plans.h"

namespace dtensor {

struct ModelConfig {
  std::variant<LlamaConfig, GPT2Config> model;
  DType dtype = DType::kF32;  // of the weights in the files: as the config says, else as they are
  // Ids of tokens, of generation_config.json or, without that file, of config.json.
  std::vector<int64_t> eos = {};  // each ends a text
  std::optional<int64_t> bos = {}, pad = {};
  // What generation_config.json, or config.json without it, has for SamplingOptions, and
  // Unimplemented naming a field by which transformers would generate other tokens than Generate
  // does. Weights and logits are none the worse for that, so reading does not fail by it.
  double repetition_penalty = 1;
  absl::Status generates = {};
  // The texts beside the weights as they were, from config.json to the tokenizer's files; none for
  // a config that came from nowhere.
  std::vector<std::pair<std::string, std::string>> files = {};
};

// Reads <folder>/config.json and, if it is there, generation_config.json. Takes the older spelling
// (rope_theta, rope_scaling, torch_dtype) and the newer one (rope_parameters, dtype). Files of a
// tokenizer are kept unread, so that an exported folder can generate as this one.
//   Errors: as ParseModelConfig, with the path before; NotFound (rank-local) without the file.
absl::StatusOr<ModelConfig> ReadModelConfig(const std::string& folder);
// `text` is that of a config.json; `where` stands before messages.
//   Errors: InvalidArgument naming the field: one that is missing, of another type, not finite or
//   does not fit the others. Unimplemented for a model_type or architecture that is not here (the
//   nearest name is given), and for fields that would change numbers and are not supported;
//   unknown fields are passed over.
absl::StatusOr<ModelConfig> ParseModelConfig(const std::string& text, const std::string& where);

// The config.json that ParseModelConfig reads back as the same, in the newer spelling.
std::string ModelConfigJson(const ModelConfig& config);

// A model whose parameters are recipes of config.dtype: SetDType, ParallelizeModule and then
// LoadPretrained, or Materialize for random values. It trains: Train(false) takes its dropouts
// away.
std::unique_ptr<CausalLM> MakeModel(const ModelConfig& config);
// LlamaPlan or GPT2Plan.
Plan PlanFor(const ModelConfig& config, const ModelPlanOptions& options = {});

struct LoadPretrainedOptions {
  SafetensorsOptions files = {};
  // A tensor of the model's that the folder lacks is no error: it gets its initial values, or keeps
  // those it has. The first rank prints the names of all such.
  bool allow_missing = false;
};
// Values of all parameters and persistent buffers from a folder's safetensors files (or one file),
// each rank reading its own parts only. Recipes are made with these values instead of their initial
// ones, in the dtype that they have (floating ones are converted); tensors that are there get them
// and lose their gradients. Of a tied parameter one name is enough. For a CausalLM, names may lack
// the model's prefix, and tensors that its IgnoresTensor names are passed over.
//   Comm:   a few host bytes per rank. All ranks of the model's meshes must call it.
//   Errors: TensorFolder::Open's; InvalidArgument listing all that is missing (with the nearest
//           name), unexpected, or of another shape or kind of dtype, and names of one parameter
//           with other bytes; Unavailable where a rank cannot read. On all ranks, and the model is
//           as it was.
absl::Status LoadPretrained(Module& model, const std::string& folder,
                            const LoadPretrainedOptions& options = {});

// Writes a model's parameters and persistent buffers and the files that came with a CausalLM's
// config (with the dtype of its parameters): all of it or nothing, as WriteTensors does. What
// LoadPretrained put into a CausalLM goes back under the names, into the files and with the headers
// that it came from, unless options.most_bytes is set; tensors that the model ignores do not. Of
// other models tied tensors are written once, under their first name.
//   Errors: WriteTensors'; FailedPrecondition for a parameter without values, and
//   CheckExportFolder's
//           for the files that a CausalLM has.
absl::Status SavePretrained(const Module& model, const std::string& folder,
                            const WriteOptions& options = {});
// That the folder has no tokenizer and no generation_config.json but those among `names`, which
// will be written over: they would stay, and be taken for the new model's; and that it is no
// checkpoint of a training. For before the work.
//   Errors: FailedPrecondition naming the file.
absl::Status CheckExportFolder(const std::string& folder, const std::set<std::string>& names);

}  // namespace dtensor
