#include "dtensor/parallel/train/schedule.h"

#include <cmath>
#include <numbers>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "dtensor/names.h"

namespace dtensor {

double LearningRate::At(int64_t step) const {
  if (step < warmup) return peak * static_cast<double>(step + 1) / static_cast<double>(warmup);
  if (decay == Decay::kConstant) return peak;
  if (step >= steps) return least;
  const double progress = static_cast<double>(step - warmup) / static_cast<double>(steps - warmup);
  const double left =
      decay == Decay::kLinear ? 1 - progress : (1 + std::cos(std::numbers::pi * progress)) / 2;
  return least + (peak - least) * left;
}

absl::Status LearningRate::Check() const {
  const auto refuse = [](const auto&... words) {
    return absl::InvalidArgumentError(absl::StrCat("[learning rate] ", words...));
  };
  if (!(peak > 0) || !std::isfinite(peak)) return refuse("it must be positive, got ", peak);
  if (!(least >= 0 && least <= peak)) {
    return refuse("what it ends at must be from 0 to ", peak, ", got ", least);
  }
  if (warmup < 0 || warmup > steps) {
    return refuse("the warm-up must be from 0 to the ", steps, " steps there are, got ", warmup);
  }
  if (decay != Decay::kConstant && steps == 0) return refuse("a decay needs steps, got none");
  return absl::OkStatus();
}

absl::StatusOr<LearningRate::Decay> ParseDecay(absl::string_view name) {
  const std::vector<std::string> names = {"constant", "linear", "cosine"};
  for (size_t i = 0; i < names.size(); ++i) {
    if (name == names[i]) return static_cast<LearningRate::Decay>(i);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("unknown schedule \"", name,
                   "\"; nearest: ", absl::StrJoin(NearestNames(std::string(name), names), ", ")));
}

}  // namespace dtensor
