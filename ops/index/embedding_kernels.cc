// Table lookups by rows: memory-bound, so one build serves every CPU level.
#include <cstring>
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

// dy [..., d], ids -> [v, d]; attrs: num_rows, padding_idx. 16-bit sums are formed in f32.
void EmbeddingBackwardKernel(const KernelCall& c) {
  const TensorRef &dy = c.in[0], &ids = c.in[1], &out = c.out[0];
  const FactorRange rows = RowsOf(c, out.sizes[0]);
  const int64_t padding = c.attrs[1].i, d = out.sizes[1], n = NumelOf(ids);
  const bool narrow = SizeOf(out.dtype) == 2;
  const DType sum_type = narrow ? DType::kF32 : out.dtype;
  const int64_t sum_size = SizeOf(sum_type), total = out.sizes[0] * d;
  auto* sums = static_cast<char*>(narrow ? c.workspace->Allocate(total * sum_size) : out.data);
  std::memset(sums, 0, static_cast<size_t>(total * sum_size));
  auto* wide = static_cast<char*>(narrow ? c.workspace->Allocate(d * sum_size) : nullptr);
  const RunTable& runs = ActiveRuns();
  const int from = static_cast<int>(out.dtype), to = static_cast<int>(sum_type);
  const ReduceRunFn add = runs.reduce[static_cast<int>(ReduceOp::kSum)][to];
  for (int64_t i = 0; i < n; ++i) {
    const int64_t id = IdAt(ids, i);
    if (!InTable(c, id, i, rows.global)) return;
    const int64_t row = id - rows.start;
    if (id == padding || row < 0 || row >= rows.local) continue;
    const char* x = static_cast<const char*>(dy.data) + i * d * SizeOf(dy.dtype);
    if (narrow) {
      runs.copy[from][to](wide, 1, x, 1, d);
      x = wide;
    }
    add(sums + row * d * sum_size, 1, x, 1, d);
  }
  if (narrow) runs.copy[to][from](out.data, 1, sums, 1, total);
}

}  // namespace

void RegisterEmbeddingKernels(AddKernelFn add) {
  add("embedding", EmbeddingKernel, kAllDTypes, KernelLayout::kContiguous);
  add("embedding_backward", EmbeddingBackwardKernel, kFloatDTypes, KernelLayout::kContiguous);
}

}  // namespace dtensor
