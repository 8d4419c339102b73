// The product of two tensors whose dims are in groups.
#pragma once

#include "dtensor/ops/family.h"

namespace dtensor {

// x [batch..., rows..., shared...] and w [batch..., cols..., shared...] -> [batch..., rows...,
// cols...], summed over the last `shared` dims. Sharding: any dim, linear in x and in w.
DTensor Contract(const DTensor& x, const DTensor& w, int batch, int shared);

}  // namespace dtensor
