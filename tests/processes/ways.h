// How a program of several ranks can be started here.
#pragma once

#include <ostream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace dtensor::testing {

struct Way {
  std::string name, launcher;  // before a number of ranks; empty: ranks are threads
  std::string Command(int ranks, const std::string& program) const {
    if (launcher.empty()) return program;
    return absl::StrCat(launcher, ranks, name == "gloo" ? " -- " : " ", program);
  }
  friend std::ostream& operator<<(std::ostream& out, const Way& way) { return out << way.name; }
};

// By processes alone, or by threads too.
inline std::vector<Way> Ways(bool threads) {
  std::vector<Way> all;
  if (threads) all.push_back({"threads", ""});
#ifdef DT_MPIRUN
  all.push_back({"mpi", DT_MPIRUN " -n "});
#endif
#ifdef DT_RUN
  all.push_back({"gloo", DT_RUN " --nproc-per-node "});
#endif
  return all;
}

inline std::string NameOfWay(const ::testing::TestParamInfo<Way>& info) { return info.param.name; }

}  // namespace dtensor::testing
