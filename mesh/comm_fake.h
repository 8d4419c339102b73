// MakeFakeBackend: see comm_fake.cc. Private to mesh/.
#pragma once

#include <memory>

#include "mesh/comm.h"

namespace dtensor {

std::unique_ptr<CommBackend> MakeFakeBackend(int index);

}  // namespace dtensor
