#include "dtensor/implicit_warning.h"

#include <cstdio>

#include "absl/algorithm/container.h"
#include "absl/strings/str_format.h"
#include "dtensor/impl.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/redistribute.h"

namespace dtensor::internal {

void WarnInModule(const OpDef& op, int input, const Spec& from, const Spec& to) {
  RankContext& context = RankContext::Current();
  const TraceState& trace = context.trace();
  PlannedModules& planned = context.Slot<PlannedModules>();
  if (!planned.paths.contains(trace.module)) return;
  if (context.rehearses() || !from.in_mesh() || !NeedsCommunication(from, to)) return;
  if (absl::c_any_of(from.coordinate(), [](int64_t c) { return c != 0; })) return;
  const std::string called(trace.op.empty() ? op.name() : trace.op);
  if (!planned.told.emplace(trace.module, called).second) return;
  const std::string text = absl::StrFormat(
      "warning: %s: %s moves its input %s by itself (%s, %.0f bytes to a rank): it comes as %s and "
      "is needed as %s. If that is meant, Redistribute it there; if not, the plan does not fit the "
      "module: docs/guide/models.md names the usual causes. ParallelizeOptions::warn = false says "
      "nothing.\n",
      *trace.module, called, op.InputName(input), DescribeRedistribution(from, to),
      RedistributeCost(from, to), from.ToString(), ToString(to.placements()));
  fputs(text.c_str(), stderr);
}

}  // namespace dtensor::internal
