// A libcuda.so.1 that answers as its environment says: for what scripts/gpu_bundle_run refuses.
#include <cstdlib>
#include <cstring>

namespace {

int Number(const char* name) {
  const char* const text = std::getenv(name);
  return text == nullptr ? 0 : std::atoi(text);
}

}  // namespace

extern "C" {

int cuInit(unsigned) { return Number("FAKE_INIT"); }
int cuDriverGetVersion(int* version) {
  *version = Number("FAKE_VERSION");
  return 0;
}
int cuDeviceGetCount(int* count) {
  *count = Number("FAKE_COUNT");
  return 0;
}
int cuDeviceGetName(char* name, int size, int) {
  std::strncpy(name, "Fake GPU", static_cast<size_t>(size));
  return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int) {
  constexpr int kMajor = 75;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 76: MINOR
  *value = attribute == kMajor ? Number("FAKE_SM") / 10 : Number("FAKE_SM") % 10;
  return 0;
}

}  // extern "C"
