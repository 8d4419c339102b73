// Device memory, copies, modules and launches.
#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tests/cusim/runtime.h"

namespace cusim {

bool Runtime::Pinned(const void* p) const {
  const uint64_t at = reinterpret_cast<uint64_t>(p);
  auto it = pinned_.upper_bound(at);
  return it != pinned_.begin() && at - (--it)->first < it->second;
}

uint8_t* Runtime::Reach(const void* p) {
  const uint64_t at = reinterpret_cast<uint64_t>(p);
  return memory_.Owns(at) ? memory_.Host(at) : reinterpret_cast<uint8_t*>(at);
}

cudaError_t Runtime::Allocate(void** p, size_t bytes, int device) {
  *p = nullptr;
  if (bytes == 0) return cudaSuccess;
  const uint64_t at = memory_.Allocate(bytes, device);
  if (at == 0) return cudaErrorMemoryAllocation;
  *p = reinterpret_cast<void*>(at);
  return cudaSuccess;
}

uint64_t Runtime::Reaches(int device) const {
  uint64_t all = 1ull << device;
  for (const auto& [from, to] : peers_) {
    if (from == device) all |= 1ull << to;
  }
  return all;
}

cudaError_t Runtime::SetPeer(int peer, bool on) {
  const std::pair<int, int> way{device(), peer};
  if (peer < 0 || peer >= devices_ || peer == way.first) return cudaErrorInvalidDevice;
  if (on) {
    return peers_.insert(way).second ? cudaSuccess : cudaErrorPeerAccessAlreadyEnabled;
  }
  return peers_.erase(way) != 0 ? cudaSuccess : cudaErrorPeerAccessNotEnabled;
}

cudaError_t Runtime::Free(void* p) {
  if (p == nullptr) return cudaSuccess;
  const uint64_t at = reinterpret_cast<uint64_t>(p);
  for (const auto& c : captures_) {
    if (c->relaxed) continue;
    c->broken = "cudaFree in a capture";
    return cudaErrorStreamCaptureUnsupported;
  }
  const Allocation* const a = memory_.Owns(at) ? memory_.Find(at) : nullptr;
  if (a != nullptr && a->address == at && !a->live) {
    Say("double free", memory_.Describe(at));
    return cudaErrorInvalidValue;
  }
  // It waits for the device, as cudaFree does.
  const cudaError_t waited =
      Await([this, on = a == nullptr ? 0 : a->device] { return ForceAll(on); });
  if (waited != cudaSuccess) return waited;
  if (!memory_.Free(at)) {
    Say("wrong free", "an address that no allocation begins at: " + memory_.Describe(at));
    return cudaErrorInvalidValue;
  }
  uses_.erase(at);
  return cudaSuccess;
}

cudaError_t Runtime::AllocateInOrder(void** p, size_t bytes, Stream* stream) {
  if (stream == nullptr) return cudaErrorInvalidResourceHandle;
  const cudaError_t e = Allocate(p, bytes, stream->device);
  if (e != cudaSuccess || *p == nullptr) return e;
  // Usable in the stream's order: a use that nothing orders after this is a race.
  const uint64_t at = reinterpret_cast<uint64_t>(*p);
  return Queue(stream, "cudaMallocAsync", [at, bytes](std::vector<Range>* ranges) {
    ranges->push_back({at, at + bytes, true});
  });
}

cudaError_t Runtime::FreeInOrder(void* p, Stream* stream) {
  if (p == nullptr) return cudaSuccess;
  const uint64_t at = reinterpret_cast<uint64_t>(p);
  Allocation* const a = memory_.Owns(at) ? memory_.Find(at) : nullptr;
  if (a == nullptr || a->address != at || !a->live || a->freed_in_order) {
    Say(a != nullptr && a->address == at ? "double free" : "wrong free", memory_.Describe(at));
    return cudaErrorInvalidValue;
  }
  a->freed_in_order = true;
  const uint64_t bytes = a->bytes;
  return Queue(stream, "cudaFreeAsync", [this, at, bytes](std::vector<Range>* ranges) {
    ranges->push_back({at, at + bytes, true});
    memory_.Free(at);
  });
}

cudaError_t Runtime::AllocatePinned(void** p, size_t bytes) {
  *p = std::malloc(bytes == 0 ? 1 : bytes);
  if (*p == nullptr) return cudaErrorMemoryAllocation;
  pinned_[reinterpret_cast<uint64_t>(*p)] = bytes;
  return cudaSuccess;
}

cudaError_t Runtime::FreePinned(void* p) {
  if (p == nullptr) return cudaSuccess;
  const cudaError_t waited = Await([this] { return ForceAll(kAllDevices); });
  if (waited != cudaSuccess) return waited;
  const uint64_t at = reinterpret_cast<uint64_t>(p);
  if (pinned_.erase(at) == 0) {
    Say("wrong free", "cudaFreeHost of memory that is not pinned");
    return cudaErrorInvalidValue;
  }
  uses_.erase(at);
  std::free(p);
  return cudaSuccess;
}

uint8_t* Runtime::Use(const std::string& what, int device, const void* p, uint64_t bytes,
                      Access access, std::vector<Range>* ranges) {
  const uint64_t at = reinterpret_cast<uint64_t>(p);
  if (access != Access::kWrite) ranges->push_back({at, at + bytes, false});
  if (access != Access::kRead) ranges->push_back({at, at + bytes, true});
  if (!memory_.Owns(at)) return reinterpret_cast<uint8_t*>(at);
  const Allocation* const a = memory_.Find(at);
  const bool live = a != nullptr && a->live && Within(at, bytes, a->address, a->bytes);
  const bool near = live && (a->device == kAllDevices || device == kAllDevices ||
                             (Reaches(device) >> a->device & 1) != 0);
  if (!near) {
    Say(live                       ? "wrong device"
        : a != nullptr && !a->live ? "use after free"
                                   : "out of bounds",
        what + " of " + std::to_string(bytes) + " bytes at " + memory_.Describe(at));
    sticky_ = cudaErrorIllegalAddress;
    return nullptr;
  }
  if (access != Access::kWrite && options_.uninitialised && !memory_.Written(at, bytes)) {
    Say("uninitialised read",
        what + " of " + memory_.Describe(at) + ", not all of which has been written");
  }
  if (access != Access::kRead) memory_.MarkWritten(at, bytes);
  return memory_.Host(at);
}

cudaError_t Runtime::Copy(const char* name, void* to, const void* from, size_t width, size_t height,
                          size_t to_pitch, size_t from_pitch, Stream* stream, bool async) {
  if (width == 0 || height == 0) return cudaSuccess;
  if (stream == nullptr) return cudaErrorInvalidResourceHandle;
  if (!async && stream->capture == nullptr && AnyCapture() && Refuses(nullptr, name)) {
    return cudaErrorStreamCaptureUnsupported;
  }
  ++copies_;
  const bool to_device = IsDevice(to), from_device = IsDevice(from);
  // Memory that is not pinned is read when the call is made, and written before it returns.
  std::shared_ptr<std::vector<uint8_t>> staged;
  if (!from_device && !Pinned(from)) {
    const auto* const begin = static_cast<const uint8_t*>(from);
    staged =
        std::make_shared<std::vector<uint8_t>>(begin, begin + from_pitch * (height - 1) + width);
  }
  const auto run = [=, this](std::vector<Range>* ranges) {
    uploads_ += to_device && !from_device ? 1 : 0;
    for (size_t row = 0; row < height; ++row) {
      uint8_t* const target = static_cast<uint8_t*>(to) + row * to_pitch;
      const uint8_t* const source = static_cast<const uint8_t*>(from) + row * from_pitch;
      const uint64_t d = reinterpret_cast<uint64_t>(target);
      const uint64_t s = reinterpret_cast<uint64_t>(source);
      if (to_device && from_device) {  // what nothing wrote is copied as such
        const bool checked = options_.uninitialised;
        options_.uninitialised = false;
        const bool fine = Use(name, kAllDevices, source, width, Access::kRead, ranges) != nullptr &&
                          Use(name, kAllDevices, target, width, Access::kWrite, ranges) != nullptr;
        options_.uninitialised = checked;
        if (!fine) return;
        std::memmove(memory_.Host(d), memory_.Host(s), width);
        memory_.CopyWritten(d, s, width);
        continue;
      }
      const uint8_t* const bytes =
          staged ? staged->data() + row * from_pitch
                 : Use(name, kAllDevices, source, width, Access::kRead, ranges);
      uint8_t* const out = bytes == nullptr
                               ? nullptr
                               : Use(name, kAllDevices, target, width, Access::kWrite, ranges);
      if (out == nullptr) return;
      std::memmove(out, bytes, width);
    }
  };
  const cudaError_t queued = Queue(stream, name, run);
  if (queued != cudaSuccess || stream->capture != nullptr) return queued;
  if (async && (to_device || Pinned(to))) {
    // What is there before it is waited for is not what was there.
    for (size_t row = 0; !to_device && row < height; ++row) {
      std::memset(static_cast<uint8_t*>(to) + row * to_pitch, 0xcd, width);
    }
    return cudaSuccess;
  }
  return Synchronize(stream);
}

cudaError_t Runtime::Fill(void* to, int value, size_t width, Stream* stream, size_t height,
                          size_t pitch) {
  if (width == 0 || height == 0) return cudaSuccess;
  return Queue(stream, "cudaMemset", [=, this](std::vector<Range>* ranges) {
    for (size_t row = 0; row < height; ++row) {
      const uint8_t* const p = static_cast<const uint8_t*>(to) + row * pitch;
      uint8_t* const out = Use("cudaMemset", kAllDevices, p, width, Access::kWrite, ranges);
      if (out == nullptr) return;
      std::memset(out, value, width);
    }
  });
}

// A fat binary: a header, then entries of which those of kind 1 are PTX.
void Runtime::Load(void** handle, const uint8_t* fatbin) {
  struct Entry {
    uint16_t kind, version;
    uint32_t header_bytes;
    uint64_t bytes;
    uint32_t compressed_bytes;
  };
  uint64_t total;
  std::memcpy(&total, fatbin + 8, sizeof total);
  bool found = false;
  for (const uint8_t *at = fatbin + 16, *end = at + total; at < end;) {
    Entry entry;
    std::memcpy(&entry, at, sizeof entry);
    if (entry.kind == 1 && entry.compressed_bytes != 0) {
      Say("module", "its PTX is compressed: build with nvcc --no-compress");
    } else if (entry.kind == 1) {
      found = true;
      const char* const text = reinterpret_cast<const char*>(at + entry.header_bytes);
      const auto place = [this](const Variable& v) {
        const uint64_t address = memory_.Allocate(std::max<size_t>(v.bytes, 1), kAllDevices);
        if (address == 0) {
          load_error_ = cudaErrorMemoryAllocation;
          throw std::runtime_error("no room for the variable " + v.name + " of " +
                                   std::to_string(v.bytes) + " bytes");
        }
        std::memset(memory_.Host(address), 0, v.bytes);
        std::copy(v.init.begin(), v.init.end(), memory_.Host(address));
        memory_.MarkWritten(address, v.bytes);
        return address;
      };
      try {
        modules_.push_back(
            std::make_unique<Module>(std::string_view(text, strnlen(text, entry.bytes)), place));
        Module* const module = modules_.back().get();
        *handle = module;
        for (const std::string& name : module->kernels()) {
          kernels_[name] = module;
          const Kernel* const kernel = whole_ ? module->Read(name) : nullptr;
          if (kernel != nullptr && !kernel->error.empty())
            Say("unknown instruction", kernel->error);
        }
        for (const auto& [name, at_bytes] : module->variables()) variables_[name] = at_bytes;
      } catch (const std::exception& e) {
        Say("module", e.what());
      }
    }
    at += entry.header_bytes + entry.bytes;
  }
  if (!found)
    Say("module", "no PTX in it: build with nvcc -gencode arch=compute_80,code=compute_80");
}

void Runtime::RegisterKernel(const void* host, const std::string& name) {
  host_kernels_[host] = name;
}
void Runtime::RegisterVariable(const void* host, const std::string& name) {
  host_variables_[host] = name;
}

const Kernel* Runtime::KernelOf(const void* host) {
  const auto name = host_kernels_.find(host);
  if (name == host_kernels_.end()) return nullptr;
  const auto module = kernels_.find(name->second);
  if (module == kernels_.end()) return nullptr;
  try {
    return module->second->Read(name->second);
  } catch (const std::exception& e) {
    Say("module", e.what());
    return nullptr;
  }
}

std::pair<uint64_t, size_t> Runtime::VariableOf(const void* host) const {
  const auto name = host_variables_.find(host);
  if (name == host_variables_.end()) return {0, 0};
  const auto variable = variables_.find(name->second);
  return variable == variables_.end() ? std::pair<uint64_t, size_t>{0, 0} : variable->second;
}

namespace {

// The bytes of one page as a range, which is sparse only where it has to be.
void AddPage(uint64_t page, const PageBits& bits, bool write, std::vector<Range>* ranges) {
  int low = -1, high = 0, count = 0;
  for (size_t i = 0; i < bits.size(); ++i) {
    if (bits[i] == 0) continue;
    if (low < 0) low = static_cast<int>(i) * 64 + std::countr_zero(bits[i]);
    high = static_cast<int>(i) * 64 + 64 - std::countl_zero(bits[i]);
    count += std::popcount(bits[i]);
  }
  if (low < 0) return;
  const uint64_t base = page * kPage;
  Range range{base + static_cast<uint64_t>(low), base + static_cast<uint64_t>(high), write};
  range.sparse = count != high - low;
  if (range.sparse) range.bits = bits;
  ranges->push_back(range);
}

}  // namespace

cudaError_t Runtime::AllowShared(const void* host, int bytes) {
  const int all = bytes + KernelOf(host)->shared_bytes;
  if (bytes < 0 || all > SharedOfABlock()) return cudaErrorInvalidValue;
  allowed_shared_[host] = static_cast<size_t>(bytes);
  return cudaSuccess;
}
size_t Runtime::DynamicSharedOf(const void* host, const Kernel& kernel) const {
  const auto allowed = allowed_shared_.find(host);
  if (allowed != allowed_shared_.end()) return allowed->second;
  return 49152 - static_cast<size_t>(kernel.shared_bytes);
}

std::shared_ptr<const Launched> Runtime::Checked(const void* host, Dim grid, Dim block, void** args,
                                                 size_t shared, int device, bool cooperative,
                                                 cudaError_t* error) {
  const Kernel* const kernel = KernelOf(host);
  *error = cudaSuccess;
  if (kernel == nullptr) {
    *error = load_error_;
  } else if (grid.count() == 0 || grid.y > 65535 || grid.z > 65535 || grid.x > 0x7fffffff ||
             block.count() == 0 || block.count() > 1024 || block.z > 64) {
    *error = cudaErrorInvalidConfiguration;
  } else if (shared > DynamicSharedOf(host, *kernel)) {
    *error = cudaErrorInvalidValue;
  } else if (cooperative && grid.count() > 4 * 8) {
    *error = cudaErrorCooperativeLaunchTooLarge;
  }
  if (*error != cudaSuccess) return nullptr;
  auto launched =
      std::make_shared<Launched>(Launched{kernel, grid, block, shared, device, cooperative, {}});
  launched->params.resize(static_cast<size_t>(kernel->param_bytes) + 16);
  for (size_t i = 0; i < kernel->params.size(); ++i) {
    const Param& p = kernel->params[i];
    std::memcpy(launched->params.data() + p.offset, args[i], static_cast<size_t>(p.bytes));
  }
  return launched;
}

cudaError_t Runtime::LaunchKernel(const void* host, Dim grid, Dim block, void** args, size_t shared,
                                  Stream* stream, bool cooperative) {
  if (KernelOf(host) == nullptr) return load_error_;
  if (stream == nullptr || stream->device != device()) return cudaErrorInvalidResourceHandle;
  cudaError_t error = cudaSuccess;
  auto launched = Checked(host, grid, block, args, shared, stream->device, cooperative, &error);
  return launched == nullptr ? error : Queue(stream, WorkOf(std::move(launched)));
}

Work Runtime::WorkOf(std::shared_ptr<const Launched> launched) {
  Work work;
  work.name = launched->kernel->name;
  work.launched = launched;
  work.run = [this, launched = std::move(launched)](std::vector<Range>* ranges) {
    const Launched& l = *launched;
    Options options = options_;
    options.cooperative = l.cooperative;
    options.devices = Reaches(l.device);
    Outcome out =
        Launch(memory_, *l.kernel, l.grid, l.block, l.shared, l.params.data(), options, &pinned_);
    for (const Report& r : out.reports) Say(r.kind, r.text);
    counters_[l.kernel->name] += out.counters;
    total_ += out.counters;
    for (const auto& [page, touched] : out.touched) {
      AddPage(page, touched.read, false, ranges);
      AddPage(page, touched.written, true, ranges);
    }
    constexpr cudaError_t kErrors[] = {cudaSuccess,
                                       cudaErrorIllegalAddress,
                                       cudaErrorMisalignedAddress,
                                       cudaErrorLaunchTimeout,
                                       cudaErrorAssert,
                                       cudaErrorIllegalInstruction};
    if (out.kind != Outcome::kFine) sticky_ = kErrors[out.kind];
  };
  return work;
}

}  // namespace cusim
