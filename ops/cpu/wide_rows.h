// Rows of operands of 16-bit floats, in f32 while a kernel of rows looks at them: scratch memory
// for a few rows, not for the operand.
#pragma once

#include "dtensor/ops/cpu/rows.h"
#include "dtensor/ops/cpu/widen.h"

namespace dtensor {
namespace DT_LEVEL_NS {

// Of so many rows of `width` elements scratch memory is made: enough that a call converts a few
// thousand elements, in the cache.
static inline int64_t RowsAtOnce(int64_t width, int64_t rows) {
  const int64_t at_once = width == 0 || width > 4096 ? 1 : 4096 / width;
  return at_once < rows ? at_once : rows;
}

// What both kinds below have: rows [first, first + at_once) in f32, where the operand is not.
template <class T>
struct WideRows {
  WideRows(const KernelCall& c, const TensorRef& operand, int64_t row_width)
      : t(operand),
        width(row_width),
        rows(row_width == 0 ? 0 : ProductOf(operand, 0, operand.ndim) / row_width),
        at_once(RowsAtOnce(row_width, rows)) {
    if (!IsNarrow(t.dtype)) return;
    first = -at_once;  // none yet
    const int64_t bytes = at_once * width * static_cast<int64_t>(sizeof(float));
    wide = static_cast<float*>(c.workspace->Allocate(bytes));
  }
  T* Row(int64_t r) const {
    if (wide == nullptr) return static_cast<T*>(t.data) + r * width;
    return static_cast<T*>(static_cast<void*>(wide + (r - first) * width));  // T is float here
  }
  bool Holds(int64_t r) const { return wide == nullptr || (r >= first && r < first + at_once); }
  int64_t Count() const { return rows - first < at_once ? rows - first : at_once; }

  const TensorRef t;
  const int64_t width, rows, at_once;
  int64_t first = 0;
  float* wide = nullptr;  // null where the operand holds T
};

// Rows that are read, in any order; the last one that was asked for can be read.
template <class T>
class RowsIn {
 public:
  RowsIn(const KernelCall& c, int i, int64_t width) : rows_(c, c.in[i], width) {}
  const T* operator()(int64_t r) {
    if (!rows_.Holds(r)) {
      rows_.first = r;
      Widen(rows_.t, r * rows_.width, rows_.Count() * rows_.width, rows_.wide);
    }
    return rows_.Row(r);
  }

 private:
  WideRows<T> rows_;
};

// Rows that are written whole, in order; the last one that was asked for can be written.
template <class T>
class RowsOut {
 public:
  RowsOut(const KernelCall& c, int o, int64_t width) : rows_(c, c.out[o], width) {}
  RowsOut(const RowsOut&) = delete;
  RowsOut& operator=(const RowsOut&) = delete;
  ~RowsOut() { Round(); }
  T* operator()(int64_t r) {
    if (!rows_.Holds(r)) {
      Round();
      rows_.first = r;
    }
    return rows_.Row(r);
  }

 private:
  void Round() {
    if (rows_.wide == nullptr || rows_.first < 0) return;
    Narrow(rows_.wide, rows_.Count() * rows_.width, rows_.t, rows_.first * rows_.width);
  }

  WideRows<T> rows_;
};

}  // namespace DT_LEVEL_NS
}  // namespace dtensor
