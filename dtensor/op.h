// Op: one declaration of what an op is and how it shards. Everything else (shape inference, legal
// placements, Partial outputs, costs) is derived from it. docs/guide/ops.md is the manual,
// docs/adr/0002-one-declaration-per-op.md the reasoning.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "dtensor/mesh/spec.h"
#include "dtensor/tensor/kernel.h"

namespace dtensor {

class OpDef;
class VjpCall;
class DTensor;

class Values;  // dtensor/distributed_tensor.h
using Attrs = absl::InlinedVector<Attr, 4>;

constexpr Attr IntAttr(int64_t v) {
  return {Attr::Kind::kInt, v, static_cast<double>(v), nullptr, 0};
}
constexpr Attr BoolAttr(bool v) { return IntAttr(v ? 1 : 0); }
constexpr Attr DTypeAttr(DType t) { return IntAttr(static_cast<int64_t>(t)); }
Attr FloatAttr(double v);
inline Attr IntsAttr(IntSpan v) {  // `v` must outlive the call
  return {Attr::Kind::kInts, 0, 0, v.data(), static_cast<int64_t>(v.size())};
}

// A call before it runs: what rules, checks and attribute functions see. Global metadata only, so
// every rank decides alike. Attributes read here enter the cache key; others do not.
class OpCall {
 public:
  OpCall(const OpDef& op, absl::Span<const Spec* const> inputs, absl::Span<const Attr> attrs)
      : op_(op), inputs_(inputs), attrs_(attrs) {}

  const OpDef& op() const { return op_; }
  int num_inputs() const { return static_cast<int>(inputs_.size()); }
  const Spec& in(int i) const { return *inputs_[i]; }
  const Shape& shape(int i) const { return inputs_[i]->shape(); }
  DType dtype(int i) const { return inputs_[i]->dtype(); }
  const DeviceMesh& mesh() const { return inputs_[0]->mesh(); }

  // By name from the signature (DT_CHECK that it exists).
  int64_t Int(absl::string_view attr) const { return Read(attr).i; }
  bool Bool(absl::string_view attr) const { return Read(attr).i != 0; }
  double Float(absl::string_view attr) const { return Read(attr).d; }
  DType Type(absl::string_view attr) const { return static_cast<DType>(Read(attr).i); }
  IntSpan Ints(absl::string_view attr) const {
    const Attr& a = Read(attr);
    return IntSpan(a.ints, a.n);
  }
  uint32_t attrs_read() const { return read_; }  // bit i: attribute i was read
  // All of them, in the signature's order; counts as reading each.
  absl::Span<const Attr> attrs() const {
    read_ = static_cast<uint32_t>((uint64_t{1} << attrs_.size()) - 1);
    return attrs_;
  }

 private:
  const Attr& Read(absl::string_view name) const;
  const OpDef& op_;
  absl::Span<const Spec* const> inputs_;
  absl::Span<const Attr> attrs_;
  mutable uint32_t read_ = 0;
};

// A factor string and the sizes that no input dim gives (new axes, the parts of a split).
struct FactorText {
  std::string text;
  std::vector<std::pair<std::string, int64_t>> sizes;
};
using FactorFn = std::function<absl::StatusOr<FactorText>(const OpCall&)>;

// One strategy for one mesh dim: a placement per input and per output. `cost_us`: what it takes
// besides redistribution, from 0 up; it counts where strategies move equally many bytes.
struct StrategyRow {
  std::vector<Placement> inputs, outputs;
  double cost_us = 0;
};
// What a Rule decides for the whole mesh.
struct ShardingDecision {
  std::vector<Placements> inputs, outputs;
};
using StrategiesFn = std::function<absl::StatusOr<std::vector<StrategyRow>>(const OpCall&)>;
using RuleFn = std::function<absl::StatusOr<ShardingDecision>(const OpCall&)>;
using CheckFn = std::function<absl::Status(const OpCall&)>;
using DTypeFn = std::function<absl::StatusOr<DType>(const OpCall&, int output)>;
using ShapeFn = std::function<absl::StatusOr<std::vector<Shape>>(const OpCall&)>;
// The local view of `in` with local shape `out_shape`.
// `factors`: as a kernel's; empty where the whole tensor is viewed. Calls no ops.
using ViewFn = absl::StatusOr<Tensor> (*)(const Tensor& in, const Shape& out_shape,
                                          absl::Span<const Attr> attrs,
                                          absl::Span<const FactorRange> factors);
using DecomposeFn = Values (*)(absl::Span<const DTensor> inputs, absl::Span<const Attr> attrs);
using VjpFn = void (*)(VjpCall&);
// What a view takes of input 0: every `step`-th index of `dim` from `start` on; `drops`: one index,
// and the dim is gone.
struct ViewCut {
  int dim;
  int64_t start, step;
  bool drops;
};
using CutFn = ViewCut (*)(absl::Span<const Attr> attrs);

// The declaration. Built once, by chaining, in a registration function (ops/families.inc);
// read-only afterwards. A malformed declaration ends the process with a message (it is a bug, found
// at the first start).
class OpDef {
 public:
  // "name(x, y; attr, attr) -> out, out": one input at least; "xs..." is any number of them; "->
  // out" may be left out.
  explicit OpDef(absl::string_view signature);

  // How it shards: several calls are a union, earlier rows win ties.
  OpDef& Factors(absl::string_view text);
  OpDef& Factors(FactorFn fn);
  // When a Partial passes: a sum of products, per output ("y: g(x) + b") or for the only output.
  OpDef& Linear(absl::string_view form);
  OpDef& Linear(std::vector<std::string> forms);
  // The forms hold only where `when` says so.
  OpDef& LinearIf(std::function<bool(const OpCall&)> when, absl::string_view form);
  OpDef& Reduces(ReduceOp op);
  // "x" or "{x, y}": Partial(max|min) of one of them passes. "x & y" (or the one name of a variadic
  // input): of any of them together, all of one kind. For ops of one output; through a reduction
  // (Reduces) only its own kind passes. True only if it holds for every value, those of ranks that
  // have nothing included: the least or greatest of an integer type, an infinity.
  OpDef& Monotone(absl::string_view args) { return MonotoneIf(nullptr, args); }
  OpDef& Decreasing(absl::string_view args) {  // same, max and min swap
    return DecreasingIf(nullptr, args);
  }
  // Only where `when` says so, of what is pending (kMax or kMin).
  using MonotoneWhen = std::function<bool(const OpCall&, ReduceOp pending)>;
  OpDef& MonotoneIf(MonotoneWhen when, absl::string_view args) {
    return AddMonotone(args, false, std::move(when));
  }
  OpDef& DecreasingIf(MonotoneWhen when, absl::string_view args) {
    return AddMonotone(args, true, std::move(when));
  }
  // The kernel is told which of the factor's indices a rank has: KernelCall::factors, in the order
  // of these calls. They must be one range, so the factor is cut into blocks only. A factor
  // string must name it, also where Strategies or a Rule decide what is sharded.
  OpDef& NeedsOffset(absl::string_view factor);
  // The same for a kernel that reads only how many they are (FactorRange::local): any partition.
  OpDef& NeedsCount(absl::string_view factor);
  // The kernel treats its operands as runs of elements, whatever their dims: it may be given
  // flat pieces of them (FlatShard). Pointwise ops and views that keep the order of elements do so
  // without saying it.
  OpDef& Elementwise();
  OpDef& Strategies(std::vector<StrategyRow> rows);
  OpDef& Strategies(StrategiesFn fn);
  OpDef& Rule(RuleFn fn);
  OpDef& Shapes(ShapeFn fn);  // output shapes, where there are no factors to derive them from
  OpDef& Decompose(DecomposeFn fn);

  // Uniform errors beyond shapes. Without one, floating inputs have to be of one dtype.
  OpDef& Check(CheckFn fn);
  OpDef& OutDType(DTypeFn fn);  // default: dtype of the first input
  OpDef& OutDType(DType dtype);
  OpDef& Pointwise();  // the kernel wants inputs expanded to the output's shape
  // No kernel: the output is a view of input 0. `reorders` false: of a row-major tensor it is
  // row-major again.
  OpDef& View(ViewFn fn, bool reorders = true);
  // The view is a part of input 0: gradients of parts are put together before they are reduced.
  OpDef& Cuts(CutFn fn);
  // The first inputs are also the outputs, each with the spec of its own: never redistributed. The
  // kernel's out[o] is in[o].
  OpDef& InPlace();
  // Gradient. `saves` lists the inputs and outputs that `fn` reads, "x, w" or "y"; the name of a
  // variadic input is all of them. Not an input that the op overwrites in place. "x for w": `fn`
  // reads the input x for the gradient of w alone ("x for w & b"), so x is kept only where that is
  // wanted, and `fn` asks VjpCall::needs first.
  OpDef& Vjp(VjpFn fn, absl::string_view saves = "");

  const std::string& name() const { return name_; }
  int id() const { return id_; }
  int num_outputs() const { return static_cast<int>(outputs_.size()); }
  bool variadic() const { return variadic_; }
  // Whether it takes so many inputs.
  bool Takes(size_t inputs) const {
    return inputs == inputs_.size() ? inputs != 0 : variadic_ && inputs != 0;
  }
  // Name of input i ("xs0", "xs1", ... for a variadic one).
  std::string InputName(int i) const;
  const std::vector<std::string>& input_names() const { return inputs_; }
  const std::vector<std::string>& output_names() const { return outputs_; }
  const std::vector<std::string>& attr_names() const { return attrs_; }
  bool pointwise() const { return pointwise_; }
  bool in_place() const { return in_place_; }
  ViewFn view() const { return view_; }
  bool view_reorders() const { return view_reorders_; }
  CutFn cuts() const { return cuts_; }
  VjpFn vjp() const { return vjp_; }
  uint32_t saved_inputs() const { return saved_inputs_; }
  // Whether backward reads the input where gradients of the inputs `wanted` are wanted (bit i, the
  // last for all from 31 on). Of a variadic op all or none.
  bool Saves(size_t input, uint32_t wanted) const {
    return ((saved_inputs_ >> std::min<size_t>(input, 31)) & 1) &&
           (readers_.empty() || (readers_[input] & wanted) != 0);
  }
  uint32_t saved_outputs() const { return saved_outputs_; }
  DecomposeFn decompose() const { return decompose_; }
  const std::string& signature() const { return signature_; }

  // --- what dtensor/sharding.cc reads ---
  struct FactorSource {
    std::string text;
    FactorFn fn;
  };
  struct LinearForm {
    std::string output;  // "" = the only one
    std::string form;
    std::function<bool(const OpCall&)> when;
  };
  struct MonotoneForm {
    std::vector<std::string> args;
    bool decreasing = false;
    bool together = false;
    MonotoneWhen when;
  };
  const std::vector<FactorSource>& factor_sources() const { return factors_; }
  const std::vector<LinearForm>& linear_forms() const { return linear_; }
  const std::vector<MonotoneForm>& monotone_forms() const { return monotone_; }
  bool has_reduce() const { return has_reduce_; }
  ReduceOp reduce_op() const { return reduce_op_; }
  const std::vector<std::string>& offsets() const { return offsets_; }
  bool in_blocks(absl::string_view factor) const;  // NeedsOffset names it
  bool elementwise() const {
    return elementwise_ || pointwise_ || (view_ != nullptr && !view_reorders_);
  }
  const StrategiesFn& strategies() const { return strategies_; }
  const RuleFn& rule() const { return rule_; }
  const ShapeFn& shapes() const { return shapes_; }
  const CheckFn& check() const { return check_; }
  const DTypeFn& out_dtype() const { return out_dtype_; }
  void NotePlanned() const { std::atomic_ref(planned_).store(true, std::memory_order_relaxed); }

 private:
  friend class OpRegistry;
  friend class OpMutator;            // dtensor/verify/mutate.cc
  friend class OutsideRegistration;  // RegisterRule, RegisterStrategies
  OpDef& AddMonotone(absl::string_view args, bool decreasing, MonotoneWhen when);
  void CheckSaves() const;
  std::string signature_, name_;
  std::vector<std::string> inputs_, attrs_, outputs_;
  bool variadic_ = false, pointwise_ = false, in_place_ = false, has_reduce_ = false;
  bool elementwise_ = false;
  ReduceOp reduce_op_ = ReduceOp::kSum;
  std::vector<FactorSource> factors_;
  std::vector<LinearForm> linear_;
  std::vector<MonotoneForm> monotone_;
  std::vector<std::string> offsets_, counted_;  // counted_: those of offsets_ by NeedsCount
  StrategiesFn strategies_;
  RuleFn rule_;
  ShapeFn shapes_;
  CheckFn check_;
  DTypeFn out_dtype_;
  ViewFn view_ = nullptr;
  bool view_reorders_ = true;
  DecomposeFn decompose_ = nullptr;
  CutFn cuts_ = nullptr;
  VjpFn vjp_ = nullptr;
  uint32_t saved_inputs_ = 0, saved_outputs_ = 0;
  std::vector<uint32_t> readers_;  // whose gradients read input i; empty: all read all
  int id_ = -1;
  mutable bool planned_ = false;  // by any rank; atomic
};

// All ops of the process. Registration takes a lock; an OpDef never moves or goes away.
class OpRegistry {
 public:
  // The reference is for chaining the declaration; a name registered twice is an error of the
  // program (DT_CHECK).
  static OpDef& Add(absl::string_view signature);
  // Errors: Unimplemented naming the op, the nearest names and how to register one.
  static absl::StatusOr<const OpDef*> Find(absl::string_view name);
  static std::vector<const OpDef*> All();
};
inline OpDef& Op(absl::string_view signature) { return OpRegistry::Add(signature); }

// How registered ops shard, said from outside their declarations, of shipped ones too
// (RegisterOps() registers those): in place of what was declared. Kernel, checks, shapes and
// gradient stay. Before the first call of the op in the process, as plans are kept.
//   Errors: throws Unimplemented for an unknown op, InvalidArgument for a null function,
//   FailedPrecondition after its first call.
void RegisterRule(const std::vector<std::string>& ops, RuleFn rule);
void RegisterStrategies(const std::vector<std::string>& ops, StrategiesFn strategies);
void RegisterStrategies(const std::vector<std::string>& ops, std::vector<StrategyRow> rows);

}  // namespace dtensor
