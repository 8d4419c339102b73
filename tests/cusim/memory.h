// Memory of simulated devices. Addresses that programs see have no access rights, so that a host
// which touches them is caught; the simulator sees the same bytes through a second mapping.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace cusim {

// Whether `bytes` at `address` lie in the `size` bytes at `base`: without sums, which may wrap.
inline bool Within(uint64_t address, uint64_t bytes, uint64_t base, uint64_t size) {
  return address >= base && bytes <= size && address - base <= size - bytes;
}

inline constexpr int kAllDevices = -1;  // variables of modules: each device has them here

struct Allocation {
  uint64_t address = 0, bytes = 0;
  int device = 0;
  bool live = true;
  bool freed_in_order = false;  // by cudaFreeAsync: live until the stream comes there
};

class DeviceMemory {
 public:
  // `range` bytes of addresses, of which each device has at most `capacity` allocated at a time.
  DeviceMemory(uint64_t range, uint64_t capacity);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  // 0 where there is no room on the device. Freed addresses are used again late, so that a use
  // after the free is seen as one.
  uint64_t Allocate(uint64_t bytes, int device = 0);
  bool Free(uint64_t address);  // false: nothing that is allocated begins there

  // The allocation, live or freed, that `address` lies in; null: none.
  const Allocation* Find(uint64_t address) const;
  Allocation* Find(uint64_t address);
  // "4 bytes behind an allocation of 64 bytes", with the device where there may be several.
  std::string Describe(uint64_t address) const;
  bool Owns(uint64_t address) const { return address >= base_ && address - base_ < range_; }
  uint8_t* Host(uint64_t address) const { return view_ + (address - base_); }

  // Which bytes have been written.
  void MarkWritten(uint64_t address, uint64_t bytes);
  void MarkUnwritten(uint64_t address, uint64_t bytes);
  bool Written(uint64_t address, uint64_t bytes) const {
    uint64_t i = address - base_;
    const uint64_t end = i + bytes;
    if (i % 8 + bytes <= 8) {  // most accesses
      const unsigned bits = ((1u << bytes) - 1) << (i % 8);
      return (written_[i / 8] & bits) == bits;
    }
    for (; i < end; ++i) {
      if (!(written_[i / 8] >> (i % 8) & 1)) return false;
    }
    return true;
  }
  void CopyWritten(uint64_t to, uint64_t from, uint64_t bytes);

  uint64_t used(int device) const {
    const auto it = used_.find(device);
    return it == used_.end() ? 0 : it->second;
  }
  uint64_t capacity() const { return capacity_; }
  const std::map<uint64_t, Allocation>& allocations() const { return allocations_; }

 private:
  uint64_t base_ = 0, range_, capacity_, next_ = 0;
  std::map<int, uint64_t> used_;  // by device
  uint8_t* view_ = nullptr;
  uint8_t* written_ = nullptr;
  std::map<uint64_t, Allocation> allocations_;  // by address, freed ones too until used again
};

}  // namespace cusim
