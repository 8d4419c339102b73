// Reading and writing along a sharded dim by asking the ranks that have the rows. Inside of ops/.
//
// Where the index is cut as dim of x is, each rank has some of the picks (elements; or slices of
// dim, where the index has one dim) and some of the rows. The picks go to the owners of their rows,
// and the rows, or what is written there, from one to the other. Owners see the picks of a row in
// the order of the whole index: what they add up and write has the bits of one rank.
#pragma once

#include <memory>

#include "dtensor/ops/ops.h"

namespace dtensor {

class Requests;
using RequestsPtr = std::shared_ptr<const Requests>;

// To read x, or to write `src` there. Null where they lie otherwise (a replicated src follows the
// index), and where asking brings more bytes than gathering the picks, or for reading the rows.
//   Comm:   4 bytes for each pick from its rank to the row's owner, and a number for each pair of
//           ranks. Waits. In a rehearsal, which has no indices, all ranks are asked for as much.
//   Errors: InvalidArgument, on the ranks that have them, for indices that are out of range.
RequestsPtr RequestsFor(const Spec& x, int64_t dim, const DTensor& index, const DTensor& src = {});

// Pick, AddUp, Write and Add (pick.h) by requests for their x; the results lie as the index does,
// or as x does. Gradients go the same way back and ask no more.
//   Comm:   one exchange: of every pick what is read or written.
DTensor PickBy(const RequestsPtr& requests, const DTensor& x);
DTensor AddUpBy(const RequestsPtr& requests, const DTensor& dy);
DTensor WriteBy(const RequestsPtr& requests, const DTensor& x, const DTensor& src);
DTensor AddBy(const RequestsPtr& requests, const DTensor& x, const DTensor& src);

}  // namespace dtensor
