// Runs the judge of sharding declarations over shipped ops.
//
//   dtensor-verify --op NAME | --all      exit code 0 if nothing claimed is wrong
#include <cstdio>
#include <string>

#include "dtensor/names.h"
#include "ops/rules.h"
#include "ops/verify_samples.h"

namespace dtensor {
namespace {

int Usage() {
  std::fprintf(stderr, "usage: dtensor-verify --op NAME | --all\n");
  return 2;
}

int Main(int argc, char** argv) {
  const std::string flag = argc > 1 ? argv[1] : "";
  const bool all = flag == "--all" && argc == 2;
  std::string wanted;
  if (flag == "--op" && argc == 3) wanted = argv[2];
  if (flag.rfind("--op=", 0) == 0 && argc == 2) wanted = flag.substr(5);
  if (!all && wanted.empty()) return Usage();
  int64_t combinations = 0, wrong = 0, ops = 0;
  std::vector<std::string> names;
  for (const VerifyCase& c : VerifyCases()) {
    names.push_back(c.op);
    if (!all && c.op != wanted) continue;
    const absl::StatusOr<VerifyReport> report = VerifyOp(GetOp(c.op), c.samples);
    if (!report.ok()) {
      std::fprintf(stderr, "error: %s: %s\n", c.op.c_str(),
                   std::string(report.status().message()).c_str());
      return 1;
    }
    std::printf("%s\n", report->ToString(c.op).c_str());
    combinations += report->combinations;
    wrong += static_cast<int64_t>(report->wrong.size());
    ++ops;
  }
  if (ops == 0) {
    std::fprintf(stderr, "error: no op \"%s\" has samples; nearest:", wanted.c_str());
    for (const std::string& near : NearestNames(wanted, names)) {
      std::fprintf(stderr, " %s", near.c_str());
    }
    std::fprintf(stderr, "\n");
    return 2;
  }
  std::printf("%lld ops, %lld strategies, %lld wrong\n", static_cast<long long>(ops),
              static_cast<long long>(combinations), static_cast<long long>(wrong));
  return wrong == 0 ? 0 : 1;
}

}  // namespace
}  // namespace dtensor

int main(int argc, char** argv) { return dtensor::Main(argc, argv); }
