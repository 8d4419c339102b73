// oneDNN's C++ face and the one engine that this library uses of it.
#pragma once

#include <dnnl.hpp>

namespace dtensor {

inline const dnnl::engine& OneDnnEngine() {
  static const dnnl::engine& engine = *new dnnl::engine(dnnl::engine::kind::cpu, 0);
  return engine;
}

}  // namespace dtensor
