// What FillTask::ToWords (rng/fill_task.h) wrote, as kernels take it: no Abseil.
#pragma once

#include "dtensor/rng/device_draw.h"
#include "dtensor/tensor/cuda/kernels/element.h"

namespace dtensor::cuda {

// The words one after the other, each value in as many as it needs.
class FillWords {
 public:
  explicit FillWords(const int64_t* words) : at_(words) {}
  template <class T>
  T Next() {
    T value;
    memcpy(static_cast<void*>(&value), at_, sizeof(T));
    at_ += (sizeof(T) + 7) / 8;
    return value;
  }

 private:
  const int64_t* at_;
};

// What comes before segments and boxes.
struct FillHead {
  uint8_t kind, op;
  DType dtype;
  int vec;
  DrawParams params;
  uint64_t seed;
  const uint64_t* shift;  // what to add to block numbers; null: nothing
  int unroll, blocks;
  uint64_t advance;
  size_t segments, boxes;
  explicit FillHead(FillWords* in) {
    kind = in->Next<uint8_t>();
    op = in->Next<uint8_t>();
    dtype = in->Next<DType>();
    vec = in->Next<int>();
    params = in->Next<DrawParams>();
    seed = in->Next<uint64_t>();
    shift = in->Next<const uint64_t*>();
    unroll = in->Next<int>();
    blocks = in->Next<int>();
    advance = in->Next<uint64_t>();
    segments = in->Next<size_t>();
    boxes = in->Next<size_t>();
  }
};
struct FillSegment {
  int64_t first, count;
  uint64_t offset;
  int64_t threads;
};

// A block number in a graph, which draws other numbers at every launch.
__device__ inline uint64_t Shifted(uint64_t block, const uint64_t* shift) {
  return shift == nullptr ? block : block + *shift;
}

// The mask of dropout: which elements of the whole tensor, counted in its memory order, are kept.
struct KeepMask {
  PhiloxKeys keys;
  uint64_t block;
  const uint64_t* shift;
  int64_t threads;
  int vec, unroll, blocks;
  float keep;  // u < keep

  KeepMask() = default;
  KeepMask(const FillHead& head, const FillSegment& segment)
      : keys(MakePhiloxKeys(head.seed)),
        block(segment.offset / 4),
        shift(head.shift),
        threads(segment.threads),
        vec(head.vec),
        unroll(head.unroll),
        blocks(head.blocks),
        keep(static_cast<float>(head.params.a)) {}

  __device__ bool operator()(int64_t g) const {
    const int64_t group = g / vec, q = group / threads, call = q / unroll;
    const auto result = static_cast<int>(vec > 1 ? g - group * vec : q - call * unroll);
    const PhiloxWords w =
        CurandBlock(keys, Shifted(block, shift) + static_cast<uint64_t>(call * blocks + result / 4),
                    static_cast<uint64_t>(group - q * threads));
    const int word = result % 4;
    return UniformFloat(word == 0 ? w.x : word == 1 ? w.y : word == 2 ? w.z : w.w) < keep;
  }
};

}  // namespace dtensor::cuda
