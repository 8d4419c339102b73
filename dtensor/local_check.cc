#include "dtensor/local_check.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/tensor/status.h"

namespace dtensor::internal {
namespace {

constexpr int kFields = 4;  // spec hash, local shape fits, hash of the bits, dtype

// FNV-1a over the bytes: only equality matters.
uint64_t HashBytes(const void* data, int64_t bytes) {
  const auto* p = static_cast<const unsigned char*>(data);
  uint64_t h = 1469598103934665603ull;
  for (int64_t i = 0; i < bytes; ++i) h = (h ^ p[i]) * 1099511628211ull;
  return h;
}

// True if both coordinates hold the same part of the tensor by their placements.
bool ShouldBeEqual(const Spec& spec, const Dims& a, const Dims& b) {
  for (int m = 0; m < spec.mesh().ndim(); ++m) {
    if (!spec.placement(m).is_replicate() && a[m] != b[m]) return false;
  }
  return true;
}

}  // namespace

absl::Status CheckLocals(const Tensor& local, const Spec& spec, const absl::Status& fits) {
  RankContext& context = RankContext::Current();
  const DeviceMesh& mesh = spec.mesh();
  std::vector<int> dims(mesh.ndim());
  std::iota(dims.begin(), dims.end(), 0);
  DT_ASSIGN_OR_RETURN(Tensor bits, local.Contiguous());
  DT_ASSIGN_OR_RETURN(bits, bits.To(DeviceType()));
  const uint64_t mine[kFields] = {spec.hash(), fits.ok() ? 1u : 0u,
                                  HashBytes(bits.data(), bits.nbytes()),
                                  static_cast<uint64_t>(local.dtype())};
  DT_ASSIGN_OR_RETURN(
      const std::vector<std::string> told,
      context.Exchange(mesh, dims, "run_check",
                       std::string(reinterpret_cast<const char*>(mine), sizeof(mine))));
  // By group index.
  const std::vector<int64_t> ranks =
      mesh.is_self() ? std::vector<int64_t>{context.rank()} : mesh.Ranks();
  std::vector<std::array<uint64_t, kFields>> all(told.size());
  for (size_t r = 0; r < told.size(); ++r) std::memcpy(&all[r], told[r].data(), sizeof(mine));
  for (size_t r = 0; r < all.size(); ++r) {
    const int64_t rank = ranks[r];
    if (all[r][3] != all[0][3] || all[r][0] != all[0][0]) {
      return absl::FailedPreconditionError(absl::StrCat("run_check: ranks ", ranks[0], " and ",
                                                        rank, " describe different tensors; rank ",
                                                        context.rank(), " has ", spec.ToString()));
    }
    if (all[r][1] == 0) {
      return absl::FailedPreconditionError(
          absl::StrCat("run_check: the local shape on rank ", rank, " does not fit ",
                       spec.ToString(), fits.ok() ? "" : absl::StrCat(": ", fits.message())));
    }
  }
  for (size_t r = 0; r < all.size(); ++r) {
    Dims a, b;
    mesh.Coordinate(ranks[r], &a);
    for (size_t s = 0; s < r; ++s) {
      mesh.Coordinate(ranks[s], &b);
      if (ShouldBeEqual(spec, a, b) && all[r][2] != all[s][2]) {
        return absl::FailedPreconditionError(absl::StrCat(
            "run_check: ranks ", ranks[s], " and ", ranks[r], " should hold the same values of ",
            spec.ToString(), " but their bits differ"));
      }
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<Shape> ShapeOfParts(const Tensor& part, const DeviceMesh& mesh,
                                   absl::Span<const Placement> placements) {
  RankContext& context = RankContext::Current();
  const int mesh_ndim = mesh.ndim(), ndim = part.ndim();
  bool cut = false;
  std::vector<int> mesh_dims(mesh_ndim), cuts(mesh_ndim, -1);  // which dim each mesh dim cuts
  for (int m = 0; m < mesh_ndim; ++m) {
    mesh_dims[m] = m;
    if (placements[m].is_flat()) return Shape();
    if (!placements[m].cuts_dim()) continue;
    DT_ASSIGN_OR_RETURN(cuts[m], NormalizeDim(placements[m].dim(), ndim));
    cut |= mesh.size(m) > 1;
  }
  if (!cut || !mesh.Contains(context.rank()) || mesh.device() == DeviceType::kMeta ||
      context.rehearses()) {
    return Shape();
  }
  DT_ASSIGN_OR_RETURN(
      const std::vector<std::string> told,
      context.Exchange(mesh, mesh_dims, "sizes of parts",
                       std::string(reinterpret_cast<const char*>(part.shape().data()),
                                   part.shape().size() * sizeof(int64_t))));
  const std::vector<int64_t> ranks = mesh.Ranks();
  std::vector<Shape> parts;
  std::vector<Dims> at(ranks.size());
  for (size_t r = 0; r < ranks.size(); ++r) {
    parts.emplace_back(told[r].size() / sizeof(int64_t));
    std::copy_n(told[r].data(), told[r].size(), reinterpret_cast<char*>(parts[r].data()));
    mesh.Coordinate(ranks[r], &at[r]);
    if (parts[r].size() == parts[0].size()) continue;
    return absl::InvalidArgumentError(absl::StrCat("rank ", ranks[0], " has a part of shape ",
                                                   ToString(parts[0]), ", rank ", ranks[r],
                                                   " one of ", ToString(parts[r])));
  }
  Shape whole(ndim, 0);
  for (int d = 0; d < ndim; ++d) {
    for (size_t r = 0; r < ranks.size(); ++r) {
      bool counts = true;  // once for each part of the dim
      for (int m = 0; m < mesh_ndim; ++m) counts &= cuts[m] == d || at[r][m] == 0;
      if (counts) whole[d] += parts[r][d];
    }
  }
  DT_ASSIGN_OR_RETURN(const SpecRef spec,
                      context.specs().Intern(mesh, placements, whole, part.dtype()));
  for (size_t r = 0; r < ranks.size(); ++r) {
    const Shape wanted = LocalShape(*spec, at[r]);
    if (parts[r] == wanted) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", ranks[r], " has a part of shape ", ToString(parts[r]), ", but ",
                     ToString(placements), " of ", ToString(whole), ", which the parts of all ",
                     ranks.size(), " ranks make together, gives it ", ToString(wanted),
                     "; uneven parts are cut as a Shard cuts them, the larger ones first"));
  }
  return whole;
}

}  // namespace dtensor::internal
