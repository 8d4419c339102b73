// The local backend, as it is, with each capability taken away, with a thread that makes progress,
// and as it serves no peers; the first two also on the far device. (Not the third: that thread has
// kernels of the CPU only.)
#include "tests/mesh/conformance.h"

#include "absl/strings/str_cat.h"
#include "dtensor/mesh/limited.h"
#include "tests/common/remote_device.h"
#include "tests/mesh/progress_backend.h"

namespace dtensor::conformance {
namespace {

// Where calls run at once; on a device, which queues them, nothing is left to be pulled later.
constexpr CommCaps kAll = {.peers = true,
                           .strided = true,
                           .many_pieces = true,
                           .overlap = true,
                           .deferred_pull = true,
                           .rank_order = true,
                           .same_bits = true};

Setting Threads(std::string name, const CommCaps& caps, WrapBackend wrap,
                DeviceType device = DeviceType::kCpu) {
  return {std::move(name), caps,
          [wrap, device](int64_t ranks, SpmdBody body, absl::Duration timeout) {
            SpmdOptions options{timeout};
            options.wrap = wrap;
            options.device = device;
            return RunSpmd(ranks, body, options);
          },
          IsRemote(device)};
}

// As it is, and with less: names begin with `prefix`.
void AddSettings(const std::string& prefix, const CommCaps& all, DeviceType device,
                 std::vector<Setting>* settings) {
  const auto without = [&](const char* name, bool CommCaps::* cap) {
    CommCaps caps = all;
    caps.*cap = false;
    caps.deferred_pull &= caps.overlap;
    settings->push_back(Threads(prefix + "Without" + name, caps, Limited(caps), device));
  };
  settings->push_back(Threads(prefix.empty() ? "Local" : prefix, all, nullptr, device));
  without("Strided", &CommCaps::strided);
  without("ManyPieces", &CommCaps::many_pieces);
  without("Overlap", &CommCaps::overlap);
  without("RankOrder", &CommCaps::rank_order);
  without("SameBits", &CommCaps::same_bits);
  const CommCaps least = {.peers = true};
  settings->push_back(Threads(prefix + "Least", least, Limited(least), device));
}

}  // namespace

std::vector<Setting> Settings() {
  CommCaps queued = kAll, fake = kAll;
  queued.deferred_pull = false;
  CommCaps far = queued;
  far.graphs_together = true;
  fake.peers = fake.deferred_pull = false;
  std::vector<Setting> all;
  AddSettings("", kAll, DeviceType::kCpu, &all);
  all.push_back(Threads("Progress", queued, WithProgress()));
  AddSettings("Far", far, testing::RemoteDevice(), &all);
  all.push_back({"Fake", fake, [](int64_t ranks, SpmdBody body, absl::Duration) {
                   return RunFake({.world = ranks, .rank = ranks - 1}, body);
                 }});
  return all;
}

}  // namespace dtensor::conformance
