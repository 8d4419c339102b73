// RankState: what tensor/ keeps for the rank whose code runs. A RankContext of mesh/ has one; a
// thread that runs no rank has one of its own, with its own devices and context. What else is kept
// per thread are caches and queues, as which any thread's would serve, and what a backend has to
// know between two calls of it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "dtensor/tensor/buffer.h"
#include "dtensor/tensor/device_health.h"

namespace dtensor {

class DeviceGraph;
class RankContext;
class RankDevices;
class TimelineTrack;

// What a failing allocation appends to its error.
using MemoryReportFn = std::string (*)();

struct RankState {
  std::shared_ptr<Allocator> allocator;     // of CPU memory; made on first use
  std::shared_ptr<Allocator> meta_counter;  // null: meta tensors are not counted
  RankDevices* devices = nullptr;           // null: those of the thread
  MemoryReportFn memory_report = nullptr;
  TimelineTrack* timeline = nullptr;  // null: nothing records
  DeviceGraph* capture = nullptr;     // the graph that is being captured
  RankContext* context = nullptr;     // null until a thread that runs no rank asks for one
  bool keeps_launches = false;        // some plan may hold a DeviceLaunch
  std::vector<std::weak_ptr<const DeviceHealth>> watched;  // by WatchHealth

  static RankState& Current() { return current_ != nullptr ? *current_ : OfThread(); }
  // Null where nobody has asked for Current() yet.
  static RankState* IfAny() { return current_; }

  // Makes the calling thread run as `state`, for a scope; scopes nest.
  class Scope {
   public:
    explicit Scope(RankState* state) : outer_(current_) { current_ = state; }
    ~Scope() { current_ = outer_; }
    Scope(const Scope&) = delete;

   private:
    RankState* const outer_;
  };

 private:
  static RankState& OfThread();
  static constinit thread_local RankState* current_;
};

}  // namespace dtensor
