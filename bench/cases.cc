// What every case line of ops/ takes on one rank, in float32, at a size given for its letters.
//
//   bench_cases [--case=softmax] [--size=64] [--letters=a=8,b=4096]
//
// Prints one line per sample: microseconds per call, name, arguments.
#include <chrono>
#include <cstdio>
#include <map>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/ops/case_samples.h"
#include "dtensor/rng/generator.h"

namespace dtensor {
namespace {

using Clock = std::chrono::steady_clock;

struct Options {
  std::string only;   // empty: all
  int64_t size = 64;  // of letters that are not in the map, and of each "..." dim
  std::map<char, int64_t> letters;

  bool Take(const std::string& argument) {
    const std::pair<std::string, std::string> parts =
        absl::StrSplit(argument, absl::MaxSplits('=', 1));
    if (parts.first == "--case") return !(only = parts.second).empty();
    if (parts.first == "--size") return absl::SimpleAtoi(parts.second, &size) && size > 0;
    if (parts.first != "--letters") return false;
    for (const std::string& one : std::vector<std::string>(absl::StrSplit(parts.second, ','))) {
      int64_t n;
      if (one.size() < 3 || one[1] != '=' || !absl::SimpleAtoi(one.substr(2), &n)) return false;
      letters[one[0]] = n;
    }
    return true;
  }
  int64_t SizeOf(char letter) const {
    const auto given = letters.find(letter);
    return given == letters.end() ? size : given->second;
  }
};

// Seconds per call, over 20 ms.
double Time(const OpCase& c, const CaseSample& sample) {
  SampleArgs args(sample, sample.Make(1));
  c.call(args);
  int64_t calls = 0;
  const Clock::time_point start = Clock::now();
  std::chrono::duration<double> took(0);
  while (took.count() < 0.02) {
    c.call(args);
    ++calls;
    took = Clock::now() - start;
  }
  return took.count() / static_cast<double>(calls);
}

void Run(const OpCase& c, const Options& options) {
  for (const CasePattern& pattern : PatternsOf(c)) {
    CaseSample sample = pattern.At([&](char letter) { return options.SizeOf(letter); },
                                   [&](size_t) -> Shape { return {options.size, options.size}; });
    for (CaseTensor& t : sample.tensors) {
      if (t.dtype == DType::kF64) t.dtype = DType::kF32;
    }
    try {
      std::printf("%12.2f us  %s(%s)\n", 1e6 * Time(c, sample), c.name.c_str(),
                  sample.ToString().c_str());
    } catch (const Error& error) {  // sizes that were given do not fit
      std::printf("%12s     %s(%s): %s\n", "-", c.name.c_str(), sample.ToString().c_str(),
                  error.what());
    }
  }
}

int Main(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    if (options.Take(argv[i])) continue;
    std::fprintf(stderr, "bench_cases [--case=softmax] [--size=64] [--letters=a=8,b=4096]\n");
    return 2;
  }
  if (!options.only.empty() && FindCase(options.only) == nullptr) {
    std::fprintf(stderr, "there is no case \"%s\"\n", options.only.c_str());
    return 2;
  }
  const absl::Status status = RunSpmd(1, [&](RankContext&) {
    ManualSeed(1);
    for (const OpCase& c : AllCases().cases) {
      if (options.only.empty() || options.only == c.name) Run(c, options);
    }
    return absl::OkStatus();
  });
  if (!status.ok()) std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
  return status.ok() ? 0 : 1;
}

}  // namespace
}  // namespace dtensor

int main(int argc, char** argv) { return dtensor::Main(argc, argv); }
