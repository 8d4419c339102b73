// What main() of a program wants around its work: errors told, output checked, signals named.
#pragma once

#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"

namespace dtensor {

// For main(): runs `work`, prints its error ("error: ..." on stderr, exceptions too) and returns
// the exit code: 0; 70 Internal; 71 a peer is lost (Aborted, or Unavailable of a process that
// is gone) and 72 one did not come (DeadlineExceeded), where the error names a rank; 75
// ResourceExhausted; 1 everything else, what was asked or what is in a file. What else makes a
// program end is told and counts as an error: output that cannot be written (a full disk;
// RLIMIT_FSIZE is an error of the write that meets it), and SIGINT, SIGTERM and SIGHUP (then the
// signal takes its course), unless they have handlers already. For a launcher an error, and the
// rank that is to blame, go into DTENSOR_ERROR_FILE as well.
//   Errors: also those of CheckLaunch.
int RunProgram(absl::FunctionRef<absl::Status()> work);

// Whether the ranks of this launch can meet: it is of one process, whose ranks are threads, or of
// several that a plugin serves (MPI's mpirun and srun, gloo's torchrun and dtensor-run), one for
// each rank. Without the plugin each would be a world of its own, silently.
//   Errors: Unimplemented there; InvalidArgument where the launcher's variables make no sense or
//   launchers contradict each other.
absl::Status CheckLaunch();

// How many processes the launch has, and which of them this is: 1 and 0 where ranks are threads.
// Process 0 is the one that prints and writes files for all. After RunProgram has begun.
int64_t LaunchedProcesses();
int64_t ThisProcess();

// Bytes of memory that this process may still take before the machine, its control group or its
// address space limit ends it.
int64_t AvailableMemory();

namespace internal {
// What a program that a signal ends while it waits for its peers tells besides; nothing where ok.
void TellAtSignal(const absl::Status& why);
}  // namespace internal

}  // namespace dtensor
