// Which process this is of how many: what launchers say in the environment. Private to mesh/.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "absl/status/statusor.h"

namespace dtensor {

// As one launcher says it.
struct ProcessPlace {
  std::string launcher;   // "Open MPI"
  std::string size_name;  // the variable that says how many: "OMPI_COMM_WORLD_SIZE"
  int64_t rank = 0, size = 1;
  int64_t local_rank = 0, local_size = 1;  // among those of this machine; size 0: it is not said
  std::string node = "";  // DTENSOR_NODE: ranks of one name are on one node; empty: of one machine
  // "rank 1 of 4, 1 of 2 on this machine, by Open MPI (OMPI_COMM_WORLD_SIZE)"
  std::string ToString() const;
};

// The value of a variable, or null: getenv, or a test's.
using Environment = std::function<const char*(const char* name)>;

// By the table of launchers in launcher.cc: own variables (DTENSOR_RANK, ...), torchrun, Open MPI 4
// and 5, hydra and other PMI, MVAPICH, srun. Empty where none has set its variables. What mpirun
// says goes before what srun says, which may have started only mpirun's helpers.
//   Errors: InvalidArgument for values that make no sense; for launchers that contradict each
//   other, naming both variables; for a size without a rank; and for a node whose name is too long.
absl::StatusOr<std::optional<ProcessPlace>> FindPlace(const Environment& environment);

}  // namespace dtensor
