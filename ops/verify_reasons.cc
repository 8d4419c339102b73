#include "dtensor/ops/verify_reasons.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace dtensor {
namespace {

bool Matches(absl::string_view pattern, absl::string_view text) {
  const size_t star = pattern.find('*');
  if (star == absl::string_view::npos) return pattern == text;
  if (!absl::ConsumePrefix(&text, pattern.substr(0, star))) return false;
  for (size_t skip = 0; skip <= text.size(); ++skip) {
    if (Matches(pattern.substr(star + 1), text.substr(skip))) return true;
  }
  return false;
}

}  // namespace

const std::vector<MissingReason>& MissingReasons() {
  static const std::vector<MissingReason>* reasons = new std::vector<MissingReason>{
#define DT_MISSING(ops, pattern, reason) {ops, pattern, reason},
#include "dtensor/ops/verify_reasons.inc"
#undef DT_MISSING
  };
  return *reasons;
}

const MissingReason* ReasonFor(const std::string& op, const VerifyFinding& missing) {
  for (const MissingReason& r : MissingReasons()) {
    for (absl::string_view name : absl::StrSplit(r.ops, ' ')) {
      if (name == op && Matches(r.pattern, missing.pattern)) return &r;
    }
  }
  return nullptr;
}

std::string DescribeMissing(
    const std::vector<std::pair<std::string, std::vector<VerifyFinding>>>& by_op) {
  std::string text;
  for (const MissingReason& r : MissingReasons()) {
    std::vector<std::string> rows;
    for (const auto& [op, findings] : by_op) {
      for (const VerifyFinding& f : findings) {
        if (ReasonFor(op, f) == &r) rows.push_back(absl::StrCat(op, ": ", f.pattern));
      }
    }
    if (rows.empty()) continue;
    absl::StrAppend(&text, "not offered: ", r.reason, "\n    ", absl::StrJoin(rows, "\n    "),
                    "\n");
  }
  for (const auto& [op, findings] : by_op) {
    for (const VerifyFinding& f : findings) {
      if (ReasonFor(op, f) != nullptr) continue;
      absl::StrAppend(&text, "MISSING without a reason: ", op, ": ", f.row, ": ", f.why, "\n    ",
                      f.reproducer, "\n");
    }
  }
  return text;
}

}  // namespace dtensor
