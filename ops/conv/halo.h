// Windows over a sharded dim: every rank fetches what its own windows read beyond its block (the
// halo) from whoever has it, instead of gathering the whole.
#pragma once

#include <initializer_list>

#include "absl/functional/function_ref.h"
#include "dtensor/ops/conv/spatial.h"

namespace dtensor {

// call(x, windows), an op that reads `windows` of the last dims of x, whatever dims come before.
// Where x is sharded in one of these dims over a mesh dim, the op runs on what every rank's block
// of the result reads, and the result is sharded so, too. Any stride, dilation and uneven blocks; a
// halo may come from several ranks.
//
// Taken where that brings fewer rows to the ranks than gathering x, no operand of `others` (nulls
// are skipped) is cut over that mesh dim, and nothing of x is pending; else x goes to the call as
// it is. `fill` is what windows find outside of x.
//   Comm:     one exchange per such dim: the rows that a rank lacks, if any does. In backward their
//             gradients go back.
using WindowCall = absl::FunctionRef<DTensor(const DTensor& x, const WindowDims& windows)>;
DTensor OverHalos(const DTensor& x, const WindowDims& windows, double fill,
                  std::initializer_list<DTensor> others, WindowCall call);

}  // namespace dtensor
