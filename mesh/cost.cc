#include "mesh/cost.h"

#include <algorithm>
#include <map>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "tensor/status.h"

namespace dtensor {

bool CostModel::SpansNodes(absl::Span<const int64_t> ranks) const {
  return std::any_of(ranks.begin(), ranks.end(),
                     [&](int64_t r) { return r / ranks_per_node != ranks[0] / ranks_per_node; });
}

double CostModel::CollectiveUs(CollectiveKind kind, int64_t bytes,
                               absl::Span<const int64_t> ranks) const {
  const auto n = static_cast<double>(ranks.size());
  if (n <= 1) return 0;
  const LinkCost& link = SpansNodes(ranks) ? inter_node : intra_node;
  double steps = n - 1;
  if (kind == CollectiveKind::kAllReduce) steps = 2 * (n - 1);
  if (kind == CollectiveKind::kSend || kind == CollectiveKind::kRecv) steps = 1;
  return steps * link.latency_us + static_cast<double>(bytes) / link.bytes_per_us;
}

namespace {

// The model as flat names; the order in which it is written.
std::vector<std::pair<std::string, double*>> Fields(CostModel* m, double* per_node) {
  return {{"intra_node.latency_us", &m->intra_node.latency_us},
          {"intra_node.bytes_per_us", &m->intra_node.bytes_per_us},
          {"inter_node.latency_us", &m->inter_node.latency_us},
          {"inter_node.bytes_per_us", &m->inter_node.bytes_per_us},
          {"ranks_per_node", per_node}};
}

}  // namespace

std::string CostModel::ToJson() const {
  CostModel copy = *this;
  auto per_node = static_cast<double>(ranks_per_node);
  std::vector<std::string> lines;
  for (const auto& [name, value] : Fields(&copy, &per_node)) {
    lines.push_back(absl::StrCat("  \"", name, "\": ", *value));
  }
  return absl::StrCat("{\n", absl::StrJoin(lines, ",\n"), "\n}\n");
}

absl::StatusOr<CostModel> CostModel::FromJson(absl::string_view text) {
  const auto bad = [](absl::string_view why) {
    return absl::InvalidArgumentError(absl::StrCat("cost model: ", why));
  };
  text = absl::StripAsciiWhitespace(text);
  if (!absl::ConsumePrefix(&text, "{") || !absl::ConsumeSuffix(&text, "}")) {
    return bad("must be a JSON object of numbers, {\"intra_node.latency_us\": 0.5, ...}");
  }
  std::map<std::string, double> given;
  for (const absl::string_view pair : absl::StrSplit(text, ',', absl::SkipWhitespace())) {
    const std::pair<absl::string_view, absl::string_view> parts =
        absl::StrSplit(pair, absl::MaxSplits(':', 1));
    absl::string_view name = absl::StripAsciiWhitespace(parts.first);
    double value;
    if (!absl::ConsumePrefix(&name, "\"") || !absl::ConsumeSuffix(&name, "\"") ||
        !absl::SimpleAtod(absl::StripAsciiWhitespace(parts.second), &value) || !(value > 0)) {
      return bad(absl::StrCat("\"", pair, "\" is not \"name\": positive number"));
    }
    if (!given.emplace(std::string(name), value).second) return bad(absl::StrCat(name, " twice"));
  }
  CostModel model;
  double per_node = 0;
  for (const auto& [name, value] : Fields(&model, &per_node)) {
    const auto it = given.find(name);
    if (it == given.end()) return bad(absl::StrCat(name, " is missing"));
    *value = it->second;
    given.erase(it);
  }
  if (!given.empty()) return bad(absl::StrCat("unknown name ", given.begin()->first));
  model.ranks_per_node = std::max<int64_t>(1, static_cast<int64_t>(per_node));
  return model;
}

}  // namespace dtensor
