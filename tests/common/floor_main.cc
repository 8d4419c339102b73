// main() of the tests of the floor, which know no device but the CPU.
#include <gtest/gtest.h>

#include "tests/common/own_tests.h"

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  dtensor::testing::LeaveOutOtherFiles(argv[0]);
  return RUN_ALL_TESTS();
}
