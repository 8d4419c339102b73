// Products of tensors whose dims have labels, the engine of einsum, tensordot and their kin: a dim
// is one number, and dims of equal label run together.
#pragma once

#include <vector>

#include "absl/strings/string_view.h"
#include "dtensor/ops/family.h"

namespace dtensor {

using Labels = std::vector<int>;  // one per dim
struct LabelledTensor {
  DTensor x;
  Labels labels;
};

// Sum over the labels that `output` lacks of the product of all terms, its dims in the order of
// `output`. A label may stand twice in a term (its diagonal); size 1 broadcasts.
//   Order:  of two terms at a time: the order that moves the fewest bytes and then takes the fewest
//           products, of all orders for up to four terms, of the next pair beyond.
//   Errors: InvalidArgument as of `op` for sizes or dtypes that differ and labels of no term.
DTensor ContractLabels(absl::string_view op, std::vector<LabelledTensor> terms,
                       const Labels& output);

}  // namespace dtensor
