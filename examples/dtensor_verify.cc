// The judge of sharding declarations over shipped ops.
//
//   dtensor-verify --op NAME | --all            exit code 0 if nothing claimed is wrong and every
//                                               true row that is not offered has its reason
//   dtensor-verify --mutate --op NAME | --all   flips declarations; 0 if 95 % are caught
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_join.h"
#include "dtensor/mutate.h"
#include "dtensor/names.h"
#include "ops/rules.h"
#include "ops/verify_reasons.h"
#include "ops/verify_samples.h"

namespace dtensor {
namespace {

using Cases = std::vector<VerifyCase>;

int Usage() {
  std::fprintf(stderr, "usage: dtensor-verify [--mutate] --op NAME | --all\n");
  return 2;
}

int Failed(const std::string& op, const absl::Status& status) {
  std::fprintf(stderr, "error: %s: %s\n", op.c_str(), std::string(status.message()).c_str());
  return 1;
}

int Verify(const Cases& cases) {
  long long combinations = 0, candidates = 0, wrong = 0, missing = 0;
  bool explained = true;
  std::vector<std::pair<std::string, std::vector<VerifyFinding>>> by_op;
  for (const VerifyCase& c : cases) {
    const absl::StatusOr<VerifyReport> report = VerifyOp(GetOp(c.op), c.samples);
    if (!report.ok()) return Failed(c.op, report.status());
    std::printf("%s\n", report->ToString(c.op).c_str());
    combinations += report->combinations;
    candidates += report->candidates;
    wrong += static_cast<long long>(report->wrong.size());
    missing += static_cast<long long>(report->missing.size());
    for (const VerifyFinding& f : report->missing) explained &= ReasonFor(c.op, f) != nullptr;
    by_op.emplace_back(c.op, report->missing);
  }
  std::printf("%s", DescribeMissing(by_op).c_str());
  std::printf("%zu ops, %lld strategies, %lld wrong; %lld rows tried, %lld true but not offered\n",
              cases.size(), combinations, wrong, candidates, missing);
  return wrong == 0 && explained ? 0 : 1;
}

int Mutate(const Cases& cases) {
  MutationReport total;
  for (const VerifyCase& c : cases) {
    const absl::StatusOr<MutationReport> report = MutateOp(GetOp(c.op), c.samples);
    if (!report.ok()) return Failed(c.op, report.status());
    std::printf("%s: %lld killed, %zu survive, %lld equivalent\n", c.op.c_str(),
                static_cast<long long>(report->killed()), report->survivors.size(),
                static_cast<long long>(report->equivalent));
    total.Add(*report);
  }
  for (const std::string& s : total.modest) std::printf("TRUE BUT NOT OFFERED %s\n", s.c_str());
  for (const std::string& s : total.survivors) std::printf("SURVIVES %s\n", s.c_str());
  const auto all = total.killed() + static_cast<int64_t>(total.survivors.size());
  const double share =
      all == 0 ? 1 : static_cast<double>(total.killed()) / static_cast<double>(all);
  std::printf(
      "%lld mutants that differ: %lld claim what is wrong, %lld miss what is true, %lld refused at "
      "declaration, %zu survive: %.1f %% killed; besides %lld derive the same as the op, %zu only "
      "declare what is true\n",
      static_cast<long long>(all), static_cast<long long>(total.wrong),
      static_cast<long long>(total.missing), static_cast<long long>(total.refused),
      total.survivors.size(), 100 * share, static_cast<long long>(total.equivalent),
      total.modest.size());
  return share >= 0.95 ? 0 : 1;
}

int Main(int argc, char** argv) {
  bool mutate = false, all = false;
  std::string wanted;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--mutate") {
      mutate = true;
    } else if (flag == "--all") {
      all = true;
    } else if (flag == "--op" && i + 1 < argc) {
      wanted = argv[++i];
    } else if (flag.rfind("--op=", 0) == 0) {
      wanted = flag.substr(5);
    } else {
      return Usage();
    }
  }
  if (all == !wanted.empty()) return Usage();
  Cases cases;
  std::vector<std::string> names;
  for (VerifyCase& c : VerifyCases()) {
    names.push_back(c.op);
    if (all || c.op == wanted) cases.push_back(std::move(c));
  }
  if (cases.empty()) {
    std::fprintf(stderr, "error: no op \"%s\" has samples; nearest: %s\n", wanted.c_str(),
                 absl::StrJoin(NearestNames(wanted, names), " ").c_str());
    return 2;
  }
  return mutate ? Mutate(cases) : Verify(cases);
}

}  // namespace
}  // namespace dtensor

int main(int argc, char** argv) { return dtensor::Main(argc, argv); }
