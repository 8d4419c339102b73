#include "dtensor/op.h"

#include <algorithm>
#include <bit>
#include <map>
#include <mutex>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "dtensor/forms.h"
#include "dtensor/names.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

std::vector<std::string> SplitNames(absl::string_view list) {
  std::vector<std::string> names;
  for (absl::string_view part : absl::StrSplit(list, ',')) {
    part = absl::StripAsciiWhitespace(part);
    if (!part.empty()) names.emplace_back(part);
  }
  return names;
}

// Bit set of the names of `list` found in `names`, or'ed into *mask; unknown names stay in *rest.
uint32_t MaskOf(const std::vector<std::string>& list, const std::vector<std::string>& names,
                std::vector<std::string>* rest) {
  uint32_t mask = 0;
  for (const std::string& name : list) {
    auto it = std::find(names.begin(), names.end(), name);
    if (it == names.end()) {
      rest->push_back(name);
    } else {
      mask |= 1u << (it - names.begin());
    }
  }
  return mask;
}

// The first name that stands twice; null: none does.
const std::string* Repeated(const std::vector<std::string>& names) {
  for (auto it = names.begin(); it != names.end(); ++it) {
    if (std::find(names.begin(), it, *it) != it) return &*it;
  }
  return nullptr;
}

struct Registry {
  std::mutex mutex;
  std::vector<std::unique_ptr<OpDef>> ops;
  std::map<std::string, OpDef*> by_name;
};
Registry& TheRegistry() {
  static Registry* registry = new Registry;
  return *registry;
}

}  // namespace

Attr FloatAttr(double v) {
  const bool fits = v >= -9.2e18 && v <= 9.2e18;  // false for NaN
  return {Attr::Kind::kFloat, fits ? static_cast<int64_t>(v) : 0, v, nullptr, 0};
}

const Attr& OpCall::Read(absl::string_view name) const {
  const std::vector<std::string>& names = op_.attr_names();
  for (size_t i = 0; i < names.size(); ++i) {
    if (name == names[i]) {
      read_ |= 1u << i;
      return attrs_[i];
    }
  }
  CheckFailed(__FILE__, __LINE__, "attribute exists",
              absl::StrCat(op_.name(), " has no attribute ", name));
}

OpDef::OpDef(absl::string_view signature) : signature_(signature) {
  const size_t open = signature.find('('), close = signature.rfind(')');
  DT_CHECK_MSG(close != absl::string_view::npos && open < close,
               absl::StrCat("op signature needs name(inputs; attrs): ", signature));
  name_ = std::string(absl::StripAsciiWhitespace(signature.substr(0, open)));
  std::pair<absl::string_view, absl::string_view> parts =
      absl::StrSplit(signature.substr(open + 1, close - open - 1), absl::MaxSplits(';', 1));
  inputs_ = SplitNames(parts.first);
  attrs_ = SplitNames(parts.second);
  absl::string_view tail = absl::StripAsciiWhitespace(signature.substr(close + 1));
  if (absl::ConsumePrefix(&tail, "->")) outputs_ = SplitNames(tail);
  if (outputs_.empty()) outputs_ = {"out"};
  if (!inputs_.empty() && absl::EndsWith(inputs_.back(), "...")) {
    DT_CHECK_MSG(inputs_.size() == 1, "a variadic input must be the only one");
    inputs_[0].resize(inputs_[0].size() - 3);
    variadic_ = true;
  }
  DT_CHECK_MSG(!inputs_.empty(),
               absl::StrCat("an op runs where its inputs are, so it needs one: ", signature));
  DT_CHECK_MSG(inputs_.size() <= 30 && attrs_.size() <= 30, "too many operands");
  DT_CHECK_MSG(!name_.empty(), absl::StrCat("an op needs a name: ", signature));
  for (const std::vector<std::string>* names : {&inputs_, &attrs_, &outputs_}) {
    const std::string* twice = Repeated(*names);
    DT_CHECK_MSG(twice == nullptr,
                 absl::StrCat("two operands have one name, ", *twice, ": ", signature));
  }
}

OpDef& OpDef::Factors(absl::string_view text) {
  factors_.push_back({std::string(text), nullptr});
  return *this;
}
OpDef& OpDef::Factors(FactorFn fn) {
  factors_.push_back({"", std::move(fn)});
  return *this;
}
OpDef& OpDef::Linear(absl::string_view form) { return LinearIf(nullptr, form); }
OpDef& OpDef::Linear(std::vector<std::string> forms) {
  for (const std::string& form : forms) LinearIf(nullptr, form);
  return *this;
}
OpDef& OpDef::LinearIf(std::function<bool(const OpCall&)> when, absl::string_view form) {
  std::string output;
  const size_t colon = form.find(':');
  if (colon != absl::string_view::npos) {
    output = std::string(absl::StripAsciiWhitespace(form.substr(0, colon)));
    form = form.substr(colon + 1);
    DT_CHECK_MSG(std::find(outputs_.begin(), outputs_.end(), output) != outputs_.end(),
                 absl::StrCat(name_, ": Linear names no output: ", output));
  }
  DT_CHECK_MSG(variadic_ || ParseLinear(form, inputs_).ok(),
               absl::StrCat(name_, ": bad linear form \"", form, "\""));
  linear_.push_back({std::move(output), std::string(form), std::move(when)});
  return *this;
}
OpDef& OpDef::Reduces(ReduceOp op) {
  DT_CHECK_MSG(
      op != ReduceOp::kAvg,
      absl::StrCat(name_, ": parts may be unequal, whose means have no mean: reduce sums"));
  has_reduce_ = true;
  reduce_op_ = op;
  return *this;
}
OpDef& OpDef::AddMonotone(absl::string_view args, bool decreasing, MonotoneWhen when) {
  const absl::string_view list = absl::StripSuffix(absl::StripPrefix(args, "{"), "}");
  const bool together = variadic_ || absl::StrContains(list, '&');
  MonotoneForm form{SplitNames(absl::StrReplaceAll(list, {{"&", ","}})), decreasing, together,
                    std::move(when)};
  for (const std::string& arg : form.args) {
    DT_CHECK_MSG(std::find(inputs_.begin(), inputs_.end(), arg) != inputs_.end(),
                 absl::StrCat(name_, ": Monotone names no input: ", arg));
  }
  DT_CHECK_MSG(outputs_.size() == 1, absl::StrCat(name_, ": Monotone needs an op of one output"));
  monotone_.push_back(std::move(form));
  return *this;
}
OpDef& OpDef::NeedsOffset(absl::string_view factor) {
  offsets_.emplace_back(factor);
  return *this;
}
OpDef& OpDef::NeedsCount(absl::string_view factor) {
  counted_.emplace_back(factor);
  return NeedsOffset(factor);
}
bool OpDef::in_blocks(absl::string_view factor) const {
  const auto names = [factor](const std::vector<std::string>& list) {
    return std::any_of(list.begin(), list.end(), [&](const auto& name) { return name == factor; });
  };
  return names(offsets_) && !names(counted_);
}
OpDef& OpDef::Elementwise() {
  elementwise_ = true;
  return *this;
}
OpDef& OpDef::Strategies(std::vector<StrategyRow> rows) {
  strategies_ = [rows = std::move(rows)](const OpCall&) { return rows; };
  return *this;
}
OpDef& OpDef::Strategies(StrategiesFn fn) {
  strategies_ = std::move(fn);
  return *this;
}
OpDef& OpDef::Rule(RuleFn fn) {
  rule_ = std::move(fn);
  return *this;
}
OpDef& OpDef::Shapes(ShapeFn fn) {
  shapes_ = std::move(fn);
  return *this;
}
OpDef& OpDef::Decompose(DecomposeFn fn) {
  decompose_ = fn;
  return *this;
}
OpDef& OpDef::Check(CheckFn fn) {
  check_ = std::move(fn);
  return *this;
}
OpDef& OpDef::OutDType(DTypeFn fn) {
  out_dtype_ = std::move(fn);
  return *this;
}
OpDef& OpDef::OutDType(DType dtype) {
  out_dtype_ = [dtype](const OpCall&, int) { return dtype; };
  return *this;
}
OpDef& OpDef::Pointwise() {
  pointwise_ = true;
  return *this;
}
OpDef& OpDef::View(ViewFn fn, bool reorders) {
  DT_CHECK_MSG(outputs_.size() == 1, absl::StrCat(name_, ": View needs an op of one output"));
  view_reorders_ = reorders;
  view_ = fn;
  return *this;
}
OpDef& OpDef::Cuts(CutFn fn) {
  cuts_ = fn;
  return *this;
}
OpDef& OpDef::InPlace() {
  DT_CHECK_MSG(outputs_.size() <= inputs_.size(),
               absl::StrCat(name_, ": InPlace needs an input for each output"));
  in_place_ = true;
  CheckSaves();
  return *this;
}
OpDef& OpDef::Vjp(VjpFn fn, absl::string_view saves) {
  vjp_ = fn;
  std::vector<std::string> names = SplitNames(saves), rest, none;
  readers_.clear();
  for (std::string& name : names) {
    const std::pair<std::string, std::string> parts = absl::StrSplit(name, " for ");
    if (parts.second.empty()) continue;
    const uint32_t saved = MaskOf({parts.first}, inputs_, &none);
    const uint32_t readers =
        MaskOf(SplitNames(absl::StrReplaceAll(parts.second, {{"&", ","}})), inputs_, &none);
    DT_CHECK_MSG(none.empty() && !variadic_,
                 absl::StrCat(name_, ": \"", name, "\" in Vjp's saves names no inputs of it"));
    if (readers_.empty()) readers_.assign(inputs_.size(), ~uint32_t{0});
    readers_[std::countr_zero(saved)] = readers;
    name = parts.first;
  }
  saved_inputs_ = MaskOf(names, inputs_, &rest);
  if (variadic_ && saved_inputs_ != 0) saved_inputs_ = ~uint32_t{0};  // one name for all
  saved_outputs_ = MaskOf(rest, outputs_, &none);
  DT_CHECK_MSG(none.empty(),
               absl::StrCat(name_, ": Vjp saves unknown ", absl::StrJoin(none, ", ")));
  CheckSaves();
  return *this;
}

// When a backward comes, what an op has written to is no longer what it read.
void OpDef::CheckSaves() const {
  if (!in_place_ || variadic_) return;
  for (size_t i = 0; i < outputs_.size(); ++i) {
    DT_CHECK_MSG(((saved_inputs_ >> i) & 1) == 0,
                 absl::StrCat(name_, ": Vjp saves ", inputs_[i],
                              ", which the op overwrites in place; what it becomes is output ",
                              outputs_[i], ", under a name of its own"));
  }
}

std::string OpDef::InputName(int i) const {
  if (variadic_) return absl::StrCat(inputs_[0], i);
  if (i >= static_cast<int>(inputs_.size())) return absl::StrCat("#", i);  // one too many
  return inputs_[i];
}

OpDef& OpRegistry::Add(absl::string_view signature) {
  auto def = std::make_unique<OpDef>(signature);
  Registry& registry = TheRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  DT_CHECK_MSG(registry.by_name.count(def->name()) == 0,
               absl::StrCat("op registered twice: ", def->name()));
  def->id_ = static_cast<int>(registry.ops.size());
  OpDef* raw = def.get();
  registry.by_name[raw->name()] = raw;
  registry.ops.push_back(std::move(def));
  return *raw;
}

absl::StatusOr<const OpDef*> OpRegistry::Find(absl::string_view name) {
  Registry& registry = TheRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  auto it = registry.by_name.find(std::string(name));
  if (it != registry.by_name.end()) return it->second;
  std::vector<std::string> all;
  for (const auto& [known, def] : registry.by_name) all.push_back(known);
  return absl::UnimplementedError(absl::StrCat(
      "[", name,
      "] no op of this name is registered; nearest: ", absl::StrJoin(NearestNames(name, all), ", "),
      ". Register one with Op(\"", name, "(x)\") and .Factors, .Strategies, .Rule or .Decompose"));
}

// Changes declarations that are made.
class OutsideRegistration {
 public:
  // `given`: there is something to register.
  static void Apply(absl::string_view registers, const std::vector<std::string>& names, bool given,
                    absl::FunctionRef<void(OpDef&)> change) {
    std::vector<OpDef*> ops;  // all or none
    for (const std::string& name : names) {
      ops.push_back(const_cast<OpDef*>(ValueOrThrow(OpRegistry::Find(name))));
      if (!std::atomic_ref(ops.back()->planned_).load(std::memory_order_relaxed)) continue;
      ThrowIfError(absl::FailedPreconditionError(absl::StrCat(
          "[", name, "] how it shards cannot be changed after its first call; register before")));
    }
    if (!given) Throw(InFunction(registers, absl::InvalidArgumentError("the function is null")));
    for (OpDef* op : ops) {
      op->rule_ = nullptr;
      op->strategies_ = nullptr;
      op->decompose_ = nullptr;
      change(*op);
    }
  }
};

void RegisterRule(const std::vector<std::string>& ops, RuleFn rule) {
  OutsideRegistration::Apply("RegisterRule", ops, rule != nullptr,
                             [&](OpDef& op) { op.Rule(rule); });
}
void RegisterStrategies(const std::vector<std::string>& ops, StrategiesFn strategies) {
  OutsideRegistration::Apply("RegisterStrategies", ops, strategies != nullptr,
                             [&](OpDef& op) { op.Strategies(strategies); });
}
void RegisterStrategies(const std::vector<std::string>& ops, std::vector<StrategyRow> rows) {
  OutsideRegistration::Apply("RegisterStrategies", ops, /*given=*/true,
                             [&](OpDef& op) { op.Strategies(rows); });
}

std::vector<const OpDef*> OpRegistry::All() {
  Registry& registry = TheRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  std::vector<const OpDef*> all;
  for (const auto& def : registry.ops) all.push_back(def.get());
  return all;
}

}  // namespace dtensor
