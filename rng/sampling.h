// Draws that need all of a tensor, on every rank: randperm, and the uniforms of multinomial.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "dtensor/rng/generator.h"
#include "dtensor/tensor/tensor.h"

namespace dtensor {

// A random permutation of 0 .. n - 1 [n] int64, whole on every rank. Errors: InvalidArgument for n
// < 0.
//   Source: torch.randperm on CUDA (Randperm.cuh): the order of random keys, ties shuffled again.
absl::StatusOr<Tensor> RandomPermutation(int64_t n, Generator* generator = nullptr);

// The uniforms that multinomial with replacement compares: [rows, samples] float32, whole.
absl::StatusOr<Tensor> MultinomialUniforms(int64_t rows, int64_t samples,
                                           Generator* generator = nullptr);

}  // namespace dtensor
