#include "dtensor/shares.h"

#include <algorithm>
#include <utility>

namespace dtensor::internal {

Shares::Shares(const Parts& source, const Parts& target, const CoordinateBox& of_source,
               const CoordinateBox& of_target)
    : source_(source),
      target_(target),
      of_source_(of_source),
      of_target_(of_target),
      same_mesh_(source.spec().mesh() == target.spec().mesh()),
      apart_(source.spec().mesh().MaxRank() < target.spec().mesh().MinRank() ||
             target.spec().mesh().MaxRank() < source.spec().mesh().MinRank()) {}

CoordinateBox Shares::PartAt(const Dims& coordinate) const {
  CoordinateBox part = of_source_;
  for (int m = 0; m < source_.spec().mesh().ndim(); ++m) {
    if (source_.cuts(m)) part.Pin(m, coordinate[m]);
  }
  return part;
}

Dims Shares::TargetPart(const Dims& coordinate) const {
  Dims part = of_target_.lo;
  for (int m = 0; m < target_.spec().mesh().ndim(); ++m) {
    if (target_.cuts(m)) part[m] = coordinate[m];
  }
  return part;
}

const std::map<Dims, std::vector<int64_t>>& Shares::ByTarget(
    const CoordinateBox& source_part) const {
  const auto [it, fresh] = by_target_.try_emplace(source_part.lo);
  if (!fresh) return it->second;
  ForEach(source_part, [&](const Dims& at) {
    const int64_t rank = source_.spec().mesh().RankAt(at);
    Dims there;
    if (target_.spec().mesh().Coordinate(rank, &there)) {
      it->second[TargetPart(there)].push_back(rank);
    }
  });
  return it->second;
}

Shares::Reducers Shares::ReducersOf(const CoordinateBox& source_part, const Dims& target) const {
  Reducers all{source_part, nullptr, true};
  if (!same_mesh_) {
    if (apart_) return all;
    const auto& by_target = ByTarget(source_part);
    const auto it = by_target.find(target);
    return it == by_target.end() ? all : Reducers{{}, &it->second, false};
  }
  Reducers wanting{source_part, nullptr, false};
  for (int m = 0; m < target_.spec().mesh().ndim(); ++m) {
    if (!target_.cuts(m)) continue;
    if (source_.cuts(m) && source_part.lo[m] != target[m]) return all;
    wanting.box.Pin(m, target[m]);
  }
  return wanting;
}

int64_t Shares::CountOf(const Reducers& r) const {
  return r.listed != nullptr ? static_cast<int64_t>(r.listed->size()) : r.box.size();
}

int64_t Shares::RankOf(const Reducers& r, int64_t index) const {
  return r.listed != nullptr ? (*r.listed)[index] : source_.spec().mesh().RankAt(r.box.At(index));
}

int64_t Shares::IndexIn(const Reducers& r, const Dims& coordinate) const {
  if (r.listed == nullptr) return r.box.Contains(coordinate) ? r.box.IndexOf(coordinate) : -1;
  const int64_t rank = source_.spec().mesh().RankAt(coordinate);
  const auto it = std::find(r.listed->begin(), r.listed->end(), rank);
  return it == r.listed->end() ? -1 : it - r.listed->begin();
}

Region Shares::Range(const Reducers& reducers, const Dims& target, const Region& both,
                     int64_t index, int64_t offset) const {
  const int64_t n = CountOf(reducers), numel = RegionNumel(both), dealt = Dealt(reducers, both);
  // Those who reduce many small parts for others do not all give the rest to the same one.
  if (reducers.foreign) index = (index + n - TargetParts().IndexOf(target) % n) % n;
  return PackedRange(both, std::min(numel, dealt * index / n),
                     std::min(numel, dealt * (index + 1) / n), offset);
}

// For foreign reducers the same number for all parts of the target: so they know in which parts
// they have something to do without looking at all.
int64_t Shares::Dealt(const Reducers& reducers, const Region& both) const {
  return reducers.foreign ? MostOfATarget() : RegionNumel(both);
}

CoordinateBox Shares::TargetParts() const {
  CoordinateBox parts = of_target_;
  for (int m = 0; m < target_.spec().mesh().ndim(); ++m) {
    if (!target_.cuts(m)) parts.Pin(m, parts.lo[m]);
  }
  return parts;
}

int64_t Shares::MostOfATarget() const {
  if (!target_.has_flat()) return RegionNumel(target_.At(of_target_.lo));  // the first is longest
  int64_t most = 0;
  for (const Placement& p : target_.spec().placements()) {
    if (p.is_flat()) most = std::max(most, p.longest());
  }
  return most;
}

// The parts of the target of which this rank may reduce elements, ascending.
std::vector<Dims> Shares::TargetsOf(const Dims& coordinate) const {
  std::vector<Dims> targets;
  if (apart_ && !same_mesh_) {
    const CoordinateBox servers = PartAt(coordinate), parts = TargetParts();
    const int64_t n = servers.size(), most = MostOfATarget(), index = servers.IndexOf(coordinate);
    if (most * ((parts.size() + n - 1) / n) < parts.size()) {  // few turns deal an element at all
      for (int64_t e = 0; e < most; ++e) {
        const int64_t turn = ((e + 1) * n - 1) / most;
        for (int64_t t = (index - turn + n) % n; t < parts.size(); t += n) {
          targets.push_back(parts.At(t));
        }
      }
      std::sort(targets.begin(), targets.end());
      return targets;
    }
  }
  if (same_mesh_) targets.push_back(TargetPart(coordinate));
  if (!same_mesh_ || !NoneForeign()) {
    for (const CoordinateBox& box : target_.Holding(source_.At(coordinate), of_target_)) {
      target_.ForEachPart(box, [&](const CoordinateBox& part) {
        bool foreign = !same_mesh_;
        for (int m = 0; m < target_.spec().mesh().ndim() && !foreign; ++m) {
          foreign = source_.cuts(m) && target_.cuts(m) && part.lo[m] != coordinate[m];
        }
        if (foreign) targets.push_back(TargetPart(part.lo));
      });
    }
  }
  std::sort(targets.begin(), targets.end());
  return targets;
}

bool Shares::NoneForeign() const {
  for (int m = 0; m < target_.spec().mesh().ndim(); ++m) {
    if (same_mesh_ && source_.cuts(m) && target_.cuts(m) && of_target_.lo[m] != of_target_.hi[m]) {
      return false;
    }
  }
  return same_mesh_;
}

std::vector<Share> Shares::Of(const Dims& coordinate) const {
  std::vector<Share> shares;
  const CoordinateBox part = PartAt(coordinate);
  const Region held = source_.At(coordinate);
  int64_t offset = 0;
  for (const Dims& target : TargetsOf(coordinate)) {
    const Reducers reducers = ReducersOf(part, target);
    const int64_t index = IndexIn(reducers, coordinate);
    if (index < 0) continue;
    const Region both = PackedOverlap(held, target_.At(target));
    Region blocks = Range(reducers, target, both, index, offset);
    if (blocks.empty()) continue;
    offset += RegionNumel(blocks);
    shares.push_back({target, std::move(blocks)});
  }
  return shares;
}

void Shares::ForEachReducer(const CoordinateBox& source_part, const Dims& target,
                            const Region& both,
                            absl::FunctionRef<void(int64_t, const Region&)> visit) const {
  const Reducers reducers = ReducersOf(source_part, target);
  const int64_t n = CountOf(reducers), numel = RegionNumel(both), dealt = Dealt(reducers, both);
  const int64_t first = reducers.foreign ? TargetParts().IndexOf(target) % n : 0;
  for (int64_t start = 0, end; start < numel; start = end) {
    const int64_t turn = ((start + 1) * n - 1) / dealt;  // the one that has this element
    end = std::min(numel, dealt * (turn + 1) / n);
    visit(RankOf(reducers, (turn + first) % n), PackedRange(both, start, end, 0));
  }
}

}  // namespace dtensor::internal
