#include "dtensor/parallel/train/describe.h"

#include <algorithm>
#include <map>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/parallel/train/log.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

using Styles = std::map<const Module*, std::string>;

// The lines below `module`, without names of its own.
std::string Below(const Module& module, const Styles& styles, int depth) {
  std::string text, previous, first, last;
  std::string type;
  const auto flush = [&] {
    if (first.empty()) return;
    const std::string name = first == last ? first : absl::StrCat(first, " .. ", last);
    absl::StrAppend(&text, std::string(2 * static_cast<size_t>(depth), ' '), name, ": ", type, "\n",
                    previous);
    first.clear();
  };
  for (const auto& [name, child] : module.children()) {
    const auto style = styles.find(child.get());
    const std::string kind = style == styles.end()
                                 ? child->type_name()
                                 : absl::StrCat(child->type_name(), ", ", style->second);
    const std::string inner = Below(*child, styles, depth + 1);
    int64_t number;
    const bool same = !first.empty() && absl::SimpleAtoi(name, &number) && kind == type &&
                      inner == previous && absl::SimpleAtoi(last, &number);
    if (!same) {
      flush();
      first = name;
    }
    last = name;
    type = kind;
    previous = inner;
  }
  flush();
  return text;
}

}  // namespace

absl::StatusOr<std::string> DescribePlan(Module& model, const Plan& plan) {
  Styles styles;
  for (const auto& [pattern, style] : plan) {
    const absl::StatusOr<std::vector<NamedModule>> found = MatchModules(model, pattern);
    if (!found.ok() && style.optional) continue;
    if (!found.ok()) return found.status();
    for (const NamedModule& m : *found) styles[m.module] = style.name;
  }
  const auto root = styles.find(&model);
  return absl::StrCat(model.type_name(), root == styles.end() ? "" : ", ",
                      root == styles.end() ? "" : root->second, "\n", Below(model, styles, 1));
}

std::string DescribeParameters(const Module& model) {
  const std::vector<NamedParameter> all = model.NamedParameters();
  size_t widest = 0;
  for (const NamedParameter& p : all) widest = std::max(widest, p.fqn.size());
  std::string text;
  double elements = 0, bytes = 0;
  for (const NamedParameter& p : all) {
    const Parameter& it = *p.parameter;
    const SpecRef spec = ValueOrThrow(
        RankContext::Current().specs().Intern(it.mesh(), it.placements(), it.shape(), it.dtype()));
    absl::StrAppend(&text, absl::StrFormat("%-*s", static_cast<int>(widest), p.fqn), "  ",
                    ToString(it.shape()), "  ", ToString(spec->placements()), "  ",
                    spec->in_mesh() ? ToString(spec->local_shape()) : "-", "  ",
                    std::string(Name(it.dtype())), p.aliases.empty() ? "" : "  = ",
                    absl::StrJoin(p.aliases, " = "), "\n");
    elements += static_cast<double>(spec->numel());
    if (spec->in_mesh()) bytes += static_cast<double>(spec->local_bytes());
  }
  absl::StrAppend(&text, HumanFormat(elements), " parameters, ", HumanFormat(bytes),
                  "B of them on this rank\n");
  return text;
}

}  // namespace dtensor
