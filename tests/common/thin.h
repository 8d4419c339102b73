// How much a test of very many cases leaves out under a sanitizer, which makes everything ten times
// as slow: it tries every Thin(n)-th of them. DT_THOROUGH=1 in the environment leaves out nothing,
// DT_THIN=1 as much in any build.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace dtensor::testing {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

// Whether what the thread sanitizer itself dies of is tried; what is left out is printed with the
// reason, so that no case goes missing silently.
inline bool SurvivesThreadSanitizer(const char* what, const char* why_not) {
#ifdef __SANITIZE_THREAD__
  std::printf("left out under the thread sanitizer: %s: %s\n", what, why_not);
  return false;
#else
  static_cast<void>(what);
  static_cast<void>(why_not);
  return true;
#endif
}
// Its memory is mapped from a file.
inline constexpr const char* kFileLimit = "dies of SIGBUS under ulimit -f";

inline bool Thorough() {
  static const bool thorough = std::getenv("DT_THOROUGH") != nullptr;
  return thorough;
}

inline int64_t Thin(int64_t n) {
  static const bool thin = (kSanitized || std::getenv("DT_THIN") != nullptr) && !Thorough();
  return thin ? n : 1;
}

// Whether case number `i` is tried where a test is thin: every n-th, others where DT_PART (below)
// says so.
inline bool InTurn(size_t i, int64_t n) {
  static const char* const part = std::getenv("DT_PART");
  const uint64_t turn = part == nullptr ? 0 : std::strtoull(part, nullptr, 10);
  return (i + turn) % static_cast<size_t>(Thin(n)) == 0;
}

// Whether case number `i` is tried where DT_PART is set (CI: to a number that is another for every
// commit, and over the turns of each kind comes to all parts): every `parts`-th. Without it all
// are.
inline bool InPart(size_t i, size_t parts) {
  static const char* const part = std::getenv("DT_PART");
  return part == nullptr || Thorough() || (i + std::strtoull(part, nullptr, 10)) % parts == 0;
}

}  // namespace dtensor::testing
