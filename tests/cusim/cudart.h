// For the functions of libcudart: each begins with CUSIM_CALL, which locks the runtime as `r`,
// counts the call and ends it where an error was asked for or stays from before.
#pragma once

#include "tests/cusim/runtime.h"

#define CUSIM_CALL(name)                                          \
  cusim::Runtime& r = cusim::Runtime::Get();                      \
  std::lock_guard<std::recursive_mutex> lock_(r.mutex);           \
  if (const cudaError_t e_ = r.Enter(#name); e_ != cudaSuccess) { \
    return r.Return(e_);                                          \
  }
