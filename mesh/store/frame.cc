#include "dtensor/mesh/store/frame.h"

#include <sys/random.h>

#include <cstring>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace dtensor::store {
namespace {

constexpr uint32_t kMagic = 0x31535444;  // "DTS1"; another version of these frames: another number

template <class T>
void Put(std::string* out, T value) {
  out->append(reinterpret_cast<const char*>(&value), sizeof(value));
}

template <class T>
bool Take(absl::string_view* from, T* value) {
  if (from->size() < sizeof(T)) return false;
  std::memcpy(value, from->data(), sizeof(T));
  from->remove_prefix(sizeof(T));
  return true;
}

}  // namespace

absl::StatusOr<std::string> NewToken() {
  char bytes[kTokenBytes / 2];
  if (getrandom(bytes, sizeof(bytes), 0) != sizeof(bytes)) {
    return absl::UnavailableError(
        absl::StrCat("no random bytes for the token of a store: ", strerror(errno)));
  }
  return absl::BytesToHexString(absl::string_view(bytes, sizeof(bytes)));
}

bool SameToken(absl::string_view a, absl::string_view b) {
  if (a.size() != b.size()) return false;
  unsigned char differ = 0;
  for (size_t i = 0; i < a.size(); ++i) differ |= static_cast<unsigned char>(a[i] ^ b[i]);
  return differ == 0;
}

std::string Encode(const Message& message, absl::string_view token) {
  std::string body;
  Put(&body, message.code);
  Put(&body, message.id);
  Put(&body, static_cast<uint32_t>(message.texts.size()));
  for (const std::string& text : message.texts) {
    Put(&body, static_cast<uint32_t>(text.size()));
    body += text;
  }
  std::string frame;
  frame.reserve(kHeadBytes + body.size());
  Put(&frame, kMagic);
  Put(&frame, static_cast<uint32_t>(body.size()));
  frame.append(token.data(), token.size());
  return frame + body;
}

absl::StatusOr<size_t> ParseHead(absl::string_view head, absl::string_view token, size_t most) {
  uint32_t magic = 0, size = 0;
  if (!Take(&head, &magic) || !Take(&head, &size) || magic != kMagic) {
    return absl::InvalidArgumentError("it does not speak to a store");
  }
  if (!SameToken(head.substr(0, kTokenBytes), token)) {
    return absl::PermissionDeniedError("it has another token");
  }
  if (size > most) {
    return absl::InvalidArgumentError(
        absl::StrCat("a message of ", size, " bytes; at most ", most));
  }
  return size;
}

absl::StatusOr<Message> ParseBody(absl::string_view body) {
  const absl::Status bad = absl::InvalidArgumentError("a message that makes no sense");
  Message message;
  uint32_t count = 0;
  if (!Take(&body, &message.code) || !Take(&body, &message.id) || !Take(&body, &count)) return bad;
  for (uint32_t i = 0; i < count; ++i) {
    uint32_t size = 0;
    if (!Take(&body, &size) || size > body.size()) return bad;
    message.texts.emplace_back(body.substr(0, size));
    body.remove_prefix(size);
  }
  if (!body.empty()) return bad;
  return message;
}

}  // namespace dtensor::store
