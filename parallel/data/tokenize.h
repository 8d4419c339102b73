// Text to the token ids that a model is trained on.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "dtensor/parallel/text/tokenizer.h"

namespace dtensor {

// What `tokenizer` makes of a whole text file, with the tokens that the model expects around a
// text. Takes memory for the text and its tokens.
//   Errors: those of ReadFile (tensor/file.h; at most 1 GiB) and of Tokenizer::Encode, with the
//   path.
absl::StatusOr<std::vector<int64_t>> TokenizeFile(const Tokenizer& tokenizer,
                                                  const std::string& path);

}  // namespace dtensor
