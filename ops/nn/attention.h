// Attention that also returns what parts of it are put together by.
#pragma once

#include <optional>

#include "dtensor/distributed_tensor.h"

namespace dtensor {

// scaled_dot_product_attention (ops/nn/nn.h) and, second, the logarithm of the sum of exp(scores)
// per query, [b, h, s], from which attention over parts of the keys is put together: o is the sum
// of o_i exp(lse_i - lse). The second has no history: no gradient goes through it.
//   Types:    the second is float32 for 16-bit floats, else as q.
//   Errors:   InvalidArgument also where all weights would have to be made: a mask that wants a
//             gradient, dropout under a ScopedRngMode whose numbers depend on layouts.
//   Source:   torch's _scaled_dot_product_flash_attention
Values scaled_dot_product_attention_lse(const DTensor& q, const DTensor& k, const DTensor& v,
                                        const DTensor& mask = {}, bool is_causal = false,
                                        std::optional<double> scale = {}, bool enable_gqa = false,
                                        double dropout_p = 0);

}  // namespace dtensor
