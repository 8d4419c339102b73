// Which build of the program a process runs. Private to mesh/.
#pragma once

#include <string>

namespace dtensor {

// The build ids that the linker wrote into the program and into this library's shared objects (at
// most 80 characters): alike in two processes that run the same files, whatever plugins for devices
// they have loaded. "none" where it wrote none.
std::string BuildId();

}  // namespace dtensor
