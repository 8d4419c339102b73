// Attention that also returns what parts of it are put together by, and causal attention of padded
// rows.
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

// scaled_dot_product_attention with is_causal where `mask`, too, leaves keys out: that of padding,
// [b, 1, 1, t], stays so small. May be null. That function refuses both together, as torch does;
// errors carry its name.
//   Shapes:   as that, and all else but:
//   Source:   that with both as one mask [b, 1, s, t]
DTensor causal_attention(const DTensor& q, const DTensor& k, const DTensor& v,
                         const DTensor& mask = {}, std::optional<double> scale = {},
                         bool enable_gqa = false, double dropout_p = 0);

}  // namespace dtensor
