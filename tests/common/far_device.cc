#include "tests/common/far_device.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <thread>

#include "dtensor/mesh/local/move.h"
#include "dtensor/tensor/device.h"
#include "dtensor/tensor/status.h"
#include "dtensor/tensor/tensor.h"

namespace dtensor::testing {
namespace {

constexpr int64_t kMemoryBytes = int64_t{1} << 34;  // address space; pages come as they are used
constexpr int64_t kPage = 4096;
enum : int { kOk = 0, kNoMemory = 1, kBadPointer = 2 };

// Which work of which stream has happened before: work number clock[s] of stream s and all before.
using Clock = std::vector<uint64_t>;
void Join(Clock* clock, const Clock& other) {
  if (clock->size() < other.size()) clock->resize(other.size());
  for (size_t s = 0; s < other.size(); ++s) (*clock)[s] = std::max((*clock)[s], other[s]);
}
bool Knows(const Clock& clock, size_t stream, uint64_t number) {
  return stream < clock.size() && clock[stream] >= number;
}

struct Access {
  uintptr_t begin, end;
  bool writes;
};

struct Far;
struct Stream;
struct Item {  // of a stream: work, or waiting until `after` has done `count` items
  std::function<void()> work;
  std::shared_ptr<Stream> after;
  uint64_t count = 0;
};
struct Stream {
  size_t id = 0;
  std::deque<Item> items;
  uint64_t queued = 0, done = 0;  // items
  Clock clock;
  bool freed = false;
};
struct FarEvent {
  std::shared_ptr<Stream> stream;  // null: never recorded
  uint64_t count = 0;
  Clock clock;
};

// An array by value, and seen through the kernels' mapping.
struct Array {
  explicit Array(const TensorRef& ref)
      : data(ref.data),
        sizes(ref.sizes, ref.sizes + ref.ndim),
        strides(ref.strides, ref.strides + ref.ndim),
        dtype(ref.dtype) {}
  TensorRef ref(ptrdiff_t shift) const {
    return {static_cast<char*>(data) + shift, sizes.data(), strides.data(),
            static_cast<int>(sizes.size()), dtype};
  }
  bool empty() const { return std::find(sizes.begin(), sizes.end(), 0) != sizes.end(); }
  Access access(bool writes) const {
    const auto begin = reinterpret_cast<uintptr_t>(data);
    int64_t last = 0;
    for (size_t d = 0; d < sizes.size(); ++d) last += (sizes[d] - 1) * strides[d];
    return {begin, empty() ? begin : begin + static_cast<uintptr_t>((last + 1) * SizeOf(dtype)),
            writes};
  }
  void* data;
  std::vector<int64_t> sizes, strides;
  DType dtype;
};

class KernelScratch final : public Workspace {
 public:
  KernelScratch(const char* op, ErrorWord* error) : op_(op), error_(error) {}
  void* Allocate(int64_t bytes) override {
    blocks_.emplace_back(std::aligned_alloc(64, static_cast<size_t>((bytes + 64) / 64 * 64)),
                         &std::free);
    return blocks_.back().get();
  }
  void Fail(std::string_view message) override {
    if (error_ == nullptr || error_->code != 0) return;
    std::snprintf(error_->op, sizeof(error_->op), "%s", op_);
    std::snprintf(error_->text, sizeof(error_->text), "%.*s", static_cast<int>(message.size()),
                  message.data());
    std::atomic_ref<uint32_t>(error_->code).store(1, std::memory_order_release);
  }

 private:
  const char* const op_;
  ErrorWord* const error_;
  std::vector<std::unique_ptr<void, decltype(&std::free)>> blocks_;
};

// The one far device, whatever its index. All under one lock: it is about order, not about speed.
struct Far {
  Far() {
    const int file = memfd_create("far_device", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, kMemoryBytes) != 0) std::abort();
    file_ = file;
    kernels_ = Map(PROT_READ | PROT_WRITE);
    host_ = Map(PROT_NONE);
    if (const char* text = std::getenv("DTENSOR_FAR_SEED")) seed = std::strtoull(text, nullptr, 10);
    random.seed(seed);
    free_[0] = kMemoryBytes;
  }

  std::mutex mutex;
  uint64_t seed = 1;
  std::mt19937_64 random;
  FarStats stats;
  int64_t fail_segment = -1;
  bool collect = false;
  std::vector<std::string> reports;
  std::vector<std::shared_ptr<Stream>> streams;  // those that have items, or are not freed

  // What this thread has seen done. Not thread-local: devices are closed after those have gone.
  Clock& HostClock() { return host_clocks_[std::this_thread::get_id()]; }

  void Report(const std::string& what) {
    if (collect) return reports.push_back(what);
    std::fprintf(stderr, "far device: %s\n", what.c_str());
    std::abort();
  }

  // --- memory ---
  int Segment(int64_t bytes, void** memory) {
    ++stats.segments;
    if (fail_segment >= 0 && fail_segment-- == 0) return kNoMemory;
    bytes = (bytes + kPage - 1) / kPage * kPage;
    for (auto& [start, size] : free_) {
      if (size < bytes) continue;
      const int64_t at = start, left = size - bytes;
      free_.erase(at);
      if (left > 0) free_[at + bytes] = left;
      live_[at] = bytes;
      std::memset(kernels_ + at, 0xC7, static_cast<size_t>(bytes));
      *memory = host_ + at;
      return kOk;
    }
    return kNoMemory;
  }
  int SegmentFree(void* memory) {
    RunAll();
    const int64_t at = static_cast<char*>(memory) - host_;
    const auto it = live_.find(at);
    if (it == live_.end()) return kBadPointer;
    const auto begin = reinterpret_cast<uintptr_t>(memory);
    Forget(begin, begin + static_cast<uintptr_t>(it->second));
    (void)fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, at, it->second);
    free_[at] = it->second;
    live_.erase(it);
    return kOk;
  }
  int Pinned(int64_t bytes, void** memory) {
    *memory = std::aligned_alloc(64, static_cast<size_t>((bytes + 64) / 64 * 64));
    if (*memory == nullptr) return kNoMemory;
    pinned_[reinterpret_cast<uintptr_t>(*memory)] = bytes;
    return kOk;
  }
  int PinnedFree(void* memory) {
    RunAll();
    const auto begin = reinterpret_cast<uintptr_t>(memory);
    const auto it = pinned_.find(begin);
    if (it == pinned_.end()) return kBadPointer;
    Forget(begin, begin + static_cast<uintptr_t>(it->second));
    pinned_.erase(it);
    std::free(memory);
    return kOk;
  }
  // From what a program sees to what kernels see; 0 for pinned memory.
  ptrdiff_t Shift(const void* data) const {
    const char* p = static_cast<const char*>(data);
    return p >= host_ && p < host_ + kMemoryBytes ? kernels_ - host_ : 0;
  }
  bool Live(const Access& a) const {
    const auto h = reinterpret_cast<uintptr_t>(host_);
    if (a.begin >= h && a.begin < h + kMemoryBytes) {
      auto it = live_.upper_bound(static_cast<int64_t>(a.begin - h));
      return it != live_.begin() &&
             static_cast<int64_t>(a.end - h) <= std::prev(it)->first + std::prev(it)->second;
    }
    auto it = pinned_.upper_bound(a.begin);
    return it != pinned_.begin() &&
           a.end <= std::prev(it)->first + static_cast<uintptr_t>(std::prev(it)->second);
  }

  // --- work ---
  void Queue(void* handle, const char* what, const std::vector<Access>& accesses,
             std::function<void()> work) {
    const auto stream = *static_cast<std::shared_ptr<Stream>*>(handle);
    ++stats.queued;
    ++stats.left;
    Join(&stream->clock, HostClock());
    if (stream->clock.size() <= stream->id) stream->clock.resize(stream->id + 1);
    ++stream->clock[stream->id];
    for (const Access& a : accesses) Check(*stream, what, a);
    stream->items.push_back({std::move(work), nullptr, 0});
    ++stream->queued;
    if (seed != 0 && random() % 4 == 0) RunOne();
  }
  bool Runs(const Stream& s) const {
    if (s.items.empty()) return false;
    const Item& head = s.items.front();
    return head.after == nullptr || head.after->done >= head.count;
  }
  // False if there is nothing to run.
  bool RunOne() {
    std::vector<Stream*> ready;
    for (const auto& s : streams) {
      if (Runs(*s)) ready.push_back(s.get());
    }
    if (ready.empty()) return false;
    const auto hold = ready[seed == 0 ? 0 : random() % ready.size()];
    Item item = std::move(hold->items.front());
    hold->items.pop_front();
    if (item.work) {
      item.work();
      --stats.left;
    }
    ++hold->done;
    return true;
  }
  void RunAll() {
    while (RunOne()) {
    }
  }
  // Lets go of streams that are freed and done. The next one takes over the number: it counts as
  // having seen what the old one did.
  void Sweep() {
    std::erase_if(streams, [&](const auto& s) {
      if (!s->freed || !s->items.empty()) return false;
      numbers_.push_back({s->id, s->id < s->clock.size() ? s->clock[s->id] : 0});
      return true;
    });
  }
  std::shared_ptr<Stream> NewStream() {
    Sweep();
    auto made = std::make_shared<Stream>();
    if (numbers_.empty()) {
      made->id = next_stream_++;
    } else {
      made->id = numbers_.back().first;
      made->clock.resize(made->id + 1);
      made->clock[made->id] = numbers_.back().second;
      numbers_.pop_back();
    }
    streams.push_back(made);
    return made;
  }

  // --- order ---
  struct Touch {
    size_t stream;
    uint64_t number;
    const char* what;
  };
  struct Cell {
    uintptr_t end;
    Touch write{0, 0, ""};  // number 0: none
    std::vector<Touch> reads;
  };
  // Cells lie side by side; makes one begin at `at`.
  void Split(uintptr_t at) {
    auto it = cells_.upper_bound(at);
    if (it == cells_.begin()) return;
    --it;
    if (it->first == at || it->second.end <= at) return;
    Cell rest = it->second;
    it->second.end = at;
    cells_[at] = std::move(rest);
  }
  void Forget(uintptr_t begin, uintptr_t end) {
    Split(begin);
    Split(end);
    cells_.erase(cells_.lower_bound(begin), cells_.lower_bound(end));
  }
  void Clash(const Stream& s, const char* what, const Access& a, const Touch& other,
             bool other_writes) {
    if (other.number == 0 || Knows(s.clock, other.stream, other.number)) return;
    Report(std::string(what) + (a.writes ? " writes " : " reads ") + "memory that " + other.what +
           (other_writes ? " writes" : " reads") + " on another stream: nothing orders them");
  }
  void Check(const Stream& s, const char* what, const Access& a) {
    if (a.begin == a.end) return;
    if (!Live(a))
      return Report(std::string(what) + " was given memory that is not the device's, or was freed");
    Split(a.begin);
    Split(a.end);
    uintptr_t at = a.begin;
    while (at < a.end) {
      auto it = cells_.lower_bound(at);
      const uintptr_t next = it == cells_.end() ? a.end : std::min(a.end, it->first);
      if (next > at) {
        cells_[at] = {next, {0, 0, ""}, {}};
        it = cells_.find(at);
      }
      Cell& cell = it->second;
      Clash(s, what, a, cell.write, true);
      const Touch touch = {s.id, s.clock[s.id], what};
      if (a.writes) {
        for (const Touch& read : cell.reads) Clash(s, what, a, read, false);
        cell.write = touch;
        cell.reads.clear();
      } else {
        std::erase_if(cell.reads, [&](const Touch& r) { return r.stream == s.id; });
        cell.reads.push_back(touch);
      }
      at = cell.end;
    }
  }

 private:
  char* Map(int protection) const {
    void* p = mmap(nullptr, kMemoryBytes, protection, MAP_SHARED | MAP_NORESERVE, file_, 0);
    if (p == MAP_FAILED) std::abort();
    return static_cast<char*>(p);
  }
  int file_ = -1;
  char *kernels_ = nullptr, *host_ = nullptr;
  std::map<int64_t, int64_t> free_, live_;  // offset -> bytes
  std::map<uintptr_t, int64_t> pinned_;
  std::map<uintptr_t, Cell> cells_;
  std::map<std::thread::id, Clock> host_clocks_;
  size_t next_stream_ = 0;
  std::vector<std::pair<size_t, uint64_t>> numbers_;  // of streams that are gone, and their last
};

Far& TheFar() {
  static Far* far = new Far;
  return *far;
}
using Lock = std::lock_guard<std::mutex>;

const char* DescribeError(int error) {
  return error == kNoMemory ? "out of memory" : "not memory of the device";
}
int Count(int* number, char*, size_t) {
  *number = 1;
  return kOk;
}
int OpenFar(int, void** device, char*, size_t) {
  *device = &TheFar();
  return kOk;
}
void CloseFar(void*) {
  Lock lock(TheFar().mutex);
  TheFar().RunAll();
}
int TakeSegment(void*, int64_t bytes, void** memory) {
  Lock lock(TheFar().mutex);
  return TheFar().Segment(bytes, memory);
}
int FreeSegment(void*, void* memory) {
  Lock lock(TheFar().mutex);
  return TheFar().SegmentFree(memory);
}
int TakePinned(void*, int64_t bytes, void** memory) {
  Lock lock(TheFar().mutex);
  return TheFar().Pinned(bytes, memory);
}
int FreePinned(void*, void* memory) {
  Lock lock(TheFar().mutex);
  return TheFar().PinnedFree(memory);
}
int MakeStream(void*, void** stream) {
  Far& far = TheFar();
  Lock lock(far.mutex);
  *stream = new std::shared_ptr<Stream>(far.NewStream());
  return kOk;
}
int FreeStream(void*, void* stream) {
  Lock lock(TheFar().mutex);
  auto* const handle = static_cast<std::shared_ptr<Stream>*>(stream);
  (*handle)->freed = true;
  delete handle;
  return kOk;
}
int MakeEvent(void*, void** event) {
  *event = new FarEvent;
  return kOk;
}
int FreeEvent(void*, void* event) {
  Lock lock(TheFar().mutex);
  delete static_cast<FarEvent*>(event);
  return kOk;
}
int Record(void* event, void* handle) {
  Lock lock(TheFar().mutex);
  const auto& stream = *static_cast<std::shared_ptr<Stream>*>(handle);
  Join(&stream->clock, TheFar().HostClock());
  *static_cast<FarEvent*>(event) = {stream, stream->queued, stream->clock};
  return kOk;
}
int Order(void* handle, void* opaque) {
  Lock lock(TheFar().mutex);
  const auto& stream = *static_cast<std::shared_ptr<Stream>*>(handle);
  const auto& event = *static_cast<FarEvent*>(opaque);
  if (event.stream == nullptr) return kOk;  // as CUDA: there is nothing to wait for
  Join(&stream->clock, event.clock);
  if (event.stream == stream) return kOk;
  stream->items.push_back({nullptr, event.stream, event.count});
  ++stream->queued;
  return kOk;
}
int Query(void* opaque, int* done) {
  Far& far = TheFar();
  Lock lock(far.mutex);
  const auto& event = *static_cast<FarEvent*>(opaque);
  const auto is_done = [&] { return event.stream == nullptr || event.stream->done >= event.count; };
  for (int i = 0; i < 100 && !is_done() && far.RunOne(); ++i) {
  }
  *done = is_done() ? 1 : 0;
  if (*done != 0) Join(&far.HostClock(), event.clock);
  return kOk;
}

// The reduction of collectives between threads, so that a mesh of far devices gives their bits:
// copies of all inputs side by side, reduced to one, and copied to all outputs.
void Reduce(const std::vector<TensorRef>& in, const std::vector<TensorRef>& out, ReduceOp op) {
  std::vector<int64_t> strides(static_cast<size_t>(in[0].ndim));
  int64_t numel = 1;
  for (int d = in[0].ndim - 1; d >= 0; --d) {
    strides[d] = numel;
    numel *= in[0].sizes[d];
  }
  if (numel == 0) return;
  const int64_t bytes = (numel * SizeOf(in[0].dtype) + 63) / 64 * 64;
  const auto n = static_cast<int64_t>(in.size());
  const std::unique_ptr<char, decltype(&std::free)> memory(
      static_cast<char*>(std::aligned_alloc(64, static_cast<size_t>(bytes * (n + 1)))), &std::free);
  const auto dense = [&](int64_t i) {
    return TensorRef{memory.get() + i * bytes, in[0].sizes, strides.data(), in[0].ndim,
                     in[0].dtype};
  };
  std::vector<const void*> parts;
  for (int64_t i = 0; i < n; ++i) {
    CopyRef(in[i], dense(i));
    parts.push_back(dense(i).data);
  }
  void* sum = dense(n).data;
  ReduceContiguous({parts.data(), static_cast<int>(n), &sum, 1, numel, in[0].dtype, op, false});
  for (const TensorRef& o : out) CopyRef(dense(n), o);
}

int CopyArrays(void* stream, const TensorRef* from, const TensorRef* to) {
  Far& far = TheFar();
  Lock lock(far.mutex);
  const Array source(*from), target(*to);
  far.Queue(stream, "a copy", {source.access(false), target.access(true)}, [&far, source, target] {
    CopyRef(source.ref(far.Shift(source.data)), target.ref(far.Shift(target.data)));
  });
  return kOk;
}
int FillArray(void* stream, const TensorRef* to, const void* value, DType value_dtype) {
  Far& far = TheFar();
  Lock lock(far.mutex);
  const Array target(*to);
  uint64_t bits = 0;
  std::memcpy(&bits, value, static_cast<size_t>(SizeOf(value_dtype)));
  far.Queue(stream, "a fill", {target.access(true)}, [&far, target, bits, value_dtype] {
    // One element with strides 0.
    const std::vector<int64_t> zeros(target.sizes.size(), 0);
    uint64_t one = bits;
    const TensorRef source = {&one, target.sizes.data(), zeros.data(),
                              static_cast<int>(zeros.size()), value_dtype};
    CopyRef(source, target.ref(far.Shift(target.data)));
  });
  return kOk;
}
int ReduceArrays(void* stream, int ins, const TensorRef* in, int outs, const TensorRef* out,
                 int op) {
  Far& far = TheFar();
  Lock lock(far.mutex);
  std::vector<Array> from, to;
  std::vector<Access> accesses;
  for (int i = 0; i < ins; ++i) {
    from.emplace_back(in[i]);
    accesses.push_back(from.back().access(false));
  }
  for (int o = 0; o < outs; ++o) {
    to.emplace_back(out[o]);
    accesses.push_back(to.back().access(true));
  }
  far.Queue(stream, "a reduction", accesses, [&far, from, to, op] {
    std::vector<TensorRef> parts, targets;
    for (const Array& a : from) parts.push_back(a.ref(far.Shift(a.data)));
    for (const Array& a : to) targets.push_back(a.ref(far.Shift(a.data)));
    Reduce(parts, targets, static_cast<ReduceOp>(op));
  });
  return kOk;
}
int Move(void* stream, void* to, const void* from, int64_t bytes) {
  Far& far = TheFar();
  Lock lock(far.mutex);
  const auto t = reinterpret_cast<uintptr_t>(to), f = reinterpret_cast<uintptr_t>(from);
  const auto n = static_cast<uintptr_t>(bytes);
  far.Queue(stream, "a move", {{f, f + n, false}, {t, t + n, true}}, [&far, to, from, bytes] {
    std::memcpy(static_cast<char*>(to) + far.Shift(to),
                static_cast<const char*>(from) + far.Shift(from), static_cast<size_t>(bytes));
  });
  return kOk;
}

// One call of a CPU kernel, by value.
struct KeptKernelCall {
  const Kernel* kernel;
  const char* op;
  ErrorWord* error;
  std::vector<Array> in, out;
  std::vector<Attr> attrs;
  std::vector<std::vector<int64_t>> ints;
  std::vector<FactorRange> factors;
  size_t calls = 1;  // of a list kernel: its operands and attributes are those of so many calls

  void Run(const Far& far) {
    std::vector<TensorRef> ins, outs;
    for (const Array& a : in) ins.push_back(a.ref(far.Shift(a.data)));
    for (const Array& a : out) outs.push_back(a.ref(far.Shift(a.data)));
    for (size_t i = 0; i < attrs.size(); ++i) attrs[i].ints = ints[i].data();
    KernelScratch scratch(op, error);
    const size_t in_each = ins.size() / calls, out_each = outs.size() / calls;
    try {
      for (size_t k = 0; k < calls; ++k) {
        const size_t i = calls - 1 - k;  // nobody may rely on their order
        kernel->fn({std::span(ins).subspan(i * in_each, in_each),
                    std::span(outs).subspan(i * out_each, out_each),
                    attrs.data() + i * (attrs.size() / calls), factors, nullptr, &scratch});
      }
    } catch (const std::exception& e) {
      scratch.Fail(e.what());
    }
  }
};

void QueueKernel(const KernelCall& call, size_t calls) {
  Far& far = TheFar();
  Lock lock(far.mutex);
  auto kept = std::make_shared<KeptKernelCall>();
  kept->kernel = static_cast<const Kernel*>(call.device->self);
  kept->op = call.device->op;
  kept->calls = calls;
  kept->error = call.device->error;
  std::vector<Access> accesses;
  for (const TensorRef& t : call.in) {
    kept->in.emplace_back(t);
    accesses.push_back(kept->in.back().access(false));
  }
  for (const TensorRef& t : call.out) {
    kept->out.emplace_back(t);
    accesses.push_back(kept->out.back().access(true));
  }
  for (int i = 0; i < call.device->num_attrs; ++i) {
    const Attr& a = call.attrs[i];
    kept->attrs.push_back(a);
    kept->ints.emplace_back(a.ints, a.ints + a.n);
  }
  kept->factors.assign(call.factors.begin(), call.factors.end());
  ++far.stats.kernels;
  far.Queue(call.stream, kept->op, accesses, [&far, kept] { kept->Run(far); });
}

void RunKernel(const KernelCall& call) { QueueKernel(call, 1); }
template <size_t kIns>
void RunList(const KernelCall& call) {
  QueueKernel(call, call.in.size() / kIns);
}

// Ops of which it takes many calls at once (dtensor/call_list.h), by how many inputs they have.
KernelFn FindList(std::string_view op) {
  if (op == "power_sum" || op == "max_abs") return &RunList<1>;
  if (op == "sgd_" || op == "scale_") return &RunList<2>;
  if (op == "sgd_momentum_") return &RunList<3>;
  if (op == "adamw_") return &RunList<4>;
  return nullptr;
}

int FindFarKernel(const char* op, Kernel* out) {
  std::string_view name = op;
  KernelFn fn = &RunKernel;
  if (name.ends_with("[]")) {
    name.remove_suffix(2);
    fn = FindList(name);
  }
  const Kernel* cpu = fn == nullptr ? nullptr : FindKernel(name, DeviceType::kCpu);
  if (cpu == nullptr) return kOk;
  *out = *cpu;
  out->fn = fn;
  out->self = cpu;
  return kOk;
}

}  // namespace

const DeviceTable* FarDevice() {
  static const DeviceTable table = {.struct_size = sizeof(DeviceTable),
                                    .abi = kDeviceTableAbi,
                                    .name = "far",
                                    .describe = &DescribeError,
                                    .count = &Count,
                                    .open = &OpenFar,
                                    .close = &CloseFar,
                                    .segment = &TakeSegment,
                                    .segment_free = &FreeSegment,
                                    .pinned = &TakePinned,
                                    .pinned_free = &FreePinned,
                                    .stream = &MakeStream,
                                    .stream_free = &FreeStream,
                                    .event = &MakeEvent,
                                    .event_free = &FreeEvent,
                                    .record = &Record,
                                    .order = &Order,
                                    .query = &Query,
                                    .copy = &CopyArrays,
                                    .fill = &FillArray,
                                    .reduce = &ReduceArrays,
                                    .move = &Move,
                                    .kernel = &FindFarKernel,
                                    .no_memory = kNoMemory};
  return &table;
}

void RegisterFarDevice() { ThrowIfError(RegisterDevice(DeviceType::kCustom, FarDevice())); }

void SeedFarDevice(uint64_t seed) {
  Far& far = TheFar();
  Lock lock(far.mutex);
  far.seed = seed;
  far.random.seed(seed);
}
FarStats GetFarStats() {
  Lock lock(TheFar().mutex);
  return TheFar().stats;
}
void FailFarSegment(int64_t n) {
  Lock lock(TheFar().mutex);
  TheFar().fail_segment = n;
}

FarReports::FarReports() {
  Lock lock(TheFar().mutex);
  TheFar().collect = true;
  TheFar().reports.clear();
}
FarReports::~FarReports() {
  Lock lock(TheFar().mutex);
  TheFar().collect = false;
}
std::vector<std::string> FarReports::Take() {
  Lock lock(TheFar().mutex);
  TheFar().RunAll();
  return std::exchange(TheFar().reports, {});
}

}  // namespace dtensor::testing
