// Reading and writing at indices. Indices are int64 or int32. Where a function says "from the end
// too", negative ones count from the end; else they are errors.
//
//   Sharding: an index tensor and what goes with it element by element share their dims, which may
//             be sharded. Where the indexed dim is sharded and the index lies alike, what is read
//             or written goes between its rank and the owner of the row, if that moves less than
//             gathering: reads lie as the index does, writes as x. Else reading picks on each rank
//             what it has and gives Partial(sum), and writing writes what is there. In place, and
//             with prod, amax and amin, always so.
//   Comm:     of requests 4 bytes per index and what it names, once; they wait for a number from
//             each rank. Gradients go the same way back and ask no more. Explain, which has no
//             indices, says what they take where all ranks are asked for as much.
//   Errors:   InvalidArgument for shapes that do not fit, dtypes that differ and indices that are
//             out of range (those on the ranks that see them).
#pragma once

#include <string>

#include "dtensor/ops/family.h"

namespace dtensor {

// out[i][j][k] = x[index[i][j][k]][j][k] for dim 0: index has x's number of dims, and is no larger
// than x in the others. The result has index's shape.
DTensor gather(const DTensor& x, int64_t dim, const DTensor& index);
// The same where index may broadcast with x in the other dims; indices from the end too. Without a
// dim, of flattened ones, and not from the end.
DTensor take_along_dim(const DTensor& x, const DTensor& index, std::optional<int64_t> dim = {});
// Slices of a dim: index has one dim, or none for one slice.
DTensor index_select(const DTensor& x, int64_t dim, const DTensor& index);
// Elements of x, flattened; indices from the end too. The result has index's shape.
DTensor take(const DTensor& x, const DTensor& index);

// x with src written where gather would read: index is no larger than src, and than x in the other
// dims. Of equal indices the last one writes; the gradient of src is as if each did.
DTensor scatter(const DTensor& x, int64_t dim, const DTensor& index, const DTensor& src);
DTensor scatter(const DTensor& x, int64_t dim, const DTensor& index, Scalar value);
// reduce: "add" or "multiply".
DTensor scatter(const DTensor& x, int64_t dim, const DTensor& index, const DTensor& src,
                const std::string& reduce);
DTensor scatter(const DTensor& x, int64_t dim, const DTensor& index, Scalar value,
                const std::string& reduce);
// x + src where index says; equal indices add up. Linear in x and src.
DTensor scatter_add(const DTensor& x, int64_t dim, const DTensor& index, const DTensor& src);
// reduce: sum, prod, mean, amax or amin, of what is scattered to one place and (include_self) of
// what x has there. Where nothing is, x stays. Means of integers are rounded down.
DTensor scatter_reduce(const DTensor& x, int64_t dim, const DTensor& index, const DTensor& src,
                       const std::string& reduce, bool include_self = true);

// x with slices of a dim changed, where index_select would read them: source has as many slices as
// index (one dim, or none) has indices.
DTensor index_add(const DTensor& x, int64_t dim, const DTensor& index, const DTensor& source,
                  Scalar alpha = 1);
DTensor index_copy(const DTensor& x, int64_t dim, const DTensor& index, const DTensor& source);
// Indices from the end too. A tensor as value has no dims; its gradient is the sum over what is
// filled, however often index names it.
DTensor index_fill(const DTensor& x, int64_t dim, const DTensor& index, Scalar value);
DTensor index_fill(const DTensor& x, int64_t dim, const DTensor& index, const DTensor& value);
// reduce: prod, mean, amax or amin.
DTensor index_reduce(const DTensor& x, int64_t dim, const DTensor& index, const DTensor& source,
                     const std::string& reduce, bool include_self = true);
// x with source written into (or added to) its elements, flattened; indices from the end too.
DTensor put(const DTensor& x, const DTensor& index, const DTensor& source, bool accumulate = false);

// x with src where slice, select or diagonal would view it.
DTensor slice_scatter(const DTensor& x, const DTensor& src, int64_t dim = 0,
                      std::optional<int64_t> start = {}, std::optional<int64_t> end = {},
                      int64_t step = 1);
DTensor select_scatter(const DTensor& x, const DTensor& src, int64_t dim, int64_t index);
DTensor diagonal_scatter(const DTensor& x, const DTensor& src, int64_t offset = 0, int64_t dim1 = 0,
                         int64_t dim2 = 1);

// --- In place; each returns its first argument, which is never redistributed.
DTensor scatter_(const DTensor& self, int64_t dim, const DTensor& index, const DTensor& src);
DTensor scatter_(const DTensor& self, int64_t dim, const DTensor& index, Scalar value);
DTensor scatter_(const DTensor& self, int64_t dim, const DTensor& index, const DTensor& src,
                 const std::string& reduce);
DTensor scatter_(const DTensor& self, int64_t dim, const DTensor& index, Scalar value,
                 const std::string& reduce);
DTensor scatter_add_(const DTensor& self, int64_t dim, const DTensor& index, const DTensor& src);
DTensor scatter_reduce_(const DTensor& self, int64_t dim, const DTensor& index, const DTensor& src,
                        const std::string& reduce, bool include_self = true);
DTensor index_add_(const DTensor& self, int64_t dim, const DTensor& index, const DTensor& source,
                   Scalar alpha = 1);
DTensor index_copy_(const DTensor& self, int64_t dim, const DTensor& index, const DTensor& source);
DTensor index_fill_(const DTensor& self, int64_t dim, const DTensor& index, Scalar value);
DTensor index_fill_(const DTensor& self, int64_t dim, const DTensor& index, const DTensor& value);
DTensor index_reduce_(const DTensor& self, int64_t dim, const DTensor& index, const DTensor& source,
                      const std::string& reduce, bool include_self = true);
DTensor put_(const DTensor& self, const DTensor& index, const DTensor& source,
             bool accumulate = false);

}  // namespace dtensor
