// Status: how errors travel.
//
// Inside the library and in every factory, planner, parser and communicator call an error is an
// `absl::Status`. At the expression surface (ops on DTensor, Module::Forward, Backward) it becomes
// one exception type, `dtensor::Error`, thrown by `ThrowIfError` only.
#pragma once

#include <exception>
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
