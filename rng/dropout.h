// Random masks whose elements share Philox blocks in groups of neighbours: dropout and bernoulli
// with a tensor of probabilities; and the draws that need all of a tensor: randperm, multinomial.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "dtensor/mesh/spec.h"
#include "dtensor/rng/generator.h"
#include "dtensor/tensor/tensor.h"

namespace dtensor {

// How dropout reads the stream: element g of N belongs to group j = g / vec; thread j mod V, call
// (j / V) * blocks + (g / 4) mod blocks, component g mod min(vec, 4). vec 1 is the generic sampler.
//   Source: torch's native_dropout on CUDA (Dropout.cu, fused_dropout_kernel_vec).
struct DropoutPlan {
  int vec = 4;
  int blocks = 1;  // Philox blocks per group: 2 for vec 8
  int64_t threads = 256;
  uint64_t offset = 0, advance = 0;
};
// Errors: InvalidArgument for a bad shape or layout_version.
// `dense`: the one-device input fills its memory without gaps; else vec is 1.
absl::StatusOr<DropoutPlan> PlanDropout(IntSpan shape, DType dtype, const Profile& profile,
                                        uint64_t offset, bool dense = true);

// The chance with which an element of a tensor stays; what stays is divided by it.
inline double KeepChance(DType dtype, double p) {
  return dtype == DType::kF64 ? 1.0 - p : static_cast<double>(static_cast<float>(1.0 - p));
}

// Writes the keep mask of dropout(p) of a tensor with `spec` (its dtype is the input's): `mask` is
// bool and holds this rank's part. Ranks that differ only in pending dims get the same mask.
//   Comm:   none; the generator moves alike on every rank.
//   Errors: InvalidArgument for p outside of [0, 1) and a pending max or min, where a mask has no
//           meaning. The generator does not move then.
// `global_strides`: of the one-device input where it is not row-major. A dense one is drawn in
// memory order, any other in logical order.
absl::Status FillDropoutMask(const Tensor& mask, const Spec& spec, double p,
                             Generator* generator = nullptr, IntSpan global_strides = {});

// Whether FillDropout has a kernel for a tensor that lies so: a contiguous one, on a device that
// draws and multiplies in one pass.
bool DropsInOnePass(const Tensor& x);

// The same mask, and y = x * mask / KeepChance beside it: x is read once, both are written once.
// `x` and `y` hold this rank's part of `spec`, contiguous as `mask` is; x DropsInOnePass where
// there is anything to draw.
//   Comm, Errors: as above.
absl::Status FillDropout(const Tensor& mask, const Tensor& x, const Tensor& y, const Spec& spec,
                         double p, Generator* generator = nullptr, IntSpan global_strides = {});

// The same mask of a row-major tensor, to be drawn later and in parts by DrawKeepMask
// (rng/keep_mask.h): reserves what it consumes and returns what DrawKeepMask has to know.
//   Errors: InvalidArgument as above. The generator does not move then.
absl::StatusOr<std::vector<int64_t>> ReserveDropout(IntSpan shape, DType dtype, double p,
                                                    Generator* generator = nullptr);

// out[i] = 1 where u <= probabilities[i]; both hold this rank's part of one spec (probabilities of
// a float dtype). Independent of the device. Moves the generator by 12.
//   Strides: those of the one-device tensors where one of them is not row-major. Elements are drawn
//            in the order of memory as far as the two agree on it, else in that of indices.
//   Errors: InvalidArgument for a probability outside of [0, 1] (found on the ranks that hold it).
//   Source: torch's CUDA_tensor_apply2 (ATen/cuda/CUDAApplyUtils.cuh, rearrangeDims)
absl::Status FillBernoulli(const Tensor& out, const Tensor& probabilities, const Spec& spec,
                           Generator* generator = nullptr, IntSpan out_strides = {},
                           IntSpan probability_strides = {});

}  // namespace dtensor
