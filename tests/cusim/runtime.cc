#include "tests/cusim/runtime.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace cusim {
namespace {

uint64_t Number(const char* name, uint64_t otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 0);
}
uint64_t MemoryOfADevice() { return Number("DT_CUSIM_MEMORY", 16ull << 30); }
// So many that an address is seldom given again; few where memory is, since valgrind has no 64 GiB.
uint64_t AddressesFor(uint64_t memory) {
  return std::clamp<uint64_t>(4 * memory, 4ull << 30, 64ull << 30);
}

thread_local cudaError_t t_last = cudaSuccess;
thread_local int t_device = 0;

struct sigaction g_before;  // what the program did with its faults: the only state of a handler

// A host that reads or writes device memory faults; it is told where.
void OnFault(int number, siginfo_t* info, void* context) {
  const uint64_t address = reinterpret_cast<uint64_t>(info->si_addr);
  if (Runtime::Get().memory().Owns(address)) {
    const std::string text =
        "cusim: host access of device memory: " + Runtime::Get().memory().Describe(address) + "\n";
    if (write(STDERR_FILENO, text.data(), text.size()) < 0) _exit(86);
    _exit(86);
  }
  sigaction(number, &g_before, nullptr);
  (void)context;
}

}  // namespace

int SharedOfABlock() { return static_cast<int>(Number("DT_CUSIM_SHARED", 232448)); }

Runtime& Runtime::Get() {
  static Runtime* const runtime = [] {
    auto* const r = new Runtime;  // outlives the program's own destructors
    std::atexit([] { Runtime::Get().AtExit(); });
    struct sigaction action = {};
    action.sa_sigaction = &OnFault;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &action, &g_before);
    return r;
  }();
  return *runtime;
}

Runtime::Runtime()
    : memory_(AddressesFor(MemoryOfADevice()), MemoryOfADevice()),
      devices_(static_cast<int>(std::min<uint64_t>(Number("DT_CUSIM_DEVICES", 1), 64))),
      strict_(Number("DT_CUSIM_STRICT", 0) != 0),
      report_(Number("DT_CUSIM_REPORT", 0) != 0),
      leaks_(Number("DT_CUSIM_LEAKS", 0) != 0),
      whole_(Number("DT_CUSIM_WHOLE", 0) != 0),
      patience_(Number("DT_CUSIM_PATIENCE", 30000)) {
  options_.seed = Number("DT_CUSIM_SEED", 0);
  options_.races = Number("DT_CUSIM_RACES", 1) != 0;
  options_.uninitialised = Number("DT_CUSIM_UNINITIALISED", 1) != 0;
  options_.limit = Number("DT_CUSIM_LIMIT", options_.limit);
  for (int device = 0; device < std::max(devices_, 1); ++device) NewStream(device);
  ReadInjections(std::getenv("DT_CUSIM_FAIL"));
}

// "cudaMalloc:3=2,cudaStreamSynchronize:1=214": the call, which one of them, the error.
void Runtime::ReadInjections(const char* given) {
  const std::string text = given != nullptr ? given : "";
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find(',', at), text.size());
    const size_t colon = text.find(':', at), equals = text.find('=', at);
    if (colon > equals || equals >= end) {
      std::fprintf(stderr, "cusim: DT_CUSIM_FAIL is CALL:NTH=ERROR,...: %s\n", text.c_str());
      std::exit(2);
    }
    injections_.push_back({text.substr(at, colon - at), std::stoull(text.substr(colon + 1)),
                           std::stoi(text.substr(equals + 1)), false, false});
    at = end + 1;
  }
}

int Runtime::device() const { return t_device; }
void Runtime::SetDevice(int device) { t_device = device; }

void Runtime::AtExit() {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  if (!ForceAll(kAllDevices)) Say("never ran", blocked_.why);
  for (const Injection& i : injections_) {
    if (i.fired) continue;
    Say("injection", i.call + ":" + std::to_string(i.nth) + "=" + std::to_string(i.error) +
                         " never came: there were " + std::to_string(calls_[i.call]) +
                         " calls of that name");
  }
  if (leaks_) {
    for (const auto& [address, a] : memory_.allocations()) {
      const bool variable = a.device == kAllDevices;  // of a module, which goes with the process
      if (a.live && !variable) Say("leak", std::to_string(a.bytes) + " bytes were never freed");
    }
  }
  if (report_) PrintCounters();
  if (strict_ && reports_ != 0) {
    std::fflush(nullptr);
    _exit(86);
  }
}

void Runtime::PrintCounters() const {
  for (const auto& [name, c] : counters_) {
    std::fprintf(stderr,
                 "cusim: %llu launches, %llu blocks, %llu warp instructions (%llu arithmetic, %llu "
                 "memory, %llu warp, %llu matrix, %llu barrier), %llu bytes asked, %llu sectors "
                 "(%.2f of ideal), %llu bank conflicts: %s\n",
                 (unsigned long long)c.launches, (unsigned long long)c.blocks,
                 (unsigned long long)c.warp_insns,
                 (unsigned long long)c.by_class[static_cast<int>(Class::kArithmetic)],
                 (unsigned long long)c.by_class[static_cast<int>(Class::kMemory)],
                 (unsigned long long)c.by_class[static_cast<int>(Class::kWarp)],
                 (unsigned long long)c.by_class[static_cast<int>(Class::kMatrix)],
                 (unsigned long long)c.by_class[static_cast<int>(Class::kBarrier)],
                 (unsigned long long)c.global_bytes, (unsigned long long)c.sectors,
                 c.sectors == 0 ? 1.0 : static_cast<double>(c.global_bytes) / 32 / c.sectors,
                 (unsigned long long)c.bank_conflicts, name.c_str());
  }
  std::fprintf(stderr,
               "cusim: %llu launches, %llu lane instructions, %llu copies, %llu "
               "synchronisations, %llu reports\n",
               (unsigned long long)total_.launches, (unsigned long long)total_.lane_insns,
               (unsigned long long)copies_, (unsigned long long)synchronizations_,
               (unsigned long long)reports_);
}

void Runtime::Visit(const CounterVisitor& v) const {
  for (const auto& [name, c] : counters_) {
    v.kernel(v.to, name.c_str(), c.launches, c.global_bytes, c.sectors);
  }
  for (const auto& [call, times] : calls_) v.number(v.to, call.c_str(), times);
  v.number(v.to, "uploads", uploads_);
}
void cusim_counters(const CounterVisitor* visitor) {
  Runtime& r = Runtime::Get();
  std::lock_guard<std::recursive_mutex> lock(r.mutex);
  r.Visit(*visitor);
}

void Runtime::FailFromNow(const char* call, uint64_t n, int error) {
  std::erase_if(injections_, [](const Injection& i) { return i.from_now; });
  if (n > 0) injections_.push_back({call, calls_[call] + n, error, false, true});
}
void cusim_fail(const char* call, uint64_t n, int error) {
  Runtime& r = Runtime::Get();
  std::lock_guard<std::recursive_mutex> lock(r.mutex);
  r.FailFromNow(call, n, error);
}

// After these nothing works until the process ends ("must be terminated and relaunched").
bool IsSticky(int error) {
  switch (error) {
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorTensorMemoryLeak:
    case cudaErrorExternalDevice:
    case cudaErrorMpsClientTerminated:
      return true;
    default:
      return false;
  }
}

int Runtime::Injected(const char* call) {
  const uint64_t n = ++calls_[call];
  for (Injection& i : injections_) {
    if (i.call != call || i.nth != n) continue;
    i.fired = true;
    return i.error;
  }
  return 0;
}

cudaError_t Runtime::Enter(const char* call) {
  const int error = Injected(call);
  if (error == 0) return sticky_;
  if (IsSticky(error)) sticky_ = static_cast<cudaError_t>(error);
  return static_cast<cudaError_t>(error);
}

cudaError_t Runtime::Return(cudaError_t error) {
  if (error != cudaSuccess && error != cudaErrorNotReady) t_last = error;
  return error;
}

void Runtime::Say(const std::string& kind, const std::string& text) {
  ++reports_;
  std::fprintf(stderr, "cusim: %s: %s\n", kind.c_str(), text.c_str());
}

Stream* Runtime::Of(cudaStream_t stream) {
  if (stream == nullptr || stream == cudaStreamLegacy || stream == cudaStreamPerThread) {
    return Legacy(device());
  }
  for (auto& [id, s] : streams_) {
    if (s.get() == reinterpret_cast<Stream*>(stream)) return s->destroyed ? nullptr : s.get();
  }
  return nullptr;
}

Stream* Runtime::NewStream(int device) {
  auto stream = std::make_unique<Stream>();
  stream->id = next_stream_++;
  stream->device = device;
  Stream* const s = stream.get();
  streams_[s->id] = std::move(stream);
  return s;
}

Stream* Runtime::MakeStream(unsigned flags, int priority) {
  Stream* const s = NewStream(device());
  s->flags = flags;
  s->legacy_waits = (flags & cudaStreamNonBlocking) == 0;
  s->priority = priority;
  return s;
}

cudaError_t Runtime::DestroyStream(Stream* stream) {
  if (IsLegacy(stream)) return cudaErrorInvalidResourceHandle;
  Force(stream, stream->queued);  // what waits for others runs when they come
  stream->destroyed = true;       // kept: events may name it
  return cudaSuccess;
}

cudaError_t Runtime::Queue(Stream* s, std::string name,
                           std::function<void(std::vector<Range>*)> run) {
  Work work;
  work.name = std::move(name);
  work.run = std::move(run);
  return Queue(s, std::move(work));
}

cudaError_t Runtime::Queue(Stream* s, Work work) {
  if (s == nullptr || s->destroyed) return cudaErrorInvalidResourceHandle;
  if (s->capture != nullptr) {
    Capture& c = *s->capture;
    const auto lane_of = [&](const Stream* of) {
      return static_cast<size_t>(std::find(c.streams.begin(), c.streams.end(), of) -
                                 c.streams.begin());
    };
    Graph::Node node{lane_of(s), std::move(work), {}};
    for (const auto& [other, count] : node.work.after) {
      node.waits.emplace_back(lane_of(other), count);
    }
    node.work.after.clear();
    ++s->captured;
    c.graph.nodes.push_back(std::move(node));
    return cudaSuccess;
  }
  const bool is_legacy = IsLegacy(s);
  if (is_legacy && AnyCapture()) {
    for (const auto& c : captures_) {
      if (c->origin->legacy_waits && c->origin->device == s->device) {
        c->broken = "the legacy stream was used, which waits for a stream that captures";
        return cudaErrorStreamCaptureImplicit;
      }
    }
  }
  Join(&s->clock, host_);
  if (is_legacy) {
    for (auto& [id, other] : streams_) {
      if (other.get() == s || !other->legacy_waits || other->device != s->device) continue;
      work.after.emplace_back(other.get(), other->queued);
      Join(&s->clock, other->clock);
    }
  } else if (s->legacy_waits) {
    Stream* const legacy = Legacy(s->device);
    work.after.emplace_back(legacy, legacy->queued);
    Join(&s->clock, legacy->clock);
  }
  s->clock[s->id] = ++s->queued;
  work.clock = s->clock;
  if (work.prepare) work.prepare(&work, s, s->queued);
  s->queue.push_back(std::move(work));
  return cudaSuccess;
}

bool Runtime::Run(Stream* s) {
  if (s->running) {  // its first work needs others, which need what comes behind that
    const std::string why = "streams wait for each other: " + s->queue.front().name + " with " +
                            (blocked_.why.empty() ? "works of others" : blocked_.why);
    if (said_.insert(s->queue.front().name).second) Say("deadlock", why);
    return false;
  }
  s->running = true;
  bool can = true;
  {
    const Work& work = s->queue.front();
    for (const auto& [other, position] : work.after) can = can && Force(other, position);
    if (can && work.ready && sticky_ == cudaSuccess) can = work.ready();
  }
  if (!can) {
    s->running = false;
    return false;
  }
  const Work work = std::move(s->queue.front());
  s->queue.pop_front();
  std::vector<Range> ranges;
  if (work.run && sticky_ == cudaSuccess) work.run(&ranges);
  ++s->done;
  ++generation_;
  s->running = false;
  if (options_.races) Check(work.name, s->id, work.clock.at(s->id), Known(work.clock), ranges);
  return true;
}

bool Runtime::Force(Stream* s, uint64_t position) {
  while (s->done < position && !s->queue.empty()) {
    if (!Run(s)) return false;
  }
  return true;
}

bool Runtime::ForceAll(int device) {
  bool all = true;
  for (auto& [id, s] : streams_) {
    if (device != kAllDevices && s->device != device) continue;
    all = Force(s.get(), s->queued) && all;
    Join(&host_, s->clock);
  }
  return all;
}

cudaError_t Runtime::Record(Event* event, Stream* s) {
  if (s == nullptr || s->device != event->device) return cudaErrorInvalidResourceHandle;
  event->stream = s;
  event->capture = s->capture;
  if (s->capture != nullptr) {
    event->position = s->captured;
    return cudaSuccess;
  }
  const cudaError_t queued =
      Queue(s, "event", [this, at = event->ticks](std::vector<Range>*) { *at = ticks(); });
  event->position = s->queued;
  event->clock = s->clock;
  return queued;
}

cudaError_t Runtime::Wait(Stream* s, Event* event) {
  if (s == nullptr) return cudaErrorInvalidResourceHandle;
  if (event->stream == nullptr) return cudaSuccess;  // never recorded: nothing to wait for
  Work wait;
  wait.name = "wait";
  wait.after.emplace_back(event->stream, event->position);
  if (event->capture != nullptr) {
    const std::shared_ptr<Capture>& c = event->capture;
    if (c->ended) {
      Say("capture", "a wait for an event that was recorded in a capture which has ended");
      return cudaErrorCapturedEvent;
    }
    if (s->capture == nullptr) {  // joins the capture
      s->capture = c;
      s->captured = s->joined = 0;
      if (std::find(c->streams.begin(), c->streams.end(), s) == c->streams.end()) {
        c->streams.push_back(s);
      }
    } else if (s->capture != c) {
      return cudaErrorStreamCaptureMerge;
    }
    event->stream->joined = std::max(event->stream->joined, event->position);
    return Queue(s, std::move(wait));
  }
  if (s->capture != nullptr) return cudaErrorStreamCaptureIsolation;
  Join(&s->clock, event->clock);
  return Queue(s, std::move(wait));
}

cudaError_t Runtime::Synchronize(Stream* s) {
  if (s == nullptr || s->destroyed) return cudaErrorInvalidResourceHandle;
  if (s->capture != nullptr && Refuses(s, "synchronisation"))
    return cudaErrorStreamCaptureUnsupported;
  ++synchronizations_;
  return Await([this, s] {
    bool all = true;
    if (IsLegacy(s)) {  // with it, all that it waits for
      for (auto& [id, other] : streams_) {
        const bool waits = other->legacy_waits && other->capture == nullptr;
        if (!waits || other->device != s->device) continue;
        all = Force(other.get(), other->queued) && all;
        if (all) Join(&host_, other->clock);
      }
    }
    all = Force(s, s->queued) && all;
    if (all) Join(&host_, s->clock);
    return all;
  });
}

cudaError_t Runtime::SynchronizeDevice() {
  if (AnyCapture() && Refuses(nullptr, "synchronisation of the device")) {
    return cudaErrorStreamCaptureUnsupported;
  }
  ++synchronizations_;
  return Await([this, on = device()] { return ForceAll(on); });
}

cudaError_t Runtime::Synchronize(Event* event) {
  if (event->capture != nullptr) return cudaErrorCapturedEvent;
  ++synchronizations_;
  if (event->stream == nullptr) return sticky_;
  // Of the event as it is now: another thread may record it again.
  return Await([this, s = event->stream, position = event->position, clock = event->clock] {
    if (!Force(s, position)) return false;
    Join(&host_, clock);
    return true;
  });
}

bool Runtime::Done(Event* event) {
  if (event->stream == nullptr || event->stream->done >= event->position) {
    Join(&host_, event->clock);
    return true;
  }
  if (!event->stream->queue.empty()) Run(event->stream);  // so that who polls comes to an end
  return false;
}

bool Runtime::Idle(Stream* s) {
  if (s->done >= s->queued) {
    Join(&host_, s->clock);
    return true;
  }
  Run(s);
  return false;
}

// What a thread's calls have met: cudaGetLastError takes it away, unless it stays for good.
cudaError_t LastError(bool take, cudaError_t sticky) {
  const cudaError_t e = sticky != cudaSuccess ? sticky : t_last;
  if (take) t_last = cudaSuccess;
  return e;
}

}  // namespace cusim
