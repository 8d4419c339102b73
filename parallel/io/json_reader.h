// JSON of strangers read from front to back, each value when it is asked for: for texts of many MB
// of a known form (headers of safetensors files, indexes of folders), of which a tree would take
// many times the memory.
#pragma once

#include <cstdint>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace dtensor {

// Strict: what is not JSON in UTF-8 is an error where it is reached. Keeps nothing of what it has
// read, so that a key is there once is for callers to see, who keep the names.
//   Errors of all functions: InvalidArgument, "not JSON at byte 7: ..." or "there is the number 8,
//   not a string".
class JsonReader {
 public:
  static constexpr int64_t kMostName = 4096;  // bytes

  // `text` outlives this.
  explicit JsonReader(absl::string_view text) : text_(text) {}

  // The next value, an object: `field` is called after each name and must read the value. Errors:
  // also those of `field`, and for names of more than kMostName bytes.
  absl::Status Object(absl::FunctionRef<absl::Status(const std::string& name)> field);
  // The same with the items of an array.
  absl::Status List(absl::FunctionRef<absl::Status()> item);
  // Errors: also for one of more than `most_bytes`, before memory is taken for it.
  absl::StatusOr<std::string> String(int64_t most_bytes);
  // From 0 to 2^63 - 1.
  absl::StatusOr<int64_t> WholeNumber();
  // A value of any kind: its text. Errors: also for a key that is there twice, more than
  // `most_levels` levels, and, over all calls, more than 100,000 values.
  absl::StatusOr<absl::string_view> Skip(int most_levels);
  // What comes last: nothing but white space may follow.
  absl::Status End();

  // The error of a key that has been there.
  static absl::Status Twice(absl::string_view name);

 private:
  char Peek();        // the next character that is no white space; 0 at the end
  bool Take(char c);  // goes past it if it is the next one
  absl::string_view Word() const;
  absl::Status Escape(std::string* out);
  int Hex4();
  absl::Status Not(absl::string_view wanted);
  absl::Status Bad(absl::string_view expected) const;

  const absl::string_view text_;
  size_t at_ = 0;
  int64_t skipped_ = 0;
};

}  // namespace dtensor
