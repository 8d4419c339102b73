// Must not compile (the ctest dropped_status).
#include "dtensor/mesh/launch.h"

int main() {
  dtensor::RunSpmd(1, [](dtensor::RankContext&) { return absl::OkStatus(); });
}
