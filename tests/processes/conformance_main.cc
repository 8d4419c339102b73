// The conformance suite on ranks that are processes: under mpirun, every process runs every test.
// A test of fewer ranks than there are has the first of them; the others look on.
#include <cstdio>
#include <cstdlib>

#include "dtensor/mesh/process/endpoint.h"
#include "dtensor/mesh/process/process_world.h"
#include "dtensor/tensor/status.h"
#include "gtest/gtest.h"
#include "tests/mesh/conformance.h"

namespace dtensor::conformance {

std::vector<Setting> Settings() {
  const CommCaps caps = {.peers = true, .many_pieces = true, .rank_order = true, .same_bits = true};
  return {{"Mpi", caps, [](int64_t ranks, SpmdBody body, absl::Duration timeout) {
             SpmdOptions options{timeout};
             options.device = DeviceType();
             return RunOnProcesses(*ValueOrThrow(Endpoint::OfLaunch()), ranks, body, options);
           }}};
}

}  // namespace dtensor::conformance

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const auto endpoint = dtensor::Endpoint::OfLaunch();
  if (!endpoint.ok() || *endpoint == nullptr) {
    fprintf(stderr, "start it by mpirun: %s\n", endpoint.status().ToString().c_str());
    return 1;
  }
  return RUN_ALL_TESTS();
}
