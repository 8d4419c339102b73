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

thread_local cudaError_t t_last = cudaSuccess;

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

void Join(Clock* into, const Clock& from) {
  for (const auto& [stream, position] : from) {
    uint64_t& have = (*into)[stream];
    have = std::max(have, position);
  }
}

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
    : memory_(64ull << 30, Number("DT_CUSIM_MEMORY", 16ull << 30)),
      devices_(static_cast<int>(Number("DT_CUSIM_DEVICES", 1))),
      strict_(Number("DT_CUSIM_STRICT", 0) != 0),
      report_(Number("DT_CUSIM_REPORT", 0) != 0),
      leaks_(Number("DT_CUSIM_LEAKS", 0) != 0) {
  options_.seed = Number("DT_CUSIM_SEED", 0);
  options_.races = Number("DT_CUSIM_RACES", 1) != 0;
  options_.uninitialised = Number("DT_CUSIM_UNINITIALISED", 1) != 0;
  options_.limit = Number("DT_CUSIM_LIMIT", options_.limit);
  auto legacy = std::make_unique<Stream>();
  legacy->id = next_stream_++;
  streams_[legacy->id] = std::move(legacy);
  // "cudaMalloc:3=2,cudaStreamSynchronize:1=214": the call, which one of them, the error.
  std::string text = std::getenv("DT_CUSIM_FAIL") ? std::getenv("DT_CUSIM_FAIL") : "";
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find(',', at), text.size());
    const size_t colon = text.find(':', at), equals = text.find('=', at);
    if (colon > equals || equals >= end) {
      std::fprintf(stderr, "cusim: DT_CUSIM_FAIL is CALL:NTH=ERROR,...: %s\n", text.c_str());
      std::exit(2);
    }
    injections_.push_back({text.substr(at, colon - at), std::stoull(text.substr(colon + 1)),
                           static_cast<cudaError_t>(std::stoi(text.substr(equals + 1)))});
    at = end + 1;
  }
}

void Runtime::AtExit() {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  SynchronizeAll();
  if (leaks_) {
    for (const auto& [address, a] : memory_.allocations()) {
      bool variable = false;
      for (const auto& [name, at] : variables_) variable |= at.first == address;
      if (a.live && !variable) Say("leak", std::to_string(a.bytes) + " bytes were never freed");
    }
  }
  if (report_) {
    for (const auto& [name, c] : counters_) {
      std::fprintf(
          stderr,
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
  if (strict_ && reports_ != 0) {
    std::fflush(nullptr);
    _exit(86);
  }
}

cudaError_t Runtime::Enter(const char* call) {
  const uint64_t n = ++calls_[call];
  for (const Injection& i : injections_) {
    if (i.call != call || i.nth != n) continue;
    const bool sticky = i.error != cudaErrorMemoryAllocation && i.error != cudaErrorInvalidValue;
    if (sticky) sticky_ = i.error;
    return i.error;
  }
  return sticky_;
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
    return streams_.begin()->second.get();
  }
  for (auto& [id, s] : streams_) {
    if (s.get() == reinterpret_cast<Stream*>(stream)) return s.get();
  }
  return nullptr;
}

Stream* Runtime::MakeStream(unsigned flags, int priority) {
  auto stream = std::make_unique<Stream>();
  stream->id = next_stream_++;
  stream->flags = flags;
  stream->legacy_waits = (flags & cudaStreamNonBlocking) == 0;
  stream->priority = priority;
  Stream* const s = stream.get();
  streams_[s->id] = std::move(stream);
  return s;
}

cudaError_t Runtime::DestroyStream(Stream* stream) {
  if (stream == streams_.begin()->second.get()) return cudaErrorInvalidResourceHandle;
  Force(stream, stream->queued);
  stream->device = -1;  // kept: events may name it
  return cudaSuccess;
}

cudaError_t Runtime::Queue(Stream* s, std::string name,
                           std::function<void(std::vector<Range>*)> run) {
  if (s == nullptr || s->device < 0) return cudaErrorInvalidResourceHandle;
  Stream* const legacy = streams_.begin()->second.get();
  if (s->capture != nullptr) {
    ++s->captured;
    s->capture->graph->works.push_back({std::move(name), std::move(run), {}, {}});
    return cudaSuccess;
  }
  if (s == legacy && AnyCapture()) {
    for (const auto& c : captures_) {
      if (c->origin->legacy_waits) {
        c->broken = "the legacy stream was used, which waits for a stream that captures";
        return cudaErrorStreamCaptureImplicit;
      }
    }
  }
  Work work{std::move(name), std::move(run), {}, {}};
  Join(&s->clock, host_);
  if (s == legacy) {
    for (auto& [id, other] : streams_) {
      if (other.get() == s || !other->legacy_waits) continue;
      work.after.emplace_back(other.get(), other->queued);
      Join(&s->clock, other->clock);
    }
  } else if (s->legacy_waits) {
    work.after.emplace_back(legacy, legacy->queued);
    Join(&s->clock, legacy->clock);
  }
  s->clock[s->id] = ++s->queued;
  work.clock = s->clock;
  s->queue.push_back(std::move(work));
  return cudaSuccess;
}

void Runtime::Run(Stream* s) {
  if (s->running) {
    Say("deadlock", "a stream waits for itself");
    sticky_ = cudaErrorLaunchTimeout;
    s->queue.clear();
    s->done = s->queued;
    return;
  }
  s->running = true;
  Work work = std::move(s->queue.front());
  s->queue.pop_front();
  for (const auto& [other, position] : work.after) Force(other, position);
  std::vector<Range> ranges;
  if (work.run && sticky_ == cudaSuccess) work.run(&ranges);
  ++s->done;
  s->running = false;
  if (options_.races) Check(work.name, s->id, work.clock.at(s->id), work.clock, ranges);
}

void Runtime::Force(Stream* s, uint64_t position) {
  while (s->done < position && !s->queue.empty()) Run(s);
}

void Runtime::Check(const std::string& name, int stream, uint64_t position, const Clock& clock,
                    const std::vector<Range>& ranges) {
  bool said = false;
  for (const Range& r : ranges) {
    const Allocation* const a = memory_.Owns(r.low) ? memory_.Find(r.low) : nullptr;
    std::vector<Use>& uses = uses_[a != nullptr ? a->address : r.low & ~0xfffull];
    size_t kept = 0;
    for (size_t i = 0; i < uses.size(); ++i) {
      Use& use = uses[i];
      const auto known = clock.find(use.stream);
      const bool before =
          use.stream == stream || (known != clock.end() && known->second >= use.position);
      const bool overlap = use.low < r.high && r.low < use.high;
      if (!before && overlap && (use.write || r.write) && !said) {
        said = true;
        Say("stream race", name + " and " + use.name +
                               " use the same memory, at least one of them writes, and nothing "
                               "orders their streams");
      }
      // What is ordered before a use that covers it need not be asked again.
      const bool covered =
          before && r.low <= use.low && use.high <= r.high && (r.write || !use.write);
      if (!covered) uses[kept++] = std::move(use);
    }
    uses.resize(kept);
    uses.push_back({stream, position, r.low, r.high, r.write, name});
  }
}

void Runtime::HostTouches(const char* what, uint64_t address, uint64_t bytes, bool write) {
  host_[0] = ++host_time_;
  if (options_.races) Check(what, 0, host_time_, host_, {{address, address + bytes, write}});
}

cudaError_t Runtime::Record(Event* event, Stream* s) {
  if (s == nullptr) return cudaErrorInvalidResourceHandle;
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
  if (event->capture != nullptr) {
    Capture* const c = event->capture;
    if (s->capture == nullptr) {  // joins the capture
      s->capture = c;
      s->captured = s->joined = 0;
      c->streams.insert(s);
    } else if (s->capture != c) {
      return cudaErrorStreamCaptureMerge;
    }
    event->stream->joined = std::max(event->stream->joined, event->position);
    return cudaSuccess;
  }
  if (s->capture != nullptr) return cudaErrorStreamCaptureIsolation;
  Join(&s->clock, event->clock);
  const cudaError_t queued = Queue(s, "wait", nullptr);
  if (queued == cudaSuccess) s->queue.back().after.emplace_back(event->stream, event->position);
  return queued;
}

bool Runtime::Refuses(Stream* s, const char* call) {
  Capture* const c = s != nullptr ? s->capture : captures_.empty() ? nullptr : captures_[0].get();
  if (c == nullptr) return false;
  c->broken = std::string(call) + " in a capture";
  return true;
}

cudaError_t Runtime::Synchronize(Stream* s) {
  if (s == nullptr || s->device < 0) return cudaErrorInvalidResourceHandle;
  if (s->capture != nullptr && Refuses(s, "synchronisation"))
    return cudaErrorStreamCaptureUnsupported;
  ++synchronizations_;
  if (s == streams_.begin()->second.get()) {  // with it, all that it waits for
    for (auto& [id, other] : streams_) {
      if (!other->legacy_waits || other->capture != nullptr) continue;
      Force(other.get(), other->queued);
      Join(&host_, other->clock);
    }
  }
  Force(s, s->queued);
  Join(&host_, s->clock);
  return sticky_;
}

cudaError_t Runtime::SynchronizeAll() {
  if (AnyCapture() && Refuses(nullptr, "synchronisation of the device")) {
    return cudaErrorStreamCaptureUnsupported;
  }
  ++synchronizations_;
  for (auto& [id, s] : streams_) {
    Force(s.get(), s->queued);
    Join(&host_, s->clock);
  }
  return sticky_;
}

cudaError_t Runtime::Synchronize(Event* event) {
  if (event->capture != nullptr) return cudaErrorCapturedEvent;
  ++synchronizations_;
  if (event->stream != nullptr) Force(event->stream, event->position);
  Join(&host_, event->clock);
  return sticky_;
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

cudaError_t Runtime::Begin(Stream* s) {
  if (s == nullptr) return cudaErrorInvalidResourceHandle;
  if (s == streams_.begin()->second.get()) return cudaErrorStreamCaptureUnsupported;
  if (s->capture != nullptr) return cudaErrorIllegalState;
  captures_.push_back(std::make_unique<Capture>());
  Capture* const c = captures_.back().get();
  c->origin = s;
  c->streams.insert(s);
  s->capture = c;
  s->captured = s->joined = 0;
  return cudaSuccess;
}

cudaError_t Runtime::End(Stream* s, Graph** graph) {
  *graph = nullptr;
  Capture* const c = s != nullptr ? s->capture : nullptr;
  if (c == nullptr) return cudaErrorIllegalState;
  if (c->origin != s) return cudaErrorStreamCaptureUnmatched;
  cudaError_t error = c->broken.empty() ? cudaSuccess : cudaErrorStreamCaptureInvalidated;
  if (error != cudaSuccess) Say("capture", c->broken);
  for (Stream* other : c->streams) {
    if (error == cudaSuccess && other != s && other->joined < other->captured) {
      error = cudaErrorStreamCaptureUnjoined;
      Say("capture", "a stream that was forked into the capture did not join its first stream");
    }
    other->capture = nullptr;
  }
  if (error == cudaSuccess) *graph = c->graph.release();
  std::erase_if(captures_, [&](const auto& other) { return other.get() == c; });
  return error;
}

cudaError_t Runtime::LaunchGraph(const Graph& graph, Stream* s) {
  for (const Work& work : graph.works) {
    const cudaError_t e = Queue(s, "graph: " + work.name, work.run);
    if (e != cudaSuccess) return e;
  }
  return cudaSuccess;
}

// What a thread's calls have met: cudaGetLastError takes it away, unless it stays for good.
cudaError_t LastError(bool take, cudaError_t sticky) {
  const cudaError_t e = sticky != cudaSuccess ? sticky : t_last;
  if (take) t_last = cudaSuccess;
  return e;
}

}  // namespace cusim
