// The conformance suite on ranks with a GPU each, by NCCL: as it is used, and with
// DTENSOR_CHECK=each, where every call is compared; of threads, in operations of 5 elements as
// calls of more than 2^31 are, and of a world of processes (which are threads here, too:
// network.h).
#include <cstdlib>

#include "dtensor/mesh/nccl/backend.h"
#include "dtensor/tensor/device.h"
#include "tests/mesh/conformance.h"
#include "tests/mesh/network.h"

namespace dtensor::conformance {

std::vector<Setting> Settings() {
  const bool each = std::getenv("DTENSOR_CHECK") != nullptr;
  const CommCaps caps = {
      .peers = true, .many_pieces = true, .overlap = !each, .same_bits = true, .graphs = true};
  const auto threads = [&](std::string name, const WrapBackend& wrap) -> Setting {
    return {std::move(name), caps, [wrap](int64_t ranks, SpmdBody body, absl::Duration timeout) {
              SpmdOptions options{timeout};
              options.device = DeviceType::kCuda;
              options.wrap = wrap;
              return RunSpmd(ranks, body, options);
            }};
  };
  const auto in_pieces = [](std::unique_ptr<CommBackend> inner) {
    if (inner->caps().peers && !inner->caps().rank_order) LimitNcclElements(*inner, 5);
    return inner;
  };
  const auto processes = [](int64_t ranks, SpmdBody body, absl::Duration timeout) {
    SpmdOptions options{timeout};
    options.device = DeviceType::kCuda;
    return testing::ThreadProcesses(ranks).Run(body, [&](int64_t) { return options; })[0];
  };
  return {threads("Nccl", nullptr),
          threads("NcclInPieces", in_pieces),
          {"NcclProcesses", caps, processes}};
}

}  // namespace dtensor::conformance
