// Helpers of the rng tests: specs of simulated ranks, bits of tensors, and a scalar model of
// docs/reference/random.md that shares nothing with the kernels but the per-word functions.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "dtensor/mesh/spec.h"
#include "dtensor/rng/fill.h"
#include "dtensor/rng/planner.h"

namespace dtensor {

template <class T>
T OrDie(absl::StatusOr<T> value) {
  EXPECT_TRUE(value.ok()) << value.status();
  return *std::move(value);
}

// A tensor's elements in logical order, as bits.
inline std::vector<uint64_t> BitsOfTensor(const Tensor& t) {
  const Tensor flat = OrDie(t.Contiguous());
  std::vector<uint64_t> bits(flat.numel(), 0);
  const int64_t size = SizeOf(t.dtype());
  for (int64_t i = 0; i < flat.numel(); ++i) {
    memcpy(&bits[i], static_cast<const char*>(flat.data()) + i * size, size);
  }
  return bits;
}

inline double ValueOfBits(uint64_t bits, DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return DoubleOf(bits);
    case DType::kF32:
      return FloatOf(static_cast<uint32_t>(bits));
    case DType::kBF16:
      return ToFloat(BFloat16{static_cast<uint16_t>(bits)});
    default:
      return ToFloat(Half{static_cast<uint16_t>(bits)});
  }
}

inline uint64_t RoundToBits(float v, DType dtype) {
  if (dtype == DType::kF32) return BitsOf(v);
  return dtype == DType::kBF16 ? ToBFloat16(v).bits : ToHalf(v).bits;
}

// The bits of element g by the formulas of rng/planner.h and rng/values.h, one element at a time.
inline uint64_t ModelBits(const RandomOp& op, DType dtype, const RandomPlan& plan, uint64_t seed,
                          int64_t g) {
  const RandomSegment* s = &plan.segments[0];
  while (g >= s->first + s->count) ++s;
  const int64_t q = (g - s->first) / s->threads, thread = (g - s->first) % s->threads;
  const PhiloxWords w = CurandBlock(MakePhiloxKeys(seed), s->offset / 4 + q / plan.unroll, thread);
  const int c = static_cast<int>(q % plan.unroll);
  const uint32_t words[4] = {w.x, w.y, w.z, w.w};
  if (dtype == DType::kF64) {
    double pair[2];
    if (op.kind == RandomKind::kNormal) {
      NormalPairD(w, &pair[0], &pair[1]);
      return BitsOf(std::fma(pair[c], op.b, op.a));
    }
    const double v = std::fma(UniformDouble(words[2 * c], words[2 * c + 1]), op.b - op.a, op.a);
    return BitsOf(v == op.b ? op.a : v);
  }
  if (op.kind == RandomKind::kNormal) {
    float pair[2];
    NormalPairF(words[c / 2 * 2], words[c / 2 * 2 + 1], &pair[0], &pair[1]);
    return RoundToBits(std::fma(pair[c % 2], float(op.b), float(op.a)), dtype);
  }
  const auto in_dtype = [&](float v) { return float(ValueOfBits(RoundToBits(v, dtype), dtype)); };
  const float from = in_dtype(float(op.a)), to = in_dtype(float(op.b)), range = in_dtype(to - from);
  const float v = in_dtype(std::fma(UniformFloat(words[c]), range, from));
  return RoundToBits(v == to ? from : v, dtype);
}

// One simulated rank: its interner and its generator.
struct FakeRank {
  explicit FakeRank(int64_t rank, Generator g = Generator()) : interner(rank), generator(g) {}
  SpecRef Intern(const DeviceMesh& mesh, const Placements& placements, IntSpan shape,
                 DType dtype = DType::kF32) {
    return OrDie(interner.Intern(mesh, placements, shape, dtype));
  }
  SpecInterner interner;
  Generator generator;
};

// The whole tensor on one device.
inline std::vector<uint64_t> WholeBits(const RandomOp& op, IntSpan shape, DType dtype,
                                       Generator* generator) {
  FakeRank rank(0);
  const SpecRef spec = rank.Intern(DeviceMesh::Self(), {}, shape, dtype);
  const Tensor t = OrDie(Tensor::Empty(shape, dtype));
  EXPECT_TRUE(FillRandom(t, *spec, op, generator).ok());
  return BitsOfTensor(t);
}

// One element of a tensor of any size, through a flat shard that holds only it.
inline uint64_t BitsAt(const RandomOp& op, int64_t numel, DType dtype, int64_t g,
                       Generator generator, uint64_t* offset_after) {
  FakeRank rank(1);
  const SpecRef spec =
      rank.Intern(DeviceMesh({3}), {FlatShard({g, 1, numel - g - 1})}, {numel}, dtype);
  const Tensor t = OrDie(Tensor::Empty(spec->local_shape(), dtype));
  EXPECT_TRUE(FillRandom(t, *spec, op, &generator).ok());
  *offset_after = generator.offset();
  return BitsOfTensor(t)[0];
}

inline Profile SmallProfile(int64_t sms = 1, int64_t threads_per_sm = 256) {
  return OrDie(CustomProfile(sms, threads_per_sm));
}

}  // namespace dtensor
