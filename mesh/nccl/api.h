// NCCL as it is called here: a table of its functions, found when somebody first asks for it.
// Neither its headers nor the library are needed to build. Private to mesh/.
//   Source: the types and values of nccl.h, which NVIDIA keeps stable within version 2
//   (docs.nvidia.com/deeplearning/nccl/user-guide/docs/api); tests/mesh/nccl_abi_test.cc compares
//   them with a header where there is one.
#pragma once

#include <climits>
#include <cstddef>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "dtensor/tensor/tensor.h"

namespace dtensor::nccl {

using CommHandle = void*;  // ncclComm_t

// ncclResult_t: those that mean no error, and that of a peer that is gone.
inline constexpr int kSuccess = 0, kInProgress = 7, kRemoteError = 6;

struct UniqueId {
  char internal[128];
};

// ncclConfig_t as far as all versions from kLeastVersion on have it; `size` says how far that is.
struct Config {
  static constexpr int kUndefined = INT_MIN;
  size_t size = sizeof(Config);
  unsigned int magic = 0xcafebeef;
  unsigned int version = 21800;
  int blocking = kUndefined;
  int cga_cluster_size = kUndefined;
  int min_ctas = kUndefined;
  int max_ctas = kUndefined;
  const char* net_name = nullptr;
  int split_share = kUndefined;
};

// ncclDataType_t and ncclRedOp_t. Bool travels as bytes, of which any but 0 is true: a sum is a
// maximum there, a product a minimum.
int TypeOf(DType t);
int OpOf(ReduceOp op, DType t);

// X(name, parameters): functions that return an ncclResult_t. `type` is an ncclDataType_t, `op` an
// ncclRedOp_t, `stream` a cudaStream_t.
#define DT_NCCL_FUNCTIONS(X)                                                                       \
  X(GetVersion, (int* version))                                                                    \
  X(GetUniqueId, (UniqueId * id))                                                                  \
  X(CommInitRankConfig, (CommHandle * comm, int ranks, UniqueId id, int rank, Config* config))     \
  X(CommGetAsyncError, (CommHandle comm, int* error))                                              \
  X(CommDestroy, (CommHandle comm))                                                                \
  X(CommAbort, (CommHandle comm))                                                                  \
  X(GroupStart, ())                                                                                \
  X(GroupEnd, ())                                                                                  \
  X(AllReduce,                                                                                     \
    (const void* in, void* out, size_t count, int type, int op, CommHandle comm, void* stream))    \
  X(Reduce, (const void* in, void* out, size_t count, int type, int op, int root, CommHandle comm, \
             void* stream))                                                                        \
  X(Broadcast,                                                                                     \
    (const void* in, void* out, size_t count, int type, int root, CommHandle comm, void* stream))  \
  X(AllGather, (const void* in, void* out, size_t count, int type, CommHandle comm, void* stream)) \
  X(ReduceScatter,                                                                                 \
    (const void* in, void* out, size_t count, int type, int op, CommHandle comm, void* stream))    \
  X(Send, (const void* in, size_t count, int type, int peer, CommHandle comm, void* stream))       \
  X(Recv, (void* out, size_t count, int type, int peer, CommHandle comm, void* stream))

struct Api {
#define DT_NCCL_FUNCTION(name, parameters) int(*name) parameters = nullptr;
  DT_NCCL_FUNCTIONS(DT_NCCL_FUNCTION)
#undef DT_NCCL_FUNCTION
  const char* (*GetErrorString)(int result) = nullptr;
  const char* (*GetLastError)(CommHandle comm) = nullptr;
  int version = 0;  // 22809 is 2.28.9

  // OK for kSuccess and kInProgress. Else Internal (rank-local): "ncclAllReduce: invalid usage
  // (...)", with NCCL's last words.
  absl::Status Check(int result, absl::string_view function, CommHandle comm = nullptr) const;
};

inline constexpr int kLeastVersion = 21800;  // configurations with all of Config
std::string VersionText(int version);        // "2.28.9"

// The functions of libnccl.so.2, or of the file that DTENSOR_NCCL_LIBRARY names; loaded once.
//   Errors: FailedPrecondition where it cannot be loaded, with the loader's words, lacks a
//   function, or is older than kLeastVersion.
absl::StatusOr<const Api*> Load();

}  // namespace dtensor::nccl
