// What main() of a program wants around its work: errors told, output checked, signals named.
#pragma once

#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"

namespace dtensor {

// For main(): runs `work`, prints its error ("error: ..." on stderr, exceptions too) and returns
// the exit code, 0 or 1. What else makes a program end is told and counts as an error: output that
// cannot be written (a full disk; RLIMIT_FSIZE is an error of the write that meets it), and SIGINT,
// SIGTERM and SIGHUP (then the signal takes its course), unless they have handlers already.
//   Errors: also those of CheckSingleProcess.
int RunProgram(absl::FunctionRef<absl::Status()> work);

// Whether this is the only process of its program: ranks are threads, so under a launcher of
// several (torchrun, Open MPI, PMI, MVAPICH, srun) each would be a world of its own, silently.
//   Errors: Unimplemented there; InvalidArgument where the launcher's variables make no sense.
absl::Status CheckSingleProcess();

// Bytes of memory that this process may still take before the machine, its control group or its
// address space limit ends it.
int64_t AvailableMemory();

}  // namespace dtensor
