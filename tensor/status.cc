#include "dtensor/tensor/status.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <vector>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "dtensor/tensor/control_flow.h"

namespace dtensor {
namespace {

constexpr absl::string_view kRankLocal = "dtensor/rank_local";
constexpr absl::string_view kCulprit = "dtensor/culprit";
// Places in the message and not texts: absl::Status::ToString prints payloads.
constexpr absl::string_view kReport = "dtensor/report";  // bytes of the report at the end
constexpr absl::string_view kOrigin = "dtensor/origin";  // bytes of the function's name and cause

// The numbers of a payload; empty where there is none.
std::vector<size_t> Numbers(const absl::Status& status, absl::string_view url) {
  std::vector<size_t> numbers;
  const auto payload = status.GetPayload(url);
  if (!payload) return numbers;
  const std::string text(*payload);
  for (const absl::string_view part : absl::StrSplit(text, ' ')) {
    numbers.emplace_back();
    if (!absl::SimpleAtoi(part, &numbers.back())) return {};
  }
  return numbers;
}

struct Message {
  absl::string_view words, report;
};
Message Split(const absl::Status& status) {
  const std::vector<size_t> size = Numbers(status, kReport);
  const absl::string_view text = status.message();
  const size_t words = text.size() - (size.empty() ? 0 : std::min(size[0], text.size()));
  return {text.substr(0, words), text.substr(words)};
}

void CopyPayloads(const absl::Status& from, absl::Status* to) {
  from.ForEachPayload(
      [&](absl::string_view url, const absl::Cord& payload) { to->SetPayload(url, payload); });
}

// Other words, the same report and marks. The origin goes: its places were in the old words.
absl::Status Reworded(const absl::Status& status, absl::string_view words) {
  absl::Status result(status.code(), absl::StrCat(words, Split(status).report));
  CopyPayloads(status, &result);
  result.ErasePayload(kOrigin);
  return result;
}

}  // namespace

static constexpr char kNoValues[] = "dtensor/no_values";  // a payload

absl::Status NoValues(absl::string_view message) {
  absl::Status status = absl::FailedPreconditionError(message);
  status.SetPayload(kNoValues, absl::Cord());
  return status;
}

bool IsNoValues(const absl::Status& status) { return status.GetPayload(kNoValues).has_value(); }

void ThrowIfError(const absl::Status& status) {
  if (!status.ok()) throw Error(status);
}

void CheckFailed(const char* file, int line, const char* condition, const std::string& message) {
  std::fprintf(stderr, "%s:%d: invariant broken: %s %s\n", file, line, condition, message.c_str());
  std::abort();
}

void Throw(const absl::Status& status) {
  ThrowIfError(status);
  CheckFailed(__FILE__, __LINE__, "!status.ok()", "Throw needs an error");
}

absl::Status RankLocal(absl::Status status) {
  status.SetPayload(kRankLocal, absl::Cord());
  return status;
}

bool IsRankLocal(const absl::Status& status) { return status.GetPayload(kRankLocal).has_value(); }

absl::Status WithCulprit(absl::Status status, int64_t rank) {
  status.SetPayload(kCulprit, absl::Cord(absl::StrCat(rank)));
  return status;
}

std::optional<int64_t> CulpritOf(const absl::Status& status) {
  const auto payload = status.GetPayload(kCulprit);
  int64_t rank;
  if (!payload || !absl::SimpleAtoi(std::string(*payload), &rank)) return std::nullopt;
  return rank;
}

absl::Status FailureOf(int64_t rank, const absl::Status& why) {
  const absl::Status failed =
      Recoded(Prefixed(absl::StrCat("rank ", rank, " failed"), why), absl::StatusCode::kAborted);
  return RankLocal(WithCulprit(failed, CulpritOf(why).value_or(rank)));
}

absl::Status WithReport(const absl::Status& status, absl::string_view report) {
  absl::Status result(status.code(), absl::StrCat(status.message(), report));
  CopyPayloads(status, &result);
  const size_t size = Split(status).report.size() + report.size();
  result.SetPayload(kReport, absl::Cord(absl::StrCat(size)));
  return result;
}

absl::Status Prefixed(absl::string_view before, const absl::Status& status) {
  return Reworded(status, absl::StrCat(before, ": ", Split(status).words));
}

absl::Status Recoded(const absl::Status& status, absl::StatusCode code) {
  absl::Status result(code, status.message());
  CopyPayloads(status, &result);
  return result;
}

absl::Status InFunction(absl::string_view function, const absl::Status& cause,
                        absl::string_view details) {
  const absl::string_view words = Split(cause).words;
  absl::Status status = Reworded(cause, absl::StrCat("[", function, "] ", words, details));
  status.SetPayload(kOrigin, absl::Cord(absl::StrCat(function.size(), " ", words.size())));
  return status;
}

std::optional<ErrorOrigin> OriginOf(const absl::Status& status) {
  const std::vector<size_t> sizes = Numbers(status, kOrigin);
  const absl::string_view words = Split(status).words;
  if (sizes.size() != 2 || sizes[0] + sizes[1] + 3 > words.size()) return std::nullopt;
  return ErrorOrigin{std::string(words.substr(1, sizes[0])),
                     Reworded(status, words.substr(sizes[0] + 3, sizes[1]))};
}

absl::Status CurrentException() {
  try {
    throw;
  } catch (const Error& e) {
    return e.status();
  } catch (const ControlFlow&) {
    throw;
  } catch (const std::bad_alloc&) {
    return RankLocal(absl::ResourceExhaustedError("out of memory (std::bad_alloc)"));
  } catch (const std::exception& e) {
    return RankLocal(absl::InternalError(e.what()));
  } catch (...) {
    return RankLocal(absl::InternalError("unknown exception"));
  }
}

}  // namespace dtensor
