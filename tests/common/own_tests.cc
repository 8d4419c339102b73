#include "tests/common/own_tests.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <set>
#include <string>
#include <string_view>

namespace dtensor::testing {

void LeaveOutOtherFiles(const char* program) {
  std::string own(program);
  own = "/" + own.substr(own.rfind('/') + 1) + ".cc";
  const size_t folder = own.find('_');
  if (folder == std::string::npos) return;
  own[folder] = '/';
  const auto is_own = [&own](const std::string_view file) { return file.ends_with(own); };
  // What a program links besides (a suite that several run) is its own too.
  const auto is_other = [&](const std::string_view file) {
    return file.ends_with("_test.cc") && !is_own(file);
  };
  std::set<std::string> kept, kept_suites, left_out;
  const auto& all = *::testing::UnitTest::GetInstance();
  for (const bool others : {false, true}) {
    for (int s = 0; s < all.total_test_suite_count(); ++s) {
      const auto& suite = *all.GetTestSuite(s);
      for (int t = 0; t < suite.total_test_count(); ++t) {
        const auto& test = *suite.GetTestInfo(t);
        if (is_other(test.file()) != others) continue;
        const std::string name = std::string(suite.name()) + "." + test.name();
        if (!others) {
          kept.insert(name);
          kept_suites.insert(suite.name());
        } else if (kept_suites.count(suite.name()) == 0) {
          left_out.insert(std::string(suite.name()) + ".*");
        } else {
          left_out.insert(name);
        }
      }
    }
  }
  if (kept.empty()) {  // a group under its own name, or a file that lost its tests
    if (!own.ends_with("_test.cc")) return;
    std::fprintf(stderr, "%s: no test of a file %s\n", program, own.c_str());
    std::exit(1);
  }
  std::string wanted = GTEST_FLAG_GET(filter);
  for (const std::string& name : left_out) {
    if (kept.count(name) != 0) {
      std::fprintf(stderr, "%s: two files have a test %s\n", program, name.c_str());
      std::exit(1);
    }
    wanted += (wanted.find('-') == std::string::npos ? "-" : ":") + name;
  }
  GTEST_FLAG_SET(filter, wanted);
}

}  // namespace dtensor::testing
