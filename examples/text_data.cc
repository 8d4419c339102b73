#include "examples/text_data.h"

#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tensor/status.h"

namespace dtensor {

absl::StatusOr<TextData> TextData::Read(const std::string& path, int64_t seq) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream content;
  if (file) content << file.rdbuf();
  TextData text;
  text.bytes_ = content.str();
  if (!file.is_open() || file.bad() || std::filesystem::is_directory(path)) {
    return absl::NotFoundError(absl::StrCat("--data ", path, ": cannot be read"));
  }
  if (text.size() < seq + 1) {
    return absl::InvalidArgumentError(absl::StrCat("--data ", path, ": has ", text.size(),
                                                   " bytes, needs at least ", seq + 1,
                                                   " for --seq ", seq));
  }
  return text;
}

Batch TextData::Sample(uint64_t seed, int64_t step, int64_t batch, int64_t seq) const {
  std::mt19937_64 random(seed * 1000003 + static_cast<uint64_t>(step));
  std::vector<int64_t> ids, targets;
  for (int64_t b = 0; b < batch; ++b) {
    const uint64_t places = bytes_.size() - static_cast<uint64_t>(seq);
    const uint64_t start = random() % places;
    for (int64_t i = 0; i < seq; ++i) {
      ids.push_back(static_cast<unsigned char>(bytes_[start + i]));
      targets.push_back(static_cast<unsigned char>(bytes_[start + i + 1]));
    }
  }
  return {ValueOrThrow(Tensor::FromVector(ids, {batch, seq}, DType::kI64)),
          ValueOrThrow(Tensor::FromVector(targets, {batch, seq}, DType::kI64))};
}

}  // namespace dtensor
