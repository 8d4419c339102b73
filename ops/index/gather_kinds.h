// How what is scattered to one place is combined; shared by declarations and kernels.
#pragma once

namespace dtensor {

enum class ScatterKind { kSum, kProd, kAmax, kAmin };

}  // namespace dtensor
