#include "examples/text_data.h"

#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "dtensor/tensor/file.h"
#include "dtensor/tensor/status.h"

namespace dtensor {

absl::StatusOr<TextData> TextData::Read(const std::string& path, int64_t seq) {
  absl::StatusOr<std::string> bytes = ReadFile(path);
  if (!bytes.ok()) {
    return absl::Status(bytes.status().code(), absl::StrCat("--data ", bytes.status().message()));
  }
  TextData text;
  text.bytes_ = *std::move(bytes);
  if (text.size() < seq + 1) {
    return absl::InvalidArgumentError(absl::StrCat("--data ", path, " has ", text.size(),
                                                   " bytes, needs at least ", seq + 1,
                                                   " for --seq ", seq));
  }
  return text;
}

Batch TextData::Sample(uint64_t seed, int64_t step, int64_t batch, int64_t seq) const {
  std::mt19937_64 random(seed * 1000003 + static_cast<uint64_t>(step));
  Batch out = {ValueOrThrow(Tensor::Empty({batch, seq}, DType::kI64)),
               ValueOrThrow(Tensor::Empty({batch, seq}, DType::kI64))};
  auto* ids = out.ids.data_as<int64_t>();
  auto* targets = out.targets.data_as<int64_t>();
  for (int64_t b = 0; b < batch; ++b) {
    const uint64_t places = bytes_.size() - static_cast<uint64_t>(seq);
    const uint64_t start = random() % places;
    for (int64_t i = 0; i < seq; ++i) {
      *ids++ = static_cast<unsigned char>(bytes_[start + i]);
      *targets++ = static_cast<unsigned char>(bytes_[start + i + 1]);
    }
  }
  return out;
}

}  // namespace dtensor
