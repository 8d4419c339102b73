// Rendezvous: how the processes of a launch agree to go on together, by messages alone: before a
// world, when there is no store yet, and when the program ends. Private to mesh/.
//
// Every process comes to every rendezvous of its program, in one order, and says what it comes for.
// Rank 0 hears all of them and answers all: so what one lacks is known to everybody at once, with
// the same words, and nobody waits for somebody who has gone another way.
#pragma once

#include <cstdint>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "dtensor/mesh/process/endpoint.h"

namespace dtensor {

// What rank 0 says to who comes to a world.
struct Invitation {
  int64_t first_channel = 0;
  std::string address, token;  // of the store
};

// Where the processes of the launch are.
struct Machines {
  std::string far;  // "rank 2 on node7": one on another machine than rank 0; empty: there is none
  // So many ranks from each of its multiples on are on one node: a machine, or what DTENSOR_NODE
  // calls one.
  int64_t ranks_each = 1;
};

// To the next world of the program, of `size` ranks. `serve` runs on rank 0, once all are there and
// come for the same: it starts the store.
//   Errors, alike on all ranks, with the culprit: FailedPrecondition for who comes for something
//   else or runs another build of the program; DeadlineExceeded naming who did not come; those of
//   `serve`; what a process ended with that will not come. After one the processes have parted:
//   every later rendezvous is FailedPrecondition.
absl::StatusOr<Invitation> MeetForWorld(
    Endpoint& endpoint, int64_t size, absl::Duration limit,
    absl::FunctionRef<absl::StatusOr<Invitation>(const Machines& machines)> serve);

// This process's program is through. Waits until all are; false where one ends in disorder: then
// the library of messages, which would wait for it, cannot be ended in order.
bool MeetForEnd(Endpoint& endpoint);

// This process ends with `how` and waits for nobody: who waits for it shall know.
void EndAlone(Endpoint& endpoint, const absl::Status& how);

}  // namespace dtensor
