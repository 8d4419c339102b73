// Plugins: libraries of ours that are loaded at run time where something asks for them, so that
// nothing else needs what they link.
#pragma once

#include "absl/status/statusor.h"

namespace dtensor {

// The function `entry` of the plugin `file` (lib<name>.so), which stays loaded: of the file that
// the environment variable `variable` names, else beside the library or the program that this code
// is in, in ../<folder>/ and in ../lib/, as built and as installed, else as the loader looks for
// libraries. `global`: its symbols serve what it loads itself. Thread-safe.
//   Errors: NotFound, "cannot be loaded (...)" with the loader's reasons; InvalidArgument, "<path>
//   is none", where a file is no plugin. To be continued from the plugin's name.
absl::StatusOr<void*> LoadPlugin(const char* file, const char* variable, const char* folder,
                                 const char* entry, bool global);

}  // namespace dtensor
