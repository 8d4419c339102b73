#include "dtensor/tensor/device.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "dtensor/tensor/device_graph.h"
#include "dtensor/tensor/device_health.h"
#include "dtensor/tensor/device_memory.h"
#include "dtensor/tensor/plugin.h"
#include "dtensor/tensor/rank_state.h"
#include "dtensor/tensor/status.h"

namespace dtensor {

#define DT_DEVICE(type, name, table) const DeviceTable* table();
#include "dtensor/tensor/devices.inc"
#undef DT_DEVICE

namespace {

struct Registry {
  std::mutex mutex;
  const DeviceTable* tables[kNumDeviceTypes] = {
      nullptr,
      nullptr,
      nullptr,
      nullptr,
#define DT_DEVICE(type, name, table) table(),
#include "dtensor/tensor/devices.inc"
#undef DT_DEVICE
  };
  std::map<std::pair<DeviceType, int>, std::weak_ptr<PhysicalDevice>> open;
};
Registry& TheRegistry() {
  static Registry* registry = new Registry;
  return *registry;
}

constexpr const char* kTypeNames[] = {
    "cpu",
    "cuda",
    "meta",
    "custom",
#define DT_DEVICE(type, name, table) name,
#include "dtensor/tensor/devices.inc"
#undef DT_DEVICE
};
constexpr int64_t kMinStagingBytes = 1 << 16, kMaxStagingBytes = 1 << 22;
constexpr size_t kMaxStagings = 16;

absl::Status NotThere(DeviceType type, absl::string_view step, absl::string_view why) {
  return absl::FailedPreconditionError(
      absl::StrCat("device ", DeviceName(type), ": ", step, " failed, ", why));
}

// The CUDA plugin's table, which is the device's from then on.
absl::StatusOr<const DeviceTable*> LoadCuda() {
  constexpr const char* kStep = "loading its plugin libdtensor_cuda.so";
  const absl::StatusOr<void*> entry = LoadPlugin("libdtensor_cuda.so", "DTENSOR_CUDA_PLUGIN",
                                                 "tensor", "dtensor_cuda_table", false);
  if (!entry.ok()) {
    return NotThere(DeviceType::kCuda, kStep, absl::StrCat("it ", entry.status().message()));
  }
  const DeviceTable* table = reinterpret_cast<const DeviceTable* (*)()>(*entry)();
  const absl::Status registered = RegisterDevice(DeviceType::kCuda, table);
  if (!registered.ok()) return NotThere(DeviceType::kCuda, kStep, registered.message());
  return table;
}

}  // namespace

namespace {

// What every table needs and this one has not; null: nothing.
const char* MissingIn(const DeviceTable& table) {
#define DT_NEEDED(field) \
  if (table.field == nullptr) return #field
  DT_NEEDED(name);
  DT_NEEDED(describe);
  DT_NEEDED(count);
  DT_NEEDED(open);
  DT_NEEDED(close);
  DT_NEEDED(segment);
  DT_NEEDED(segment_free);
  DT_NEEDED(pinned);
  DT_NEEDED(pinned_free);
  DT_NEEDED(stream);
  DT_NEEDED(stream_free);
  DT_NEEDED(event);
  DT_NEEDED(event_free);
  DT_NEEDED(record);
  DT_NEEDED(order);
  DT_NEEDED(query);
  DT_NEEDED(copy);
  DT_NEEDED(fill);
  DT_NEEDED(reduce);
  DT_NEEDED(move);
  DT_NEEDED(kernel);
#undef DT_NEEDED
  return nullptr;
}

}  // namespace

absl::Status RegisterDevice(DeviceType type, const DeviceTable* table) {
  if (!IsRemote(type)) {
    return absl::InvalidArgumentError("RegisterDevice: cpu and meta are built in");
  }
  if (table != nullptr &&
      (table->abi != kDeviceTableAbi || table->struct_size < sizeof(DeviceTable))) {
    return absl::InvalidArgumentError(
        absl::StrCat("RegisterDevice: the table has abi ", table->abi, " and ", table->struct_size,
                     " bytes, this library needs abi ", kDeviceTableAbi, " and ",
                     sizeof(DeviceTable), "; build the plugin against this version"));
  }
  if (const char* missing = table == nullptr ? nullptr : MissingIn(*table)) {
    return absl::InvalidArgumentError(absl::StrCat("RegisterDevice: the table has no ", missing));
  }
  Registry& registry = TheRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  registry.tables[static_cast<int>(type)] = table;
  return absl::OkStatus();
}

const DeviceTable* FindDevice(DeviceType type) {
  Registry& registry = TheRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  return registry.tables[static_cast<int>(type)];
}

std::string DeviceName(DeviceType type) {
  const DeviceTable* table = FindDevice(type);
  return table != nullptr ? table->name : kTypeNames[static_cast<int>(type)];
}

absl::StatusOr<DeviceType> ParseDevice(absl::string_view name) {
  std::vector<std::string> known;
  for (int i = 0; i < kNumDeviceTypes; ++i) {
    const auto type = static_cast<DeviceType>(i);
    if (type == DeviceType::kCustom && FindDevice(type) == nullptr) continue;
    known.push_back(DeviceName(type));
    if (known.back() == name) return type;
  }
  std::string list;
  for (const std::string& k : known) absl::StrAppend(&list, list.empty() ? "" : ", ", k);
  return absl::InvalidArgumentError(absl::StrCat("device \"", name, "\": known are ", list));
}

absl::StatusOr<DeviceType> ChooseDevice(absl::string_view name) {
  if (name != "auto") return ParseDevice(name);
  static const DeviceType chosen = [] {
    const absl::Status cuda = PhysicalDevice::Open(DeviceType::kCuda, 0).status();
    const std::string why = cuda.ok() ? "" : absl::StrCat(" (", cuda.message(), ")");
    fprintf(stderr, "device: %s%s\n", cuda.ok() ? "cuda" : "cpu", why.c_str());
    return cuda.ok() ? DeviceType::kCuda : DeviceType::kCpu;
  }();
  return chosen;
}

absl::StatusOr<DeviceType> DefaultDevice() {
  const char* name = std::getenv("DTENSOR_DEVICE");
  if (name == nullptr || *name == '\0') return DeviceType::kCpu;
  absl::StatusOr<DeviceType> type = ChooseDevice(name);
  absl::Status status = type.status();
  if (type.ok() && IsRemote(*type)) {
    status = PhysicalDevice::Open(*type, 0).status();
  }
  if (!status.ok()) return Prefixed("DTENSOR_DEVICE", status);
  return type;
}

// --- PhysicalDevice, Event ---------------------------------------------------------------------

absl::StatusOr<std::shared_ptr<PhysicalDevice>> PhysicalDevice::Open(DeviceType type, int index) {
  const DeviceTable* table = FindDevice(type);
  if (table == nullptr && type == DeviceType::kCuda) {
    DT_ASSIGN_OR_RETURN(table, LoadCuda());
  }
  if (table == nullptr) {
    return NotThere(type, "finding a backend for it",
                    "this build has none and the program registered none; use DeviceType::kCpu, or "
                    "kMeta for planning without data");
  }
  char why[256] = "no reason given";
  int number = 0;
  if (table->count(&number, why, sizeof(why)) != 0 || number < 1) {
    return NotThere(type, "counting devices", why);
  }
  index %= number;
  Registry& registry = TheRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  std::weak_ptr<PhysicalDevice>& known = registry.open[{type, index}];
  if (auto device = known.lock()) return device;
  std::shared_ptr<PhysicalDevice> device(new PhysicalDevice);
  device->index_ = index;
  if (table->open(index, &device->handle_, why, sizeof(why)) != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("device ", table->name, ":", index, ": opening it failed, ", why));
  }
  device->table_ = table;
  known = device;
  return device;
}

PhysicalDevice::~PhysicalDevice() {
  if (table_ == nullptr) return;  // was not opened
  for (void* event : events_) (void)table_->event_free(handle_, event);
  table_->close(handle_);
}

absl::Status PhysicalDevice::Check(int error, absl::string_view step) const {
  if (error == 0) return absl::OkStatus();
  return RankLocal(absl::InternalError(absl::StrCat("device ", table_->name, ":", index_, ": ",
                                                    step, " failed, ", table_->describe(error))));
}

Event::Rep::Rep(std::shared_ptr<PhysicalDevice> on) : device(std::move(on)) {
  {
    std::lock_guard<std::mutex> lock(device->mutex_);
    if (!device->events_.empty()) {
      handle = device->events_.back();
      device->events_.pop_back();
      return;
    }
  }
  ThrowIfError(device->Check(device->table().event(device->handle(), &handle), "making an event"));
}
Event::Rep::~Rep() {
  std::lock_guard<std::mutex> lock(device->mutex_);
  device->events_.push_back(handle);
}

Event Event::Record(const std::shared_ptr<PhysicalDevice>& device, StreamHandle stream) {
  Event event;
  auto rep = std::make_shared<Rep>(device);
  rep->capture = DeviceGraph::Captured();
  ThrowIfError(device->Check(device->table().record(rep->handle, stream), "recording an event"));
  event.rep_ = std::move(rep);
  return event;
}

bool Event::Done() const {
  if (rep_ == nullptr) return true;
  if (rep_->capture != 0) return rep_->capture != DeviceGraph::Captured();
  int done = 0;
  ThrowIfError(rep_->device->Check(rep_->device->table().query(rep_->handle, &done),
                                   "the work before an event"));
  return done != 0;
}

void Event::OrderBefore(StreamHandle stream) const {
  if (rep_ == nullptr) return;
  // All that was queued before a capture is done, and must not be named in it.
  if (rep_->capture != DeviceGraph::Captured() && Done()) return;
  ThrowIfError(
      rep_->device->Check(rep_->device->table().order(stream, rep_->handle), "ordering a stream"));
}

// --- RankDevice --------------------------------------------------------------------------------

absl::StatusOr<std::unique_ptr<RankDevice>> RankDevice::Open(DeviceType type, int index) {
  std::unique_ptr<RankDevice> rank(new RankDevice);
  DT_ASSIGN_OR_RETURN(rank->device_, PhysicalDevice::Open(type, index));
  const PhysicalDevice& device = *rank->device_;
  DT_RETURN_IF_ERROR(
      device.Check(device.table().stream(device.handle(), &rank->stream_), "making a stream"));
  rank->streams_.push_back(rank->stream_);
  void* word = nullptr;
  DT_RETURN_IF_ERROR(device.Check(device.table().pinned(device.handle(), sizeof(ErrorWord), &word),
                                  "taking pinned memory"));
  rank->error_ = new (word) ErrorWord{};
  rank->memory_ = CreateDeviceAllocator(rank->device_, &rank->stream_);
  return rank;
}

RankDevice::~RankDevice() {
  if (error_ != nullptr) {
    try {  // a device that fails here fails whoever uses it next
      (void)Synchronize();
    } catch (const Error&) {
    }
  }
  memory_.reset();
  const DeviceTable* table = device_ == nullptr ? nullptr : &device_->table();
  for (StreamHandle stream : streams_) (void)table->stream_free(device_->handle(), stream);
  for (const auto& s : staging_) (void)table->pinned_free(device_->handle(), s->data);
  if (error_ != nullptr) (void)table->pinned_free(device_->handle(), error_);
}

std::shared_ptr<Allocator> RankDevice::NewMemory() {
  return CreateDeviceAllocator(device_, &stream_);
}

absl::Status RankDevice::Reach(const Event& event, absl::Duration limit) {
  DT_RETURN_IF_ERROR(DeviceGraph::Allows("the host waits for it"));
  ++stats_.host_waits;
  const absl::Time deadline = absl::Now() + limit;
  for (int64_t polls = 0; !event.Done(); ++polls) {
    if (polls < 1000) continue;
    std::this_thread::yield();
    if (polls % 1000 != 0) continue;
    DT_RETURN_IF_ERROR(CheckHealth());
    if (absl::Now() > deadline) {
      return RankLocal(absl::DeadlineExceededError(absl::StrCat(
          "device ", table().name, " did not get there within ", absl::FormatDuration(limit))));
    }
  }
  return CheckHealth();
}

absl::Status RankDevice::Wait(const Event& event, absl::Duration limit) {
  DT_RETURN_IF_ERROR(Reach(event, limit));
  return TakeError();
}

void RankDevice::OrderAfterAll() {
  if (side_ != nullptr) OrderAfter(Event::Record(device_, side_));
}

absl::Status RankDevice::Synchronize() {
  OrderAfterAll();
  return Wait(Record());
}

absl::Status RankDevice::TakeError() {
  std::atomic_ref<uint32_t> code(error_->code);
  // 1: written. Another value: a kernel that runs now is about to write it.
  if (code.load(std::memory_order_acquire) != 1) return absl::OkStatus();
  const absl::Status status = RankLocal(absl::InvalidArgumentError(absl::StrCat(
      "[", error_->op, "] ", error_->text, " (found on the device; told where the host waits)")));
  code.store(0, std::memory_order_release);
  return status;
}

// Nothing is freed before the end: on CUDA that waits for all devices of the process, of which one
// may wait for what this thread is about to queue.
absl::StatusOr<RankDevice::Staging*> RankDevice::Stage(int64_t bytes) {
  const auto fits = [&](const auto& s) { return s->bytes >= bytes; };
  for (const auto& s : staging_) {
    if (fits(s) && s->busy.Done()) return s.get();
  }
  const auto oldest = std::find_if(staging_.begin(), staging_.end(), fits);
  if (staging_.size() >= kMaxStagings && oldest != staging_.end()) {
    std::rotate(oldest, oldest + 1, staging_.end());
    DT_RETURN_IF_ERROR(Wait(staging_.back()->busy));
    return staging_.back().get();
  }
  auto made = std::make_unique<Staging>();
  for (made->bytes = kMinStagingBytes; made->bytes < bytes; made->bytes *= 2) {
  }
  void* data = nullptr;
  DT_RETURN_IF_ERROR(device_->Check(table().pinned(device_->handle(), made->bytes, &data),
                                    "taking pinned memory"));
  made->data = static_cast<char*>(data);
  staging_.push_back(std::move(made));
  return staging_.back().get();
}

void RankDevice::Upload(const void* from, int64_t bytes, void* to) {
  ThrowIfError(DeviceGraph::Allows("values of the host are brought to it"));
  ++stats_.uploads;
  for (int64_t at = 0; at < bytes; at += kMaxStagingBytes) {
    const int64_t n = std::min(kMaxStagingBytes, bytes - at);
    Staging* stage = ValueOrThrow(Stage(n));
    std::memcpy(stage->data, static_cast<const char*>(from) + at, static_cast<size_t>(n));
    ThrowIfError(device_->Check(table().move(stream_, static_cast<char*>(to) + at, stage->data, n),
                                "an upload"));
    stage->busy = Record();
  }
}

absl::Status RankDevice::Download(const void* from, int64_t bytes, void* to) {
  DT_RETURN_IF_ERROR(DeviceGraph::Allows("the host reads a value (Item, ToVector, a file)"));
  ++stats_.downloads;
  for (int64_t at = 0; at < bytes || at == 0; at += kMaxStagingBytes) {
    const int64_t n = std::min(kMaxStagingBytes, bytes - at);
    DT_ASSIGN_OR_RETURN(Staging * stage, Stage(n));
    DT_RETURN_IF_ERROR(device_->Check(
        table().move(stream_, stage->data, static_cast<const char*>(from) + at, n), "a download"));
    stage->busy = Record();
    DT_RETURN_IF_ERROR(Wait(stage->busy));
    std::memcpy(static_cast<char*>(to) + at, stage->data, static_cast<size_t>(n));
  }
  return absl::OkStatus();
}

StreamHandle RankDevice::NewStream() {
  StreamHandle stream = nullptr;
  ThrowIfError(device_->Check(table().stream(device_->handle(), &stream), "making a stream"));
  streams_.push_back(stream);
  return stream;
}

StreamScope::StreamScope(RankDevice& device) : device_(device), outer_(device.stream_) {
  const Event before = device.Record();
  StreamHandle stream = nullptr;
  if (device.free_streams_.empty()) {
    stream = device.NewStream();
    device.free_streams_.reserve(device.streams_.size());
  } else {
    stream = device.free_streams_.back();
    device.free_streams_.pop_back();
  }
  before.OrderBefore(stream);
  device.stream_ = stream;
}

StreamScope::~StreamScope() {
  const StreamHandle inner = device_.stream_;
  device_.free_streams_.push_back(inner);
  Event after;
  try {
    after = device_.Record();
    after.OrderBefore(outer_);
  } catch (const Error&) {  // the device fails every later call too
  }
  device_.stream_ = outer_;
}

SideStream::SideStream(RankDevice& device) : device_(device), outer_(device.stream_) {
  if (device.side_ == nullptr) device.side_ = device.NewStream();
  device.stream_ = device.side_;
}

// --- RankDevices -------------------------------------------------------------------------------

RankDevices& RankDevices::Current() {
  RankState& state = RankState::Current();
  if (state.devices == nullptr) {
    thread_local RankDevices of_thread(ValueOrThrow(DefaultDevice()));
    state.devices = &of_thread;
  }
  return *state.devices;
}

absl::StatusOr<RankDevice*> RankDevices::Get(DeviceType type) {
  if (!IsRemote(type)) {
    return absl::InvalidArgumentError(absl::StrCat("device ", DeviceName(type), " has no streams"));
  }
  std::unique_ptr<RankDevice>& open = open_[static_cast<int>(type)];
  if (open == nullptr) {
    DT_ASSIGN_OR_RETURN(open, RankDevice::Open(type, index_));
  }
  return open.get();
}

absl::Status RankDevices::Synchronize() {
  absl::Status status;
  for (const auto& device : open_) {
    if (device != nullptr) status.Update(device->Synchronize());
  }
  return status;
}

}  // namespace dtensor
