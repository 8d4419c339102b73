// The local backend, as it is, with each capability taken away, with a thread that makes progress,
// and as it serves no peers.
#include "tests/mesh/conformance.h"

#include "absl/strings/str_cat.h"
#include "dtensor/mesh/limited.h"
#include "tests/mesh/progress_backend.h"

namespace dtensor::conformance {
namespace {

constexpr CommCaps kAll = {.peers = true,
                           .strided = true,
                           .many_pieces = true,
                           .overlap = true,
                           .deferred_pull = true,
                           .rank_order = true,
                           .same_bits = true};

Setting Threads(std::string name, const CommCaps& caps, WrapBackend wrap) {
  return {std::move(name), caps, [wrap](int64_t ranks, SpmdBody body, absl::Duration timeout) {
            SpmdOptions options{timeout};
            options.wrap = wrap;
            return RunSpmd(ranks, body, options);
          }};
}

Setting Without(std::string name, bool CommCaps::* cap) {
  CommCaps caps = kAll;
  caps.*cap = false;
  caps.deferred_pull &= caps.overlap;
  return Threads("Without" + std::move(name), caps, Limited(caps));
}

}  // namespace

std::vector<Setting> Settings() {
  const CommCaps least = {.peers = true};
  CommCaps progress = kAll, fake = kAll;
  progress.deferred_pull = false;
  fake.peers = fake.deferred_pull = false;
  return {Threads("Local", kAll, nullptr),
          Without("Strided", &CommCaps::strided),
          Without("ManyPieces", &CommCaps::many_pieces),
          Without("Overlap", &CommCaps::overlap),
          Without("RankOrder", &CommCaps::rank_order),
          Without("SameBits", &CommCaps::same_bits),
          Threads("Least", least, Limited(least)),
          Threads("Progress", progress, WithProgress()),
          {"Fake", fake, [](int64_t ranks, SpmdBody body, absl::Duration) {
             return RunFake({.world = ranks, .rank = ranks - 1}, body);
           }}};
}

}  // namespace dtensor::conformance
