#include "examples/resume.h"

#include <cstdio>

#include "dtensor/mesh/launch.h"
#include "dtensor/tensor/file.h"
#include "dtensor/tensor/status.h"

namespace dtensor {

absl::Status ResumeOrBegin(Trainer& trainer, const std::string& folder, const std::string& save) {
  if (folder.empty()) return absl::OkStatus();
  const absl::Status resumed = trainer.Resume(folder);
  const bool begins = absl::IsNotFound(resumed) && !save.empty() && SameFile(folder, save);
  if (!begins) DT_RETURN_IF_ERROR(resumed);
  if (RankContext::Current().rank() == 0) {
    std::printf(begins ? "beginning: nothing in %s yet\n" : "going on from %s\n",
                begins ? folder.c_str() : trainer.resumed_from().c_str());
  }
  return absl::OkStatus();
}

}  // namespace dtensor
