// pixel_shuffle and pixel_unshuffle: channels to space and back, as views.
#include "absl/strings/str_cat.h"
#include "dtensor/ops/ops.h"
#include "dtensor/ops/rules.h"

namespace dtensor {
namespace {

// Dims as [..., a, b] with what comes before.
DimList WithLeading(const DTensor& x, std::initializer_list<int64_t> last) {
  DimList shape(x.shape().begin(), x.shape().end() - 3);
  shape.insert(shape.end(), last);
  return shape;
}

// The last six or five dims in this order, those before as they are.
DTensor PermuteLast(const DTensor& x, std::initializer_list<int64_t> order) {
  const int64_t leading = x.ndim() - static_cast<int64_t>(order.size());
  DimList dims;
  for (int64_t d = 0; d < leading; ++d) dims.push_back(d);
  for (const int64_t d : order) dims.push_back(leading + d);
  return permute(x, dims);
}

void CheckShuffle(absl::string_view op, const DTensor& x, int64_t factor) {
  if (x.ndim() < 3) {
    ThrowInvalid(op, absl::StrCat("needs [..., c, h, w], got ", ToString(x.shape())));
  }
  if (factor < 1 || factor > 1 << 15) {
    ThrowInvalid(op, absl::StrCat("the factor must be at least 1, is ", factor));
  }
}

}  // namespace

DTensor pixel_shuffle(const DTensor& x, int64_t r) {
  return AsOp("pixel_shuffle", {{"x", x}}, [&] {
    CheckShuffle("pixel_shuffle", x, r);
    const int64_t c = x.size(-3), h = x.size(-2), w = x.size(-1);
    if (c % (r * r) != 0) {
      ThrowInvalid("pixel_shuffle",
                   absl::StrCat("the ", c, " channels must be a multiple of ", r * r));
    }
    const DTensor apart = reshape(x, WithLeading(x, {c / (r * r), r, r, h, w}));
    return reshape(PermuteLast(apart, {0, 3, 1, 4, 2}),
                   WithLeading(x, {c / (r * r), h * r, w * r}));
  });
}

DTensor pixel_unshuffle(const DTensor& x, int64_t r) {
  return AsOp("pixel_unshuffle", {{"x", x}}, [&] {
    CheckShuffle("pixel_unshuffle", x, r);
    const int64_t c = x.size(-3), h = x.size(-2), w = x.size(-1);
    if (h % r != 0 || w % r != 0) {
      ThrowInvalid("pixel_unshuffle",
                   absl::StrCat("height ", h, " and width ", w, " must be multiples of ", r));
    }
    const DTensor apart = reshape(x, WithLeading(x, {c, h / r, r, w / r, r}));
    return reshape(PermuteLast(apart, {0, 2, 4, 1, 3}), WithLeading(x, {c * r * r, h / r, w / r}));
  });
}

}  // namespace dtensor
