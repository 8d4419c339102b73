// What both ends of a store's connections ask of the system. Private to mesh/.
#pragma once

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdint>

#include "absl/time/time.h"

namespace dtensor::store {

// Small messages go at once. A machine that answers nothing for `silence` is given up: what was
// sent is not acknowledged, or, where nothing is sent, probes are not. (A process that is stopped
// is not found so: its system answers.)
inline void SetOptions(int fd, absl::Duration silence) {
  const auto set = [fd](int level, int name, int value) {
    (void)setsockopt(fd, level, name, &value, sizeof(value));
  };
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  const int64_t ms = std::clamp<int64_t>(absl::ToInt64Milliseconds(silence), 1000, 1 << 30);
  const int probe = static_cast<int>(std::clamp<int64_t>(ms / 4000, 1, 30000));  // seconds
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, probe);
  set(IPPROTO_TCP, TCP_KEEPINTVL, probe);
  set(IPPROTO_TCP, TCP_KEEPCNT, 3);
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(ms));
}

}  // namespace dtensor::store
