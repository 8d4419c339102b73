#include "dtensor/ops/index/found.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>
#include <utility>

#include "dtensor/errors.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/ops/long_list.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

int64_t Product(IntSpan sizes) {
  int64_t n = 1;
  for (const int64_t s : sizes) n *= s;
  return n;
}

}  // namespace

Tensor PlacesIn(const DTensor& x) {
  const NoGrad no_grad;
  const DTensor bools = x.dtype() == DType::kBool ? x : ne(x, 0);
  const Tensor mask = ValueOrThrow(internal::FullLocal(bools).ToHost());
  const auto* truth = static_cast<const uint8_t*>(mask.data());
  const int64_t n = mask.numel();
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) count += truth[i] != 0 ? 1 : 0;
  // Every place is written, and kept where something is: no branch that a processor would guess.
  const Tensor places = ValueOrThrow(Tensor::Empty({count + 1}, DType::kI64));
  auto* at = static_cast<int64_t*>(places.data());
  for (int64_t i = 0; i < n; ++i) {
    *at = i;
    at += truth[i] != 0 ? 1 : 0;
  }
  return places.Slice(0, 0, count);
}

Tensor IndicesOf(const Tensor& places, IntSpan shape) {
  const auto ndim = static_cast<int64_t>(shape.size());
  const Tensor indices = ValueOrThrow(Tensor::Empty({places.numel(), ndim}, DType::kI64));
  if (ndim == 0 || places.numel() == 0) return indices;
  const auto* const first = static_cast<const int64_t*>(places.data());
  const int64_t width = shape[ndim - 1];
  auto* at = static_cast<int64_t*>(indices.data());
  int64_t row_end = 0;  // of the last dim, in which places are mostly neighbours
  for (const int64_t place : IntSpan(first, places.numel())) {
    if (place >= row_end) {
      int64_t rest = place / width;
      row_end = (rest + 1) * width;
      for (int64_t d = ndim - 1; d-- > 0;) {
        at[d] = rest % shape[d];
        rest /= shape[d];
      }
    } else {
      for (int64_t d = 0; d < ndim - 1; ++d) at[d] = at[d - ndim];
    }
    at[ndim - 1] = place - (row_end - width);
    at += ndim;
  }
  return indices;
}

Found::Found(const DTensor& x, const MeshDims& mesh_dims, int dim)
    : mask_(x.spec_ref()), move_{mesh_dims, 0, {}, {}}, local_(x.local().shape()), cut_(dim) {
  const Tensor places = PlacesIn(OnSelf(x.local()));
  places_ = DistributeTensor(places, Here().mesh, {});
  RankContext& context = RankContext::Current();
  me_ = ValueOrThrow(context.CommFor(x.mesh(), mesh_dims))->index();
  first_ = BlocksOf(x.spec(), dim, mesh_dims)[me_][0].begin;
  // How many there are per index of the dims before the cut one: in the list ranks take turns
  // there.
  const int64_t leading = Product(IntSpan(local_.data(), dim));
  const int64_t below = Product(local_) / std::max<int64_t>(leading, 1);
  std::vector<int64_t> mine(leading, 0);
  const auto* const at = static_cast<const int64_t*>(places.data());
  for (const int64_t p : IntSpan(at, places.numel())) ++mine[p / below];
  std::string bytes(mine.size() * sizeof(int64_t), 0);
  if (!mine.empty()) std::memcpy(bytes.data(), mine.data(), bytes.size());
  const absl::StatusOr<std::vector<std::string>> all =
      context.Exchange(x.mesh(), mesh_dims, "nonzero", std::move(bytes));
  ThrowIfError(TellPeers(x.mesh(), all.status()));
  std::vector<std::vector<int64_t>> counts;
  for (const std::string& theirs : *all) {
    counts.emplace_back(leading, 0);
    if (!theirs.empty()) std::memcpy(counts.back().data(), theirs.data(), theirs.size());
  }
  Place(counts);
}

void Found::Place(const std::vector<std::vector<int64_t>>& counts) {
  const auto ranks = static_cast<int64_t>(counts.size());
  move_.have.resize(ranks);
  std::vector<int64_t> so_far(ranks, 0);
  for (size_t i = 0; i < counts[0].size(); ++i) {
    for (int64_t r = 0; r < ranks; ++r) {
      const int64_t n = counts[r][i];
      if (n > 0) move_.have[r].push_back({count_ - so_far[r], count_, count_ + n});
      so_far[r] += n;
      count_ += n;
    }
  }
  move_.want = BlocksOf(*ListSpec({count_}, DType::kI64), 0, move_.mesh_dims);
}

std::optional<Found> Found::In(const DTensor& x) {
  if (x.mesh().is_self() || x.spec().has_partial()) return {};
  if (!x.has_values()) return {};
  size_t cuts = 0;
  for (const Placement& p : x.placements()) cuts += p.cuts() ? 1 : 0;
  for (int d = 0; d < x.ndim(); ++d) {
    const MeshDims mesh_dims = CutsOf(x.spec(), d);
    if (mesh_dims.empty() || mesh_dims.size() != cuts) continue;
    int64_t numbers = Product(IntSpan(x.shape().data(), d));
    for (const int m : mesh_dims) numbers *= x.mesh().size(m);
    if (numbers * static_cast<int64_t>(sizeof(int64_t)) > x.numel()) return {};
    return Found(x, mesh_dims, d);
  }
  return {};
}

DTensor Found::Indices() const {
  const Tensor indices = IndicesOf(ValueOrThrow(places_.local().ToHost()), local_);
  auto* at = static_cast<int64_t*>(indices.data());
  for (int64_t i = cut_; i < indices.numel(); i += mask_->ndim()) at[i] += first_;
  return DistributeTensor(indices, Here().mesh, {});
}

TensorOptions Found::Here(DType dtype) const {
  return {.dtype = dtype, .mesh = DeviceMesh::Self(mask_->mesh().device())};
}

Placements Found::ListPlacements() const {
  Placements placements(mask_->mesh().ndim());
  for (const int m : move_.mesh_dims) placements[m] = Shard(0);
  return placements;
}

SpecRef Found::ListSpec(const Shape& shape, DType dtype) const {
  return ValueOrThrow(
      RankContext::Current().specs().Intern(mask_->mesh(), ListPlacements(), shape, dtype));
}

DTensor Found::Spread(const Tensor& rows) const {
  Shape shape = rows.shape();
  shape[0] = count_;
  const SpecRef spec = ListSpec(shape, rows.dtype());
  return OfParts(*spec, [&] {
    const Tensor mine =
        ValueOrThrow(Tensor::Empty(spec->local_shape(), rows.dtype(), rows.device()));
    MoveRows(move_, spec->mesh(), rows, mine);
    return mine;
  });
}

DTensor Found::Select(const DTensor& x) const {
  const NoGrad no_grad;
  return Spread(index_select(flatten(OnSelf(x.local())), 0, places_).local());
}

DTensor Found::RowsOf(const DTensor& list) const {
  if (list.placements()[move_.mesh_dims[0]].is_replicate()) {
    RankList<int64_t> at;
    for (const Rows& r : move_.have[me_]) {
      at.resize(at.size() + r.end - r.begin);
      std::iota(at.end() - (r.end - r.begin), at.end(), r.begin);
    }
    const auto n = static_cast<int64_t>(at.size());
    return index_select(OnSelf(list.local()), 0, FromList(at, {n}, Here().mesh));
  }
  const DTensor rows = zeros({places_.numel()}, Here(list.dtype()));
  AddRowsBack(move_, mask_->mesh(), list.local(), rows.local());
  return rows;
}

DTensor Found::Put(const DTensor& list) const {
  const NoGrad no_grad;
  const SpecRef spec = ValueOrThrow(RankContext::Current().specs().Intern(
      mask_->mesh(), mask_->placements(), mask_->shape(), list.dtype()));
  return OfParts(*spec, [&] {
    const DTensor line = zeros({Product(local_)}, Here(list.dtype()));
    return reshape(index_copy(line, 0, places_, RowsOf(list)), local_).local();
  });
}

}  // namespace dtensor
