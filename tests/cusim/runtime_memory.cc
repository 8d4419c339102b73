// Device memory, copies, modules and launches.
#include <algorithm>
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

cudaError_t Runtime::Allocate(void** p, size_t bytes) {
  *p = nullptr;
  if (bytes == 0) return cudaSuccess;
  const uint64_t at = memory_.Allocate(bytes);
  if (at == 0) return cudaErrorMemoryAllocation;
  *p = reinterpret_cast<void*>(at);
  return cudaSuccess;
}

cudaError_t Runtime::Free(void* p) {
  if (p == nullptr) return cudaSuccess;
  const uint64_t at = reinterpret_cast<uint64_t>(p);
  if (AnyCapture() && Refuses(nullptr, "cudaFree")) return cudaErrorStreamCaptureUnsupported;
  SynchronizeAll();  // as cudaFree does
  const Allocation* const a = memory_.Owns(at) ? memory_.Find(at) : nullptr;
  if (a != nullptr && a->address == at && !a->live) {
    Say("double free", memory_.Describe(at));
    return cudaErrorInvalidValue;
  }
  if (!memory_.Free(at)) {
    Say("wrong free", "an address that no allocation begins at: " + memory_.Describe(at));
    return cudaErrorInvalidValue;
  }
  uses_.erase(at);
  return cudaSuccess;
}

cudaError_t Runtime::AllocateInOrder(void** p, size_t bytes, Stream* stream) {
  const cudaError_t e = Allocate(p, bytes);
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

bool Runtime::InRange(uint64_t address, uint64_t bytes, const char* what) {
  if (!memory_.Owns(address) || bytes == 0) return true;
  const Allocation* const a = memory_.Find(address);
  if (a != nullptr && a->live && address + bytes <= a->address + a->bytes) return true;
  Say(a != nullptr && !a->live ? "use after free" : "out of bounds",
      std::string(what) + " of " + std::to_string(bytes) + " bytes at " +
          memory_.Describe(address));
  sticky_ = cudaErrorIllegalAddress;
  return false;
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
  const size_t to_bytes = to_pitch * (height - 1) + width;
  const size_t from_bytes = from_pitch * (height - 1) + width;
  // Memory that is not pinned is read when the call is made, and written before it returns.
  std::shared_ptr<std::vector<uint8_t>> staged;
  if (!from_device && !Pinned(from)) {
    const auto* const begin = static_cast<const uint8_t*>(from);
    staged = std::make_shared<std::vector<uint8_t>>(begin, begin + from_bytes);
  }
  const auto run = [=, this](std::vector<Range>* ranges) {
    const uint64_t d = reinterpret_cast<uint64_t>(to), s = reinterpret_cast<uint64_t>(from);
    if (!InRange(d, to_bytes, name) || !InRange(s, from_bytes, name)) return;
    const uint8_t* const source = staged ? staged->data() : Reach(from);
    for (size_t row = 0; row < height; ++row) {
      std::memmove(Reach(to) + row * to_pitch, source + row * from_pitch, width);
      if (to_device && from_device) {
        memory_.CopyWritten(d + row * to_pitch, s + row * from_pitch, width);
      } else if (to_device) {
        memory_.MarkWritten(d + row * to_pitch, width);
      } else if (from_device && options_.uninitialised &&
                 !memory_.Written(s + row * from_pitch, width)) {
        Say("uninitialised read", std::string(name) + " to the host of " +
                                      memory_.Describe(s + row * from_pitch) +
                                      ", not all of which has been written");
      }
    }
    if (!staged) ranges->push_back({s, s + from_bytes, false});
    ranges->push_back({d, d + to_bytes, true});
  };
  const cudaError_t queued = Queue(stream, name, run);
  if (queued != cudaSuccess || stream->capture != nullptr) return queued;
  if (async && (to_device || Pinned(to))) {
    // What is there before it is waited for is not what was there.
    if (!to_device && height == 1) std::memset(to, 0xcd, width);
    return cudaSuccess;
  }
  return Synchronize(stream);
}

cudaError_t Runtime::Fill(void* to, int value, size_t bytes, Stream* stream) {
  if (bytes == 0) return cudaSuccess;
  if (stream == nullptr) return cudaErrorInvalidResourceHandle;
  return Queue(stream, "cudaMemset", [=, this](std::vector<Range>* ranges) {
    const uint64_t d = reinterpret_cast<uint64_t>(to);
    if (!InRange(d, bytes, "cudaMemset")) return;
    std::memset(Reach(to), value, bytes);
    if (IsDevice(to)) memory_.MarkWritten(d, bytes);
    ranges->push_back({d, d + bytes, true});
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
      const char* const text = reinterpret_cast<const char*>(at + entry.header_bytes);
      const auto place = [this](const Variable& v) {
        const uint64_t address = memory_.Allocate(std::max<size_t>(v.bytes, 1));
        std::memset(memory_.Host(address), 0, v.bytes);
        std::copy(v.init.begin(), v.init.end(), memory_.Host(address));
        memory_.MarkWritten(address, v.bytes);
        return address;
      };
      try {
        modules_.push_back(std::make_unique<Module>(
            ParsePtx(std::string_view(text, strnlen(text, entry.bytes)), place)));
        *handle = modules_.back().get();
        for (const auto& [name, kernel] : modules_.back()->kernels) kernels_[name] = &kernel;
        for (const auto& [name, at_bytes] : modules_.back()->variables) variables_[name] = at_bytes;
        found = true;
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

const Kernel* Runtime::KernelOf(const void* host) const {
  const auto name = host_kernels_.find(host);
  if (name == host_kernels_.end()) return nullptr;
  const auto kernel = kernels_.find(name->second);
  return kernel == kernels_.end() ? nullptr : kernel->second;
}

std::pair<uint64_t, size_t> Runtime::VariableOf(const void* host) const {
  const auto name = host_variables_.find(host);
  if (name == host_variables_.end()) return {0, 0};
  const auto variable = variables_.find(name->second);
  return variable == variables_.end() ? std::pair<uint64_t, size_t>{0, 0} : variable->second;
}

namespace {

// Pages that follow each other are one range.
void AddRanges(const std::map<uint64_t, Touched>& touched, std::vector<Range>* ranges) {
  std::vector<Range> writes;
  const auto add = [](std::vector<Range>* to, Range r) {
    if (r.low >= r.high) return;
    if (!to->empty() && to->back().high == r.low) {
      to->back().high = r.high;
    } else {
      to->push_back(r);
    }
  };
  for (const auto& [page, t] : touched) {
    add(ranges, {t.read_low, t.read_high, false});
    add(&writes, {t.write_low, t.write_high, true});
  }
  ranges->insert(ranges->end(), writes.begin(), writes.end());
}

}  // namespace

cudaError_t Runtime::LaunchKernel(const void* host, Dim grid, Dim block, void** args, size_t shared,
                                  Stream* stream, bool cooperative) {
  const Kernel* const kernel = KernelOf(host);
  if (kernel == nullptr) return cudaErrorInvalidDeviceFunction;
  if (grid.count() == 0 || grid.y > 65535 || grid.z > 65535 || grid.x > 0x7fffffff ||
      block.count() == 0 || block.count() > 1024 || block.z > 64 ||
      shared + static_cast<size_t>(kernel->shared_bytes) > 232448) {
    return cudaErrorInvalidConfiguration;
  }
  if (cooperative && grid.count() > 4 * 8) return cudaErrorCooperativeLaunchTooLarge;
  auto params =
      std::make_shared<std::vector<uint8_t>>(static_cast<size_t>(kernel->param_bytes) + 16);
  for (size_t i = 0; i < kernel->params.size(); ++i) {
    const Param& p = kernel->params[i];
    std::memcpy(params->data() + p.offset, args[i], static_cast<size_t>(p.bytes));
  }
  return Queue(stream, kernel->name, [=, this](std::vector<Range>* ranges) {
    Options options = options_;
    options.cooperative = cooperative;
    Outcome out = Launch(memory_, *kernel, grid, block, shared, params->data(), options, &pinned_);
    for (const Report& r : out.reports) Say(r.kind, r.text);
    counters_[kernel->name] += out.counters;
    total_ += out.counters;
    AddRanges(out.touched, ranges);
    constexpr cudaError_t kErrors[] = {cudaSuccess,
                                       cudaErrorIllegalAddress,
                                       cudaErrorMisalignedAddress,
                                       cudaErrorLaunchTimeout,
                                       cudaErrorAssert,
                                       cudaErrorIllegalInstruction};
    if (out.kind != Outcome::kFine) sticky_ = kErrors[out.kind];
  });
}

}  // namespace cusim
