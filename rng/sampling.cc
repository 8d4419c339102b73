#include "dtensor/rng/sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/rng/fill.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

// Low `bits` bits as the sort compares them.
uint64_t SortKey(int64_t key, int bits, int width) {
  auto u = static_cast<uint64_t>(key);
  if (width == 32) u &= 0xFFFFFFFFu;
  if (bits >= width) return u ^ (uint64_t{1} << (width - 1));  // signed order
  return u & ((uint64_t{1} << bits) - 1);
}

// One-word draws of thread `t`: x, y, z, w of one block after the other.
class WordStream {
 public:
  WordStream(uint64_t seed, uint64_t thread, uint64_t offset)
      : keys_(MakePhiloxKeys(seed)), thread_(thread), block_(offset / 4) {}
  uint32_t Next() {
    if (at_ == 4) at_ = 0;
    if (at_ == 0) words_ = CurandBlock(keys_, block_++, thread_);
    const uint32_t w[4] = {words_.x, words_.y, words_.z, words_.w};
    return w[at_++];
  }

 private:
  PhiloxKeys keys_;
  uint64_t thread_, block_;
  PhiloxWords words_{};
  int at_ = 0;
};

absl::StatusOr<Tensor> Whole(IntSpan shape, DType dtype, const RandomOp& op, Generator* generator) {
  DT_ASSIGN_OR_RETURN(Tensor t, Tensor::Empty(shape, dtype));
  DT_ASSIGN_OR_RETURN(const SpecRef spec,
                      RankContext::Current().specs().Intern(DeviceMesh::Self(), {}, shape, dtype));
  DT_RETURN_IF_ERROR(FillRandom(t, *spec, op, generator));
  return t;
}

}  // namespace

absl::StatusOr<Tensor> RandomPermutation(int64_t n, Generator* generator) {
  if (n < 0) return absl::InvalidArgumentError(absl::StrCat("randperm: n is negative: ", n));
  if (!generator) generator = &DefaultGenerator();
  if (n == 0) return Tensor::Empty({0}, DType::kI64);
  const auto d = static_cast<double>(n);
  const int bits = std::min(
      64, static_cast<int>(std::ceil(std::log2(d - (6 * d * d + 1) / (12 * std::log(0.9))))));
  const bool narrow = bits <= 32;
  DT_ASSIGN_OR_RETURN(const Tensor keys,
                      narrow ? Whole({n}, DType::kI32,
                                     RandomRangeOp(std::numeric_limits<int32_t>::min(),
                                                   std::numeric_limits<int32_t>::max()),
                                     generator)
                             : Whole({n}, DType::kI64,
                                     RandomRangeOp(std::numeric_limits<int64_t>::min(),
                                                   std::numeric_limits<int64_t>::max()),
                                     generator));
  const Generator::Reservation second = generator->Reserve(static_cast<uint64_t>(n));
  using KeyAndIndex = std::pair<uint64_t, int64_t>;
  static_assert(sizeof(KeyAndIndex) == 16);
  DT_ASSIGN_OR_RETURN(const Tensor pairs, Tensor::Empty({n, 2}, DType::kI64));
  auto* order = static_cast<KeyAndIndex*>(pairs.data());
  for (int64_t i = 0; i < n; ++i) {
    const int64_t key = narrow ? keys.data_as<int32_t>()[i] : keys.data_as<int64_t>()[i];
    new (order + i) KeyAndIndex(SortKey(key, bits, narrow ? 32 : 64), i);
  }
  std::sort(order, order + n);   // by key, then by index
  for (int64_t t = 0; t < n;) {  // equal keys are shuffled among themselves
    int64_t end = t + 1;
    while (end < n && order[end].first == order[t].first) ++end;
    if (end - t > 1) {
      WordStream words(second.seed, static_cast<uint64_t>(t), second.offset);
      for (int64_t i = end - t - 1; i > 0; --i) {
        const auto r = static_cast<int64_t>(words.Next() % static_cast<uint64_t>(i + 1));
        std::swap(order[t + i].second, order[t + r].second);
      }
    }
    t = end;
  }
  DT_ASSIGN_OR_RETURN(Tensor permutation, Tensor::Empty({n}, DType::kI64));
  for (int64_t i = 0; i < n; ++i) permutation.data_as<int64_t>()[i] = order[i].second;
  return permutation;
}

absl::StatusOr<Tensor> MultinomialUniforms(int64_t rows, int64_t samples, Generator* generator) {
  if (!generator) generator = &DefaultGenerator();
  DT_ASSIGN_OR_RETURN(Tensor u, Tensor::Empty({rows, samples}, DType::kF32));
  if (rows == 0 || samples == 0) return u;
  const int64_t grid = std::min<int64_t>(rows, 65535);
  const Generator::Reservation at =
      generator->Reserve(4 * static_cast<uint64_t>((rows - 1) / grid + 1));
  const int64_t width = (samples + 127) / 128 * 128;
  const PhiloxKeys keys = MakePhiloxKeys(at.seed);
  auto* data = u.data_as<float>();
  for (int64_t d = 0; d < rows; ++d) {
    for (int64_t s = 0; s < samples; ++s) {
      const auto thread = static_cast<uint64_t>((d % grid) * width + s);
      const auto block = at.offset / 4 + static_cast<uint64_t>(d / grid);
      data[d * samples + s] = UniformFloat(CurandBlock(keys, block, thread).x);
    }
  }
  return u;
}

}  // namespace dtensor
