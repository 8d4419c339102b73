#include "dtensor/mesh/cost.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "dtensor/tensor/file.h"
#include "dtensor/tensor/status.h"

namespace dtensor {

bool CostModel::SpansNodes(absl::Span<const int64_t> ranks) const {
  return std::any_of(ranks.begin(), ranks.end(),
                     [&](int64_t r) { return r / ranks_per_node != ranks[0] / ranks_per_node; });
}

double CostModel::Steps(CollectiveKind kind, int64_t n) {
  if (kind == CollectiveKind::kSend || kind == CollectiveKind::kRecv) return 1;
  return static_cast<double>(kind == CollectiveKind::kAllReduce ? 2 * (n - 1) : n - 1);
}

double CostModel::CollectiveUs(CollectiveKind kind, int64_t bytes,
                               absl::Span<const int64_t> ranks) const {
  return CollectiveUs(kind, static_cast<double>(bytes), static_cast<int64_t>(ranks.size()),
                      SpansNodes(ranks));
}

double CostModel::CollectiveUs(CollectiveKind kind, double received, int64_t n,
                               bool spans_nodes) const {
  if (n <= 1) return 0;
  const LinkCost& link = spans_nodes ? inter_node : intra_node;
  const double steps = Steps(kind, n);
  const auto own = link.measured.find(kind);
  const MessageCost& cost = own != link.measured.end() ? own->second : link;
  double us = steps * cost.latency_us + received / cost.bytes_per_us;
  const bool reduces = kind == CollectiveKind::kAllReduce || kind == CollectiveKind::kReduceScatter;
  if (reduces && own == link.measured.end() && link.reduce_bytes_per_us > 0) {
    // Of what an all-reduce receives, half are sums already.
    us += received / (kind == CollectiveKind::kAllReduce ? 2 : 1) / link.reduce_bytes_per_us;
  }
  return us;
}

namespace {

constexpr int kNumKinds = static_cast<int>(CollectiveKind::kBarrier) + 1;

std::string KindName(CollectiveKind kind) { return std::string(Name(kind)); }

using Numbers = std::map<std::string, double>;

void WriteLink(const std::string& name, const LinkCost& link,
               std::vector<std::pair<std::string, double>>* out) {
  out->emplace_back(name + ".latency_us", link.latency_us);
  out->emplace_back(name + ".bytes_per_us", link.bytes_per_us);
  if (link.reduce_bytes_per_us > 0) {
    out->emplace_back(name + ".reduce_bytes_per_us", link.reduce_bytes_per_us);
  }
  for (const auto& [kind, cost] : link.measured) {
    const std::string prefix = absl::StrCat(name, ".", KindName(kind));
    out->emplace_back(prefix + ".latency_us", cost.latency_us);
    out->emplace_back(prefix + ".bytes_per_us", cost.bytes_per_us);
  }
}

absl::Status Bad(absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat("cost model: ", why));
}

absl::Status Take(const std::string& name, Numbers* given, double* value) {
  const auto it = given->find(name);
  if (it == given->end()) return Bad(absl::StrCat(name, " is missing"));
  *value = it->second;
  given->erase(it);
  return absl::OkStatus();
}

absl::Status TakeMessage(const std::string& name, Numbers* given, MessageCost* cost) {
  DT_RETURN_IF_ERROR(Take(name + ".latency_us", given, &cost->latency_us));
  return Take(name + ".bytes_per_us", given, &cost->bytes_per_us);
}

absl::Status TakeLink(const std::string& name, Numbers* given, LinkCost* link) {
  *link = {};
  DT_RETURN_IF_ERROR(TakeMessage(name, given, link));
  if (given->count(name + ".reduce_bytes_per_us") != 0) {
    DT_RETURN_IF_ERROR(Take(name + ".reduce_bytes_per_us", given, &link->reduce_bytes_per_us));
  }
  for (int k = 0; k < kNumKinds; ++k) {
    const auto kind = static_cast<CollectiveKind>(k);
    const std::string prefix = absl::StrCat(name, ".", KindName(kind));
    if (given->count(prefix + ".latency_us") + given->count(prefix + ".bytes_per_us") == 0)
      continue;
    DT_RETURN_IF_ERROR(TakeMessage(prefix, given, &link->measured[kind]));
  }
  return absl::OkStatus();
}

// A flat JSON object of positive numbers.
absl::StatusOr<Numbers> ReadNumbers(absl::string_view text) {
  text = absl::StripAsciiWhitespace(text);
  if (!absl::ConsumePrefix(&text, "{") || !absl::ConsumeSuffix(&text, "}")) {
    return Bad("must be a JSON object of numbers, {\"intra_node.latency_us\": 0.5, ...}");
  }
  Numbers given;
  for (const absl::string_view pair : absl::StrSplit(text, ',', absl::SkipWhitespace())) {
    const std::pair<absl::string_view, absl::string_view> parts =
        absl::StrSplit(pair, absl::MaxSplits(':', 1));
    absl::string_view name = absl::StripAsciiWhitespace(parts.first);
    double value;
    if (!absl::ConsumePrefix(&name, "\"") || !absl::ConsumeSuffix(&name, "\"") ||
        !absl::SimpleAtod(absl::StripAsciiWhitespace(parts.second), &value) || !(value > 0) ||
        !std::isfinite(value)) {
      return Bad(absl::StrCat("\"", pair, "\" is not \"name\": positive number"));
    }
    if (!given.emplace(std::string(name), value).second) return Bad(absl::StrCat(name, " twice"));
  }
  return given;
}

}  // namespace

std::string CostModel::ToJson() const {
  std::vector<std::pair<std::string, double>> numbers;
  WriteLink("intra_node", intra_node, &numbers);
  WriteLink("inter_node", inter_node, &numbers);
  numbers.emplace_back("ranks_per_node", ranks_per_node);
  std::vector<std::string> lines;
  for (const auto& [name, value] : numbers) {
    lines.push_back(absl::StrFormat("  \"%s\": %.17g", name, value));
  }
  return absl::StrCat("{\n", absl::StrJoin(lines, ",\n"), "\n}\n");
}

absl::StatusOr<CostModel> CostModel::FromJson(absl::string_view text) {
  DT_ASSIGN_OR_RETURN(Numbers given, ReadNumbers(text));
  CostModel model;
  double per_node = 0;
  DT_RETURN_IF_ERROR(TakeLink("intra_node", &given, &model.intra_node));
  DT_RETURN_IF_ERROR(TakeLink("inter_node", &given, &model.inter_node));
  DT_RETURN_IF_ERROR(Take("ranks_per_node", &given, &per_node));
  if (!given.empty()) return Bad(absl::StrCat("unknown name ", given.begin()->first));
  if (per_node > 1e9) return Bad(absl::StrCat("ranks_per_node ", per_node, " is above 1e9"));
  model.ranks_per_node = std::max<int64_t>(1, static_cast<int64_t>(per_node));
  return model;
}

absl::StatusOr<CostModel> CostModel::FromFile(const std::string& path) {
  DT_ASSIGN_OR_RETURN(const std::string text, ReadFile(path, /*most_bytes=*/1 << 20));
  absl::StatusOr<CostModel> model = FromJson(text);
  return model.ok() ? model : Prefixed(path, model.status());
}

}  // namespace dtensor
