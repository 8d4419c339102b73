// Dispatch: one op call. Cache lookup by (op, interned specs, attributes the rule read); on a miss
// dtensor/sharding chooses a strategy; inputs are redistributed, outputs allocated, the local
// kernel runs, the VJP is recorded.
#pragma once

#include <cstdint>
#include <string>

#include "dtensor/dtensor.h"
#include "dtensor/op.h"

namespace dtensor {

using Inputs = absl::Span<const DTensor* const>;

struct DispatchOptions {
  // Layout the caller would like output 0 to have; breaks ties between strategies (and counts as
  // cost where it differs, but for a pending sum in place of a copy). Null: none.
  const Spec* like = nullptr;
};

// The non-throwing form. Errors: InvalidArgument and FailedPrecondition for uniform errors,
// whatever the kernel or a peer reported for rank-local ones.
absl::StatusOr<Values> Dispatch(const OpDef& op, Inputs inputs, absl::Span<const Attr> attrs = {},
                                const DispatchOptions& options = {});

// The throwing form, for op functions.
Values Call(const OpDef& op, Inputs inputs, absl::Span<const Attr> attrs = {},
            const DispatchOptions& options = {});
DTensor Call1(const OpDef& op, Inputs inputs, absl::Span<const Attr> attrs = {},
              const DispatchOptions& options = {});

// The form of every uniform error: "[op] cause; inputs: x = <spec>, ... (rank r of n)".
struct NamedInput {
  absl::string_view name;
  const DTensor& value;
  bool optional = false;  // may be null: then it is not mentioned
};
absl::Status ExplainError(absl::string_view op, absl::Span<const NamedInput> inputs,
                          const absl::Status& cause);

struct DispatchStats {
  int64_t hits = 0, misses = 0, entries = 0, evictions = 0;
  int64_t contiguous_copies = 0;  // inputs copied for kernels that want contiguous ones
};
DispatchStats GetDispatchStats();  // of the calling rank
void ClearDispatchCache();

}  // namespace dtensor
