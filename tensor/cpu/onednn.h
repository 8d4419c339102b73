// oneDNN's C++ face and the one engine that this library uses of it.
#pragma once

#include <dnnl.hpp>

namespace dtensor {

inline const dnnl::engine& OneDnnEngine() {
  static const dnnl::engine& engine = *[] {
#ifdef __SANITIZE_THREAD__
    // The thread sanitizer does not see how oneDNN's own cache orders its readers and writers.
    dnnl::set_primitive_cache_capacity(0);
#endif
    return new dnnl::engine(dnnl::engine::kind::cpu, 0);
  }();
  return engine;
}

}  // namespace dtensor
