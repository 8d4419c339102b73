// Products of bfloat16 by the CPU's units for them (AVX512_BF16, AMX), through oneDNN.
#pragma once

#include "dtensor/tensor/cpu/gemm.h"

namespace dtensor {

// Whether this CPU, at the active level, has such units and oneDNN knows them.
bool HasBf16Units();

// False where oneDNN does not take it, or would be slow: then nothing was done. Sums in float32,
// results rounded once. What oneDNN prepares for a shape is kept, up to 512 shapes per thread.
//   Bits:   the same for the same call on the same CPU.
//   Memory: what oneDNN asks for to reorder operands, from CurrentAllocator.
//   Errors: throws Error (ResourceExhausted) without memory.
bool TryBf16Gemm(const GemmCall& call);

}  // namespace dtensor
