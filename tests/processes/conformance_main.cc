// The conformance suite on ranks that are processes: under mpirun or dtensor-run, every process
// runs every test. A test of fewer ranks than there are has the first of them; the others look on.
// With DT_TEST_DEVICE=cuda by NCCL, each process with a GPU of its own.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>

#include "absl/strings/str_cat.h"
#include "dtensor/mesh/process/endpoint.h"
#include "dtensor/mesh/process/process_world.h"
#include "dtensor/mesh/store.h"
#include "dtensor/tensor/status.h"
#include "gtest/gtest.h"
#include "tests/common/remote_device.h"
#include "tests/mesh/conformance.h"

namespace dtensor::conformance {

std::vector<Setting> Settings() {
  const bool cuda = std::getenv("DT_TEST_DEVICE") != nullptr;
  const bool each = std::getenv("DTENSOR_CHECK") != nullptr;  // every call of NCCL is compared
  const DeviceType device = cuda ? testing::RemoteDevice() : DeviceType();
  const CommCaps caps = {.peers = true,
                         .many_pieces = true,
                         .overlap = !each,
                         .rank_order = !cuda,
                         .same_bits = true,
                         .graphs = cuda};
  return {{"Processes", caps, [device](int64_t ranks, SpmdBody body, absl::Duration timeout) {
             SpmdOptions options{timeout};
             options.device = device;
             return RunOnProcesses(*ValueOrThrow(Endpoint::OfLaunch()), ranks, body, options);
           }}};
}

}  // namespace dtensor::conformance

namespace {

// Rank 0 draws one for all.
absl::Status ShareSeed(dtensor::Endpoint& endpoint) {
  dtensor::SpmdOptions options{absl::Seconds(60)};
  options.device = dtensor::DeviceType();
  const auto share = [](dtensor::RankContext& context) -> absl::Status {
    dtensor::Store& store = context.store();
    const std::string mine = absl::StrCat(std::random_device{}());
    if (context.rank() == 0) DT_RETURN_IF_ERROR(store.Set("seed", mine));
    DT_ASSIGN_OR_RETURN(const std::string seed, store.Get("seed", absl::Now() + absl::Seconds(60)));
    setenv("DT_SEED", seed.c_str(), /*overwrite=*/0);
    return absl::OkStatus();
  };
  return dtensor::RunOnProcesses(endpoint, endpoint.size(), share, options);
}

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const auto endpoint = dtensor::Endpoint::OfLaunch();
  if (!endpoint.ok() || *endpoint == nullptr) {
    fprintf(stderr, "start it by mpirun or dtensor-run: %s\n",
            endpoint.status().ToString().c_str());
    return 1;
  }
  const absl::Status shared = ShareSeed(**endpoint);
  if (!shared.ok()) {
    fprintf(stderr, "%s\n", shared.ToString().c_str());
    return 1;
  }
  return RUN_ALL_TESTS();
}
