#include "dtensor/explain.h"

#include <algorithm>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "dtensor/impl.h"
#include "dtensor/mesh/region.h"
#include "dtensor/redistribute.h"
#include "dtensor/rehearsal.h"
#include "dtensor/sharding.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

// What redistributions of one tensor would take, by the collectives that they are made of. Each is
// rehearsed once.
class MoveTimes {
 public:
  double To(const DTensor& x, const Placements& to) {
    for (const auto& [placements, us] : known_) {
      if (placements == to) return us;
    }
    const NoGrad no_grad;
    const CommTrace trace;
    const DTensor moved = x.Redistribute(to);
    known_.emplace_back(to, trace.ModelledUs());
    return known_.back().second;
  }

 private:
  std::vector<std::pair<Placements, double>> known_;
};

std::string PlacementLists(const std::vector<Placements>& lists) {
  return absl::StrJoin(lists, ", ", [](std::string* out, const Placements& p) {
    absl::StrAppend(out, ToString(p));
  });
}

std::string Row(const Alternative& a) {
  return absl::StrFormat("%s -> %s: %.0f bytes, %.1f us", PlacementLists(a.inputs),
                         PlacementLists(a.outputs), a.bytes, a.modelled_us);
}

}  // namespace

std::string Explanation::ToString(int most) const {
  std::string text = absl::StrCat("[", op, "] ", absl::StrJoin(input_specs, ", "),
                                  "\nchosen: ", Row(chosen), "\n", why, "\n");
  most = std::max(most, 0);
  int shown = 0;
  for (const Alternative& a : alternatives) {
    if (shown++ == most) break;
    absl::StrAppend(&text, "  ", Row(a), "\n");
  }
  if (static_cast<int>(alternatives.size()) > most) {
    absl::StrAppend(&text, "  and ", alternatives.size() - most, " dearer ones\n");
  }
  return text;
}

namespace {

// Every legal strategy with what it would take to bring the inputs there. Empty where one rule
// decides for the whole mesh.
std::vector<Alternative> Alternatives(const OpCall& call, Inputs inputs) {
  std::vector<MoveTimes> times(inputs.size());
  std::vector<Alternative> all;
  for (const Strategy& s : LegalStrategies(call)) {
    Alternative& a = all.emplace_back(Alternative{s.inputs, s.outputs, s.cost_bytes, 0});
    for (size_t i = 0; i < inputs.size(); ++i) {
      a.modelled_us += times[i].To(*inputs[i], s.inputs[i]);
    }
  }
  return all;
}

std::string Why(const Explanation& e, bool has_rows) {
  if (!has_rows) {
    return absl::StrCat("why: it has no strategies of its own, only ops that it is made of",
                        e.made_of.empty() ? "" : ": ", absl::StrJoin(e.made_of, "; "));
  }
  if (!e.made_of.empty()) {
    return absl::StrCat("why: as other ops it moves fewer bytes than any strategy of its own: ",
                        absl::StrJoin(e.made_of, "; "));
  }
  if (e.chosen.bytes == 0) {
    return absl::StrCat("why: the inputs match it as they are; the first of such rows is taken, ",
                        e.alternatives.size(), " strategies are legal");
  }
  return absl::StrCat("why: no legal strategy takes the inputs as they are; of ",
                      e.alternatives.size(), " it moves the fewest bytes",
                      e.beam ? " (a beam search: not all were priced)" : "",
                      e.events.empty() ? "; here they have been moved there before" : "");
}

Placements PlacementsOf(const DTensor& t) {
  return Placements(t.placements().begin(), t.placements().end());
}

}  // namespace

absl::StatusOr<Explanation> Explain(const OpDef& op, Inputs inputs, absl::Span<const Attr> attrs,
                                    const std::optional<CostModel>& cost) {
  Explanation e;
  e.op = op.name();
  Rehearsal rehearsal(cost ? *cost : RankContext::Current().cost_model());
  {
    const CommTrace trace;
    DT_ASSIGN_OR_RETURN(const Values outputs, Dispatch(op, inputs, attrs));
    e.events = trace.events();
    e.chosen.modelled_us = trace.ModelledUs();
    for (const DTensor& t : outputs) {
      e.chosen.outputs.push_back(PlacementsOf(t));
      e.output_specs.push_back(t.spec().ToString());
    }
  }
  const std::vector<RehearsedOp>& ops = rehearsal.ops();
  for (size_t i = 1; i < ops.size(); ++i) e.made_of.push_back(ops[i].strategy);
  absl::InlinedVector<const Spec*, 4> specs;
  for (size_t i = 0; i < inputs.size(); ++i) {
    specs.push_back(&inputs[i]->spec());
    e.input_specs.push_back(
        absl::StrCat(op.InputName(static_cast<int>(i)), " = ", specs[i]->ToString()));
    if (!(specs[i]->mesh() == specs[0]->mesh())) return e;  // ImplicitReplication
  }
  const OpCall call(op, specs, attrs);
  DT_ASSIGN_OR_RETURN(const OpPlan plan, PlanOp(call, nullptr));
  e.beam = plan.beam;
  e.chosen.inputs = plan.strategy.inputs;
  e.chosen.bytes = plan.strategy.cost_bytes;
  const bool has_rows = !e.chosen.inputs.empty();  // not where it has a decomposition alone
  if (!has_rows || !e.made_of.empty()) {
    e.chosen.inputs.clear();
    for (const DTensor* t : inputs) e.chosen.inputs.push_back(PlacementsOf(*t));
    e.chosen.bytes = rehearsal.moved_bytes();
  }
  e.alternatives = Alternatives(call, inputs);
  if (e.alternatives.empty() || !e.made_of.empty()) e.alternatives.push_back(e.chosen);
  std::stable_sort(e.alternatives.begin(), e.alternatives.end(),
                   [](const Alternative& a, const Alternative& b) {
                     return std::pair(a.bytes, a.modelled_us) < std::pair(b.bytes, b.modelled_us);
                   });
  e.why = Why(e, has_rows);
  return e;
}

std::string Describe(const Spec& spec, int64_t most_ranks) {
  std::string text = absl::StrCat(spec.ToString(), "\n");
  const DeviceMesh& mesh = spec.mesh();
  int64_t shown = 0;
  for (int64_t i = 0; i < mesh.size(); ++i) {
    if (shown++ == most_ranks) {
      absl::StrAppend(&text, "and ", mesh.size() - most_ranks, " ranks more\n");
      break;
    }
    Dims coordinate;
    int64_t rest = i;
    for (int m = mesh.ndim() - 1; m >= 0; --m) {
      coordinate.insert(coordinate.begin(), rest % mesh.size(m));
      rest /= mesh.size(m);
    }
    std::vector<std::string> where, block;
    for (int m = 0; m < mesh.ndim(); ++m) {
      const std::string& name = mesh.names()[m];
      where.push_back(absl::StrCat(name.empty() ? absl::StrCat(m) : name, "=", coordinate[m]));
    }
    for (const auto& intervals : LocalIndex(spec, coordinate)) {
      block.push_back(intervals.empty()
                          ? "none"
                          : absl::StrJoin(intervals, "+", [](std::string* out, const Interval& v) {
                              absl::StrAppend(out, v.start, ":", v.end);
                            }));
    }
    const int64_t rank = mesh.is_self() ? RankContext::Current().rank() : mesh.RankAt(coordinate);
    absl::StrAppend(&text, "rank ", rank, where.empty() ? "" : " (", absl::StrJoin(where, " "),
                    where.empty() ? "" : ")", ": [", absl::StrJoin(block, ", "), "]");
    for (int m = 0; m < mesh.ndim(); ++m) {
      if (spec.placement(m).is_partial()) absl::StrAppend(&text, " a term");
      if (!spec.placement(m).is_flat()) continue;
      // The spec above names all lengths; of many a line has its own.
      const Placement& flat = spec.placement(m);
      const int64_t at = coordinate[m], start = flat.FlatStart(at);
      constexpr size_t kFew = 16;
      absl::StrAppend(&text, " ",
                      flat.lengths().size() <= kFew
                          ? flat.ToString()
                          : absl::StrCat("Flat[", start, ":", start + flat.lengths()[at], "]"),
                      " piece ", at);
    }
    text += "\n";
  }
  return text;
}

absl::StatusOr<std::string> DescribeSvg(const Spec& spec) {
  if (spec.ndim() < 1 || spec.ndim() > 2) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a picture needs one or two dims, the tensor has shape ", ToString(spec.shape())));
  }
  constexpr double kSide = 400;
  const double rows = std::max<double>(1, spec.ndim() == 2 ? spec.shape()[0] : 1);
  const double columns = std::max<double>(1, spec.shape().back());
  std::string svg = absl::StrFormat(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%.0f\" height=\"%.0f\">\n"
      "<title>%s</title>\n",
      kSide, kSide,
      absl::StrReplaceAll(spec.ToString(), {{"&", "&amp;"}, {"<", "&lt;"}}));  // names of mesh dims
  // Ranks that hold the same block share its label.
  std::vector<std::pair<std::string, std::string>> blocks;  // rectangle, ranks
  absl::flat_hash_map<std::string, size_t> places;          // of rectangles among them
  const DeviceMesh& mesh = spec.mesh();
  for (int64_t rank : mesh.Ranks()) {
    Dims coordinate;
    mesh.Coordinate(rank, &coordinate);
    const std::vector<Interval> one = {{0, 1}};
    for (const Block& block : RegionOf(spec, coordinate)) {
      for (const Interval& r : spec.ndim() == 2 ? block.index[0] : one) {
        for (const Interval& c : block.index.back()) {
          const std::string box = absl::StrFormat(
              "x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\"", c.start / columns * kSide,
              r.start / rows * kSide, c.length() / columns * kSide, r.length() / rows * kSide);
          const auto [it, fresh] = places.try_emplace(box, blocks.size());
          if (fresh) {
            blocks.emplace_back(box, absl::StrCat(rank));
          } else {
            absl::StrAppend(&blocks[it->second].second, " ", rank);
          }
        }
      }
    }
  }
  for (size_t i = 0; i < blocks.size(); ++i) {
    absl::StrAppendFormat(&svg,
                          "<g><rect %s fill=\"hsl(%d,60%%,80%%)\" stroke=\"black\"/>"
                          "<title>ranks %s</title></g>\n",
                          blocks[i].first, static_cast<int>(i * 137 % 360), blocks[i].second);
  }
  return svg + "</svg>\n";
}

}  // namespace dtensor
