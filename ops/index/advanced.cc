// x[tensors]: the indexed dims are made one, and that is gathered from or scattered to.
#include "dtensor/ops/index/advanced.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "dtensor/ops/index/pick.h"
#include "dtensor/ops/rules.h"

namespace dtensor {
namespace {

// A tensor or null (all of the dim) per dim of x, from the first on.
using IndexPerDim = std::vector<DTensor>;

// Appends what `index` means for the dims of x from `dim` on.
void Append(const char* op, const DTensor& x, const DTensor& index, IndexPerDim* dims) {
  if (index.dtype() != DType::kBool) {
    if (IsFloating(index.dtype()) || index.dtype() == DType::kU8) {
      ThrowInvalid(
          op, absl::StrCat("indices must be int64, int32 or bool, are ", TypeName(index.dtype())));
    }
    dims->push_back(index);
    return;
  }
  const size_t dim = dims->size();
  const IntSpan rest = IntSpan(x.shape()).subspan(std::min<size_t>(dim, x.ndim()));
  if (rest.first(std::min<size_t>(index.ndim(), rest.size())) != IntSpan(index.shape())) {
    ThrowInvalid(
        op, absl::StrCat("a bool index ", ToString(index.shape()), " does not have the dims of x ",
                         ToString(x.shape()), " from ", dim, " on"));
  }
  const DTensor found = nonzero(index);
  for (int d = 0; d < index.ndim(); ++d) dims->push_back(select(found, 1, d));
}

// Where tensors index x, brought into one dim.
class Indexed {
 public:
  Indexed(const char* op, const DTensor& x, IndexPerDim dims) : shape_(x.shape()) {
    if (static_cast<int>(dims.size()) > x.ndim()) {
      ThrowInvalid(op, absl::StrCat(dims.size(), " indices for ", x.ndim(), " dims"));
    }
    // A tensor without dims is a number, as in PyTorch: its dim is taken first, as select does, and
    // is no neighbour that the others may lack.
    DimList taken, lists;
    for (int d = 0; d < static_cast<int>(dims.size()); ++d) {
      if (!dims[d].defined()) continue;
      taken.push_back(d);
      if (dims[d].ndim() > 0) lists.push_back(d);
    }
    if (taken.empty()) ThrowInvalid(op, "needs at least one tensor of indices");
    if (lists.empty()) lists = taken;
    const auto is_kept = [&](int64_t d) { return !Contains(taken, d); };
    int64_t kept_between = 0;
    for (int64_t d = lists.front(); d < lists.back(); ++d) kept_between += is_kept(d) ? 1 : 0;
    const int64_t where = kept_between > 0 ? 0 : lists.front();  // no neighbours: to the front
    for (int64_t d = 0; d < where; ++d) {
      if (is_kept(d)) order_.push_back(d);
    }
    first_ = static_cast<int>(order_.size());
    count_ = static_cast<int>(taken.size());
    order_.insert(order_.end(), taken.begin(), taken.end());
    for (int64_t d = where; d < x.ndim(); ++d) {
      if (is_kept(d)) order_.push_back(d);
    }
    moves_ = !std::is_sorted(order_.begin(), order_.end());
    for (const int64_t d : taken) AddDim(op, dims[d], shape_[d]);
  }

  // x with the indexed dims as one, and the indices of that, in one dim.
  DTensor Joined(const DTensor& x) const {
    const DTensor y = moves_ ? permute(x, order_) : x;
    return count_ > 1 ? flatten(y, first_, first_ + count_ - 1) : y;
  }
  DTensor Back(const DTensor& joined) const {
    if (count_ == 1 && !moves_) return joined;
    Shape shape;
    DimList inverse(shape_.size());
    for (size_t d = 0; d < shape_.size(); ++d) {
      shape.push_back(shape_[order_[d]]);
      inverse[order_[d]] = static_cast<int64_t>(d);
    }
    const DTensor y = reshape(joined, shape);
    return moves_ ? permute(y, inverse) : y;
  }
  bool is_one_dim() const { return count_ == 1; }
  int dim() const { return first_; }
  DTensor index() const { return flatten(index_); }

  // Shapes of what is picked: as a program sees it, and with the picks in one dim.
  Shape Picked(bool joined) const {
    Shape shape;
    for (int d = 0; d < first_; ++d) shape.push_back(shape_[order_[d]]);
    if (joined) {
      shape.push_back(index_.numel());
    } else {
      shape.insert(shape.end(), index_.shape().begin(), index_.shape().end());
    }
    for (int d = first_ + count_; d < static_cast<int>(shape_.size()); ++d) {
      shape.push_back(shape_[order_[d]]);
    }
    return shape;
  }

 private:
  // index_ = index_ * size + index; broadcast.
  void AddDim(const char* op, const DTensor& index, int64_t size) {
    const DTensor next = CheckedIndex(index, size, /*wraps=*/true);
    if (!index_.defined()) {
      index_ = next;
      return;
    }
    const absl::StatusOr<Shape> shape = BroadcastShapes(index_.shape(), next.shape());
    if (!shape.ok()) {
      ThrowInvalid(op, absl::StrCat("indices do not broadcast: ", shape.status().message()));
    }
    index_ = add(mul(index_, size), next);
  }

  const Shape shape_;
  DimList order_;  // of the dims, the indexed ones together
  bool moves_;     // which is another one than they have
  int first_, count_;
  DTensor index_;
};

DTensor PutJoined(const Indexed& at, const DTensor& x, const DTensor& values, bool accumulate) {
  const DTensor from = reshape(expand(values, at.Picked(false)), at.Picked(true));
  const DTensor base = at.Joined(x);
  return at.Back((accumulate ? Add : Write)(base, at.dim(), at.index(), from));
}

// Runs run(where) for the indices of an index_put, which must fit.
template <class Run>
DTensor Put(const char* op, const DTensor& x, absl::Span<const DTensor> indices,
            const DTensor& values, const Run& run) {
  return AsOp(op, {{"x", x}, {"values", values}}, [&] {
    if (x.dtype() != values.dtype()) {
      ThrowInvalid(op, absl::StrCat("x is ", TypeName(x.dtype()), " and values ",
                                    TypeName(values.dtype()), ": they must have one dtype"));
    }
    IndexPerDim dims;
    for (const DTensor& index : indices) {
      if (index.defined()) {
        Append(op, x, index, &dims);
      } else {
        dims.emplace_back();
      }
    }
    return run(Indexed(op, x, std::move(dims)));
  });
}

// Whether `index` is a bool tensor without dims. It takes none of x's: it makes one of size 1,
// whose index 0 it names if it is true, and none if it is false.
bool IsTruth(const DTensor& index) {
  return index.defined() && index.dtype() == DType::kBool && index.ndim() == 0;
}

}  // namespace

DTensor getitem(const DTensor& x, absl::Span<const TensorIndex> at) {
  return AsOp("getitem", {{"x", x}}, [&] {
    int64_t named = 0;  // dims that indices are for
    int tensors = 0;
    std::vector<Index> plain;
    for (const TensorIndex& i : at) {
      const Index::Kind kind = i.index.kind();
      const bool one = kind == Index::Kind::kNumber || kind == Index::Kind::kSlice;
      tensors += i.tensor.defined() ? 1 : 0;
      plain.push_back(i.index);
      named += !i.tensor.defined() ? one : i.tensor.dtype() == DType::kBool ? i.tensor.ndim() : 1;
    }
    if (tensors == 0) return index(x, plain);
    if (named > x.ndim()) {
      ThrowInvalid("getitem", absl::StrCat(named, " indices for ", x.ndim(), " dims"));
    }
    // What is a view first; tensors take their dims whole until then.
    DTensor y = x;
    IndexPerDim dims;
    for (const TensorIndex& i : at) {
      const auto dim = static_cast<int64_t>(dims.size());
      if (i.tensor.defined()) {
        if (!IsTruth(i.tensor)) {
          Append("getitem", y, i.tensor, &dims);
          continue;
        }
        y = unsqueeze(y, dim);
        const auto named_here = i.tensor.ToVector<int64_t>()[0];
        if (tensors == 1) {  // a view
          y = slice(y, dim, 0, named_here);
          dims.emplace_back();
        } else {
          dims.push_back(zeros({named_here}, {DType::kI64, x.mesh(), {}}));
        }
      } else if (i.index.kind() == Index::Kind::kEllipsis) {
        dims.resize(dim + x.ndim() - named);
      } else if (i.index.kind() == Index::Kind::kNumber) {
        y = select(y, dim, i.index.number());
      } else {
        std::vector<Index> one(dim, Index(Slice()));
        one.push_back(i.index);
        y = index(y, one);
        dims.emplace_back();
      }
    }
    const bool none = std::none_of(dims.begin(), dims.end(), [](auto& d) { return d.defined(); });
    if (none) return y;  // one truth value alone
    const Indexed where("getitem", y, std::move(dims));
    return reshape(Pick(where.Joined(y), where.dim(), where.index()), where.Picked(false));
  });
}

DTensor index_put(const DTensor& x, absl::Span<const DTensor> indices, const DTensor& values,
                  bool accumulate) {
  return Put("index_put", x, indices, values,
             [&](const Indexed& at) { return PutJoined(at, x, values, accumulate); });
}

DTensor index_put_(const DTensor& self, absl::Span<const DTensor> indices, const DTensor& values,
                   bool accumulate) {
  return Put("index_put_", self, indices, values, [&](const Indexed& at) {
    if (!at.is_one_dim()) return copy_(self, PutJoined(at, clone(self), values, accumulate));
    const DTensor from = reshape(expand(values, at.Picked(false)), at.Picked(true));
    return (accumulate ? AddTo : WriteTo)(self, at.dim(), at.index(), from);
  });
}

}  // namespace dtensor
