// Blocks of a matrix become those of its transpose.
#pragma once

#include <cstdint>

namespace dtensor {
namespace DT_LEVEL_NS {

// Four rows of four elements become columns; rows are `pitch` and `step` apart.
template <class T>
static inline void Turn4x4(const T* from, int64_t pitch, T* to, int64_t step) {
  typedef T Four __attribute__((vector_size(4 * sizeof(T))));
  Four row[4];
  for (int k = 0; k < 4; ++k) __builtin_memcpy(&row[k], from + k * pitch, sizeof(Four));
  const Four a = __builtin_shufflevector(row[0], row[1], 0, 4, 1, 5);
  const Four b = __builtin_shufflevector(row[2], row[3], 0, 4, 1, 5);
  const Four c = __builtin_shufflevector(row[0], row[1], 2, 6, 3, 7);
  const Four d = __builtin_shufflevector(row[2], row[3], 2, 6, 3, 7);
  row[0] = __builtin_shufflevector(a, b, 0, 1, 4, 5);
  row[1] = __builtin_shufflevector(a, b, 2, 3, 6, 7);
  row[2] = __builtin_shufflevector(c, d, 0, 1, 4, 5);
  row[3] = __builtin_shufflevector(c, d, 2, 3, 6, 7);
  for (int k = 0; k < 4; ++k) __builtin_memcpy(to + k * step, &row[k], sizeof(Four));
}

// The same of rows x columns.
template <class T>
static inline void Turn(const T* from, int64_t pitch, int64_t rows, int64_t columns, T* to,
                        int64_t step) {
  const int64_t whole_rows = rows & ~int64_t{3}, whole_columns = columns & ~int64_t{3};
  for (int64_t r = 0; r < whole_rows; r += 4) {
    for (int64_t c = 0; c < whole_columns; c += 4) {
      Turn4x4(from + r * pitch + c, pitch, to + c * step + r, step);
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = r < whole_rows ? whole_columns : 0; c < columns; ++c) {
      to[c * step + r] = from[r * pitch + c];
    }
  }
}

}  // namespace DT_LEVEL_NS
}  // namespace dtensor
