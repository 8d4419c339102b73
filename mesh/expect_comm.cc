#include "dtensor/mesh/expect_comm.h"

#include <fnmatch.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "dtensor/tensor/text.h"

namespace dtensor {
namespace {

// "blocks.*.mlp" names "blocks.0.mlp" and all below.
bool InModule(const std::string& pattern, const std::string& path) {
  const std::vector<std::string> want = absl::StrSplit(pattern, '.'),
                                 have = absl::StrSplit(path, '.');
  if (want.size() > have.size()) return false;
  for (size_t i = 0; i < want.size(); ++i) {
    if (fnmatch(want[i].c_str(), have[i].c_str(), 0) != 0) return false;
  }
  return true;
}

bool Agrees(const CommExpectation& x, const CommEvent& e) {
  return (!x.kind || *x.kind == e.kind) && (!x.mesh_dims || *x.mesh_dims == e.mesh_dims) &&
         (!x.phase || *x.phase == e.phase) && (!x.module || InModule(*x.module, e.module)) &&
         (!x.op || *x.op == e.op) && (!x.implicit || *x.implicit == e.implicit);
}

std::string Describe(const CommExpectation& x) {
  std::vector<std::string> parts;
  if (x.kind) parts.emplace_back(View(Name(*x.kind)));
  if (x.mesh_dims) parts.push_back(absl::StrCat("over ", *x.mesh_dims));
  if (x.phase) parts.push_back(absl::StrCat("in ", View(Name(*x.phase))));
  if (x.module) parts.push_back(absl::StrCat("of module ", *x.module));
  if (x.op) parts.push_back(absl::StrCat("by ", *x.op));
  if (x.implicit) parts.emplace_back(*x.implicit ? "implicit" : "explicit");
  return parts.empty() ? "anything" : absl::StrJoin(parts, " ");
}

}  // namespace

std::string CommMismatch(const CommTrace& trace, const std::vector<CommExpectation>& expected) {
  std::vector<int64_t> count(expected.size(), 0), bytes(expected.size(), 0);
  std::vector<std::string> problems;
  int64_t strangers = 0, stranger_bytes = 0;
  for (const CommEvent& e : trace.events()) {
    size_t i = 0;
    while (i < expected.size() && !Agrees(expected[i], e)) ++i;
    if (i == expected.size()) {
      ++strangers;
      stranger_bytes += e.bytes;
    } else {
      ++count[i];
      bytes[i] += e.bytes;
    }
  }
  for (size_t i = 0; i < expected.size(); ++i) {
    const CommExpectation& x = expected[i];
    const auto wrong = [&](absl::string_view what, int64_t want, int64_t have) {
      problems.push_back(absl::StrCat(Describe(x), ": expected ", what, want, ", got ", have));
    };
    if (x.count && *x.count != count[i]) wrong("count ", *x.count, count[i]);
    if (x.bytes && *x.bytes != bytes[i]) wrong("bytes ", *x.bytes, bytes[i]);
    if (x.max_bytes && *x.max_bytes < bytes[i]) wrong("at most bytes ", *x.max_bytes, bytes[i]);
  }
  if (strangers > 0) {
    problems.push_back(
        absl::StrCat("not expected: ", strangers, " collectives, ", stranger_bytes, " bytes"));
  }
  if (problems.empty()) return "";
  return absl::StrCat("communication differs from what is expected:\n  ",
                      absl::StrJoin(problems, "\n  "), "\nthe trace:\n",
                      trace.ToString(CommBy::kOp));
}

}  // namespace dtensor
