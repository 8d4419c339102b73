// The kernels of CUDA threads, run on the host: the bits of the CPU kernels, for every sampler and
// dtype. device_draw.cu runs the same functions on a device.
#include "dtensor/rng/device_draw.h"

#include <memory>
#include <random>

#include "dtensor/rng/check.h"
#include "dtensor/rng/dropout.h"
#include "tests/rng/rng_test_util.h"

namespace dtensor::device_draw_test {
namespace {

DeviceSegment SegmentOf(const RandomPlan& plan, uint64_t seed) {
  const RandomSegment& s = plan.segments.at(0);
  return {MakePhiloxKeys(seed), s.offset / 4, s.first, s.threads};
}

// Memory for a kernel to write, not zero before. Not a vector: those of bool have no data().
template <class T>
struct Untouched {
  int64_t size;
  std::unique_ptr<T[]> values;
  explicit Untouched(int64_t n) : size(n), values(new T[n]) {
    memset(static_cast<void*>(values.get()), 0xA5, n * sizeof(T));
  }
  std::vector<uint64_t> Bits() const {
    std::vector<uint64_t> bits(size, 0);
    for (int64_t i = 0; i < size; ++i) memcpy(&bits[i], &values[i], sizeof(T));
    return bits;
  }
};

constexpr uint64_t kSeed = 0x5EED00000007ull, kOffset = 8;

// A matrix by K1, K2 and, where it is small enough, K4, in random parts.
template <template <class> class Sampler, class T>
void CheckKernels(const RandomOp& wanted, DType dtype, int64_t rows, int64_t width,
                  const Profile& profile) {
  SCOPED_TRACE(wanted.name + " " + std::string(Name(dtype)) + " " + std::to_string(rows) + " x " +
               std::to_string(width));
  const RandomOp op = OrDie(CheckedRandomOp(wanted, dtype, profile));
  const int64_t n = rows * width;
  const RandomPlan plan = OrDie(PlanRandom(op.kind, {rows, width}, dtype, profile, kOffset));
  ASSERT_EQ(plan.unroll, kResults<Sampler<T>>);
  Generator g(kSeed, profile);
  ASSERT_TRUE(g.SetOffset(kOffset).ok());
  const std::vector<uint64_t> whole = WholeBits(wanted, {rows, width}, dtype, &g);
  const Sampler<T> sampler(SamplerParams(op, profile));
  const DeviceSegment segment = SegmentOf(plan, kSeed);
  std::mt19937 random(static_cast<unsigned>(n));
  const auto below = [&](int64_t k) { return static_cast<int64_t>(random() % k); };
  for (int part = 0; part < 4; ++part) {
    const int64_t begin = part == 0 ? 0 : below(n),
                  end = part == 0 ? n : begin + 1 + below(n - begin);
    const std::vector<uint64_t> expected(whole.begin() + begin, whole.begin() + end);
    const Untouched<T> out(end - begin);
    const IntervalJob<T> job = {segment, begin, end, out.values.get()};
    for (int64_t i = 0; i < IntervalThreads<Sampler<T>>(job); ++i) IntervalThread(job, sampler, i);
    ASSERT_EQ(out.Bits(), expected);
    if (n <= segment.threads) {
      const Untouched<T> small(end - begin);
      const IntervalJob<T> again = {segment, begin, end, small.values.get()};
      for (int64_t i = 0; i < end - begin; ++i) SmallThread(again, sampler, i);
      ASSERT_EQ(small.Bits(), expected);
    }
    const int64_t row = below(rows), column = below(width);
    const int64_t height = 1 + below(rows - row), columns = 1 + below(width - column);
    const Untouched<T> block(height * columns);
    const BoxJob<T> box = {segment,
                           row,
                           height,
                           column,
                           columns,
                           FastDivide(width),
                           FastDivide(columns),
                           FastDivide(segment.threads),
                           block.values.get()};
    for (int64_t i = 0; i < BoxThreads(box); ++i) BoxThread(box, sampler, i);
    std::vector<uint64_t> in_box;
    for (int64_t r = row; r < row + height; ++r) {
      in_box.insert(in_box.end(), whole.begin() + r * width + column,
                    whole.begin() + r * width + column + columns);
    }
    ASSERT_EQ(block.Bits(), in_box);
  }
}

template <template <class> class Sampler, class T>
void CheckSizes(const RandomOp& op, DType dtype) {
  const Profile small = SmallProfile();  // V = 256
  CheckKernels<Sampler, T>(op, dtype, 3, 50, small);
  CheckKernels<Sampler, T>(op, dtype, 70, 64, small);  // the width divides V
  CheckKernels<Sampler, T>(op, dtype, 33, 77, small);
  CheckKernels<Sampler, T>(op, dtype, 5, 1000, SmallProfile(3, 512));
}
template <template <class> class Sampler>
void CheckFloating(const RandomOp& op) {
  CheckSizes<Sampler, double>(op, DType::kF64);
  CheckSizes<Sampler, float>(op, DType::kF32);
  CheckSizes<Sampler, BFloat16>(op, DType::kBF16);
  CheckSizes<Sampler, Half>(op, DType::kF16);
}
template <template <class> class Sampler>
void CheckNumbers(const RandomOp& op) {
  CheckFloating<Sampler>(op);
  CheckSizes<Sampler, int64_t>(op, DType::kI64);
  CheckSizes<Sampler, int32_t>(op, DType::kI32);
  CheckSizes<Sampler, uint8_t>(op, DType::kU8);
}

TEST(DeviceDraw, EverySampler) {
  CheckFloating<Uniform>(UniformOp(-0.3, 0.7));
  CheckFloating<Uniform>(UniformOp());
  CheckFloating<Normal>(NormalOp(1, 2));
  CheckFloating<LogNormal>(LogNormalOp(0, 1));
  CheckFloating<Exponential>(ExponentialOp(2));
  CheckFloating<Cauchy>(CauchyOp(1, 3));
  CheckNumbers<Geometric>(GeometricOp(0.2));
  CheckNumbers<Bernoulli>(BernoulliOp(0.3));
  CheckSizes<Bernoulli, bool>(BernoulliOp(0.3), DType::kBool);
  CheckNumbers<Words32>(RandomRangeOp(0, 100));
  CheckSizes<Words32, bool>(RandomFullOp(), DType::kBool);
  CheckSizes<Words32, float>(RandomFullOp(), DType::kF32);
  CheckSizes<Words32, int32_t>(RandomFullOp(), DType::kI32);
  CheckSizes<Words64, int64_t>(RandomFullOp(), DType::kI64);
  CheckSizes<Words64, int64_t>(RandomRangeOp(-5, int64_t{1} << 40), DType::kI64);
  CheckSizes<Words64, double>(RandomFullOp(), DType::kF64);
}

template <class T, class Acc>
void CheckDropout(DType dtype, int64_t n) {
  SCOPED_TRACE(std::string(Name(dtype)) + " " + std::to_string(n));
  const Profile profile = SmallProfile(2, 256);
  Generator g(kSeed, profile);
  ASSERT_TRUE(g.SetOffset(kOffset).ok());
  FakeRank rank(0);
  const SpecRef spec = rank.Intern(DeviceMesh::Self(), {}, {n}, dtype);
  const Tensor mask = OrDie(Tensor::Empty({n}, DType::kBool));
  ASSERT_TRUE(FillDropoutMask(mask, *spec, 0.3, &g).ok());
  const std::vector<uint64_t> expected = BitsOfTensor(mask);
  const DropoutPlan plan = OrDie(PlanDropout({n}, dtype, profile, kOffset));
  ASSERT_EQ(plan.vec, kDropoutVec<T>);
  std::vector<T> x;
  for (int64_t i = 0; i < n; ++i) x.push_back(FromReal<T>(static_cast<double>(i % 13) - 6));
  const Acc keep = static_cast<Acc>(1.0 - 0.3), scale = static_cast<Acc>(1.0 / keep);
  // Whole, of whole groups, and of parts of groups; memory lies well in the first alone.
  const int64_t third = n / plan.vec / 3 * plan.vec, fifth = n / plan.vec / 5 * plan.vec;
  for (const auto& [first, end] :
       {std::pair<int64_t, int64_t>{0, n}, {third, n - fifth}, {third + 1, n - 1}}) {
    const int64_t count = end - first;
    const Untouched<T> y(count), expected_y(count);
    const Untouched<bool> kept(count);
    const DropoutJob<T, Acc> job = {{MakePhiloxKeys(kSeed), plan.offset / 4, 0, plan.threads},
                                    first,
                                    end,
                                    static_cast<float>(keep),
                                    scale,
                                    x.data() + first,
                                    y.values.get(),
                                    kept.values.get()};
    for (int64_t i = 0; i < DropoutThreads(job); ++i) DropoutThread(job, i);
    for (int64_t i = 0; i < count; ++i) {
      ASSERT_EQ(kept.values[i], expected[first + i] != 0) << i;
      const Acc v = static_cast<Acc>((first + i) % 13 - 6) * Acc(kept.values[i]) * scale;
      expected_y.values[i] = FromReal<T>(static_cast<double>(v));
    }
    ASSERT_EQ(y.Bits(), expected_y.Bits());
  }
}

TEST(DeviceDraw, Dropout) {
  for (int64_t n : {512, 3000 * 8, 4100 * 2}) {
    CheckDropout<float, float>(DType::kF32, n);
    CheckDropout<double, double>(DType::kF64, n);
    CheckDropout<BFloat16, float>(DType::kBF16, n);
    CheckDropout<Half, float>(DType::kF16, n);
  }
}

TEST(DeviceDraw, FastDivide) {
  std::mt19937_64 random(7);
  for (int64_t d : {int64_t{1}, int64_t{2}, int64_t{3}, int64_t{7}, int64_t{256}, int64_t{270336},
                    int64_t{1000000007}, (int64_t{1} << 62) + 3, int64_t{1} << 40}) {
    const FastDivide by(d);
    for (int i = 0; i < 20000; ++i) {
      const auto n = static_cast<int64_t>(random() >> (1 + i % 60));
      ASSERT_EQ(Divide(by, n), n / d) << n << " / " << d;
    }
    for (int64_t n : {int64_t{0}, d - 1, d, INT64_MAX}) ASSERT_EQ(Divide(by, n), n / d);
  }
}

}  // namespace
}  // namespace dtensor::device_draw_test
