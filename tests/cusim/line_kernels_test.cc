// Kernels whose blocks hold lines of an array in shared memory (softmax, norms, cross entropy):
// lines of every length, beginning anywhere. How much a device can hold changes no bit.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "tests/cusim/family_kernels.h"

namespace dtensor::testing {
namespace {

DType Wide(DType t) { return IsNarrow(t) ? DType::kF32 : t; }

// Every such kernel on `rows` lines of n, those of the inputs beginning `behind` elements behind a
// boundary of 64 bytes.
std::vector<KernelCase> LineKernels(int64_t rows, int64_t n, DType t, int64_t behind) {
  const DType wide = Wide(t);
  const Operand x = {.sizes = {rows, n}, .dtype = t, .behind = behind};
  const Operand some = {.sizes = {rows, n}, .dtype = t, .low = -8, .high = 0, .behind = behind};
  const Operand y = {.sizes = {rows, n}, .dtype = t}, weight = {.sizes = {n}, .dtype = t};
  const Operand stat = {.sizes = {rows}, .dtype = wide, .low = 0.5, .high = 2};
  const Operand targets = {.sizes = {rows}, .dtype = DType::kI64, .low = 0, .high = 4};
  // Errors of sums, which grow with the root of their number.
  const double ulps = n > 4096 ? 400 : 60;
  std::vector<KernelCase> all;
  for (const char* op : {"softmax", "log_softmax"}) {
    all.push_back({.op = op, .in = {x}, .out = {y}, .attrs = {Int(1)}, .ulps = ulps});
  }
  for (const char* op : {"softmax_backward", "log_softmax_backward"}) {
    all.push_back({.op = op, .in = {x, some}, .out = {y}, .attrs = {Int(1)}, .ulps = 4 * ulps});
  }
  all.push_back({.op = "sum_exp", .in = {x, stat}, .out = {stat}, .ulps = ulps});
  all.push_back({.op = "layer_norm",
                 .in = {x, weight, weight},
                 .out = {y, stat, stat},
                 .attrs = {Number(1e-5)},
                 .ulps = ulps});
  all.push_back({.op = "rms_norm",
                 .in = {x, weight},
                 .out = {y, stat},
                 .attrs = {Number(1e-5)},
                 .ulps = ulps});
  all.push_back({.op = "layer_norm_backward",
                 .in = {x, some, stat, stat, weight},
                 .out = {y, weight, weight},
                 .ulps = ulps});
  all.push_back(
      {.op = "rms_norm_backward", .in = {x, some, stat, weight}, .out = {y, weight}, .ulps = ulps});
  all.push_back({.op = "cross_entropy_rows",
                 .in = {x, targets},
                 .out = {stat, stat, stat},
                 .attrs = {Int(-100)},
                 .ulps = ulps});
  all.push_back({.op = "cross_entropy_backward",
                 .in = {stat, x, stat, stat, targets},
                 .out = {y},
                 .attrs = {Int(-100)},
                 .factors = {{0, n, n}},
                 .ulps = 8});
  all.push_back({.op = "nll_pick_backward",
                 .in = {{.sizes = {rows}, .dtype = t}, targets},
                 .out = {y},
                 .attrs = {Int(n), Int(-100)},
                 .factors = {{0, n, n}}});
  return all;
}

TEST(LineKernels, GiveWhatTheCpuGives) {
  // Of a few lanes, of a warp, of several, of all; what no lane holds; amid sectors and not.
  for (const int64_t n : {5, 31, 64, 251, 300, 1027, 4095, 4096, 4097, 8191, 8192, 9001}) {
    for (const DType t : {DType::kF64, DType::kF32, DType::kBF16}) {
      if (t == DType::kBF16 && n != 251 && n != 9001) continue;
      const int64_t rows = n < 64 ? 70 : n < 400 ? 19 : 3;
      for (const KernelCase& call : LineKernels(rows, n, t, n % 3)) Compare(call);
    }
  }
}

// Of which not even the sums over rows fit into shared memory; and no rows.
TEST(LineKernels, LongerThanAnyDeviceHolds) {
  for (const int64_t rows : {0, 1}) {
    for (const KernelCase& call : LineKernels(rows, 60001, DType::kF32, 1)) Compare(call);
  }
  setenv("DT_CUSIM_SHARED", "49152", 1);  // so that fewer elements do; rows of two teams
  for (const KernelCase& call : LineKernels(18, 6001, DType::kF64, 0)) {
    if (std::string(call.op).ends_with("norm_backward")) Compare(call);
  }
  unsetenv("DT_CUSIM_SHARED");
}

// Where dim 1 is not the last one, neighbouring lines are held together.
TEST(LineKernels, LinesOfAnyDim) {
  for (const int64_t n : {65, 130, 1500}) {
    for (const DType t : {DType::kF64, DType::kBF16}) {
      const Operand x = {.sizes = {2, n, 35}, .dtype = t};
      Compare({.op = "softmax", .in = {x}, .out = {x}, .attrs = {Int(1)}, .ulps = 60});
      Compare(
          {.op = "softmax_backward", .in = {x, x}, .out = {x}, .attrs = {Int(1)}, .ulps = 2000});
    }
  }
}

TEST(LineKernels, BitsDependOnNoDeviceAndNoPlace) {
  // Bytes of shared memory of a block: of sm_90, of sm_80, and of sm_86, the least that there is.
  const char* const devices[] = {"232448", "166912", "101376"};
  for (const int64_t n : {251, 4090, 9001, 30001}) {
    for (const DType t : {DType::kF64, DType::kF32, DType::kBF16}) {
      if (n == 30001 && t != DType::kF32) continue;
      const int64_t rows = n < 1000 ? 9 : n < 9000 ? 2 : 1;
      setenv("DT_CUSIM_SHARED", devices[0], 1);
      std::vector<std::vector<std::vector<char>>> want;
      for (const KernelCase& call : LineKernels(rows, n, t, 0)) want.push_back(OutputsOf(call));
      for (const char* const device : devices) {
        setenv("DT_CUSIM_SHARED", device, 1);
        const int64_t behind = device == devices[0] ? 5 : device == devices[1] ? 4 : 0;
        const std::vector<KernelCase> calls = LineKernels(rows, n, t, behind);
        for (size_t k = 0; k < calls.size(); ++k) {
          EXPECT_TRUE(OutputsOf(calls[k]) == want[k])
              << calls[k].op << " of " << n << " of " << Name(t) << " with " << device << " bytes, "
              << behind << " elements behind a boundary";
        }
      }
      unsetenv("DT_CUSIM_SHARED");
    }
  }
}

}  // namespace
}  // namespace dtensor::testing
