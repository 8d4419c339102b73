#include "dtensor/ops/index/found.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "dtensor/errors.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

int64_t Product(IntSpan sizes) {
  int64_t n = 1;
  for (const int64_t s : sizes) n *= s;
  return n;
}

// Row-major places of what is not 0.
std::vector<int64_t> PlacesIn(const DTensor& local) {
  const DTensor truth = local.dtype() == DType::kBool ? local : ne(local, 0);
  std::vector<int64_t> places;
  const std::vector<int64_t> all = truth.ToVector<int64_t>();
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i] != 0) places.push_back(static_cast<int64_t>(i));
  }
  return places;
}

}  // namespace

Found::Found(const DTensor& x, int mesh_dim, int dim)
    : mask_(x.spec_ref()), move_{mesh_dim, 0, {}, {}}, local_(x.local().shape()), cut_(dim) {
  const NoGrad no_grad;
  const std::vector<int64_t> places = PlacesIn(OnSelf(x.local()));
  places_ = FromVector(places, {static_cast<int64_t>(places.size())}, Here());
  RankContext& context = RankContext::Current();
  Dims coordinate;
  x.mesh().Coordinate(context.rank(), &coordinate);
  first_ = BlocksOf(x, dim, mesh_dim)[coordinate[mesh_dim]][0].begin;
  // How many there are per index of the dims before the cut one: in the list ranks take turns
  // there.
  const int64_t leading = Product(IntSpan(local_.data(), dim));
  const int64_t below = Product(local_) / std::max<int64_t>(leading, 1);
  std::vector<int64_t> mine(leading, 0);
  for (const int64_t p : places) ++mine[p / below];
  std::string bytes(mine.size() * sizeof(int64_t), 0);
  if (!mine.empty()) std::memcpy(bytes.data(), mine.data(), bytes.size());
  const int dims[] = {mesh_dim};
  const absl::StatusOr<std::vector<std::string>> all =
      context.Exchange(x.mesh(), dims, "nonzero", std::move(bytes));
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
  for (int64_t r = 0; r < ranks; ++r) {
    const Interval block = ShardInterval(count_, 1, ranks, r);
    move_.want.push_back({{block.start, block.start, block.end}});
  }
}

std::optional<Found> Found::In(const DTensor& x) {
  if (x.mesh().is_self() || x.spec().has_partial()) return {};
  if (!x.has_values() || RankContext::Current().rehearses()) return {};
  int cuts = 0;
  for (const Placement& p : x.placements()) cuts += p.cuts() ? 1 : 0;
  for (int d = 0; cuts == 1 && d < x.ndim(); ++d) {
    const int m = OnlyCut(x, d);
    if (m < 0) continue;
    const int64_t numbers = Product(IntSpan(x.shape().data(), d)) * x.mesh().size(m);
    if (numbers * static_cast<int64_t>(sizeof(int64_t)) > x.numel()) return {};
    return Found(x, m, d);
  }
  return {};
}

DTensor Found::Indices() const {
  const std::vector<int64_t> places = places_.ToVector<int64_t>();
  const int64_t n = static_cast<int64_t>(places.size()), ndim = mask_->ndim();
  std::vector<int64_t> indices(n * ndim);
  for (int64_t i = 0; i < n; ++i) {
    int64_t rest = places[i];
    for (int64_t d = ndim; d-- > 0;) {
      indices[i * ndim + d] = rest % local_[d] + (d == cut_ ? first_ : 0);
      rest /= local_[d];
    }
  }
  return FromVector(indices, {n, ndim}, Here());
}

TensorOptions Found::Here() const {
  return {.dtype = DType::kI64, .mesh = DeviceMesh::Self(mask_->mesh().device())};
}

Placements Found::ListPlacements() const {
  Placements placements(mask_->mesh().ndim());
  placements[move_.mesh_dim] = Shard(0);
  return placements;
}

DTensor Found::Spread(const Tensor& rows) const {
  Shape shape = rows.shape();
  shape[0] = count_;
  const SpecRef spec = ValueOrThrow(
      RankContext::Current().specs().Intern(mask_->mesh(), ListPlacements(), shape, rows.dtype()));
  return OfParts(*spec, [&] {
    const Tensor mine =
        ValueOrThrow(Tensor::Empty(spec->local_shape(), rows.dtype(), rows.device()));
    MoveRows(move_, spec->mesh(), rows, mine);
    return mine;
  });
}

}  // namespace dtensor
