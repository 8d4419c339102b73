// World: who the ranks of a program are, and what they share besides tensors. How they were started
// is its business alone: as threads (mesh/local), as processes (mesh/process), or as one rank that
// has no others (mesh/fake).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "dtensor/mesh/comm_backend.h"
#include "dtensor/mesh/cost.h"
#include "dtensor/mesh/flight.h"
#include "dtensor/mesh/store.h"
#include "dtensor/tensor/kernel.h"

namespace dtensor {

enum class Launcher : uint8_t { kThreads, kFake, kProcesses };

// A group as one of its members asks for it.
struct GroupRequest {
  std::vector<int64_t> ranks;  // world ranks, by group index
  int index = 0;               // of who asks
  std::string label;           // "tp": two groups of the same ranks may have different names
  DeviceType device = {};

  GroupRequest OnHost() const {  // the same for what lies in the host's memory
    GroupRequest request = *this;
    request.device = {};
    return request;
  }
};

// What a group is made with; all its members give the same.
struct GroupOptions {
  // Of every wait for peers on it. 0: the world's (SpmdOptions::timeout).
  absl::Duration timeout = absl::ZeroDuration();
};

// Thread-safe: ranks may be threads.
class World {
 public:
  virtual ~World() = default;
  virtual int64_t size() const = 0;
  virtual Launcher launcher() const = 0;
  // Whether the ranks run one program; false where a thread outside of any has a world of one.
  virtual bool spmd() const = 0;
  // By which placements are compared, alike on all ranks. It knows which ranks share a machine.
  virtual const CostModel& cost_model() const = 0;

  // Of every wait for peers.
  virtual absl::Duration timeout() const { return absl::InfiniteDuration(); }

  // The store of the world, asked by `rank`.
  virtual Store& StoreOf(int64_t rank) = 0;
  // A communicator of the group; by its members only, whenever each of them comes to it.
  virtual absl::StatusOr<std::unique_ptr<CommBackend>> MakeComm(const GroupRequest& group) = 0;
  // For this member's waits in every present and later communicator of the group, by whatever name.
  virtual absl::Status SetOptions(const GroupRequest& group, const GroupOptions& options) = 0;
  // Bytes of every member for every member, by group index: for what is no tensor. Waits for all,
  // and all must say that it is for the same; errors as of a collective of the group, of which none
  // goes on by itself meanwhile. Without peers the others say what the caller says.
  virtual absl::StatusOr<std::vector<std::string>> Exchange(const GroupRequest& group,
                                                            absl::string_view what_for,
                                                            std::string mine) = 0;

  // `rank` failed: aborts every present and later group of it with the first failure of the world,
  // which its peers are told.
  virtual void Fail(int64_t rank, const absl::Status& why) = 0;
  // Its body has returned; an error is a failure.
  virtual void Leave(int64_t rank, const absl::Status& how) = 0;
  // The first failure as RunSpmd returns it: "rank 2: message".
  virtual absl::Status FirstCause() = 0;

  // All ranks' calls, as they stand.
  virtual FlightReport Report() = 0;
  // The report that was taken when a wait failed or calls differed; empty if none did.
  virtual FlightReport LastReport() = 0;
};

}  // namespace dtensor
