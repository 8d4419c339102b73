#include "tests/fuzz/ops_fuzz.h"

#include <algorithm>
#include <cmath>
#include <mutex>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/ops/rules.h"
#include "dtensor/rehearsal.h"
#include "dtensor/tensor/status.h"
#include "tests/fuzz/fuzz_calls.h"

namespace dtensor::testing {
namespace {

struct FuzzInput {
  bool first = false;  // is the first one once more
  Shape shape;
  DType dtype = DType::kF64;
  std::vector<double> values;
  Placements placements;
};
struct FuzzCase {
  const FuzzCall* call;
  CaseSample sample;
  Dims mesh;
  std::vector<FuzzInput> inputs;
  bool grad = false;
  std::vector<uint8_t> rest;  // what attributes are read from
};

// --- decoding ------------------------------------------------------------------------------------

DType TypeFor(const CaseTensor& t, DType common, Bytes& b) {
  if (t.dtype == DType::kBool) return b.Chance(240) ? DType::kBool : common;
  if (t.below > 0) return b.Chance(240) ? DType::kI64 : DType::kI32;
  if (b.Chance(24)) return static_cast<DType>(b.Below(kNumDTypes));
  return common;
}

Placement AnyPlacement(const Shape& shape, int64_t ranks, Bytes& b) {
  const int64_t kind = b.Below(8);
  if (kind == 0) return Partial();
  if (kind == 1) return Partial(static_cast<ReduceOp>(b.Below(5)));
  if (shape.empty() || kind == 2) return Replicate();
  const int dim = static_cast<int>(b.Below(static_cast<int64_t>(shape.size())));
  if (kind == 3) return Shard(dim, b.Between(1, 3));
  if (kind == 4 && b.Chance(192)) {
    const int64_t first = b.Below(shape[dim] + 1);
    return SegmentedShard(dim, {{first, b.Between(1, 2)}, {shape[dim] - first, b.Between(1, 3)}});
  }
  if (kind == 5 && b.Chance(96)) {
    std::vector<int64_t> lengths(static_cast<size_t>(ranks), 0);
    int64_t left = Numel(shape);
    for (size_t r = 0; r + 1 < lengths.size(); ++r) {
      lengths[r] = b.Below(left + 1);
      left -= lengths[r];
    }
    lengths.back() = left;
    return FlatShard(std::move(lengths));
  }
  return Shard(dim);
}

FuzzInput DecodeInput(const CaseTensor& tensor, DType common, const Dims& mesh, Bytes& b) {
  FuzzInput in;
  const Shape& shape = tensor.shape;
  in.shape = shape;
  in.dtype = TypeFor(tensor, common, b);
  const bool indices = tensor.below > 0 && b.Chance(230);
  const uint64_t seed = b.Next();
  uint64_t state = seed * 0x9E3779B97F4A7C15u + 99;
  for (int64_t i = 0; i < Numel(shape); ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    const auto r = static_cast<int64_t>(state >> 40);
    in.values.push_back(static_cast<double>(indices || in.dtype == DType::kU8 ? r % 3 : r % 7 - 3));
    if (in.dtype == DType::kBool) in.values.back() = static_cast<double>(r % 2);
  }
  for (int64_t n : mesh) in.placements.push_back(AnyPlacement(shape, n, b));
  return in;
}

FuzzCase Decode(const uint8_t* data, size_t size) {
  Bytes b(data, size);
  FuzzCase c;
  c.call = &FuzzCalls()[static_cast<size_t>(b.Next() * 256 + b.Next()) % FuzzCalls().size()];
  static const std::vector<Dims> meshes = {{2}, {3}, {4}, {2, 2}, {1}, {2, 1}};
  c.mesh = meshes[static_cast<size_t>(b.Below(static_cast<int64_t>(meshes.size())))];
  c.grad = b.Chance(128);
  static constexpr DType kCommon[] = {DType::kF64, DType::kF64, DType::kF32, DType::kBF16,
                                      DType::kF16, DType::kI64, DType::kI32};
  const DType common = kCommon[b.Below(7)];
  c.sample = c.call->Draw(b);
  for (const CaseTensor& tensor : c.sample.tensors) {
    c.inputs.push_back(DecodeInput(tensor, common, c.mesh, b));
    c.inputs.back().first = c.inputs.size() > 1 && b.Chance(8);
  }
  for (int i = 0; i < 16; ++i) c.rest.push_back(b.Next());
  return c;
}

std::string Describe(const FuzzCase& c) {
  std::vector<std::string> inputs;
  for (const FuzzInput& in : c.inputs) {
    inputs.push_back(in.first ? "the first"
                              : absl::StrCat(TypeName(in.dtype), " ", ToString(in.shape), " ",
                                             ToString(in.placements)));
  }
  for (const auto& [name, text] : c.sample.others) {
    inputs.push_back(absl::StrCat(name, "=", text));
  }
  return absl::StrCat(c.call->name, "(", absl::StrJoin(inputs, ", "), ") on ",
                      absl::StrJoin(c.mesh, "x"), c.grad ? ", gradients" : "");
}

// --- running -------------------------------------------------------------------------------------

struct Answer {
  std::vector<std::vector<double>> values;  // outputs, then gradients
  std::vector<DType> dtypes;
};

void Keep(const DTensor& t, Answer* answer) {
  answer->dtypes.push_back(t.defined() ? t.dtype() : DType::kBool);
  answer->values.push_back(t.defined() ? t.ToVector<double>() : std::vector<double>());
}

// One call: what it gives and communicates.
struct Doings {
  absl::Status status;
  Values outputs;
  std::vector<std::string> specs, events;
};

// Functions whose exchanges go to the owners of rows (ops/index/owners.h) or sort a line
// (ops/sort/sharded_sort.h): a rehearsal, which has neither indices nor elements, does not know how
// much.
bool GoesByValues(absl::string_view function) {
  constexpr absl::string_view kAll[] = {
      "gather",       "gather_backward", "index_select", "take",       "take_along_dim",
      "scatter",      "scatter_add",     "index_add",    "index_copy", "index_fill",
      "put",          "getitem",         "index_put",    "embedding",  "embedding_bag",
      "index_reduce", "scatter_reduce",  "sort",         "argsort",    "msort",
      "quantile",     "nanquantile"};
  absl::ConsumeSuffix(&function, "_");  // in place the same way
  return std::find(std::begin(kAll), std::end(kAll), function) != std::end(kAll);
}

Doings WhatItDoes(const FuzzCase& c, const std::vector<DTensor>& inputs) {
  Doings doings;
  Bytes attrs(c.rest.data(), c.rest.size());
  const CommTrace trace;
  try {
    doings.outputs = c.call->Run(c.sample, inputs, attrs);
  } catch (const Error& error) {
    doings.status = error.status();
  }
  for (const DTensor& y : doings.outputs) {
    doings.specs.push_back(y.defined() ? y.spec().ToString() : "null");
  }
  for (const CommEvent& e : trace.events()) {
    const bool by_values = e.kind == CollectiveKind::kExchange && GoesByValues(e.op);
    doings.events.push_back(absl::StrCat(std::string(Name(e.kind)), " ", e.mesh_dims, " ",
                                         by_values ? "some" : absl::StrCat(e.bytes), " ", e.op,
                                         e.implicit ? " implicit" : ""));
  }
  return doings;
}

// The same as a rehearsal sees it.
Doings Foretold(const FuzzCase& c, const std::vector<DTensor>& inputs) {
  const CostModel cost;
  const Rehearsal rehearsal(cost);
  Doings doings = WhatItDoes(c, inputs);
  doings.outputs.clear();  // without values, and foreign outside
  return doings;
}

// Internal unless the call did what the rehearsal had told. Values it does not know: nothing of it
// stands where they were asked for, or where a kernel refused them.
absl::Status SameDoings(const Doings& told, const Doings& done) {
  if (IsNoValues(told.status) || IsRankLocal(done.status)) return absl::OkStatus();
  if (!told.status.ok()) {
    if (told.status.code() == done.status.code()) return absl::OkStatus();
    return absl::InternalError(absl::StrCat("a rehearsal told ", told.status.ToString(),
                                            ", the call gave ", done.status.ToString()));
  }
  if (!done.status.ok()) return absl::OkStatus();
  if (told.specs == done.specs && told.events == done.events) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("a rehearsal told ", absl::StrJoin(told.specs, ", "),
                                          " by ", absl::StrJoin(told.events, ", "),
                                          "; the call gave ", absl::StrJoin(done.specs, ", "),
                                          " by ", absl::StrJoin(done.events, ", ")));
}

absl::Status RunCase(const FuzzCase& c, const DeviceMesh& mesh, Answer* answer) {
  std::vector<DTensor> inputs;
  bool differentiable = c.grad && !c.call->draws();
  for (const FuzzInput& in : c.inputs) {
    if (in.first) {
      inputs.push_back(inputs[0]);
      continue;
    }
    absl::StatusOr<Tensor> whole = Tensor::FromVector(in.values, in.shape, in.dtype);
    if (!whole.ok()) return whole.status();
    DTensor x = DistributeTensor(*whole, mesh, Placements(mesh.ndim()));
    if (!mesh.is_self()) x = clone(x).Redistribute(in.placements);
    if (differentiable && IsFloating(in.dtype)) {
      x = x.Detach();
      x.RequiresGrad();
    }
    inputs.push_back(std::move(x));
  }
  const Doings told = mesh.is_self() ? Doings() : Foretold(c, inputs);
  const Doings done = WhatItDoes(c, inputs);
  if (!mesh.is_self()) DT_RETURN_IF_ERROR(SameDoings(told, done));
  DT_RETURN_IF_ERROR(done.status);
  const Values& outputs = done.outputs;
  for (const DTensor& y : outputs) Keep(y, answer);
  if (outputs.empty()) return absl::OkStatus();  // a split into no pieces
  const DTensor& y = outputs[0];
  if (!differentiable || !y.defined() || !y.requires_grad()) return absl::OkStatus();
  absl::StatusOr<Tensor> ones = Tensor::Full(y.shape(), y.dtype(), 1);
  if (!ones.ok()) return ones.status();
  y.Backward(DistributeTensor(*ones, mesh, Placements(mesh.ndim())));
  for (const DTensor& x : inputs) {
    if (x.defined() && x.requires_grad() && x.is_leaf()) Keep(x.grad(), answer);
  }
  return absl::OkStatus();
}

absl::Status RunOn(const FuzzCase& c, const Dims& mesh_shape, Answer* answer) {
  SpmdOptions options;
  options.timeout = absl::Seconds(60);
  options.pin = false;
  return RunSpmd(
      Numel(mesh_shape),
      [&](RankContext& context) -> absl::Status {
        Answer mine;
        const DeviceMesh mesh =
            mesh_shape.empty() ? DeviceMesh::Self() : ValueOrThrow(DeviceMesh::Create(mesh_shape));
        const absl::Status status = RunCase(c, mesh, &mine);
        if (context.rank() == 0) *answer = std::move(mine);
        return status;
      },
      options);
}

double Tolerance(DType t) {
  if (t == DType::kF64) return 1e-8;
  return t == DType::kF32 ? 1e-3 : IsFloating(t) ? 0.1 : 0;
}

// `rounds`: what the coarsest input leaves uncertain in results of any floating dtype.
std::string Differs(const Answer& got, const Answer& want, double rounds) {
  if (got.values.size() != want.values.size()) {
    return absl::StrCat(got.values.size(), " results, must be ", want.values.size());
  }
  for (size_t o = 0; o < got.values.size(); ++o) {
    if (got.dtypes[o] != want.dtypes[o] || got.values[o].size() != want.values[o].size()) {
      return absl::StrCat("result ", o, " has ", got.values[o].size(), " elements of ",
                          TypeName(got.dtypes[o]), ", must have ", want.values[o].size(), " of ",
                          TypeName(want.dtypes[o]));
    }
    double scale = 1;
    for (double w : want.values[o]) scale = std::max(scale, std::isfinite(w) ? std::fabs(w) : 0);
    for (size_t i = 0; i < got.values[o].size(); ++i) {
      const double g = got.values[o][i], w = want.values[o][i];
      // What is infinite in one term of a pending sum may be not a number in their sum.
      if (g == w || (!std::isfinite(g) && !std::isfinite(w))) continue;
      const double own = Tolerance(got.dtypes[o]);
      if (std::fabs(g - w) <= (own == 0 ? 0 : std::max(own, rounds)) * scale) continue;
      return absl::StrCat("result ", o, " element ", i, " is ", g, ", must be ", w);
    }
  }
  return "";
}

// An error that says what was wrong; Internal is an exception nobody expected, DeadlineExceeded a
// hang.
bool IsHonest(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kOutOfRange:
    case absl::StatusCode::kUnimplemented:
    case absl::StatusCode::kResourceExhausted:
    case absl::StatusCode::kNotFound:
      return !status.message().empty();
    default:
      return false;
  }
}

}  // namespace

std::string DescribeFuzzCall(const uint8_t* data, size_t size) {
  return Describe(Decode(data, size));
}

FuzzOutcome FuzzOneCall(const uint8_t* data, size_t size) {
  const FuzzCase c = Decode(data, size);
  FuzzOutcome outcome;
  Answer want, got;
  const absl::Status one = RunOn(c, {}, &want), many = RunOn(c, c.mesh, &got);
  outcome.error = !one.ok() || !many.ok();
  for (const absl::Status& status : {one, many}) {
    if (!status.ok() && !IsHonest(status)) outcome.wrong = status.ToString();
  }
  double rounds = 0;
  for (const FuzzInput& input : c.inputs) rounds = std::max(rounds, Tolerance(input.dtype));
  if (one.ok() && many.ok()) outcome.wrong = Differs(got, want, rounds);
  if (!one.ok() && many.ok()) {
    outcome.wrong = absl::StrCat("an answer where one rank refuses: ", one.ToString());
  }
  return outcome;
}

}  // namespace dtensor::testing
