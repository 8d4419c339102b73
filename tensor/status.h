// Status: how errors travel.
//
// Inside the library and in every factory, planner, parser and communicator call an error is an
// `absl::Status`. At the expression surface (ops on DTensor, Module::Forward, Backward) it becomes
// one exception type, `dtensor::Error`, thrown by `ThrowIfError` only.
//
// An error is uniform unless it is marked rank-local: it follows from what all ranks know (shapes,
// placements, attributes), so all fail alike and the world stays usable. A rank-local one comes
// from what one rank alone has: memory, its data, a file, a function of the program that throws, a
// peer. Others wait for this rank then, so functions on a mesh abort its groups (TellPeers in
// dtensor/errors.h). The mark, and who and what failed, are payloads: nothing reads messages.
#pragma once

#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace dtensor {

// The one exception of the library. Immutable; safe to copy between threads.
class Error : public std::exception {
 public:
  explicit Error(absl::Status status) : status_(std::move(status)), message_(status_.message()) {}
  const char* what() const noexcept override { return message_.c_str(); }
  const absl::Status& status() const { return status_; }

 private:
  absl::Status status_;
  std::string message_;
};

// FailedPrecondition, marked: a program asks for the elements of a tensor that has none (on meta).
absl::Status NoValues(absl::string_view message);
bool IsNoValues(const absl::Status& status);

// Throws `Error` when `status` is not OK.
void ThrowIfError(const absl::Status& status);
// The same for a status that is an error.
[[noreturn]] void Throw(const absl::Status& status);

template <class T>
T ValueOrThrow(absl::StatusOr<T> value) {
  ThrowIfError(value.status());
  return *std::move(value);
}

// Marks an error as rank-local.
absl::Status RankLocal(absl::Status status);
bool IsRankLocal(const absl::Status& status);

// Names the world rank that failed or did not come.
absl::Status WithCulprit(absl::Status status, int64_t rank);
std::optional<int64_t> CulpritOf(const absl::Status& status);

// What the peers of a rank that failed get: Aborted, "rank 2 failed: message", rank-local, with
// this culprit unless `why` names one already.
absl::Status FailureOf(int64_t rank, const absl::Status& why);

// Puts a report of several lines behind the message, where it stays whatever words are added.
absl::Status WithReport(const absl::Status& status, absl::string_view report);

// "before: message", with all payloads; so do the two below.
absl::Status Prefixed(absl::string_view before, const absl::Status& status);
absl::Status Recoded(const absl::Status& status, absl::StatusCode code);
// "[function] cause" and `details`: what failed at the surface.
absl::Status InFunction(absl::string_view function, const absl::Status& cause,
                        absl::string_view details = "");
// Which function that was and the cause as it was given, for whoever says it in other words. Null
// where the status did not come from InFunction.
struct ErrorOrigin {
  std::string function;
  absl::Status cause;
};
std::optional<ErrorOrigin> OriginOf(const absl::Status& status);

// In a catch block: the exception as a status. An Error keeps its own; another exception is
// rank-local: ResourceExhausted for std::bad_alloc, else Internal with its text.
absl::Status CurrentException();

// Prints `message` with its place and ends the process: for broken invariants only.
[[noreturn]] void CheckFailed(const char* file, int line, const char* condition,
                              const std::string& message);

}  // namespace dtensor

#define DT_CONCAT_INNER(a, b) a##b
#define DT_CONCAT(a, b) DT_CONCAT_INNER(a, b)

#define DT_RETURN_IF_ERROR(expr)             \
  do {                                       \
    absl::Status dt_status_ = (expr);        \
    if (!dt_status_.ok()) return dt_status_; \
  } while (false)

#define DT_ASSIGN_OR_RETURN(lhs, expr) \
  DT_ASSIGN_OR_RETURN_INNER(DT_CONCAT(dt_status_or_, __LINE__), lhs, expr)
#define DT_ASSIGN_OR_RETURN_INNER(var, lhs, expr) \
  auto var = (expr);                              \
  if (!var.ok()) return var.status();             \
  lhs = *std::move(var)

#define DT_CHECK(cond)                                                  \
  do {                                                                  \
    if (!(cond)) ::dtensor::CheckFailed(__FILE__, __LINE__, #cond, ""); \
  } while (false)
#define DT_CHECK_MSG(cond, msg)                                            \
  do {                                                                     \
    if (!(cond)) ::dtensor::CheckFailed(__FILE__, __LINE__, #cond, (msg)); \
  } while (false)
