// What NVTX (nvtx3, in the plugin) loads in place of a profiler where NVTX_INJECTION64_PATH names
// it: prints ranges of threads as they are opened and closed.
#include <nvtx3/nvToolsExt.h>

#include <cstdio>

namespace {

int Push(const char* name) {
  std::printf("push %s\n", name);
  return 0;
}
int Pop() {
  std::printf("pop\n");
  return 0;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int InitializeInjectionNvtx2(
    NvtxGetExportTableFunc_t get) {
  unsigned size = 0;
  NvtxFunctionTable table = nullptr;
  const auto* callbacks = static_cast<const NvtxExportTableCallbacks*>(get(NVTX_ETID_CALLBACKS));
  if (callbacks == nullptr ||
      callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE, &table, &size) == 0 ||
      size <= NVTX_CBID_CORE_RangePop) {
    return 0;
  }
  *table[NVTX_CBID_CORE_RangePushA] = reinterpret_cast<NvtxFunctionPointer>(&Push);
  *table[NVTX_CBID_CORE_RangePop] = reinterpret_cast<NvtxFunctionPointer>(&Pop);
  return 1;
}
