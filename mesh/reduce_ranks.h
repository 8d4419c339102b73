// ReduceRanks: the arithmetic of reducing collectives. Plain C++, included by per-level kernel
// files.
#pragma once

#include <cstdint>

#include "dtensor/tensor/cpu/level.h"
#include "dtensor/tensor/dtype.h"

namespace dtensor {

// out[k][i] = op over r of in[r][i], r ascending, for every k: the same bits however a message is
// cut. bf16 and f16 are summed up in float and rounded once. Integers wrap; bool: sum and max are
// "or", prod and min "and"; max and min give NaN if any term is. An output may be one of the
// inputs.
struct ReduceRanksCall {
  const void* const* in;
  int inputs;
  void* const* out;
  int outputs;
  int64_t count;
  DType dtype;
  ReduceOp op;
  bool bypass;    // store around the caches where the CPU can: for outputs too large to stay there
  int terms = 0;  // what kAvg divides by; 0: inputs. More where an input is a sum of several
};

DT_AT_EACH_CPU_LEVEL(void ReduceRanks(const ReduceRanksCall& call);)

}  // namespace dtensor
