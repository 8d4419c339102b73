// The judge of sharding declarations over shipped ops.
//
//   dtensor-verify --op NAME... | --all         exit code 0 if nothing claimed is wrong and every
//                                               true row that is not offered has its reason
//   dtensor-verify --mutate --op NAME... | --all   flips declarations; 0 if 95 % are caught
//
// --part I/N: every N-th op from the I-th on (from 0), of those asked for. --jobs N: threads, one
// op each; by default as many as there are cores.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <functional>
#include <future>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/mesh/program.h"
#include "dtensor/names.h"
#include "dtensor/ops/rules.h"
#include "dtensor/ops/verify_reasons.h"
#include "dtensor/ops/verify_samples.h"
#include "dtensor/verify/mutate.h"

namespace dtensor {
namespace {

using Cases = std::vector<VerifyCase>;

absl::Status Usage() {
  return absl::InvalidArgumentError(
      "usage: dtensor-verify [--mutate] [--part I/N] [--jobs N] --op NAME... | --all");
}

absl::Status Failed(const std::string& op, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(op, ": ", status.message()));
}

// One result per case, each made on one of `jobs` threads, handed on in the order of the cases.
template <class Result>
absl::Status ForEach(const Cases& cases, int jobs,
                     const std::function<absl::StatusOr<Result>(const VerifyCase&)>& make,
                     const std::function<void(const VerifyCase&, const Result&)>& take) {
  std::vector<std::promise<absl::StatusOr<Result>>> promises(cases.size());
  std::atomic<size_t> next = 0;
  std::atomic<bool> stop = false;
  std::vector<std::thread> workers;
  for (int j = 0; j < jobs; ++j) {
    workers.emplace_back([&] {
      for (size_t i; !stop && (i = next++) < cases.size();) promises[i].set_value(make(cases[i]));
    });
  }
  absl::Status status;
  for (size_t i = 0; i < cases.size() && status.ok(); ++i) {
    const absl::StatusOr<Result> result = promises[i].get_future().get();
    if (result.ok()) {
      take(cases[i], *result);
    } else {
      status = Failed(cases[i].op, result.status());
    }
  }
  stop = true;
  for (std::thread& w : workers) w.join();
  return status;
}

absl::Status Verify(const Cases& cases, int jobs) {
  long long combinations = 0, candidates = 0, wrong = 0, missing = 0;
  bool explained = true;
  std::vector<std::pair<std::string, std::vector<VerifyFinding>>> by_op;
  DT_RETURN_IF_ERROR(ForEach<VerifyReport>(
      cases, jobs, [](const VerifyCase& c) { return VerifyOp(GetOp(c.op), c.samples); },
      [&](const VerifyCase& c, const VerifyReport& report) {
        std::printf("%s\n", report.ToString(c.op).c_str());
        combinations += report.combinations;
        candidates += report.candidates;
        wrong += static_cast<long long>(report.wrong.size());
        missing += static_cast<long long>(report.missing.size());
        for (const VerifyFinding& f : report.missing) explained &= ReasonFor(c.op, f) != nullptr;
        by_op.emplace_back(c.op, report.missing);
      }));
  std::printf("%s", DescribeMissing(by_op).c_str());
  std::printf("%zu ops, %lld strategies, %lld wrong; %lld rows tried, %lld true but not offered\n",
              cases.size(), combinations, wrong, candidates, missing);
  if (wrong != 0) return absl::FailedPreconditionError("what is claimed is not all true");
  if (!explained) return absl::FailedPreconditionError("a true row is missing without a reason");
  return absl::OkStatus();
}

absl::Status Mutate(const Cases& cases, int jobs) {
  MutationReport total;
  DT_RETURN_IF_ERROR(ForEach<MutationReport>(
      cases, jobs, [](const VerifyCase& c) { return MutateOp(GetOp(c.op), c.samples); },
      [&](const VerifyCase& c, const MutationReport& report) {
        std::printf("%s: %lld killed, %zu survive, %lld equivalent\n", c.op.c_str(),
                    static_cast<long long>(report.killed()), report.survivors.size(),
                    static_cast<long long>(report.equivalent));
        total.Add(report);
      }));
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
  if (share >= 0.95) return absl::OkStatus();
  return absl::FailedPreconditionError("fewer than 95 % of the mutants are killed");
}

absl::Status Main(int argc, char** argv) {
  bool mutate = false, all = false;
  int64_t part = 0, parts = 1;
  int jobs = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  std::vector<std::string> wanted;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--mutate") {
      mutate = true;
    } else if (flag == "--all") {
      all = true;
    } else if (flag == "--part" && i + 1 < argc) {
      const std::pair<absl::string_view, absl::string_view> of =
          absl::StrSplit(argv[++i], absl::MaxSplits('/', 1));
      if (!absl::SimpleAtoi(of.first, &part) || !absl::SimpleAtoi(of.second, &parts) || part < 0 ||
          part >= parts) {
        return Usage();
      }
    } else if (flag == "--jobs" && i + 1 < argc) {
      if (!absl::SimpleAtoi(argv[++i], &jobs) || jobs < 1) return Usage();
    } else if (flag == "--op" && i + 1 < argc) {
      wanted.push_back(argv[++i]);
    } else if (flag.rfind("--op=", 0) == 0) {
      wanted.push_back(flag.substr(5));
    } else {
      return Usage();
    }
  }
  if (all == !wanted.empty()) return Usage();
  Cases known = VerifyCases(), cases;
  std::vector<std::string> names;
  for (const VerifyCase& c : known) names.push_back(c.op);
  for (const std::string& name : wanted) {
    if (absl::c_linear_search(names, name)) continue;
    return absl::NotFoundError(absl::StrCat("no op \"", name, "\" has samples; nearest: ",
                                            absl::StrJoin(NearestNames(name, names), " ")));
  }
  for (VerifyCase& c : known) {
    if (all || absl::c_linear_search(wanted, c.op)) cases.push_back(std::move(c));
  }
  Cases mine;
  for (size_t i = 0; i < cases.size(); ++i) {
    if (static_cast<int64_t>(i) % parts == part) mine.push_back(std::move(cases[i]));
  }
  return mutate ? Mutate(mine, jobs) : Verify(mine, jobs);
}

}  // namespace
}  // namespace dtensor

int main(int argc, char** argv) {
  return dtensor::RunProgram([&] { return dtensor::Main(argc, argv); });
}
