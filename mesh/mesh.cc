#include "dtensor/mesh/mesh.h"

#include <algorithm>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "dtensor/mesh/hash.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/tensor/device.h"
#include "dtensor/tensor/status.h"
#include "dtensor/tensor/tensor.h"

namespace dtensor {

// Either strided (rank = offset + sum coordinate * stride; strides of size-1 dims are 0) or, where
// the ranks follow no such pattern, a row-major list of them with its inverse. The form is decided
// by the ranks alone, so that equality and hash need not look at how a mesh was made.
struct DeviceMesh::Rep {
  Dims shape;
  std::vector<std::string> names;
  DeviceType device = DeviceType{};
  int64_t size = 1;
  int64_t offset = 0;
  int64_t min_rank = 0, max_rank = 0;
  Dims strides;
  std::vector<int64_t> list;
  absl::flat_hash_map<int64_t, int64_t> position;  // rank -> index in `list`
  uint64_t hash = 0;
};

namespace {

absl::StatusOr<int64_t> CheckShape(IntSpan shape) {
  for (size_t i = 0; i < shape.size(); ++i) {
    if (shape[i] < 1) {
      return absl::InvalidArgumentError(absl::StrCat("mesh shape ", ToString(shape), ": size ",
                                                     shape[i], " of dim ", i, " is less than 1"));
    }
  }
  auto size = CheckedNumel(shape);
  if (!size.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("mesh shape ", ToString(shape), ": the number of ranks overflows"));
  }
  return size;
}

absl::Status CheckNames(IntSpan shape, const std::vector<std::string>& names) {
  if (names.empty()) return absl::OkStatus();
  if (names.size() != shape.size()) {
    return absl::InvalidArgumentError(absl::StrCat("mesh of ", shape.size(), " dims got ",
                                                   names.size(),
                                                   " names: ", absl::StrJoin(names, ", ")));
  }
  absl::flat_hash_set<absl::string_view> seen;
  for (size_t i = 0; i < names.size(); ++i) {
    if (names[i].empty()) {
      return absl::InvalidArgumentError(absl::StrCat("the name of mesh dim ", i, " is empty"));
    }
    if (!seen.insert(names[i]).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("mesh dim name \"", names[i], "\" is used twice"));
    }
  }
  return absl::OkStatus();
}

std::vector<std::string> NamesOrBlank(std::vector<std::string> names, size_t ndim) {
  names.resize(ndim);
  return names;
}

// Row-major strides times `unit`, 0 where the size is 1.
Dims MeshStrides(IntSpan shape, int64_t unit) {
  Dims strides(shape.size(), 0);
  for (size_t i = shape.size(); i-- > 0;) {
    strides[i] = shape[i] == 1 ? 0 : unit;
    unit *= shape[i];
  }
  return strides;
}

// Dims of size > 1, largest stride first.
Dims Order(IntSpan shape, IntSpan strides) {
  Dims order;
  for (size_t i = 0; i < shape.size(); ++i) {
    if (shape[i] > 1) order.push_back(static_cast<int64_t>(i));
  }
  std::sort(order.begin(), order.end(),
            [&](int64_t a, int64_t b) { return strides[a] > strides[b]; });
  return order;
}

// The stride that steps through all ranks in row-major order, or 0 if there is none.
int64_t MergedStride(IntSpan shape, IntSpan strides) {
  int64_t unit = 0, next = 0;
  for (size_t i = shape.size(); i-- > 0;) {
    if (shape[i] == 1) continue;
    if (unit == 0) {
      unit = strides[i];
    } else if (strides[i] != next) {
      return 0;
    }
    next = strides[i] * shape[i];
  }
  return unit == 0 ? 1 : unit;
}

// The set of ranks as nested arithmetic progressions (stride, length), largest stride first and as
// few as possible: the same for all strided meshes of these ranks.
std::vector<std::pair<int64_t, int64_t>> Progressions(IntSpan shape, IntSpan strides) {
  std::vector<std::pair<int64_t, int64_t>> runs;
  for (const int64_t i : Order(shape, strides)) {
    if (!runs.empty() && runs.back().first == strides[i] * shape[i]) {
      runs.back() = {strides[i], runs.back().second * shape[i]};
    } else {
      runs.push_back({strides[i], shape[i]});
    }
  }
  return runs;
}

// Coordinate whose row-major index is `index`.
void Unravel(IntSpan shape, int64_t index, Dims* coordinate) {
  coordinate->assign(shape.size(), 0);
  for (size_t i = shape.size(); i-- > 0;) {
    (*coordinate)[i] = index % shape[i];
    index /= shape[i];
  }
}

// Finds strides that reproduce `list`, nested so that division recovers the coordinate.
bool FindLayout(IntSpan shape, const std::vector<int64_t>& list, Dims* strides) {
  strides->assign(shape.size(), 0);
  int64_t step = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    if (shape[i] > 1) (*strides)[i] = list[step] - list[0];
    step *= shape[i];
  }
  int64_t span = 0;  // largest distance that the dims of smaller stride can reach
  Dims order = Order(shape, *strides);
  for (size_t k = order.size(); k-- > 0;) {
    int64_t i = order[k];
    if ((*strides)[i] <= span) return false;
    span += (*strides)[i] * (shape[i] - 1);
  }
  Dims coordinate;
  for (size_t at = 0; at < list.size(); ++at) {
    Unravel(shape, static_cast<int64_t>(at), &coordinate);
    int64_t rank = list[0];
    for (size_t i = 0; i < shape.size(); ++i) rank += coordinate[i] * (*strides)[i];
    if (rank != list[at]) return false;
  }
  return true;
}

}  // namespace

DeviceMesh DeviceMesh::Make(std::shared_ptr<Rep> rep) {
  rep->size = Numel(rep->shape);
  if (rep->shape.empty()) {  // stands for every rank by itself
    rep->offset = 0;
    rep->list.clear();
  }
  if (!rep->list.empty()) {
    if (FindLayout(rep->shape, rep->list, &rep->strides)) {
      rep->offset = rep->list[0];
      rep->list.clear();
    } else {
      rep->offset = 0;
      rep->strides.clear();
      for (size_t i = 0; i < rep->list.size(); ++i) rep->position[rep->list[i]] = i;
    }
  }
  if (rep->list.empty()) {
    rep->min_rank = rep->max_rank = rep->offset;
    for (size_t i = 0; i < rep->shape.size(); ++i) {
      rep->max_rank += (rep->shape[i] - 1) * rep->strides[i];
    }
  } else {
    const auto [min, max] = std::minmax_element(rep->list.begin(), rep->list.end());
    rep->min_rank = *min;
    rep->max_rank = *max;
  }
  uint64_t h = HashRange(HashRange(static_cast<uint64_t>(rep->device), rep->shape), rep->strides);
  for (const std::string& name : rep->names) h = HashRange(h, name);
  rep->hash = HashRange(HashMix(h, static_cast<uint64_t>(rep->offset)), rep->list);
  return DeviceMesh(std::move(rep));
}

absl::StatusOr<DeviceMesh> DeviceMesh::Create(IntSpan shape, std::vector<std::string> names,
                                              std::optional<DeviceType> wanted) {
  const DeviceType device = wanted.value_or(RankDevices::Current().type());
  DT_RETURN_IF_ERROR(CheckShape(shape).status());
  DT_RETURN_IF_ERROR(CheckNames(shape, names));
  DT_RETURN_IF_ERROR(CheckDevice(device));
  auto rep = std::make_shared<Rep>();
  rep->shape.assign(shape.begin(), shape.end());
  rep->names = NamesOrBlank(std::move(names), shape.size());
  rep->device = device;
  rep->strides = MeshStrides(shape, 1);
  return Make(std::move(rep));
}

absl::StatusOr<DeviceMesh> DeviceMesh::FromRanks(IntSpan shape, std::vector<int64_t> ranks,
                                                 std::vector<std::string> names,
                                                 std::optional<DeviceType> wanted) {
  const DeviceType device = wanted.value_or(RankDevices::Current().type());
  DT_ASSIGN_OR_RETURN(int64_t size, CheckShape(shape));
  DT_RETURN_IF_ERROR(CheckNames(shape, names));
  DT_RETURN_IF_ERROR(CheckDevice(device));
  if (static_cast<int64_t>(ranks.size()) != size) {
    return absl::InvalidArgumentError(absl::StrCat("mesh shape ", dtensor::ToString(shape),
                                                   " needs ", size, " ranks, got ", ranks.size()));
  }
  absl::flat_hash_set<int64_t> seen;
  for (int64_t rank : ranks) {
    if (rank < 0)
      return absl::InvalidArgumentError(absl::StrCat("mesh rank ", rank, " is negative"));
    if (!seen.insert(rank).second) {
      return absl::InvalidArgumentError(absl::StrCat("rank ", rank, " appears twice in the mesh"));
    }
  }
  auto rep = std::make_shared<Rep>();
  rep->shape.assign(shape.begin(), shape.end());
  rep->names = NamesOrBlank(std::move(names), shape.size());
  rep->device = device;
  rep->list = std::move(ranks);
  return Make(std::move(rep));
}

absl::StatusOr<DeviceMesh> DeviceMesh::Parse(absl::string_view text,
                                             std::optional<DeviceType> device) {
  auto bad = [&] {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot read mesh \"", text, "\": write it as dp=2,tp=4"));
  };
  Dims shape;
  std::vector<std::string> names;
  for (absl::string_view part : absl::StrSplit(text, ',')) {
    std::pair<absl::string_view, absl::string_view> kv =
        absl::StrSplit(part, absl::MaxSplits('=', 1));
    int64_t size;
    absl::string_view name = absl::StripAsciiWhitespace(kv.first);
    if (name.empty() || !absl::SimpleAtoi(kv.second, &size)) return bad();
    names.emplace_back(name);
    shape.push_back(size);
  }
  return Create(shape, std::move(names), device);
}

const DeviceMesh& DeviceMesh::Self() { return Self(RankDevices::Current().type()); }

const DeviceMesh& DeviceMesh::Self(DeviceType device) {
  static const std::vector<DeviceMesh>* selves = [] {
    auto* made = new std::vector<DeviceMesh>;
    for (int type = 0; type < kNumDeviceTypes; ++type) {
      auto rep = std::make_shared<Rep>();
      rep->device = static_cast<DeviceType>(type);
      made->push_back(Make(std::move(rep)));
    }
    return made;
  }();
  return (*selves)[static_cast<size_t>(device)];
}

DeviceMesh::DeviceMesh(std::initializer_list<int64_t> shape, std::vector<std::string> names)
    : DeviceMesh(ValueOrThrow(Create(IntSpan(shape.begin(), shape.size()), std::move(names)))) {}

int DeviceMesh::ndim() const { return static_cast<int>(rep_->shape.size()); }
int64_t DeviceMesh::size() const { return rep_->size; }
int64_t DeviceMesh::size(int mesh_dim) const { return rep_->shape[mesh_dim]; }
IntSpan DeviceMesh::shape() const { return rep_->shape; }
absl::Span<const std::string> DeviceMesh::names() const { return rep_->names; }
DeviceType DeviceMesh::device() const { return rep_->device; }
uint64_t DeviceMesh::hash() const { return rep_ ? rep_->hash : 0; }

namespace {

absl::Status OfNull(absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat(what, " of a null mesh"));
}

}  // namespace

absl::StatusOr<int> DeviceMesh::DimIndex(absl::string_view name) const {
  if (!defined()) return OfNull("a dim");
  for (int i = 0; i < ndim(); ++i) {
    if (!name.empty() && rep_->names[i] == name) return i;
  }
  return absl::NotFoundError(absl::StrCat("mesh ", ToString(), " has no dim \"", name,
                                          "\"; its dims are [", absl::StrJoin(rep_->names, ", "),
                                          "]"));
}

int64_t DeviceMesh::RankAt(IntSpan coordinate) const {
  DT_CHECK(coordinate.size() == rep_->shape.size());
  int64_t index = 0, rank = rep_->offset;
  for (int i = 0; i < ndim(); ++i) {
    DT_CHECK(coordinate[i] >= 0 && coordinate[i] < rep_->shape[i]);
    index = index * rep_->shape[i] + coordinate[i];
    if (rep_->list.empty()) rank += coordinate[i] * rep_->strides[i];
  }
  return rep_->list.empty() ? rank : rep_->list[index];
}

bool DeviceMesh::Coordinate(int64_t rank, Dims* coordinate) const {
  coordinate->assign(rep_->shape.size(), 0);
  if (is_self()) return true;
  if (!rep_->list.empty()) {
    auto it = rep_->position.find(rank);
    if (it == rep_->position.end()) return false;
    Unravel(rep_->shape, it->second, coordinate);
    return true;
  }
  int64_t rest = rank - rep_->offset;
  if (rest < 0) return false;
  for (int64_t i : Order(rep_->shape, rep_->strides)) {
    int64_t c = rest / rep_->strides[i];
    if (c >= rep_->shape[i]) return false;
    (*coordinate)[i] = c;
    rest -= c * rep_->strides[i];
  }
  return rest == 0;
}

bool DeviceMesh::Contains(int64_t rank) const {
  Dims coordinate;
  return Coordinate(rank, &coordinate);
}

std::vector<int64_t> DeviceMesh::Ranks() const {
  if (!rep_->list.empty()) return rep_->list;
  std::vector<int64_t> ranks;
  ranks.reserve(rep_->size);
  Dims coordinate;
  for (int64_t i = 0; i < rep_->size; ++i) {
    Unravel(rep_->shape, i, &coordinate);
    ranks.push_back(RankAt(coordinate));
  }
  return ranks;
}

bool DeviceMesh::SameRanks(const DeviceMesh& other) const {
  if (*this == other) return true;
  if (size() != other.size() || is_self() || other.is_self()) return false;
  if (rep_->list.empty() && other.rep_->list.empty()) {
    return rep_->offset == other.rep_->offset &&
           Progressions(rep_->shape, rep_->strides) ==
               Progressions(other.shape(), other.rep_->strides);
  }
  std::vector<int64_t> a = Ranks(), b = other.Ranks();
  std::sort(a.begin(), a.end());
  std::sort(b.begin(), b.end());
  return a == b;
}

int64_t DeviceMesh::MaxRank() const { return rep_->max_rank; }
int64_t DeviceMesh::MinRank() const { return rep_->min_rank; }

absl::StatusOr<DeviceMesh> DeviceMesh::SubMeshByDims(absl::Span<const int> dims,
                                                     int64_t rank) const {
  if (!defined()) return OfNull("a sub-mesh");
  Dims coordinate;
  if (!Coordinate(rank, &coordinate)) {
    return absl::InvalidArgumentError(absl::StrCat("rank ", rank, " is not in mesh ", ToString()));
  }
  auto rep = std::make_shared<Rep>();
  rep->device = rep_->device;
  for (size_t k = 0; k < dims.size(); ++k) {
    int d = dims[k];
    if (d < 0 || d >= ndim()) {
      return absl::InvalidArgumentError(
          absl::StrCat("mesh ", ToString(), " has no dim ", d, "; it has ", ndim(), " dims"));
    }
    if (std::find(dims.begin(), dims.begin() + k, d) != dims.begin() + k) {
      return absl::InvalidArgumentError(
          absl::StrCat("mesh dim ", rep_->names[d].empty() ? absl::StrCat(d) : rep_->names[d],
                       " is named twice"));
    }
    coordinate[d] = 0;
    rep->shape.push_back(rep_->shape[d]);
    rep->names.push_back(rep_->names[d]);
    if (rep_->list.empty()) rep->strides.push_back(rep_->strides[d]);
  }
  if (dims.empty()) return Make(std::move(rep));
  rep->offset = RankAt(coordinate);
  if (!rep_->list.empty()) {
    Dims sub;
    for (int64_t i = 0, n = Numel(rep->shape); i < n; ++i) {
      Unravel(rep->shape, i, &sub);
      for (size_t k = 0; k < dims.size(); ++k) coordinate[dims[k]] = sub[k];
      rep->list.push_back(RankAt(coordinate));
    }
  }
  return Make(std::move(rep));
}

absl::StatusOr<DeviceMesh> DeviceMesh::SubMesh(absl::Span<const std::string> names,
                                               int64_t rank) const {
  std::vector<int> dims;
  for (const std::string& name : names) {
    DT_ASSIGN_OR_RETURN(int d, DimIndex(name));
    dims.push_back(d);
  }
  return SubMeshByDims(dims, rank);
}

absl::StatusOr<std::vector<DeviceMesh>> DeviceMesh::AllSubMeshes(
    absl::Span<const std::string> names) const {
  if (!defined()) return OfNull("sub-meshes");
  std::vector<int> dims;
  Dims others = rep_->shape;  // 1 where the sub-meshes extend
  for (const std::string& name : names) {
    DT_ASSIGN_OR_RETURN(int d, DimIndex(name));
    dims.push_back(d);
    others[d] = 1;
  }
  std::vector<DeviceMesh> result;
  Dims coordinate;
  for (int64_t i = 0, n = Numel(others); i < n; ++i) {
    Unravel(others, i, &coordinate);
    DT_ASSIGN_OR_RETURN(DeviceMesh mesh, SubMeshByDims(dims, RankAt(coordinate)));
    result.push_back(std::move(mesh));
  }
  return result;
}

DeviceMesh DeviceMesh::operator[](absl::string_view name) const { return (*this)[{name}]; }

DeviceMesh DeviceMesh::operator[](std::initializer_list<absl::string_view> names) const {
  if (!defined()) Throw(OfNull("a dim"));
  std::vector<std::string> list(names.begin(), names.end());
  return ValueOrThrow(SubMesh(list, RankContext::Current().rank()));
}

DeviceMesh DeviceMesh::Flatten(std::string name) const {
  std::vector<std::string> names;
  if (!name.empty()) names.push_back(std::move(name));
  return ValueOrThrow(Reshape({defined() ? size() : 1}, std::move(names)));
}

absl::StatusOr<DeviceMesh> DeviceMesh::Reshape(IntSpan shape,
                                               std::vector<std::string> names) const {
  if (!defined()) return OfNull("another shape");
  DT_ASSIGN_OR_RETURN(int64_t size, CheckShape(shape));
  DT_RETURN_IF_ERROR(CheckNames(shape, names));
  if (size != rep_->size) {
    return absl::InvalidArgumentError(absl::StrCat("cannot reshape mesh ", ToString(), " of ",
                                                   rep_->size, " ranks to ",
                                                   dtensor::ToString(shape), " of ", size));
  }
  auto rep = std::make_shared<Rep>();
  rep->shape.assign(shape.begin(), shape.end());
  rep->names = NamesOrBlank(std::move(names), shape.size());
  rep->device = rep_->device;
  int64_t unit = rep_->list.empty() ? MergedStride(rep_->shape, rep_->strides) : 0;
  if (unit != 0) {
    rep->offset = rep_->offset;
    rep->strides = MeshStrides(shape, unit);
  } else {
    rep->list = Ranks();
  }
  return Make(std::move(rep));
}

std::string DeviceMesh::ToString() const {
  if (!rep_) return "null";
  if (is_self()) return "self";
  bool named = std::any_of(rep_->names.begin(), rep_->names.end(),
                           [](const std::string& name) { return !name.empty(); });
  std::string text;
  for (int i = 0; i < ndim(); ++i) {
    if (i > 0) text += named ? " " : "x";
    if (named) absl::StrAppend(&text, rep_->names[i], "=");
    absl::StrAppend(&text, rep_->shape[i]);
  }
  return text;
}

bool operator==(const DeviceMesh& a, const DeviceMesh& b) {
  if (a.rep_ == b.rep_) return true;
  if (!a.rep_ || !b.rep_ || a.rep_->hash != b.rep_->hash) return false;
  return a.rep_->device == b.rep_->device && a.rep_->shape == b.rep_->shape &&
         a.rep_->offset == b.rep_->offset && a.rep_->strides == b.rep_->strides &&
         a.rep_->names == b.rep_->names && a.rep_->list == b.rep_->list;
}

}  // namespace dtensor
