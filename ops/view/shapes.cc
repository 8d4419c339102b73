// Views and copies that are made of other views.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "dtensor/ops/ops.h"
#include "dtensor/ops/rules.h"

namespace dtensor {

DTensor t(const DTensor& x) {
  return AsOp("t", {{"x", x}}, [&] {
    if (x.ndim() > 2) ThrowInvalid("t", "needs at most two dims");
    return transpose(x, 0, x.ndim() - 1);
  });
}

DTensor T(const DTensor& x) {
  return AsOp("T", {{"x", x}}, [&] {
    DimList dims;
    for (int d = x.ndim(); d-- > 0;) dims.push_back(d);
    return permute(x, dims);
  });
}

DTensor mT(const DTensor& x) {
  return AsOp("mT", {{"x", x}}, [&] {
    if (x.ndim() < 2) ThrowInvalid("mT", "needs two dims or more");
    return transpose(x, -2, -1);
  });
}

DTensor swapaxes(const DTensor& x, int64_t a, int64_t b) { return transpose(x, a, b); }

DTensor movedim(const DTensor& x, DimList source, DimList destination) {
  return AsOp("movedim", {{"x", x}}, [&] {
    if (source.size() != destination.size()) {
      ThrowInvalid("movedim", absl::StrCat("source ", ToString(source), " and destination ",
                                           ToString(destination), " must name equally many dims"));
    }
    if (x.ndim() == 0) return permute(x, {});
    DimList order(x.ndim(), -1);
    std::vector<bool> moved(x.ndim(), false);
    for (size_t i = 0; i < source.size(); ++i) {
      const int from = CheckedDim("movedim", source[i], x.ndim());
      const int to = CheckedDim("movedim", destination[i], x.ndim());
      if (moved[from] || order[to] >= 0) ThrowInvalid("movedim", "a dim is named twice");
      moved[from] = true;
      order[to] = from;
    }
    int next = 0;  // of the dims that are not named, which keep their order
    for (int64_t& dim : order) {
      if (dim >= 0) continue;
      while (moved[next]) ++next;
      dim = next++;
    }
    return permute(x, order);
  });
}

DTensor broadcast_to(const DTensor& x, IntSpan shape) {
  return AsOp("broadcast_to", {{"x", x}}, [&] { return expand(x, shape); });
}
DTensor expand_as(const DTensor& x, const DTensor& other) {
  return AsOp("expand_as", {{"x", x}, {"other", other}}, [&] { return expand(x, other.shape()); });
}
DTensor view_as(const DTensor& x, const DTensor& other) {
  return AsOp("view_as", {{"x", x}, {"other", other}}, [&] { return view(x, other.shape()); });
}
DTensor reshape_as(const DTensor& x, const DTensor& other) {
  return AsOp("reshape_as", {{"x", x}, {"other", other}},
              [&] { return reshape(x, other.shape()); });
}
DTensor ravel(const DTensor& x) { return flatten(x); }

DTensor narrow(const DTensor& x, int64_t dim, int64_t start, int64_t length) {
  return AsOp("narrow", {{"x", x}}, [&] {
    if (x.ndim() == 0) ThrowInvalid("narrow", "x has no dims");
    const int64_t size = x.size(CheckedDim("narrow", dim, x.ndim()));
    const bool from_end = start < 0 && start >= -size;
    const int64_t first = from_end ? start + size : start;
    if (first < 0 || first > size || length < 0 || length > size - first) {
      ThrowInvalid("narrow", absl::StrCat(length, " elements from ", start, " on are not in dim ",
                                          dim, " of x ", ToString(x.shape())));
    }
    return slice(x, dim, first, first + length);
  });
}

DTensor narrow(const DTensor& x, int64_t dim, const DTensor& start, int64_t length) {
  return AsOp("narrow", {{"x", x}, {"start", start}}, [&] {
    if (start.numel() != 1 || IsFloating(start.dtype())) {
      ThrowInvalid("narrow", "start must be a number or an integer tensor of one element");
    }
    return narrow(x, dim, start.ToVector<int64_t>()[0], length);
  });
}

namespace {

DTensor AtLeast(const char* op, const DTensor& x, int ndim) {
  return AsOp(op, {{"x", x}}, [&] {
    DTensor y = Unchanged(op, x);
    // A row becomes [1, n], then [1, n, 1].
    if (y.ndim() < 1 && ndim > 0) y = unsqueeze(y, 0);
    if (y.ndim() < 2 && ndim > 1) y = unsqueeze(y, 0);
    if (y.ndim() < 3 && ndim > 2) y = unsqueeze(y, -1);
    return y;
  });
}

// The shape that all of xs broadcast to.
Shape CommonShape(const char* op, absl::Span<const DTensor> xs) {
  Shape shape;
  for (size_t i = 0; i < xs.size(); ++i) {
    RequireDefined(op, {{absl::StrCat("xs", i), xs[i]}});
    absl::StatusOr<Shape> next = BroadcastShapes(shape, xs[i].shape());
    if (!next.ok()) ThrowInvalid(op, next.status().message());
    shape = *std::move(next);
  }
  return shape;
}

}  // namespace

DTensor atleast_1d(const DTensor& x) { return AtLeast("atleast_1d", x, 1); }
DTensor atleast_2d(const DTensor& x) { return AtLeast("atleast_2d", x, 2); }
DTensor atleast_3d(const DTensor& x) { return AtLeast("atleast_3d", x, 3); }

Values broadcast_tensors(absl::Span<const DTensor> xs) {
  const Shape shape = CommonShape("broadcast_tensors", xs);
  Values all;
  for (const DTensor& x : xs) all.push_back(expand(x, shape));
  return all;
}

Values meshgrid(absl::Span<const DTensor> xs, const std::string& indexing) {
  if (xs.empty()) ThrowInvalid("meshgrid", "needs at least one tensor");
  const bool changed = indexing == "xy" && xs.size() > 1;
  if (indexing != "ij" && indexing != "xy") {
    ThrowInvalid("meshgrid", absl::StrCat("indexing must be ij or xy, is \"", indexing, "\""));
  }
  Values grown;
  for (size_t i = 0; i < xs.size(); ++i) {
    RequireDefined("meshgrid", {{absl::StrCat("xs", i), xs[i]}});
    if (xs[i].ndim() > 1) {
      ThrowInvalid("meshgrid", absl::StrCat("tensor ", i, " is ", ToString(xs[i].shape()),
                                            ": each must have one dim or none"));
    }
    Shape shape(xs.size(), 1);
    shape[changed && i < 2 ? 1 - i : i] = xs[i].numel();
    grown.push_back(reshape(xs[i], shape));
  }
  return broadcast_tensors(grown);
}

Values chunk(const DTensor& x, int64_t chunks, int64_t dim) {
  return AsOp("chunk", {{"x", x}}, [&] {
    if (x.ndim() == 0) ThrowInvalid("chunk", "x has no dims");
    if (chunks < 1) ThrowInvalid("chunk", absl::StrCat("needs 1 piece or more, not ", chunks));
    const int64_t size = x.size(CheckedDim("chunk", dim, x.ndim()));
    // Of nothing there are as many empty pieces as are asked for.
    if (size == 0) return split(x, DimList(std::min<int64_t>(chunks, 1 << 16), 0), dim);
    return split(x, (size - 1) / chunks + 1, dim);
  });
}

Values tensor_split(const DTensor& x, int64_t sections, int64_t dim) {
  return AsOp("tensor_split", {{"x", x}}, [&] {
    if (x.ndim() == 0) ThrowInvalid("tensor_split", "x has no dims");
    if (sections < 1 || sections > 1 << 20) {
      ThrowInvalid("tensor_split", absl::StrCat("cannot make ", sections, " pieces"));
    }
    const int64_t size = x.size(CheckedDim("tensor_split", dim, x.ndim()));
    DimList sizes(sections, size / sections);
    for (int64_t i = 0; i < size % sections; ++i) ++sizes[i];
    return split(x, std::move(sizes), dim);
  });
}

Values tensor_split(const DTensor& x, DimList indices, int64_t dim) {
  return AsOp("tensor_split", {{"x", x}}, [&] {
    if (x.ndim() == 0) ThrowInvalid("tensor_split", "x has no dims");
    const int64_t size = x.size(CheckedDim("tensor_split", dim, x.ndim()));
    Values pieces;
    int64_t start = 0;
    for (const int64_t end : indices) {
      pieces.push_back(slice(x, dim, start, end));
      start = end;
    }
    pieces.push_back(slice(x, dim, start, size));
    return pieces;
  });
}

Values unbind(const DTensor& x, int64_t dim) {
  return AsOp("unbind", {{"x", x}}, [&] {
    if (x.ndim() == 0) ThrowInvalid("unbind", "x has no dims");
    const int d = CheckedDim("unbind", dim, x.ndim());
    Values all;
    for (int64_t i = 0; i < x.size(d); ++i) all.push_back(select(x, d, i));
    return all;
  });
}

DTensor repeat(const DTensor& x, DimList repeats) {
  return AsOp("repeat", {{"x", x}}, [&] {
    const int extra = static_cast<int>(repeats.size()) - x.ndim();
    const auto negative = [](int64_t n) { return n < 0; };
    if (extra < 0 || std::any_of(repeats.begin(), repeats.end(), negative)) {
      ThrowInvalid("repeat", absl::StrCat("repeats ", ToString(repeats), " must name ", x.ndim(),
                                          " dims or more, 0 times or more"));
    }
    // [a, b] -> [1, a, 1, b] -> [r, a, s, b] -> [r * a, s * b]
    Shape apart, grown, joined;
    for (int d = 0; d < static_cast<int>(repeats.size()); ++d) {
      const int64_t size = d < extra ? 1 : x.size(d - extra);
      apart.insert(apart.end(), {1, size});
      grown.insert(grown.end(), {repeats[d], size});
    }
    ThrowIfError(CheckedNumel(grown).status());
    for (size_t d = 0; d < grown.size(); d += 2) joined.push_back(grown[d] * grown[d + 1]);
    return reshape(clone(expand(reshape(x, apart), grown)), joined);
  });
}

DTensor tile(const DTensor& x, DimList repeats) {
  return AsOp("tile", {{"x", x}}, [&] {
    while (static_cast<int>(repeats.size()) < x.ndim()) repeats.insert(repeats.begin(), 1);
    return repeat(x, std::move(repeats));
  });
}

}  // namespace dtensor
