// Indexing by numbers, slices, an ellipsis and new dims.
#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "dtensor/ops/ops.h"
#include "dtensor/ops/rules.h"

namespace dtensor {

DTensor index(const DTensor& x, absl::Span<const Index> at) {
  using Kind = Index::Kind;
  RequireDefined("index", {{"x", x}});
  const auto count = [at](Kind kind) {
    return std::count_if(at.begin(), at.end(), [kind](const Index& i) { return i.kind() == kind; });
  };
  const int64_t named = count(Kind::kNumber) + count(Kind::kSlice);
  if (named > x.ndim() || count(Kind::kEllipsis) > 1) {
    ThrowInvalid("index",
                 named > x.ndim() ? absl::StrCat(named, " indices for ", x.ndim(), " dims")
                                  : std::string("more than one ellipsis"),
                 {{"x", x}});
  }
  DTensor y = x;
  int64_t dim = 0;  // of y, that the next index is for
  for (const Index& i : at) {
    switch (i.kind()) {
      case Kind::kNumber:
        y = select(y, dim, i.number());
        break;
      case Kind::kSlice:
        // As PyTorch, a view also where all is taken.
        y = slice(y, dim++, i.slice().start.value_or(0),
                  i.slice().end.value_or(std::numeric_limits<int64_t>::max()), i.slice().step);
        break;
      case Kind::kEllipsis:
        dim += x.ndim() - named;
        break;
      case Kind::kNewDim:
        y = unsqueeze(y, dim++);
        break;
    }
  }
  return y.impl() == x.impl() ? view(x, x.shape()) : y;  // a tensor of its own, as any index gives
}

DTensor DTensor::operator[](const Index& at) const { return index(*this, {at}); }
DTensor DTensor::operator[](std::initializer_list<Index> at) const { return index(*this, at); }

}  // namespace dtensor
