// Calls of the gather and scatter ops for operands that are checked already; shared by the files
// of this folder.
//
// `index` has x's number of dims and picks an element each, or one dim and picks slices of `dim`.
#pragma once

#include "dtensor/ops/long_list.h"
#include "dtensor/ops/ops.h"

namespace dtensor {

DTensor Pick(const DTensor& x, int64_t dim, const DTensor& index);
// Its gradient: a tensor of zeros with `size` indices in dim, to which dy is added where index
// says.
DTensor AddUp(const DTensor& dy, int64_t dim, const DTensor& index, int64_t size,
              const Spec* like = nullptr);
// x with src written, added or combined where index says; equal to x in all dims but `dim`.
DTensor Write(const DTensor& x, int64_t dim, const DTensor& index, const DTensor& src);
DTensor Add(const DTensor& x, int64_t dim, const DTensor& index, const DTensor& src);
enum class ScatterKind { kProd, kAmax, kAmin };
DTensor Combine(const DTensor& x, int64_t dim, const DTensor& index, const DTensor& src,
                ScatterKind kind);
// In place.
DTensor WriteTo(const DTensor& self, int64_t dim, const DTensor& index, const DTensor& src);
DTensor AddTo(const DTensor& self, int64_t dim, const DTensor& index, const DTensor& src);

// The reductions of scatter_reduce and index_reduce, by name; `op` is whose error it would be.
DTensor ReduceInto(const char* op, const DTensor& x, int64_t dim, const DTensor& index,
                   const DTensor& src, const std::string& reduce, bool include_self);

// index as int64 in [0, size); with `wraps` negative ones count from the end. What is not in range
// is an error of the call.
DTensor CheckedIndex(const DTensor& index, int64_t size, bool wraps);

// start, start + step, ..., `count` of them, as indices where x is.
DTensor IndexRange(const DTensor& x, int64_t start, int64_t count, int64_t step);
// Given indices there.
DTensor IndexList(const DTensor& x, const RankList<int64_t>& indices);

// A tensor of at least one dim.
inline DTensor WithDims(const DTensor& x) { return x.ndim() == 0 ? reshape(x, {1}) : x; }

}  // namespace dtensor
