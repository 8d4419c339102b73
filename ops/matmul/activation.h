// What may stand behind a product of matrices. Plain C++ without Abseil: kernel files include it.
#pragma once

#include <cstdint>

namespace dtensor {

// As relu, gelu, gelu with approx_tanh, silu.
enum class Activation : uint8_t { kRelu, kGelu, kGeluTanh, kSilu };

// The pointwise op of it. Of gelu's two the attribute says which.
inline const char* OpOf(Activation a) {
  return a == Activation::kRelu ? "relu" : a == Activation::kSilu ? "silu" : "gelu";
}

}  // namespace dtensor
