// The judges of sharding declarations and of functions, over what ships.
//
//   dtensor-verify --op NAME... | --all         exit code 0 if nothing claimed is wrong, every true
//                                               row that is not offered has its reason (of all ops
//                                               at most 30 rows), and functions give on meshes what
//                                               they give on one rank
//   dtensor-verify --mutate --op NAME... | --all   flips declarations; 0 if 98 % are caught
//
// A name stands for the op and for the function that have it. --part I/N: every N-th op and
// function from the I-th on (from 0), of those asked for. --jobs N: threads, one op each; by
// default as many as there are cores.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <future>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/functional/function_ref.h"
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
using Functions = std::vector<FunctionCase>;

const std::string& NameOf(const VerifyCase& c) { return c.op; }
const std::string& NameOf(const FunctionCase& c) { return c.name; }

absl::Status Usage() {
  return absl::InvalidArgumentError(
      "usage: dtensor-verify [--mutate] [--part I/N] [--jobs N] --op NAME... | --all");
}

absl::Status Failed(const std::string& op, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(op, ": ", status.message()));
}

// One result per case, each made on one of `jobs` threads, handed on in the order of the cases.
template <class Result, class Case>
absl::Status ForEach(const std::vector<Case>& cases, int jobs,
                     absl::FunctionRef<absl::StatusOr<Result>(const Case&)> make,
                     absl::FunctionRef<void(const Case&, const Result&)> take) {
  std::vector<std::promise<absl::StatusOr<Result>>> promises(cases.size());
  std::atomic<size_t> next = 0;
  std::atomic<bool> stop = false;
  std::vector<std::thread> workers;
  for (size_t j = 0; j < std::min(static_cast<size_t>(jobs), cases.size()); ++j) {
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
      status = Failed(NameOf(cases[i]), result.status());
    }
  }
  stop = true;
  for (std::thread& w : workers) w.join();
  return status;
}

// Of all ops: reasons explain exceptions, and are no way round declaring what is true.
constexpr long long kMostMissing = 30;

struct Counts {
  std::set<std::string> names;
  long long strategies = 0, candidates = 0, wrong = 0, missing = 0, placements = 0;
  bool explained = true;
};

absl::Status VerifyDeclarations(const Cases& cases, int jobs, Counts* counts) {
  std::vector<std::pair<std::string, std::vector<VerifyFinding>>> by_op;
  const auto make = [](const VerifyCase& c) { return VerifyOp(GetOp(c.op), c.samples); };
  const auto take = [&](const VerifyCase& c, const VerifyReport& report) {
    std::printf("%s\n", report.ToString(c.op).c_str());
    counts->names.insert(c.op);
    counts->strategies += report.combinations;
    counts->candidates += report.candidates;
    counts->wrong += static_cast<long long>(report.wrong.size());
    counts->missing += static_cast<long long>(report.missing.size());
    for (const VerifyFinding& f : report.missing) {
      counts->explained &= ReasonFor(c.op, f) != nullptr;
    }
    by_op.emplace_back(c.op, report.missing);
  };
  DT_RETURN_IF_ERROR((ForEach<VerifyReport, VerifyCase>(cases, jobs, make, take)));
  std::printf("%s", DescribeMissing(by_op).c_str());
  return absl::OkStatus();
}

absl::Status VerifyFunctions(const Functions& functions, int jobs, Counts* counts) {
  const auto make = [](const FunctionCase& c) {
    return VerifyFunction(c.name, c.samples, c.options);
  };
  const auto take = [&](const FunctionCase& c, const VerifyReport& report) {
    std::printf("%s(): %lld placements of its inputs, %zu wrong\n", c.name.c_str(),
                static_cast<long long>(report.combinations), report.wrong.size());
    for (const VerifyFinding& f : report.wrong) {
      std::printf("  WRONG %s: %s\n", f.row.c_str(), f.why.c_str());
    }
    counts->names.insert(c.name);
    counts->placements += report.combinations;
    counts->wrong += static_cast<long long>(report.wrong.size());
  };
  return ForEach<VerifyReport, FunctionCase>(functions, jobs, make, take);
}

absl::Status Verify(const Cases& cases, const Functions& functions, int jobs) {
  Counts counts;
  DT_RETURN_IF_ERROR(VerifyDeclarations(cases, jobs, &counts));
  DT_RETURN_IF_ERROR(VerifyFunctions(functions, jobs, &counts));
  std::printf(
      "%zu ops and functions: %zu declarations in %lld strategies (%lld rows tried, %lld true but "
      "not offered), %zu functions under %lld placements; %lld wrong\n",
      counts.names.size(), cases.size(), counts.strategies, counts.candidates, counts.missing,
      functions.size(), counts.placements, counts.wrong);
  if (counts.wrong != 0) return absl::FailedPreconditionError("what is claimed is not all true");
  if (!counts.explained) {
    return absl::FailedPreconditionError("a true row is missing without a reason");
  }
  if (counts.missing > kMostMissing) {
    return absl::FailedPreconditionError(
        absl::StrCat(counts.missing, " rows are true but not offered, at most ", kMostMissing,
                     " may be: declare some of them"));
  }
  return absl::OkStatus();
}

absl::Status Mutate(const Cases& cases, int jobs) {
  MutationReport total;
  const auto make = [](const VerifyCase& c) { return MutateOp(GetOp(c.op), c.samples); };
  const auto take = [&](const VerifyCase& c, const MutationReport& report) {
    std::printf("%s: %lld killed, %zu survive, %lld equivalent\n", c.op.c_str(),
                static_cast<long long>(report.killed()), report.survivors.size(),
                static_cast<long long>(report.equivalent));
    total.Add(report);
  };
  DT_RETURN_IF_ERROR((ForEach<MutationReport, VerifyCase>(cases, jobs, make, take)));
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
  if (share >= 0.98) return absl::OkStatus();
  return absl::FailedPreconditionError("fewer than 98 % of the mutants are killed");
}

// Those that are wanted, or all; of them every `parts`-th.
template <class Case>
std::vector<Case> Chosen(std::vector<Case> known, const std::vector<std::string>& wanted,
                         int64_t part, int64_t parts) {
  std::vector<Case> chosen;
  int64_t i = 0;
  for (Case& c : known) {
    if (!wanted.empty() && !absl::c_linear_search(wanted, NameOf(c))) continue;
    if (i++ % parts == part) chosen.push_back(std::move(c));
  }
  return chosen;
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
  const Cases cases = VerifyCases();
  const Functions functions = FunctionCases();
  std::vector<std::string> names;
  for (const VerifyCase& c : cases) names.push_back(c.op);
  for (const FunctionCase& c : functions) names.push_back(c.name);
  for (const std::string& name : wanted) {
    if (absl::c_linear_search(names, name)) continue;
    return absl::NotFoundError(absl::StrCat("no op \"", name, "\" has samples; nearest: ",
                                            absl::StrJoin(NearestNames(name, names), " ")));
  }
  const Cases mine = Chosen(cases, wanted, part, parts);
  if (mutate) return Mutate(mine, jobs);
  return Verify(mine, Chosen(functions, wanted, part, parts), jobs);
}

}  // namespace
}  // namespace dtensor

int main(int argc, char** argv) {
  return dtensor::RunProgram([&] { return dtensor::Main(argc, argv); });
}
