// Elementwise kernels give the same bits at every instruction-set level that this CPU has.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "dtensor/ops/kernels.h"
#include "dtensor/ops/ops.h"
#include "dtensor/ops/rules.h"
#include "dtensor/tensor/cpu/level.h"
#include "tests/ops/gradcheck.h"

namespace dtensor::levels_test {
namespace {

using Table = std::map<std::string, Kernel>;
Table* collecting = nullptr;
void Collect(const char* name, KernelFn fn, uint32_t dtypes, KernelLayout layout) {
  (*collecting)[name] = {fn, dtypes, layout};
}
Table TableOf(void (*registration)(AddKernelFn)) {
  Table table;
  collecting = &table;
  registration(Collect);
  return table;
}

// Scratch that lives as long as the test.
class Memory : public Workspace {
 public:
  void* Allocate(int64_t bytes) override {
    blocks_.emplace_back(static_cast<size_t>(bytes) + 64);
    return blocks_.back().data();
  }
  void Fail(std::string_view message) override { FAIL() << message; }

 private:
  std::vector<std::vector<char>> blocks_;
};

// Every magnitude and sign, the special values, and numbers around zero; 1,003 is no multiple of
// any vector width.
std::vector<double> Values(uint64_t seed) {
  std::vector<double> v = testing::Noise(1003, seed);
  for (size_t i = 0; i < v.size(); i += 2) {
    v[i] = std::ldexp(v[i], static_cast<int>(i % 600) - 300);
  }
  const double special[] = {0.0,  -0.0, HUGE_VAL, -HUGE_VAL, std::nan(""), 1e-310, -1e-310, 1.0,
                            -1.0, 88.7, -88.7,    709.7,     -745.0,       1e-45,  3.4e38};
  std::copy(std::begin(special), std::end(special), v.begin() + static_cast<int64_t>(seed % 50));
  return v;
}

std::vector<char> Bytes(const Tensor& t) {
  std::vector<char> bytes(static_cast<size_t>(t.numel() * SizeOf(t.dtype())));
  std::memcpy(bytes.data(), t.data(), bytes.size());
  return bytes;
}

// The output of one kernel on one dtype; NaNs count as equal whatever their payload.
std::vector<char> Output(const Kernel& kernel, const PointwiseCase& c, DType dtype,
                         DType out_type) {
  std::vector<Tensor> in;
  for (int i = 0; i < c.inputs; ++i) {
    const DType t = i == c.bool_input ? DType::kBool : dtype;
    std::vector<double> v = Values(static_cast<uint64_t>(i + 3));
    if (!IsFloating(t)) {
      for (double& x : v) x = std::isfinite(x) ? std::fmod(x * 100, 7) : 1;
      for (double& x : v) x = c.divides && i == 1 && std::fabs(x) < 1 ? 1 : x;
    }
    in.push_back(ValueOrThrow(Tensor::FromVector(v, {1003}, t)));
  }
  const Tensor out = ValueOrThrow(Tensor::Full({1003}, out_type, 0));
  const bool in_place = GetOp(c.name).in_place();
  if (in_place) Copy(in[0], out);
  std::vector<TensorRef> refs;
  for (const Tensor& t : in) refs.push_back(t.ref());
  if (in_place) refs[0] = out.ref();
  const TensorRef out_ref = out.ref();
  const Attr attrs[] = {FloatAttr(1.25), FloatAttr(1.5), FloatAttr(0.75)};
  Memory memory;
  kernel.fn({refs, {&out_ref, 1}, attrs, {}, nullptr, &memory});
  if (IsFloating(out_type)) {
    const std::vector<double> values = out.ToVector<double>();
    for (size_t i = 0; i < values.size(); ++i) {
      if (std::isnan(values[i])) {
        std::memset(static_cast<char*>(out.data()) + i * SizeOf(out_type), 0x7F, SizeOf(out_type));
      }
    }
  }
  return Bytes(out);
}

TEST(Levels, ElementwiseOpsGiveTheSameBits) {
  RegisterOps();
  std::vector<std::pair<std::string, Table>> levels = {
      {"baseline", TableOf(cpu_baseline::RegisterPointwise)}};
  if (ActiveCpuLevel() >= CpuLevel::kV3) {
    levels.emplace_back("v3", TableOf(cpu_v3::RegisterPointwise));
  }
  if (ActiveCpuLevel() >= CpuLevel::kV4) {
    levels.emplace_back("v4", TableOf(cpu_v4::RegisterPointwise));
  }
  int64_t compared = 0;
  for (const PointwiseCase& c : PointwiseCases()) {
    const Kernel& first = levels[0].second.at(c.name);
    for (int t = 0; t < kNumDTypes; ++t) {
      const auto dtype = static_cast<DType>(t);
      const DType input0 = c.bool_input == 0 ? DType::kBool : dtype;
      if (!(first.dtypes & DTypeBit(input0))) continue;
      const DType out = c.compares ? DType::kBool : dtype;
      const std::vector<char> want = Output(first, c, dtype, out);
      for (size_t l = 1; l < levels.size(); ++l) {
        EXPECT_EQ(Output(levels[l].second.at(c.name), c, dtype, out), want)
            << c.name << " of " << std::string(Name(dtype)) << " at " << levels[l].first;
        ++compared;
      }
    }
  }
  std::printf("%zu levels on this CPU, %lld comparisons of 1,003 elements\n", levels.size(),
              static_cast<long long>(compared));
  EXPECT_GE(compared, 300 * (static_cast<int64_t>(levels.size()) - 1));
}

}  // namespace
}  // namespace dtensor::levels_test
