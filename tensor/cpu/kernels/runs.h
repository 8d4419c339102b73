// One-dimensional runs of the floor's kernels: what is compiled per CPU level. Strides in elements.
#pragma once

#include <cstdint>

#include "dtensor/tensor/cpu/level.h"
#include "dtensor/tensor/dtype.h"

namespace dtensor {

using CopyRunFn = void (*)(void* dst, int64_t dst_stride, const void* src, int64_t src_stride,
                           int64_t n);
using FillRunFn = void (*)(void* dst, int64_t stride, const void* value, int64_t n);
using ReduceRunFn = void (*)(void* acc, int64_t acc_stride, const void* x, int64_t x_stride,
                             int64_t n);
// dst[i * dst0 + j * dst1] = src[i * src0 + j * src1], same dtype, in blocks that fit the cache.
using CopyPlaneFn = void (*)(void* dst, int64_t dst0, int64_t dst1, const void* src, int64_t src0,
                             int64_t src1, int64_t n0, int64_t n1);

// At least 64 bytes, that lie together and do not overlap; past the caches: for what is not read
// soon.
using StreamFn = void (*)(void* dst, const void* src, int64_t bytes);

struct RunTable {
  CopyRunFn copy[kNumDTypes][kNumDTypes];  // [src][dst]
  FillRunFn fill[4];                       // by log2 of the element size
  CopyPlaneFn plane[4];
  StreamFn stream;
  ReduceRunFn reduce[4][kNumDTypes];  // by ReduceOp, but for kAvg
};

DT_AT_EACH_CPU_LEVEL(const RunTable& TensorRuns();)

// Those of the active level.
const RunTable& ActiveRuns();

}  // namespace dtensor
