// Parts of a dropout mask, for kernels that draw it as they go instead of keeping it. No Abseil:
// included by the per-level kernel files.
#pragma once

#include <cstdint>

namespace dtensor {

// Writes the bools of `rows` rows of `n` elements of the mask that ReserveDropout
// (rng/dropout.h) returned as `words`: row r starts at element first + r * row_step of the whole,
// counted as in a row-major tensor, and at out + r * out_row.
void DrawKeepMask(const int64_t* words, int64_t num_words, int64_t first, int64_t rows,
                  int64_t row_step, int64_t n, bool* out, int64_t out_row);

}  // namespace dtensor
