// What tests of NCCL's stand-in have of a rank.
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstddef>
#include <vector>

#include "gtest/gtest.h"

#define CUDA_OK(call) ASSERT_EQ((call), cudaSuccess)
#define NCCL_OK(call) ASSERT_EQ((call), ncclSuccess)

// What one rank has: its device, a stream and a communicator.
struct Rank {
  int rank = 0, size = 0;
  cudaStream_t stream = nullptr;
  ncclComm_t comm = nullptr;

  template <class T>
  T* Put(const std::vector<T>& values) const {
    T* p = nullptr;
    cudaMalloc(reinterpret_cast<void**>(&p), values.size() * sizeof(T));
    cudaMemcpyAsync(p, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice, stream);
    return p;
  }
  template <class T>
  std::vector<T> Take(const T* p, size_t n) const {
    std::vector<T> values(n);
    cudaStreamSynchronize(stream);
    cudaMemcpy(values.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost);
    return values;
  }
};

template <class T>
std::vector<T> Values(int rank, size_t n) {
  std::vector<T> values(n);
  for (size_t i = 0; i < n; ++i) {
    values[i] = static_cast<T>((i * 7 + static_cast<size_t>(rank) * 3) % 5 + 1);
  }
  return values;
}
