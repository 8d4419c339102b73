#include "dtensor/parallel/train/check_copies.h"

#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "dtensor/errors.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/parallel/io/checkpoint_file.h"
#include "dtensor/parallel/io/checkpoint_parts.h"
#include "dtensor/parallel/module/agree.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

absl::StatusOr<uint64_t> SumOfPart(const DTensor& t) {
  const bool here = t.spec().in_mesh();  // throws for null
  DT_RETURN_IF_ERROR(CheckOwn(t));
  if (!here) return uint64_t{0};
  DT_ASSIGN_OR_RETURN(const Tensor part, t.local().ToHost());
  return internal::ElementSum(part.data(), 0, part.numel(), SizeOf(part.dtype()));
}

// The coordinates that decide which part a rank holds.
Dims PartOf(const Spec& spec, const Dims& coordinate) {
  Dims part = coordinate;
  for (int m = 0; m < spec.mesh().ndim(); ++m) {
    if (spec.placement(m).is_replicate()) part[m] = 0;
  }
  return part;
}

// "b.weight on ranks 2, 3 is not that of rank 0"; empty where all agree. `sum` is by rank.
template <class Sum>
std::string Difference(const std::string& name, const Spec& spec, const Sum& sum) {
  if (spec.mesh().is_self()) return "";           // each rank's own
  std::map<std::vector<int64_t>, int64_t> first;  // the rank that holds a part first
  std::vector<int64_t> other;
  int64_t of = -1;
  for (const int64_t rank : spec.mesh().Ranks()) {
    Dims coordinate;
    spec.mesh().Coordinate(rank, &coordinate);
    const Dims part = PartOf(spec, coordinate);
    const auto [at, is_first] = first.try_emplace({part.begin(), part.end()}, rank);
    if (is_first || sum(rank) == sum(at->second)) continue;
    if (of < 0) of = at->second;
    if (of == at->second) other.push_back(rank);
  }
  if (other.empty()) return "";
  return absl::StrCat(name, " on rank", other.size() > 1 ? "s " : " ", absl::StrJoin(other, ", "),
                      " is not that of rank ", of);
}

}  // namespace

absl::Status CheckCopies(const Module& model, const Optimizer& optimizer) {
  StateDict all;
  for (const NamedParameter& p : model.NamedTensors()) {
    all.emplace_back(p.fqn, p.parameter->tensor());
  }
  DT_ASSIGN_OR_RETURN(StateDict states, optimizer.GetStateDictOfAll());
  for (auto& state : states) all.push_back(std::move(state));
  return CheckCopies(all);
}

absl::Status CheckCopies(const StateDict& all) {
  RankContext& rank = RankContext::Current();
  const DeviceMesh world({rank.world_size()}, {"world"});
  std::vector<std::string> names;
  std::vector<uint64_t> mine;
  for (const auto& [name, value] : all) {
    names.push_back(name);
    const absl::StatusOr<uint64_t> sum =
        internal::Guarded([&value = value] { return SumOfPart(value); });
    if (!sum.ok()) return TellPeers(world, Prefixed(name, sum.status()));
    mine.push_back(*sum);
  }
  DT_ASSIGN_OR_RETURN(
      const std::vector<std::string> bytes,
      internal::ExchangeListed(
          "check_copies", names,
          std::string(reinterpret_cast<const char*>(mine.data()), mine.size() * sizeof(uint64_t))));
  std::vector<std::string> problems;
  for (size_t i = 0; i < all.size(); ++i) {
    const auto sum = [&](int64_t r) {
      uint64_t value = 0;
      std::memcpy(&value, bytes[static_cast<size_t>(r)].data() + i * sizeof(value), sizeof(value));
      return value;
    };
    const std::string problem = Difference(all[i].first, all[i].second.spec(), sum);
    if (!problem.empty()) problems.push_back(problem);
  }
  if (problems.empty()) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("copies differ: ", absl::StrJoin(problems, "; ")));
}

}  // namespace dtensor
