#include "dtensor/parallel/data/tokenize.h"

#include "dtensor/tensor/file.h"
#include "dtensor/tensor/status.h"

namespace dtensor {

absl::StatusOr<std::vector<int64_t>> TokenizeFile(const Tokenizer& tokenizer,
                                                  const std::string& path) {
  DT_ASSIGN_OR_RETURN(const std::string text, ReadFile(path));
  absl::StatusOr<std::vector<int64_t>> ids = tokenizer.Encode(text);
  return ids.ok() ? ids : Prefixed(path, ids.status());
}

}  // namespace dtensor
