// Devices: where tensors live that are not in CPU memory.
//
// A device is a DeviceTable (device_table.h) registered for a DeviceType. PhysicalDevice is one of
// them opened by this process; RankDevice is that device as one rank uses it: its allocator, its
// current stream, its error word and its ways between host and device. Work is queued and the host
// goes on; only RankDevice::Wait waits, and with it what reads values (ToVector, Item, files).
//
// Streams nest: a StreamScope comes after all that was queued before it, and what follows it comes
// after all that it queued. So any work may use any tensor, and only work that outlives a scope
// (collectives) has to say what it uses (Buffer::RecordUse).
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "dtensor/tensor/buffer.h"
#include "dtensor/tensor/device_table.h"
#include "dtensor/tensor/kernel.h"

namespace dtensor {

// Makes `table` the device of a type; null: there is none any more. To be called before its first
// use. Thread-safe. Errors: InvalidArgument for a table of another abi, naming both, or without one
// of the functions that every device needs.
absl::Status RegisterDevice(DeviceType type, const DeviceTable* table);
// Null where none is registered.
const DeviceTable* FindDevice(DeviceType type);
// "cpu", "meta", a registered device's own name, else the type's.
std::string DeviceName(DeviceType type);
// Reads DeviceName's words. Errors: InvalidArgument listing the devices there are.
absl::StatusOr<DeviceType> ParseDevice(absl::string_view name);
// The same, for what a user asks of a program: also "auto", which is cuda where there is one, else
// the CPU; which of them and why is told on stderr, once.
absl::StatusOr<DeviceType> ChooseDevice(absl::string_view name);

// Where a program makes tensors unless it says otherwise: DTENSOR_DEVICE, else the CPU. Errors:
// ChooseDevice's, PhysicalDevice::Open's.
absl::StatusOr<DeviceType> DefaultDevice();

// One device, opened once for all ranks of the process that use it. Thread-safe.
class PhysicalDevice {
 public:
  // Errors: FailedPrecondition naming the step that failed.
  static absl::StatusOr<std::shared_ptr<PhysicalDevice>> Open(DeviceType type, int index);
  ~PhysicalDevice();
  PhysicalDevice(const PhysicalDevice&) = delete;

  const DeviceTable& table() const { return *table_; }
  void* handle() const { return handle_; }
  // What a function of the table returned. Errors: Internal naming device, step and reason.
  absl::Status Check(int error, absl::string_view step) const;

 private:
  friend class Event;
  PhysicalDevice() = default;
  const DeviceTable* table_ = nullptr;
  int index_ = 0;
  void* handle_ = nullptr;
  std::mutex mutex_;
  std::vector<void*> events_;  // free ones
};

// A place in the work of a stream. Copies share it. Null (default): nothing to wait for.
class Event {
 public:
  Event() = default;
  // The work of `stream` so far. Throws Error (Internal) where the device refuses.
  static Event Record(const std::shared_ptr<PhysicalDevice>& device, StreamHandle stream);
  bool defined() const { return rep_ != nullptr; }
  bool Done() const;
  // Later work of `stream` comes after it.
  void OrderBefore(StreamHandle stream) const;
  // Recorded while a DeviceGraph was captured it is a place in that graph. When that is captured
  // whole it counts as done: launches have their place among the rank's other work.

 private:
  struct Rep {
    explicit Rep(std::shared_ptr<PhysicalDevice> device);
    ~Rep();
    std::shared_ptr<PhysicalDevice> device;
    void* handle = nullptr;
    uint64_t capture = 0;  // DeviceGraph::Captured() when it was recorded
  };
  std::shared_ptr<const Rep> rep_;
};

struct DeviceStats {
  int64_t host_waits = 0;  // RankDevice::Wait
  int64_t uploads = 0, downloads = 0;
};

// A device as one rank uses it. For the rank's thread only, but for what frees its memory.
class RankDevice {
 public:
  // Errors: PhysicalDevice::Open's; Internal where the device gives no stream or pinned memory.
  static absl::StatusOr<std::unique_ptr<RankDevice>> Open(DeviceType type, int index);
  ~RankDevice();  // waits
  RankDevice(const RankDevice&) = delete;

  const DeviceTable& table() const { return device_->table(); }
  const std::shared_ptr<PhysicalDevice>& device() const { return device_; }
  const std::shared_ptr<Allocator>& memory() const { return memory_; }
  StreamHandle stream() const { return stream_; }  // the current one
  ErrorWord* error_word() const { return error_; }
  const DeviceStats& stats() const { return stats_; }

  // Of the current stream. Throw Error (Internal) where the device refuses.
  Event Record() { return Event::Record(device_, stream_); }
  void OrderAfter(const Event& event) { event.OrderBefore(stream_); }
  // The host waits; it does nowhere else than here and in Reach.
  //   Errors: DeadlineExceeded after `limit`; InvalidArgument (rank-local) with what a kernel wrote
  //   into the error word meanwhile, which is free again then.
  absl::Status Wait(const Event& event, absl::Duration limit = absl::Seconds(60));
  // The same, but what a kernel wrote stays for who waits next.
  absl::Status Reach(const Event& event, absl::Duration limit = absl::Seconds(60));
  // What is queued later comes after all that was queued, on the side stream too.
  void OrderAfterAll();
  // Waits for that.
  absl::Status Synchronize();

  // Contiguous bytes. Upload returns before they have arrived; `from` may be reused. Download
  // waits.
  void Upload(const void* from, int64_t bytes, void* to);
  absl::Status Download(const void* from, int64_t bytes, void* to);

  // Memory comes from `memory` from now on; what it came from before.
  std::shared_ptr<Allocator> ExchangeMemory(std::shared_ptr<Allocator> memory) {
    return std::exchange(memory_, std::move(memory));
  }
  // Another allocator of the device.
  std::shared_ptr<Allocator> NewMemory();

 private:
  friend class StreamScope;
  friend class SideStream;
  RankDevice() = default;
  struct Staging {  // pinned memory
    char* data = nullptr;
    int64_t bytes = 0;
    Event busy;
  };
  absl::StatusOr<Staging*> Stage(int64_t bytes);
  absl::Status TakeError();
  StreamHandle NewStream();

  std::shared_ptr<PhysicalDevice> device_;
  std::shared_ptr<Allocator> memory_;
  StreamHandle stream_ = nullptr;
  StreamHandle side_ = nullptr;
  std::vector<StreamHandle> streams_, free_streams_;  // all; those that no scope uses
  std::vector<std::unique_ptr<Staging>> staging_;
  ErrorWord* error_ = nullptr;
  DeviceStats stats_;
};

// Work on another stream for a scope: after all that was queued before on the current one, and
// before all that is queued after the scope.
class StreamScope {
 public:
  explicit StreamScope(RankDevice& device);
  ~StreamScope();
  StreamScope(const StreamScope&) = delete;

 private:
  RankDevice& device_;
  const StreamHandle outer_;
};

// Work beside all other for a scope, on a stream that the rank has for that: only events order it
// (Event::OrderBefore, Record). No memory may be taken meanwhile, and what it touches and may be
// freed before it is done needs Buffer::RecordUse.
class SideStream {
 public:
  explicit SideStream(RankDevice& device);
  ~SideStream() { device_.stream_ = outer_; }
  SideStream(const SideStream&) = delete;

 private:
  RankDevice& device_;
  const StreamHandle outer_;
};

// The devices of one rank, opened on first use.
class RankDevices {
 public:
  // `type`: where tensors and meshes are made unless their maker says otherwise. `index`: which
  // device of a type, modulo how many there are.
  explicit RankDevices(DeviceType type, int index = 0) : type_(type), index_(index) {}
  // Those of the rank whose code runs (RankState), else of the thread.
  static RankDevices& Current();
  DeviceType type() const { return type_; }
  // Errors: RankDevice::Open's; InvalidArgument for the CPU and meta, which need none.
  absl::StatusOr<RankDevice*> Get(DeviceType type);
  // The host waits for all that was queued. Errors: RankDevice::Wait's.
  absl::Status Synchronize();
  // Null where it was not opened.
  RankDevice* Opened(DeviceType type) const { return open_[static_cast<int>(type)].get(); }

 private:
  const DeviceType type_;
  const int index_;
  std::unique_ptr<RankDevice> open_[kNumDeviceTypes];
};

}  // namespace dtensor
