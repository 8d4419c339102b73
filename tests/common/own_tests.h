// Files of tests that are compiled into one program are told apart by the name it is started under.
#pragma once

namespace dtensor::testing {

// Started as .../ops_sort_test the program leaves out the tests of other files than
// ops/sort_test.cc, and fails where it has none of that file; under a name that does not end so it
// runs all. What --gtest_filter asks for stays. After InitGoogleTest.
void LeaveOutOtherFiles(const char* program);

}  // namespace dtensor::testing
