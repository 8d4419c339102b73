#include "dtensor/mesh/nccl/api.h"

#include <dlfcn.h>

#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "dtensor/tensor/status.h"

namespace dtensor::nccl {
namespace {

absl::Status None(absl::string_view what) {
  return absl::FailedPreconditionError(
      absl::StrCat("ranks on several GPUs communicate by NCCL: ", what));
}

absl::StatusOr<Api> Open() {
  const char* const named = std::getenv("DTENSOR_NCCL_LIBRARY");
  const char* const file = named != nullptr ? named : "libnccl.so.2";
  void* const library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return None(absl::StrCat("it cannot be loaded (", dlerror(),
                             "); install it, or let DTENSOR_NCCL_LIBRARY name its file"));
  }
  Api api;
  const char* missing = nullptr;
  const auto find = [&](auto& function, const char* name) {
    void* const symbol = dlsym(library, name);
    if (symbol == nullptr) missing = name;
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(symbol);
  };
#define DT_NCCL_FUNCTION(name, parameters) find(api.name, "nccl" #name);
  DT_NCCL_FUNCTIONS(DT_NCCL_FUNCTION)
#undef DT_NCCL_FUNCTION
  find(api.GetErrorString, "ncclGetErrorString");
  find(api.GetLastError, "ncclGetLastError");
  if (api.GetVersion != nullptr && api.GetVersion(&api.version) == kSuccess &&
      api.version < kLeastVersion) {
    return None(absl::StrCat(file, " is version ", VersionText(api.version), ", at least ",
                             VersionText(kLeastVersion), " is needed"));
  }
  if (missing != nullptr) return None(absl::StrCat(file, " has no function ", missing));
  return api;
}

}  // namespace

int TypeOf(DType t) {
  switch (t) {
    case DType::kU8:
    case DType::kBool:
      return 1;  // ncclUint8
    case DType::kI32:
      return 2;
    case DType::kI64:
      return 4;
    case DType::kF16:
      return 6;
    case DType::kF32:
      return 7;
    case DType::kF64:
      return 8;
    case DType::kBF16:
      return 9;
  }
  DT_CHECK_MSG(false, "a dtype that NCCL has no type for");
  return 0;
}

int OpOf(ReduceOp op, DType t) {
  const bool truth = t == DType::kBool;
  switch (op) {
    case ReduceOp::kSum:
      return truth ? 2 : 0;
    case ReduceOp::kProd:
      return truth ? 3 : 1;
    case ReduceOp::kMax:
      return 2;
    case ReduceOp::kMin:
      return 3;
    case ReduceOp::kAvg:
      return 4;
  }
  DT_CHECK_MSG(false, "a reduction that NCCL has no operator for");
  return 0;
}

absl::Status Api::Check(int result, absl::string_view function, CommHandle comm) const {
  if (result == kSuccess || result == kInProgress) return absl::OkStatus();
  const char* const more = GetLastError(comm);
  return RankLocal(absl::InternalError(
      absl::StrCat("NCCL ", VersionText(version), ": nccl", function, ": ", GetErrorString(result),
                   more == nullptr || *more == '\0' ? "" : absl::StrCat("; ", more))));
}

std::string VersionText(int version) {
  return absl::StrCat(version / 10000, ".", version / 100 % 100, ".", version % 100);
}

absl::StatusOr<const Api*> Load() {
  static const auto* const api = new absl::StatusOr<Api>(Open());
  if (!api->ok()) return api->status();
  return &**api;
}

}  // namespace dtensor::nccl
