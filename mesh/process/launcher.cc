#include "dtensor/mesh/process/launcher.h"

#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

struct Row {
  const char* launcher;
  const char *rank, *size, *local_rank, *local_size;  // null: it does not say
  bool only_with_rank;                                // others use the name of its size too
  bool underneath;  // may be set for whoever starts the processes, not for them
};

constexpr Row kTable[] = {
    {"dtensor", "DTENSOR_RANK", "DTENSOR_WORLD_SIZE", "DTENSOR_LOCAL_RANK",
     "DTENSOR_LOCAL_WORLD_SIZE", false, false},
    {"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE", false, false},
    {"PMI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", false, false},
    {"MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK",
     "MV2_COMM_WORLD_LOCAL_SIZE", false, false},
    {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", true, false},
    {"srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", nullptr, false, true},
};

constexpr size_t kMostNodeName = 95;  // what a rendezvous compares

// The number that a variable holds, if it is set.
absl::StatusOr<std::optional<int64_t>> Number(const Environment& environment, const char* name,
                                              int64_t least) {
  const char* text = name == nullptr ? nullptr : environment(name);
  if (text == nullptr) return std::optional<int64_t>();
  int64_t value = 0;
  if (absl::SimpleAtoi(text, &value) && value >= least) return std::optional<int64_t>(value);
  return absl::InvalidArgumentError(
      absl::StrCat(name, " is \"", text, "\": give a number of at least ", least, ", or unset it"));
}

// How many of the step's `size` tasks srun has put on this node: number SLURM_NODEID of a list like
// "2(x3),1", in which a count may be repeated. Empty where it does not say.
absl::StatusOr<std::optional<int64_t>> OnThisNode(const Environment& environment, int64_t size) {
  DT_ASSIGN_OR_RETURN(const std::optional<int64_t> nodes,
                      Number(environment, "SLURM_STEP_NUM_NODES", 1));
  if (nodes && *nodes == 1) return std::optional<int64_t>(size);
  DT_ASSIGN_OR_RETURN(const std::optional<int64_t> node, Number(environment, "SLURM_NODEID", 0));
  const char* const list = environment("SLURM_STEP_TASKS_PER_NODE");
  if (!node || list == nullptr) return std::optional<int64_t>();
  int64_t before = 0;
  for (const absl::string_view part : absl::StrSplit(list, ',')) {
    const std::vector<absl::string_view> count = absl::StrSplit(part, absl::MaxSplits("(x", 1));
    int64_t tasks = 0, times = 1;
    if (!absl::SimpleAtoi(count[0], &tasks) || tasks < 1 ||
        (count.size() == 2 && !absl::SimpleAtoi(absl::StripSuffix(count[1], ")"), &times))) {
      return std::optional<int64_t>();
    }
    before += times;
    if (*node < before) return std::optional<int64_t>(tasks);
  }
  return std::optional<int64_t>();
}

// Each process would be a world of its own.
absl::Status HalfSet(const Row& row) {
  return absl::InvalidArgumentError(
      absl::StrCat(row.rank, " is set and ", row.size, " is not: give both, or none"));
}

// Whether two launchers say the same, as far as they say it.
bool SamePlace(const ProcessPlace& a, const ProcessPlace& b) {
  if (a.size != b.size || a.rank != b.rank) return false;
  const bool both = a.local_size != 0 && b.local_size != 0;
  return !both || (a.local_size == b.local_size && a.local_rank == b.local_rank);
}

absl::StatusOr<std::optional<ProcessPlace>> Read(const Environment& environment, const Row& row) {
  if (row.only_with_rank && environment(row.rank) == nullptr) return std::optional<ProcessPlace>();
  DT_ASSIGN_OR_RETURN(const std::optional<int64_t> size, Number(environment, row.size, 1));
  // A name of ours that stands alone was meant for us.
  if (!size && &row == &kTable[0] && environment(row.rank) != nullptr) return HalfSet(row);
  if (!size) return std::optional<ProcessPlace>();
  ProcessPlace place{row.launcher, row.size};
  place.size = *size;
  DT_ASSIGN_OR_RETURN(const std::optional<int64_t> rank, Number(environment, row.rank, 0));
  if (*size == 1 && rank.value_or(0) == 0) return std::optional<ProcessPlace>(std::move(place));
  if (!rank || *rank >= *size) {
    return absl::InvalidArgumentError(absl::StrCat(
        row.size, " is ", *size, " and ", row.rank,
        rank ? absl::StrCat(" is ", *rank) : " is not set", ": a rank is from 0 to ", *size - 1,
        "; start one process, or use a launcher, which sets both (mpirun, srun, torchrun, "
        "dtensor-run)"));
  }
  DT_ASSIGN_OR_RETURN(const std::optional<int64_t> local, Number(environment, row.local_rank, 0));
  DT_ASSIGN_OR_RETURN(std::optional<int64_t> near, Number(environment, row.local_size, 1));
  place.rank = *rank;
  if (!near && row.underneath) {
    DT_ASSIGN_OR_RETURN(near, OnThisNode(environment, *size));
  }
  if (near && *near > *size) {
    return absl::InvalidArgumentError(absl::StrCat(row.local_size, " is ", *near, ", more than ",
                                                   row.size, ", which is ", *size));
  }
  if (local && near && *local >= *near) {
    return absl::InvalidArgumentError(absl::StrCat(row.local_rank, " is ", *local,
                                                   ": of the processes on this machine there are ",
                                                   *near, ", from 0"));
  }
  place.local_rank = local.value_or(near == size ? *rank : 0);
  place.local_size = near.value_or(0);
  return std::optional<ProcessPlace>(std::move(place));
}

}  // namespace

std::string ProcessPlace::ToString() const {
  const std::string near = local_size == 0
                               ? std::string()
                               : absl::StrCat(local_rank, " of ", local_size, " on this machine, ");
  return absl::StrCat("rank ", rank, " of ", size, ", ", near, "by ", launcher, " (", size_name,
                      ")");
}

absl::StatusOr<std::optional<ProcessPlace>> FindPlace(const Environment& environment) {
  std::optional<ProcessPlace> found;
  for (const Row& row : kTable) {
    DT_ASSIGN_OR_RETURN(std::optional<ProcessPlace> place, Read(environment, row));
    if (!place || (row.underneath && found)) continue;
    // Of those who started one process each the last word has who started several.
    if (!found || found->size == 1) {
      found = std::move(place);
    } else if (place->size != 1 && !SamePlace(*place, *found)) {
      return absl::InvalidArgumentError(
          absl::StrCat("launchers contradict each other: ", found->ToString(), ", but ",
                       place->ToString(), "; unset ", found->size_name, " or ", place->size_name));
    }
  }
  for (const Row& row : kTable) {  // Slurm's is set in scripts, too, which run once
    if (!found && !row.underneath && environment(row.rank) != nullptr) return HalfSet(row);
  }
  if (const char* node = environment("DTENSOR_NODE"); found && node != nullptr) {
    found->node = node;
    if (found->node.size() > kMostNodeName) {
      return absl::InvalidArgumentError(absl::StrCat("DTENSOR_NODE is a name of ",
                                                     found->node.size(), " characters: at most ",
                                                     kMostNodeName));
    }
  }
  return found;
}

}  // namespace dtensor
