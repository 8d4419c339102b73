// main() of the tests above the floor: gtest's, with a far device to run on. DTENSOR_DEVICE=far
// runs a test program, as it is, where the host cannot read tensors and nothing is done when it is
// queued.
#include <gtest/gtest.h>

#include "tests/common/far_device.h"
#include "tests/common/own_tests.h"

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  dtensor::testing::LeaveOutOtherFiles(argv[0]);
  dtensor::testing::RegisterFarDevice();
  return RUN_ALL_TESTS();
}
