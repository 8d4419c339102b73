#include "examples/op_catalog.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "dtensor/mesh/comm_trace.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/ops/case_samples.h"
#include "dtensor/ops/cases.h"
#include "dtensor/ops/ops.h"
#include "dtensor/ops/rules.h"
#include "dtensor/ops/verify_samples.h"
#include "dtensor/sharding.h"
#include "dtensor/tensor/kernel.h"
#include "dtensor/tensor/status.h"
#include "dtensor/verify/simulate.h"
#include "dtensor/watch.h"

namespace dtensor {
namespace {

constexpr int64_t kRanks = 2;
constexpr size_t kCalls = 2;  // of an op, in the golden file

std::string AttrText(const Attr& a) {
  if (a.kind == Attr::Kind::kNone) return "none";
  if (a.kind == Attr::Kind::kFloat) return absl::StrFormat("%g", a.d);
  if (a.kind == Attr::Kind::kInt) return absl::StrCat(a.i);
  return absl::StrCat("[", absl::StrJoin(IntSpan(a.ints, a.n), ", "), "]");
}

// "x float64 [4, 6], w float64 [6, 5]; axes=[1]"
std::string CallText(const OpDef& op, const VerifySample& sample, const Attrs& attrs) {
  std::vector<std::string> inputs, values;
  for (size_t i = 0; i < sample.inputs.size(); ++i) {
    const VerifyInput& in = sample.inputs[i];
    inputs.push_back(absl::StrCat(op.InputName(static_cast<int>(i)), " ",
                                  std::string(Name(in.dtype)), " ", ToString(in.shape)));
  }
  for (size_t a = 0; a < attrs.size(); ++a) {
    values.push_back(absl::StrCat(op.attr_names()[a], "=", AttrText(attrs[a])));
  }
  return absl::StrCat(absl::StrJoin(inputs, ", "), values.empty() ? "" : "; ",
                      absl::StrJoin(values, ", "));
}

// One call on one mesh dim of kRanks ranks, without values. Use inside a rank of that world.
class PlacedSample {
 public:
  PlacedSample(const OpDef& op, const VerifySample& sample, std::vector<Placement> inputs)
      : op_(op), attrs_(internal::AttrsOf(sample)) {
    const DeviceMesh mesh({kRanks}, {"tp"});
    for (size_t i = 0; i < inputs.size(); ++i) {
      const VerifyInput& in = sample.inputs[i];
      absl::StatusOr<SpecRef> spec =
          RankContext::Current().specs().Intern(mesh, {inputs[i]}, in.shape, in.dtype);
      if (spec.ok()) refs_.push_back(*std::move(spec));
    }
    ok_ = refs_.size() == inputs.size();
    for (const SpecRef& s : refs_) specs_.push_back(s.get());
  }
  // Whether the inputs can be placed so.
  bool ok() const { return ok_; }
  const Attrs& attrs() const { return attrs_; }
  OpCall Call() const { return OpCall(op_, specs_, attrs_); }

 private:
  const OpDef& op_;
  const Attrs attrs_;
  std::vector<SpecRef> refs_;
  std::vector<const Spec*> specs_;
  bool ok_ = false;
};

std::string OneDim(const std::vector<Placements>& operands) {
  return absl::StrJoin(operands, ", ", [](std::string* s, const Placements& p) {
    absl::StrAppend(s, p[0].ToString());
  });
}

// --- the golden file ---

// All strategies that a call has with whole inputs, with pending ones of each kind, and, for ops in
// place, with sharded ones.
std::set<std::string> StrategiesOf(const OpDef& op, const VerifySample& sample) {
  std::vector<Placement> everywhere = {Replicate(), Partial(), Partial(ReduceOp::kMax),
                                       Partial(ReduceOp::kMin)};
  for (size_t d = 0; op.in_place() && d < sample.inputs[0].shape.size(); ++d) {
    everywhere.push_back(Shard(static_cast<int>(d)));
  }
  std::set<std::string> lines;
  for (const Placement& p : everywhere) {
    const PlacedSample placed(op, sample, std::vector<Placement>(sample.inputs.size(), p));
    if (!placed.ok()) continue;
    for (const Strategy& s : LegalStrategies(placed.Call())) {
      lines.insert(absl::StrCat("  ", OneDim(s.inputs), " -> ", OneDim(s.outputs), "\n"));
    }
  }
  return lines;
}

// --- the catalog ---

std::string Joined(const std::vector<std::string>& items) { return absl::StrJoin(items, ", "); }

// As declared, or as derived for a call where the declaration is a function of it.
std::string FactorsText(const OpDef& op, const OpCall& call) {
  std::vector<std::string> texts;
  for (const OpDef::FactorSource& source : op.factor_sources()) {
    if (!source.fn) {
      texts.push_back(absl::StrCat("`", source.text, "`"));
      continue;
    }
    const absl::StatusOr<FactorText> text = source.fn(call);
    if (text.ok()) texts.push_back(absl::StrCat("`", text->text, "` (of the call below)"));
  }
  return Joined(texts);
}

std::string FormsText(const OpDef& op) {
  std::vector<std::string> texts;
  const auto condition = [](bool given) { return given ? " where the call allows" : ""; };
  for (const OpDef::LinearForm& f : op.linear_forms()) {
    texts.push_back(absl::StrCat("linear `", f.output.empty() ? "" : f.output + ": ", f.form, "`",
                                 condition(f.when != nullptr)));
  }
  if (op.has_reduce()) {
    texts.push_back(absl::StrCat("reduces by ", std::string(Name(op.reduce_op()))));
  }
  for (const OpDef::MonotoneForm& f : op.monotone_forms()) {
    texts.push_back(absl::StrCat(f.decreasing ? "decreasing" : "monotone", " in `",
                                 absl::StrJoin(f.args, f.together ? " & " : ", "), "`",
                                 condition(f.when != nullptr)));
  }
  return texts.empty() ? "none" : Joined(texts);
}

std::string WaysText(const OpDef& op) {
  std::vector<std::string> ways;
  if (op.rule()) ways.push_back("a rule");
  if (op.strategies()) ways.push_back("strategies by hand");
  if (op.decompose() != nullptr) ways.push_back("other ops, where they move less");
  if (op.view() != nullptr) ways.push_back("a view, without a kernel");
  if (op.in_place()) ways.push_back("in place");
  if (op.elementwise()) ways.push_back("flat pieces");
  return Joined(ways);
}

std::string GradientText(const OpDef& op) {
  if (op.vjp() == nullptr) return "none";
  std::vector<std::string> saved;
  for (size_t i = 0; i < op.input_names().size(); ++i) {
    if ((op.saved_inputs() >> i) & 1) saved.push_back(op.input_names()[i]);
  }
  for (size_t o = 0; o < op.output_names().size(); ++o) {
    if ((op.saved_outputs() >> o) & 1) saved.push_back(op.output_names()[o]);
  }
  return saved.empty() ? "yes" : absl::StrCat("yes; reads ", Joined(saved));
}

std::string KernelText(const OpDef& op) {
  const Kernel* kernel = FindHostKernel(op.name());
  if (kernel == nullptr) return "none";
  std::vector<std::string> types;
  for (const DType t : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16, DType::kI64,
                        DType::kI32, DType::kU8, DType::kBool}) {
    if (kernel->dtypes & DTypeBit(t)) types.push_back(std::string(Name(t)));
  }
  const bool one = op.input_names().empty();
  return absl::StrCat(one ? "" : absl::StrCat(op.InputName(0), " "), Joined(types),
                      kernel->layout == KernelLayout::kStrided ? "; any strides" : "; contiguous");
}

// What one input at a time under every placement, the others whole, is brought to.
std::string BytesTable(const OpDef& op, const VerifySample& sample) {
  std::string table = "\n| inputs | run as | bytes |\n|---|---|---|\n";
  const size_t n = sample.inputs.size(), written = op.in_place() ? op.num_outputs() : 0;
  std::set<std::string> known;
  for (size_t i = 0; i < n; ++i) {
    if (i > 0 && i < written) continue;
    std::vector<Placement> options = {Replicate()};
    for (size_t d = 0; d < sample.inputs[i].shape.size(); ++d) {
      options.push_back(Shard(static_cast<int>(d)));
    }
    options.push_back(Partial());
    for (const Placement& p : options) {
      std::vector<Placement> inputs(n, Replicate());
      inputs[i] = p;
      if (i == 0) std::fill_n(inputs.begin(), written, p);  // what an op writes goes together
      const PlacedSample placed(op, sample, inputs);
      if (!placed.ok()) continue;
      const std::string from = absl::StrJoin(inputs, ", ", [](std::string* s, const Placement& q) {
        absl::StrAppend(s, q.ToString());
      });
      if (!known.insert(from).second) continue;
      const OpCall call = placed.Call();
      const absl::StatusOr<OpPlan> plan = PlanOp(call, nullptr);
      if (!plan.ok()) {  // in place: the input would have to move
        absl::StrAppend(&table, "| ", from, " | refused | |\n");
        continue;
      }
      if (plan->strategy.outputs.empty() || plan->strategy.inputs.empty()) return "";
      absl::StrAppendFormat(&table, "| %s | %s -> %s | %.0f |\n", from,
                            OneDim(plan->strategy.inputs), OneDim(plan->strategy.outputs),
                            plan->strategy.cost_bytes);
    }
  }
  return table;
}

std::string Section(const OpDef& op, const VerifySample& sample) {
  const PlacedSample whole(op, sample, std::vector<Placement>(sample.inputs.size(), Replicate()));
  std::string text = absl::StrCat("\n## ", op.name(), "\n\n`", op.signature(), "`\n\n");
  const auto line = [&text](const char* what, const std::string& value) {
    if (!value.empty()) absl::StrAppend(&text, "- ", what, ": ", value, "\n");
  };
  line("factors", FactorsText(op, whole.Call()));
  line("forms", FormsText(op));
  line("also", WaysText(op));
  line("gradient", GradientText(op));
  if (op.view() == nullptr) line("CPU kernel", KernelText(op));
  line("call", CallText(op, sample, whole.attrs()));
  return text + BytesTable(op, sample);
}

// `text(op, samples)` of every op that has samples, by name.
template <class TextFn>
absl::StatusOr<std::string> ForAllOps(const TextFn& text) {
  std::vector<VerifyCase> cases = VerifyCases();
  std::sort(cases.begin(), cases.end(),
            [](const VerifyCase& a, const VerifyCase& b) { return a.op < b.op; });
  std::string all;
  DT_RETURN_IF_ERROR(RunFake({.world = kRanks, .rank = 0}, [&](RankContext&) {
    for (const VerifyCase& c : cases) absl::StrAppend(&all, text(GetOp(c.op), c.samples));
    return absl::OkStatus();
  }));
  return all;
}

// --- functions along a sharded dim ---

struct LineFunction {
  const char* call;
  Values (*run)(const DTensor& x);
};
constexpr LineFunction kLineFunctions[] = {
    {"argmin(x, 1)", [](const DTensor& x) -> Values { return {argmin(x, 1)}; }},
    {"argmax(x, 1)", [](const DTensor& x) -> Values { return {argmax(x, 1)}; }},
    {"argmax(x)", [](const DTensor& x) -> Values { return {argmax(x)}; }},
    {"batch_norm(t(x), null, null, null, null, true)",
     [](const DTensor& x) -> Values { return {batch_norm(t(x), {}, {}, {}, {}, true)}; }},
    {"cummax(x, 1)", [](const DTensor& x) { return cummax(x, 1); }},
    {"cummin(x, 1)", [](const DTensor& x) { return cummin(x, 1); }},
    {"cumprod(x, 1)", [](const DTensor& x) -> Values { return {cumprod(x, 1)}; }},
    {"cumsum(x, 1)", [](const DTensor& x) -> Values { return {cumsum(x, 1)}; }},
    {"flip(x, {1})", [](const DTensor& x) -> Values { return {flip(x, {1})}; }},
    {"layer_norm(x, {4096})", [](const DTensor& x) -> Values { return {layer_norm(x, {4096})}; }},
    {"log_softmax(x, 1)", [](const DTensor& x) -> Values { return {log_softmax(x, 1)}; }},
    {"logsumexp(x, {1})", [](const DTensor& x) -> Values { return {logsumexp(x, {1})}; }},
    {"max(x, 1)", [](const DTensor& x) { return max(x, 1); }},
    {"norm(x, 2, {1})", [](const DTensor& x) -> Values { return {norm(x, 2, {1})}; }},
    {"rms_norm(x, {4096})", [](const DTensor& x) -> Values { return {rms_norm(x, {4096})}; }},
    {"roll(x, {1}, {1})", [](const DTensor& x) -> Values { return {roll(x, {1}, {1})}; }},
    {"roll(x, {-100}, {1})", [](const DTensor& x) -> Values { return {roll(x, {-100}, {1})}; }},
    {"roll(x, {1500}, {1})", [](const DTensor& x) -> Values { return {roll(x, {1500}, {1})}; }},
    {"softmax(x, 1)", [](const DTensor& x) -> Values { return {softmax(x, 1)}; }},
    {"std(x, {1})", [](const DTensor& x) -> Values { return {std(x, {1})}; }},
    {"topk(x, 32, 1)", [](const DTensor& x) { return topk(x, 32, 1); }},
    {"var(x, {1})", [](const DTensor& x) -> Values { return {var(x, {1})}; }},
};

// What the first rank receives, pending results reduced, against gathering the dim.
absl::StatusOr<std::string> LineTable() {
  constexpr int64_t kLineRanks = 4, kLines = 8, kSize = 4096;
  constexpr double kGathered = 4.0 * kLines * kSize * (kLineRanks - 1) / kLineRanks;
  std::string table = absl::StrFormat(
      "\n## Along a sharded dim\n\nFunctions of x float32 [%d, %d] with `S(1)` on %d ranks: bytes "
      "that the first of them receives until nothing is pending, and their share of what gathering "
      "dim 1 would be, %.0f bytes.\n\n| call | result | bytes | of gathering "
      "|\n|---|---|---|---|\n",
      kLines, kSize, kLineRanks, kGathered);
  DT_RETURN_IF_ERROR(RunFake({.world = kLineRanks, .rank = 0}, [&](RankContext&) -> absl::Status {
    DT_ASSIGN_OR_RETURN(const DeviceMesh mesh, DeviceMesh::Create({kLineRanks}));
    const DTensor x = zeros({kLines, kSize}, {.mesh = mesh, .placements = {Shard(1)}});
    for (const LineFunction& f : kLineFunctions) {
      const CommTrace trace;
      Values y = f.run(x);
      for (DTensor& t : y) t = Settled(t);
      const auto bytes = static_cast<double>(trace.TotalBytes());
      absl::StrAppendFormat(&table, "| `%s` | %s | %.0f | %.2f %% |\n", f.call,
                            y[0].placements()[0].ToString(), bytes, 100 * bytes / kGathered);
    }
    return absl::OkStatus();
  }));
  return table;
}

// Indices of all elements of a line in disorder, which lie as it does.
DTensor Places(const DTensor& x) {
  const Placements placements(x.placements().begin(), x.placements().end());
  return remainder(arange(0, 61 * x.numel(), 61, {DType::kI64, x.mesh(), placements}), x.numel());
}

// Of a line; how much there is of the result, or to send, depends on values.
constexpr LineFunction kFoundFunctions[] = {
    {"gather(x, 0, i)", [](const DTensor& x) -> Values { return {gather(x, 0, Places(x))}; }},
    {"index_select(x, 0, i)",
     [](const DTensor& x) -> Values { return {index_select(x, 0, Places(x))}; }},
    {"kthvalue(x, 5000)", [](const DTensor& x) { return kthvalue(x, 5000); }},
    {"masked_scatter(x, gt(x, 0.5), x)",
     [](const DTensor& x) -> Values { return {masked_scatter(x, gt(x, 0.5), x)}; }},
    {"masked_select(x, gt(x, 0.5))",
     [](const DTensor& x) -> Values { return {masked_select(x, gt(x, 0.5))}; }},
    {"median(x)", [](const DTensor& x) -> Values { return {median(x)}; }},
    {"nonzero(gt(x, 0.5))", [](const DTensor& x) -> Values { return {nonzero(gt(x, 0.5))}; }},
    {"quantile(x, 0.3)", [](const DTensor& x) -> Values { return {quantile(x, 0.3)}; }},
    {"scatter(x, 0, i, x)",
     [](const DTensor& x) -> Values { return {scatter(x, 0, Places(x), x)}; }},
    {"scatter_add(x, 0, i, x)",
     [](const DTensor& x) -> Values { return {scatter_add(x, 0, Places(x), x)}; }},
    {"sort(x)", [](const DTensor& x) { return sort(x); }},
    {"unique(x)", [](const DTensor& x) { return unique(x); }},
    {"unique(x, true, true)", [](const DTensor& x) { return unique(x, true, true); }},
    {"unique_consecutive(x, true)", [](const DTensor& x) { return unique_consecutive(x, true); }},
};

// What the first rank receives, on ranks that hold values.
absl::StatusOr<std::string> FoundTable() {
  constexpr int64_t kLineRanks = 4, kSize = 16384;
  constexpr double kGathered = 8.0 * kSize * (kLineRanks - 1) / kLineRanks;
  std::string table = absl::StrFormat(
      "\n## Of a sharded line\n\nFunctions of x float64 [%d] with `S(0)` on %d ranks, of 1,000 "
      "different numbers in [0, 1) in disorder, and i int64 [%d] alike, its indices in disorder: "
      "bytes "
      "that the first of them receives, and their share of what gathering x would be, %.0f "
      "bytes.\n\n| call | result | bytes | of gathering "
      "|\n|---|---|---|---|\n",
      kSize, kLineRanks, kSize, kGathered);
  std::vector<double> values(kSize);
  for (int64_t i = 0; i < kSize; ++i) values[i] = static_cast<double>(i * 7919 % 1000) / 1000;
  DT_RETURN_IF_ERROR(RunSpmd(kLineRanks, [&](RankContext& context) -> absl::Status {
    DT_ASSIGN_OR_RETURN(const DeviceMesh mesh, DeviceMesh::Create({kLineRanks}));
    const DTensor x = FromVector(values, {kSize}, {DType::kF64, mesh, {Shard(0)}});
    for (const LineFunction& f : kFoundFunctions) {
      const CommTrace trace;
      const Values y = f.run(x);
      if (context.rank() != 0) continue;
      const auto bytes = static_cast<double>(trace.TotalBytes());
      absl::StrAppendFormat(&table, "| `%s` | %s | %.0f | %.2f %% |\n", f.call,
                            y[0].placements()[0].ToString(), bytes, 100 * bytes / kGathered);
    }
    return absl::OkStatus();
  }));
  return table;
}

// --- all functions ---

// What the calls of a case line run on one rank: "`mul`, `sum`".
std::string RunsText(const OpCase& function) {
  std::set<std::string> ops;
  const NoGrad no_grad;
  for (const CaseSample& sample : SamplesOf(function)) {
    SampleArgs args(sample, sample.Make(1), /*writes=*/true);
    const WatchCalls watch(
        [&](const OpDef& op, Inputs, absl::Span<const Attr>) { ops.insert(op.name()); });
    function.call(args);
  }
  return ops.empty() ? "none" : absl::StrCat("`", absl::StrJoin(ops, "`, `"), "`");
}

absl::StatusOr<std::string> FunctionTable() {
  std::map<std::string, std::string> functions;
  DT_RETURN_IF_ERROR(RunSpmd(1, [&](RankContext&) -> absl::Status {
    for (const OpCase& c : AllCases().cases) functions[c.name] = RunsText(c);
    return absl::OkStatus();
  }));
  std::string table = absl::StrCat(
      "\n## All functions\n\nThe ", functions.size(),
      " functions of ops/ by name, each with the ops that its sample calls run on one rank, "
      "without "
      "gradients; on a mesh, where a dim that they work along is sharded, others take their place. "
      "Shapes, dtypes and errors stand with the declaration, in the headers that "
      "dtensor/ops/ops.h includes.\n\n| function | runs |\n|---|---|\n");
  for (const auto& [name, runs] : functions) {
    absl::StrAppend(&table, "| `", name, "` | ", runs, " |\n");
  }
  absl::StrAppend(&table,
                  "\n## Decided against\n\nFunctions of PyTorch's that there are not.\n\n"
                  "| function | reason |\n|---|---|\n");
  for (const DecidedAgainst& d : OpsDecidedAgainst()) {
    absl::StrAppend(&table, "| `", d.name, "` | ", d.reason, " |\n");
  }
  return table;
}

}  // namespace

absl::StatusOr<std::string> OpCatalog() {
  DT_ASSIGN_OR_RETURN(const std::string lines, LineTable());
  DT_ASSIGN_OR_RETURN(const std::string found, FoundTable());
  DT_ASSIGN_OR_RETURN(const std::string functions, FunctionTable());
  DT_ASSIGN_OR_RETURN(const std::string sections,
                      ForAllOps([](const OpDef& op, const std::vector<VerifySample>& samples) {
                        return Section(op, samples[0]);
                      }));
  return absl::StrCat(
      "# All ops\n\nWritten by `./dev ops` from the declarations; `docs/guide/ops.md` explains the "
      "words. The tables: one call on two ranks, one input placed, the others whole; what it then "
      "runs as and the bytes that a rank receives for it. A CPU kernel goes by the dtype of the "
      "first "
      "input; a gradient reads what is named with it. Functions that are made of several ops have "
      "no "
      "entry of their own: all functions stand at the end, those that work along a sharded dim "
      "before them, and what was decided against behind them.\n",
      sections, lines, found, functions);
}

absl::StatusOr<std::string> DerivedStrategies() {
  return ForAllOps([](const OpDef& op, const std::vector<VerifySample>& samples) {
    std::string text;
    for (size_t k = 0; k < samples.size() && k < kCalls; ++k) {
      absl::StrAppend(&text, op.name(), ": ",
                      CallText(op, samples[k], internal::AttrsOf(samples[k])), "\n",
                      absl::StrJoin(StrategiesOf(op, samples[k]), ""));
    }
    return text;
  });
}

}  // namespace dtensor
