#include "dtensor/parallel/local/types.h"

#include <algorithm>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/sharding.h"
#include "dtensor/tensor/status.h"

namespace dtensor {

absl::string_view Name(LocalType type) {
  static constexpr absl::string_view kNames[] = {"V", "P", "R", "I"};
  return kNames[static_cast<int>(type)];
}

}  // namespace dtensor
namespace dtensor::internal {

const TypedLocal* LocalTypes::Find(const DTensor& x) const {
  const auto it = held_.find(x.local().buffer().identity());
  return it == held_.end() ? nullptr : &it->second.typed;
}

void LocalTypes::Set(const DTensor& x, TypedLocal typed) {
  // What nobody else holds any more: a region keeps no memory of its own.
  absl::erase_if(held_, [](const auto& entry) { return entry.second.buffer.unique(); });
  const Buffer& buffer = x.local().buffer();
  held_[buffer.identity()] = {buffer, std::move(typed), buffer.version()};
}

void LocalTypes::Made(const DTensor& result, const DTensor& of) {
  const TypedLocal* const read = Find(of);
  if (read == nullptr) return;
  TypedLocal typed;
  if (const TypedLocal* made = Find(result)) typed = *made;
  typed.types.resize(mesh_.ndim(), kR);
  for (int m = 0; m < mesh_.ndim(); ++m) {
    LocalType& type = typed.types[m];
    const LocalType how = read->types[m];
    if (how == kP || (how == kV && (type == kP || type == kI))) {
      Throw(InFunction("local_map",
                       absl::InvalidArgumentError(absl::StrCat(
                           "over ", mesh_.names()[m], ": which elements there are is read from ",
                           Name(how), " (", read->made_by, ")",
                           how == kP ? ", a term of a sum; AllReduce it first"
                                     : absl::StrCat(", and these are ", Name(type))))));
    }
    if (how == kV) type = kV;
  }
  typed.made_by = absl::StrCat("made as ", read->made_by, " says");
  Set(result, std::move(typed));
}

bool LocalTypes::WritesBesideOps() const {
  return absl::c_any_of(held_, [](const auto& entry) {
    const Held& held = entry.second;
    return held.buffer.version() != held.version && absl::c_linear_search(held.typed.types, kV);
  });
}

std::string LocalTypes::Describe(const Operand& operand, int m) const {
  return absl::StrCat(operand.name, " is ", Name(operand.type(m)),
                      operand.typed ? absl::StrCat(" (", operand.typed->made_by, ")")
                                    : std::string(" (made from numbers)"));
}

// Whether the op takes what is pending as it is, by its declaration: one term of a sum per rank in,
// one out.
absl::Status LocalTypes::CheckLinear(const OpDef& op, const Operands& operands,
                                     absl::Span<const Attr> attrs, int m) const {
  RankContext& context = RankContext::Current();
  // Two ranks that nobody meets: the rule is that of any number.
  DT_ASSIGN_OR_RETURN(
      const DeviceMesh line,
      DeviceMesh::FromRanks({2}, {context.rank(), context.rank() + 1}, {}, DeviceType::kMeta));
  absl::InlinedVector<SpecRef, 4> specs;
  absl::InlinedVector<const Spec*, 4> pointers;
  for (const Operand& o : operands) {
    const bool pending = o.type(m) == LocalType::kPartial;
    const Placement placement = pending ? Partial() : Replicate();
    DT_ASSIGN_OR_RETURN(SpecRef spec, context.specs().Intern(line, {placement}, o.value->shape(),
                                                             o.value->dtype()));
    specs.push_back(std::move(spec));
  }
  for (const SpecRef& spec : specs) pointers.push_back(&*spec);
  const OpCall call(op, pointers, attrs);
  const absl::StatusOr<OpPlan> plan = PlanOp(call, nullptr);
  std::string joins;  // what a plan would make a term of the sum, on one rank only
  bool as_it_is = plan.ok() && plan->strategy.outputs[0][0].is_partial();
  for (size_t i = 0; plan.ok() && i < operands.size(); ++i) {
    const bool pending = operands[i].type(m) == LocalType::kPartial;
    const bool wanted = plan->strategy.inputs[i][0].is_partial();
    // Nor may it cut what is whole, as a sum over a cut dim would.
    as_it_is &= plan->strategy.inputs[i][0] == specs[i]->placement(0);
    if (wanted && !pending) joins = operands[i].name;
  }
  if (as_it_is) return absl::OkStatus();
  if (!joins.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("the sum would count ", joins,
                                                   " once per rank; AllReduce or ReduceScatter "
                                                   "what is P first, or Convert ",
                                                   joins, " to P"));
  }
  return absl::InvalidArgumentError(
      "the op is not linear in it; AllReduce or ReduceScatter what is P first");
}

absl::StatusOr<LocalType> LocalTypes::CheckDim(const OpDef& op, const Operands& operands,
                                               absl::Span<const Attr> attrs, int m) const {
  const Operand* of[4] = {};  // the first of each type
  bool all_invariant = true;
  for (const Operand& o : operands) {
    LocalType t = o.type(m);
    all_invariant &= o.typed == nullptr || t == LocalType::kInvariant;
    // Without a gradient there is nothing that tells it from an R.
    if (t == LocalType::kInvariant && !o.grad()) t = LocalType::kReplicate;
    const Operand*& first = of[static_cast<int>(t)];
    // Of several R the one that takes a gradient matters beside an I.
    if (first == nullptr || (!first->grad() && o.grad())) first = &o;
  }
  if (all_invariant) return LocalType::kInvariant;
  const Operand *v = of[0], *p = of[1], *r = of[2], *i = of[3];
  const auto meet = [&](const Operand& a, const Operand& b, absl::string_view why) {
    return absl::InvalidArgumentError(absl::StrCat(op.name(), " over ", mesh_.names()[m], ": ",
                                                   Describe(a, m), ", ", Describe(b, m), ": ",
                                                   why));
  };
  if (i != nullptr) {
    const Operand* other = v ? v : p ? p : r != nullptr && r->grad() ? r : nullptr;
    if (other == nullptr) return LocalType::kInvariant;
    return meet(*i, *other,
                absl::StrCat("the gradient of an I is the same on all ranks, and this use gives "
                             "each rank another; Convert ",
                             i->name, " to R first (its backward all-reduces)"));
  }
  if (p == nullptr) return v != nullptr ? LocalType::kVarying : LocalType::kReplicate;
  if (v != nullptr) {
    return meet(*p, *v,
                "a term of a sum does not meet a value that each rank has its own of; AllReduce or "
                "ReduceScatter the P first, or Convert the V to P");
  }
  const absl::Status linear = CheckLinear(op, operands, attrs, m);
  if (linear.ok()) return LocalType::kPartial;
  const Operand* beside = nullptr;
  for (const Operand& o : operands) {
    if (&o != p) beside = &o;
  }
  if (beside != nullptr) return meet(*p, *beside, linear.message());
  return absl::InvalidArgumentError(absl::StrCat(op.name(), " over ", mesh_.names()[m], ": ",
                                                 Describe(*p, m), ": ", linear.message()));
}

absl::StatusOr<TypedLocal> LocalTypes::Check(const OpDef& op, const Values& inputs,
                                             absl::Span<const Attr> attrs) const {
  Operands operands;
  bool any = false;
  TypedLocal result;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const TypedLocal* typed = Find(inputs[i]);
    operands.push_back({op.InputName(static_cast<int>(i)), typed, &inputs[i]});
    if (typed == nullptr && inputs[i].requires_grad()) {
      return absl::InvalidArgumentError(
          absl::StrCat(op.name(), ": ", operands.back().name,
                       " takes a gradient and is from outside of the region; give it to LocalMap "
                       "as an input"));
    }
    any |= typed != nullptr;
  }
  if (!any) return result;  // numbers only: no types
  for (int m = 0; m < mesh_.ndim(); ++m) {
    DT_ASSIGN_OR_RETURN(const LocalType type, CheckDim(op, operands, attrs, m));
    result.types.push_back(type);
  }
  result.made_by = absl::StrCat("made by ", op.name());
  return result;
}

}  // namespace dtensor::internal
