// Kernels of rows (softmax, norms, losses) on 16-bit floats: their numbers are those of float32,
// rounded once, and their scratch memory is a few rows.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "dtensor/dispatch.h"
#include "dtensor/ops/ops.h"
#include "dtensor/rng/generator.h"
#include "dtensor/tensor/status.h"

namespace dtensor::half_rows_test {
namespace {

// A call of a kernel by what its inputs are: v has x's shape, s is a number per row, f such a one
// in float32, g a number per column, t a target per row.
struct Call {
  const char* op;
  const char* inputs;
  Attrs attrs;
};

std::vector<Call> CallsOf(int64_t columns) {
  return {{"softmax", "v", {IntAttr(1)}},
          {"log_softmax", "v", {IntAttr(1)}},
          {"softmax_backward", "vv", {IntAttr(1)}},
          {"log_softmax_backward", "vv", {IntAttr(1)}},
          {"softmax", "v", {IntAttr(0)}},
          {"softmax_backward", "vv", {IntAttr(0)}},
          {"layer_norm", "vgg", {FloatAttr(1e-5)}},
          {"layer_norm_backward", "vvffg", {}},
          {"rms_norm", "vg", {FloatAttr(1e-5)}},
          {"rms_norm_backward", "vvfg", {}},
          {"nll_pick", "vt", {IntAttr(-100)}},
          {"nll_pick_backward", "st", {IntAttr(columns), IntAttr(-100)}},
          {"sum_exp", "vs", {}},
          {"cross_entropy_rows", "vt", {IntAttr(-100)}},
          {"cross_entropy_backward", "svfft", {IntAttr(-100)}}};
}

std::vector<DTensor> InputsOf(const Call& call, int64_t rows, int64_t columns, DType dtype) {
  std::vector<DTensor> in;
  for (const char kind : std::string(call.inputs)) {
    if (kind == 't') {
      in.push_back(randint(0, columns, {rows}));
      if (rows > 2) fill_(select(in.back(), 0, 2), -100);
      continue;
    }
    const Shape shape = kind == 'v' ? Shape{rows, columns} : Shape{kind == 'g' ? columns : rows};
    in.push_back(to(randn(shape), kind == 'f' ? DType::kF32 : dtype));
  }
  return in;
}

Values Results(const Call& call, const std::vector<DTensor>& in) {
  std::vector<const DTensor*> pointers;
  for (const DTensor& x : in) pointers.push_back(&x);
  return ValueOrThrow(Dispatch(**OpRegistry::Find(call.op), pointers, call.attrs));
}

TEST(HalfRows, AreThoseOfFloat32RoundedOnce) {
  NoGrad no_grad;
  ManualSeed(5);
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    // Rows that fit many times into what is converted at once, with a rest; just so; not at all.
    for (const Shape& shape : {Shape{9, 1}, Shape{5000, 3}, Shape{23, 576}, Shape{3, 4096},
                               Shape{4, 5003}, Shape{1, 7}}) {
      for (const Call& call : CallsOf(shape[1])) {
        const std::vector<DTensor> in = InputsOf(call, shape[0], shape[1], dtype);
        std::vector<DTensor> wide;
        for (const DTensor& x : in) wide.push_back(x.dtype() == dtype ? to(x, DType::kF32) : x);
        const Values got = Results(call, in), want = Results(call, wide);
        ASSERT_EQ(got.size(), want.size());
        for (size_t o = 0; o < got.size(); ++o) {
          EXPECT_TRUE(equal(isnan(got[o]), isnan(want[o])) &&
                      equal(nan_to_num(got[o]), nan_to_num(to(want[o], got[o].dtype()))))
              << call.op << " along " << (call.attrs.empty() ? 1 : call.attrs[0].i) << ", result "
              << o << ", " << Name(dtype) << " [" << shape[0] << ", " << shape[1] << "]";
        }
      }
    }
  }
}

TEST(HalfRows, TakeScratchMemoryForAFewRows) {
  NoGrad no_grad;
  const int64_t rows = 2048, columns = 1024;
  for (const Call& call : CallsOf(columns)) {
    const std::vector<DTensor> in = InputsOf(call, rows, columns, DType::kBF16);
    Results(call, in);  // what is made once
    const auto stats = [] { return CurrentAllocator()->stats(); };
    const int64_t before = stats().in_use_bytes;
    CurrentAllocator()->ResetPeak();
    const Values out = Results(call, in);
    const int64_t results = stats().in_use_bytes - before;
    const int64_t scratch = stats().peak_bytes - before - results;
    // Numbers per row and per column, what is converted at once; softmax along dim 0 has all rows
    // of 256 columns. An operand is 4 MiB, or 8 in float32.
    const bool along_rows = !call.attrs.empty() && call.attrs[0].i == 0;
    EXPECT_LE(scratch, along_rows ? 7 << 20 : 1 << 17) << call.op;
  }
}

}  // namespace
}  // namespace dtensor::half_rows_test
