// Table lookups by rows: memory-bound, so one build serves every CPU level.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>

#include "dtensor/ops/kernels.h"
#include "dtensor/tensor/cpu/kernels/runs.h"

namespace dtensor {
namespace {

int64_t IdAt(const TensorRef& ids, int64_t i) {
  return ids.dtype == DType::kI32 ? static_cast<const int32_t*>(ids.data)[i]
                                  : static_cast<const int64_t*>(ids.data)[i];
}
FactorRange RowsOf(const KernelCall& c, int64_t rows) {
  if (c.factors.empty() || c.factors[0].global < 0) return {0, rows, rows};
  return c.factors[0];
}

// False (and the call fails) for an id outside the table.
bool InTable(const KernelCall& c, int64_t id, int64_t position, int64_t rows) {
  if (id >= 0 && id < rows) return true;
  c.workspace->Fail("index " + std::to_string(id) + " is out of range for " + std::to_string(rows) +
                    " rows (position " + std::to_string(position) + ")");
  return false;
}

// w [v, d], ids; rows of other ranks give zeros.
void EmbeddingKernel(const KernelCall& c) {
  const TensorRef &w = c.in[0], &ids = c.in[1];
  const FactorRange rows = RowsOf(c, w.sizes[0]);
  const int64_t width = w.sizes[1] * SizeOf(w.dtype), n = NumelOf(ids);
  auto* out = static_cast<char*>(c.out[0].data);
  for (int64_t i = 0; i < n; ++i, out += width) {
    const int64_t id = IdAt(ids, i);
    if (!InTable(c, id, i, rows.global)) return;
    const int64_t row = id - rows.start;
    if (row < 0 || row >= rows.local) {
      std::memset(out, 0, static_cast<size_t>(width));
    } else {
      std::memcpy(out, static_cast<const char*>(w.data) + row * width, static_cast<size_t>(width));
    }
  }
}

// Where sums of rows are formed: in the result, or, of 16-bit floats, in f32 apart from it, for
// those rows only that have terms.
class RowSums {
 public:
  // At most `most` rows have terms.
  RowSums(const KernelCall& c, int64_t rows, int64_t most)
      : out_(c.out[0]), d_(out_.sizes[1]), rows_(rows), narrow_(SizeOf(out_.dtype) == 2) {
    std::memset(out_.data, 0, static_cast<size_t>(rows * d_ * SizeOf(out_.dtype)));
    if (!narrow_) return;
    const bool all = d_ < kShort;
    sums_ = static_cast<float*>(
        c.workspace->Allocate((all ? rows : std::min(most, rows)) * d_ * kWide));
    place_ =
        static_cast<int64_t*>(c.workspace->Allocate(rows * static_cast<int64_t>(sizeof(int64_t))));
    std::fill(place_, place_ + rows, -1);
    if (all) {
      std::iota(place_, place_ + rows, 0);
      std::fill_n(sums_, rows * d_, 0.0f);
    }
    term_ = static_cast<float*>(c.workspace->Allocate(d_ * kWide));
  }

  void Add(int64_t row, const char* term) {
    const RunTable& runs = ActiveRuns();
    const int type = static_cast<int>(out_.dtype), wide = static_cast<int>(DType::kF32);
    const auto& add = runs.reduce[static_cast<int>(ReduceOp::kSum)];
    if (!narrow_) {
      return add[type](static_cast<char*>(out_.data) + row * d_ * SizeOf(out_.dtype), 1, term, 1,
                       d_);
    }
    if (place_[row] < 0) {
      place_[row] = used_++;
      std::fill_n(sums_ + place_[row] * d_, d_, 0.0f);
    }
    runs.copy[type][wide](term_, 1, term, 1, d_);
    add[wide](sums_ + place_[row] * d_, 1, term_, 1, d_);
  }

  // Rounds what was formed apart.
  void Finish() {
    if (!narrow_) return;
    const CopyRunFn round =
        ActiveRuns().copy[static_cast<int>(DType::kF32)][static_cast<int>(out_.dtype)];
    if (d_ < kShort) return round(out_.data, 1, sums_, 1, rows_ * d_);
    for (int64_t row = 0; row < rows_; ++row) {
      if (place_[row] < 0) continue;
      round(static_cast<char*>(out_.data) + row * d_ * SizeOf(out_.dtype), 1,
            sums_ + place_[row] * d_, 1, d_);
    }
  }

 private:
  static constexpr int64_t kWide = sizeof(float), kShort = 32;
  const TensorRef& out_;
  const int64_t d_, rows_;
  const bool narrow_;
  float *sums_ = nullptr, *term_ = nullptr;
  int64_t *place_ = nullptr, used_ = 0;
};

// dy [..., d], ids -> [v, d]; attrs: num_rows, padding_idx.
void EmbeddingBackwardKernel(const KernelCall& c) {
  const TensorRef &dy = c.in[0], &ids = c.in[1], &out = c.out[0];
  const FactorRange rows = RowsOf(c, out.sizes[0]);
  const int64_t padding = c.attrs[1].i, width = out.sizes[1] * SizeOf(dy.dtype), n = NumelOf(ids);
  RowSums sums(c, out.sizes[0], n);
  for (int64_t i = 0; i < n; ++i) {
    const int64_t id = IdAt(ids, i);
    if (!InTable(c, id, i, rows.global)) return;
    const int64_t row = id - rows.start;
    if (id == padding || row < 0 || row >= rows.local) continue;
    sums.Add(row, static_cast<const char*>(dy.data) + i * width);
  }
  sums.Finish();
}

}  // namespace

void RegisterEmbeddingKernels(AddKernelFn add) {
  add("embedding", EmbeddingKernel, kAllDTypes, KernelLayout::kContiguous);
  add("embedding_backward", EmbeddingBackwardKernel, kFloatDTypes, KernelLayout::kContiguous);
}

}  // namespace dtensor
