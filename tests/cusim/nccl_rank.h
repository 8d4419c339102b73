// What tests of NCCL's stand-in have of a rank.
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstddef>
#include <vector>

#include "gmock/gmock.h"
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

// Two ranks have 1 each, capture its sum in place, and launch that three times.
inline void SumThriceAsAGraph(const Rank& me) {
  int* const x = me.Put<int>({1});
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CUDA_OK(cudaStreamBeginCapture(me.stream, cudaStreamCaptureModeThreadLocal));
  NCCL_OK(ncclAllReduce(x, x, 1, ncclInt32, ncclSum, me.comm, me.stream));
  CUDA_OK(cudaStreamEndCapture(me.stream, &graph));
  CUDA_OK(cudaGraphInstantiate(&exec, graph, 0));
  for (int i = 0; i < 3; ++i) CUDA_OK(cudaGraphLaunch(exec, me.stream));
  EXPECT_EQ(me.Take(x, 1)[0], 8);
  CUDA_OK(cudaGraphExecDestroy(exec));
  CUDA_OK(cudaGraphDestroy(graph));
  CUDA_OK(cudaFree(x));
}

// Two ranks reduce unlike counts, which both are told, then call unlike collectives.
inline void CallWhatDoesNotFit(const Rank& me) {
  int* const x = me.Put(std::vector<int>(8, 1));
  NCCL_OK(ncclAllReduce(x, x, me.rank == 0 ? 4 : 8, ncclInt32, ncclSum, me.comm, me.stream));
  CUDA_OK(cudaStreamSynchronize(me.stream));
  ncclResult_t error;
  NCCL_OK(ncclCommGetAsyncError(me.comm, &error));
  EXPECT_EQ(error, ncclInvalidUsage);
  EXPECT_THAT(ncclGetLastError(me.comm),
              ::testing::HasSubstr("rank 1 ncclAllReduce(8 x int32, sum)"));
  if (me.rank == 0) {
    NCCL_OK(ncclAllGather(x, x, 4, ncclInt32, me.comm, me.stream));
  } else {
    NCCL_OK(ncclBroadcast(x, x, 4, ncclInt32, 0, me.comm, me.stream));
  }
  CUDA_OK(cudaStreamSynchronize(me.stream));
  CUDA_OK(cudaFree(x));
}
