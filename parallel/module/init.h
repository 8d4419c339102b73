// Initialisers: how first values are drawn. Under any placement they are one device's.
//   Source: torch.nn.init. Errors: InvalidArgument for a tensor with fewer dims than the rule
//   needs.
#pragma once

#include "dtensor/distributed_tensor.h"

namespace dtensor {

enum class FanMode { kIn, kOut };
// What the layer is followed by: its gain. kLinear 1, kTanh 5/3, kRelu sqrt(2), kLeakyRelu
// sqrt(2 / (1 + a^2)).
enum class Gain { kLinear, kTanh, kRelu, kLeakyRelu };

// weight [out, in, ...]; bound = gain * sqrt(3 / fan), std = gain / sqrt(fan).
void kaiming_uniform_(const DTensor& weight, double a = 0, FanMode mode = FanMode::kIn,
                      Gain gain = Gain::kLeakyRelu);
void kaiming_normal_(const DTensor& weight, double a = 0, FanMode mode = FanMode::kIn,
                     Gain gain = Gain::kLeakyRelu);
// bound = gain * sqrt(6 / (fan_in + fan_out)), std = gain * sqrt(2 / (fan_in + fan_out)).
void xavier_uniform_(const DTensor& weight, double gain = 1);
void xavier_normal_(const DTensor& weight, double gain = 1);
// Normal values within [a, b], by the inverse of the distribution's integral.
//   Types: floating; computed in float64 from the uniform numbers of the tensor's dtype.
void trunc_normal_(const DTensor& t, double mean = 0, double std = 1, double a = -2, double b = 2);
// Rows (or columns, where there are fewer) orthonormal, times gain. Every rank makes the whole,
// on the host: on a device it waits once for the numbers drawn, and the result is copied back.
void orthogonal_(const DTensor& weight, double gain = 1);

}  // namespace dtensor
