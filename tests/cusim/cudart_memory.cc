// libcudart's functions of memory.
#include <cstdlib>
#include <cstring>

#include "tests/cusim/cudart.h"

using cusim::Runtime;
using cusim::Stream;

extern "C" {

cudaError_t cudaMalloc(void** p, size_t bytes) {
  CUSIM_CALL(cudaMalloc);
  return r.Return(r.Allocate(p, bytes, r.device()));
}
cudaError_t cudaFree(void* p) {
  CUSIM_CALL(cudaFree);
  return r.Return(r.Free(p));
}
cudaError_t cudaMallocAsync(void** p, size_t bytes, cudaStream_t stream) {
  CUSIM_CALL(cudaMallocAsync);
  return r.Return(r.AllocateInOrder(p, bytes, r.Of(stream)));
}
cudaError_t cudaFreeAsync(void* p, cudaStream_t stream) {
  CUSIM_CALL(cudaFreeAsync);
  return r.Return(r.FreeInOrder(p, r.Of(stream)));
}
cudaError_t cudaMallocManaged(void**, size_t, unsigned) {
  CUSIM_CALL(cudaMallocManaged);
  return r.Return(cudaErrorNotSupported);
}

cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned) {
  CUSIM_CALL(cudaHostAlloc);
  return r.Return(r.AllocatePinned(p, bytes));
}
cudaError_t cudaMallocHost(void** p, size_t bytes) {
  CUSIM_CALL(cudaMallocHost);
  return r.Return(r.AllocatePinned(p, bytes));
}
cudaError_t cudaFreeHost(void* p) {
  CUSIM_CALL(cudaFreeHost);
  return r.Return(r.FreePinned(p));
}
cudaError_t cudaHostRegister(void* p, size_t bytes, unsigned) {
  CUSIM_CALL(cudaHostRegister);
  if (r.Pinned(p)) return r.Return(cudaErrorHostMemoryAlreadyRegistered);
  r.pinned()[reinterpret_cast<uint64_t>(p)] = bytes;
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* p) {
  CUSIM_CALL(cudaHostUnregister);
  const bool known = r.pinned().erase(reinterpret_cast<uint64_t>(p)) != 0;
  return r.Return(known ? cudaSuccess : cudaErrorHostMemoryNotRegistered);
}
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  CUSIM_CALL(cudaHostGetDevicePointer);
  if (!r.Pinned(host)) return r.Return(cudaErrorInvalidValue);
  *device = host;
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* p) {
  CUSIM_CALL(cudaPointerGetAttributes);
  std::memset(attributes, 0, sizeof *attributes);
  attributes->type = r.IsDevice(p) ? cudaMemoryTypeDevice
                     : r.Pinned(p) ? cudaMemoryTypeHost
                                   : cudaMemoryTypeUnregistered;
  if (attributes->type != cudaMemoryTypeUnregistered) {
    const cusim::Allocation* const a =
        r.IsDevice(p) ? r.memory().Find(reinterpret_cast<uint64_t>(p)) : nullptr;
    attributes->device = a != nullptr && a->device > 0 ? a->device : a != nullptr ? 0 : r.device();
    attributes->devicePointer = const_cast<void*>(p);
    if (!r.IsDevice(p)) attributes->hostPointer = const_cast<void*>(p);
  } else {
    attributes->device = -2;
  }
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  CUSIM_CALL(cudaMemGetInfo);
  *total = r.memory().capacity();
  *free = *total - r.memory().used(r.device());
  return cudaSuccess;
}

cudaError_t cudaMemset(void* p, int value, size_t bytes) {
  CUSIM_CALL(cudaMemset);
  return r.Return(r.Fill(p, value, bytes, r.Of(nullptr)));
}
cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t stream) {
  CUSIM_CALL(cudaMemsetAsync);
  return r.Return(r.Fill(p, value, bytes, r.Of(stream)));
}
cudaError_t cudaMemset2DAsync(void* p, size_t pitch, int value, size_t width, size_t height,
                              cudaStream_t stream) {
  CUSIM_CALL(cudaMemset2DAsync);
  if (width > pitch) return r.Return(cudaErrorInvalidValue);
  return r.Return(r.Fill(p, value, width, r.Of(stream), height, pitch));
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  CUSIM_CALL(cudaMemcpy);
  return r.Return(r.Copy("cudaMemcpy", to, from, bytes, 1, bytes, bytes, r.Of(nullptr), false));
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  CUSIM_CALL(cudaMemcpyAsync);
  return r.Return(r.Copy("cudaMemcpyAsync", to, from, bytes, 1, bytes, bytes, r.Of(stream), true));
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes,
                                cudaStream_t stream) {
  CUSIM_CALL(cudaMemcpyPeerAsync);
  return r.Return(
      r.Copy("cudaMemcpyPeerAsync", to, from, bytes, 1, bytes, bytes, r.Of(stream), true));
}
cudaError_t cudaMemcpy2D(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                         size_t width, size_t height, cudaMemcpyKind) {
  CUSIM_CALL(cudaMemcpy2D);
  if (width > to_pitch || width > from_pitch) return r.Return(cudaErrorInvalidPitchValue);
  return r.Return(
      r.Copy("cudaMemcpy2D", to, from, width, height, to_pitch, from_pitch, r.Of(nullptr), false));
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                              size_t width, size_t height, cudaMemcpyKind, cudaStream_t stream) {
  CUSIM_CALL(cudaMemcpy2DAsync);
  if (width > to_pitch || width > from_pitch) return r.Return(cudaErrorInvalidPitchValue);
  return r.Return(r.Copy("cudaMemcpy2DAsync", to, from, width, height, to_pitch, from_pitch,
                         r.Of(stream), true));
}

cudaError_t cudaGetSymbolAddress(void** p, const void* symbol) {
  CUSIM_CALL(cudaGetSymbolAddress);
  *p = reinterpret_cast<void*>(r.VariableOf(symbol).first);
  return r.Return(*p == nullptr ? cudaErrorInvalidSymbol : cudaSuccess);
}
cudaError_t cudaGetSymbolSize(size_t* bytes, const void* symbol) {
  CUSIM_CALL(cudaGetSymbolSize);
  *bytes = r.VariableOf(symbol).second;
  return r.Return(*bytes == 0 ? cudaErrorInvalidSymbol : cudaSuccess);
}
cudaError_t cudaMemcpyToSymbol(const void* symbol, const void* from, size_t bytes, size_t offset,
                               cudaMemcpyKind) {
  CUSIM_CALL(cudaMemcpyToSymbol);
  const auto [address, size] = r.VariableOf(symbol);
  if (address == 0) return r.Return(cudaErrorInvalidSymbol);
  if (offset + bytes > size) return r.Return(cudaErrorInvalidValue);
  return r.Return(r.Copy("cudaMemcpyToSymbol", reinterpret_cast<void*>(address + offset), from,
                         bytes, 1, bytes, bytes, r.Of(nullptr), false));
}
cudaError_t cudaMemcpyFromSymbol(void* to, const void* symbol, size_t bytes, size_t offset,
                                 cudaMemcpyKind) {
  CUSIM_CALL(cudaMemcpyFromSymbol);
  const auto [address, size] = r.VariableOf(symbol);
  if (address == 0) return r.Return(cudaErrorInvalidSymbol);
  if (offset + bytes > size) return r.Return(cudaErrorInvalidValue);
  return r.Return(r.Copy("cudaMemcpyFromSymbol", to, reinterpret_cast<void*>(address + offset),
                         bytes, 1, bytes, bytes, r.Of(nullptr), false));
}

}  // extern "C"
