// What a store says over a connection, in both directions: frames of a fixed head (what this is,
// how long, the token of the launch) and a body of a number, a code and some texts. Private to
// mesh/.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace dtensor::store {

// Who does not know it is a stranger. Any 32 bytes.
inline constexpr size_t kTokenBytes = 32;
inline constexpr size_t kHeadBytes = 8 + kTokenBytes;
inline constexpr size_t kMostBytes = size_t{64} << 20;  // of a body
inline constexpr size_t kMostHello = 4096;              // of the first, from whoever connects

enum class Op : uint8_t { kHello, kSet, kGet, kWait, kAdd, kExchange, kBye, kRemove };

struct Message {
  uint8_t code = 0;  // of a request an Op, of a reply an absl::StatusCode
  uint64_t id = 0;   // a reply has that of its request
  std::vector<std::string> texts;
};

// 32 characters that nobody guesses. Errors: Unavailable without a source of them.
absl::StatusOr<std::string> NewToken();
// In a time that does not depend on where they differ.
bool SameToken(absl::string_view a, absl::string_view b);

std::string Encode(const Message& message, absl::string_view token);
// Size of the body that follows this head.
//   Errors: InvalidArgument for another magic number and more than `most` bytes; PermissionDenied
//   for another token.
absl::StatusOr<size_t> ParseHead(absl::string_view head, absl::string_view token, size_t most);
absl::StatusOr<Message> ParseBody(absl::string_view body);

}  // namespace dtensor::store
