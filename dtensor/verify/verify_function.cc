#include "dtensor/verify/verify_function.h"

#include <algorithm>
#include <cmath>
#include <mutex>
#include <optional>
#include <random>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "dtensor/distribute.h"
#include "dtensor/impl.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/tensor/status.h"
#include "dtensor/verify/claims.h"
#include "dtensor/verify/simulate.h"

namespace dtensor {
namespace {

using internal::Draw;
using internal::WholeValues;

// How a result lies in the memory of one device: random numbers fill it in this order, and what is
// a view is not changed in place while recording.
struct Layout {
  bool is_view = false;
  std::vector<int> dims;  // of more than one element, the outermost in memory first
  bool operator==(const Layout&) const = default;
};

Layout LayoutOf(const DTensor& y, const std::vector<DTensor>& inputs) {
  Layout layout;
  if (!y.defined()) return layout;
  for (const DTensor& x : inputs) {
    if (x.impl() == y.impl()) return layout;
  }
  layout.is_view = y.impl()->is_view;
  for (int d = 0; d < y.ndim(); ++d) {
    if (y.size(d) > 1) layout.dims.push_back(d);
  }
  const IntSpan strides = MemoryStrides(*y.impl());
  if (strides.empty()) return layout;
  std::stable_sort(layout.dims.begin(), layout.dims.end(),
                   [&](int a, int b) { return strides[a] > strides[b]; });
  return layout;
}

// What the function gives, whole.
struct Answer {
  std::vector<DType> dtypes;
  std::vector<Layout> layouts;
  std::vector<WholeValues> values;
  std::vector<std::vector<WholeValues>> gradients;  // of each result in each input, or empty
};

double Tolerance(DType t) {
  if (t == DType::kF64) return 1e-8;
  return t == DType::kF32 ? 1e-4 : IsFloating(t) ? 0.05 : 0;
}

// "" where all are near each other. `far`: infinities of all kinds are alike.
std::string Differs(const WholeValues& got, const WholeValues& want, double tolerance, bool far) {
  if (got.size() != want.size()) {
    return absl::StrCat("has ", got.size(), " elements, must have ", want.size());
  }
  double scale = 1;
  for (double w : want) scale = std::max(scale, std::isfinite(w) ? std::fabs(w) : 0);
  for (size_t i = 0; i < got.size(); ++i) {
    const double g = got[i], w = want[i];
    if (g == w || (std::isnan(g) && std::isnan(w))) continue;
    if (far && !std::isfinite(g) && !std::isfinite(w)) continue;
    if (std::fabs(g - w) <= tolerance * scale) continue;
    return absl::StrCat("element ", i, " is ", g, ", must be ", w);
  }
  return "";
}

// Placements of one input on one mesh dim of `ranks`. Terms of narrow floats would round.
std::vector<Placement> Choices(const VerifyInput& in, int64_t ranks, bool extremes) {
  std::vector<Placement> all = {Replicate()};
  for (int d = 0; d < static_cast<int>(in.shape.size()); ++d) {
    all.push_back(Shard(d));
    all.push_back(Shard(d, 2));
    all.push_back(internal::HalvesOf(in.shape[d], d));
  }
  if (!in.shape.empty()) all.push_back(internal::FlatPieces(Numel(in.shape), ranks));
  if (IsNarrow(in.dtype)) return all;
  if (in.dtype != DType::kBool) all.push_back(Partial());
  if (extremes) all.insert(all.end(), {Partial(ReduceOp::kMax), Partial(ReduceOp::kMin)});
  return all;
}

class FunctionJudge {
 public:
  FunctionJudge(const FunctionSample& sample, const FunctionOptions& options)
      : sample_(sample), options_(options) {}

  absl::Status Truth() {
    return RunSpmd(1, [&](RankContext&) {
      truth_ = Run(DeviceMesh::Self(), std::vector<Placements>(sample_.inputs.size()), {}, false);
      return absl::OkStatus();
    });
  }

  void Judge(const Dims& shape, VerifyReport* report) const {
    std::vector<Try> tries = Tries(shape);
    const absl::Status status =
        RunSpmd(Numel(shape),
                [&](RankContext& context) -> absl::Status {
                  DT_ASSIGN_OR_RETURN(const DeviceMesh mesh, DeviceMesh::Create(shape));
                  for (size_t t = 0; t < tries.size(); ++t)
                    One(mesh, context.rank(), t % 2 != 0, &tries[t]);
                  return absl::OkStatus();
                },
                {.pin = false});
    for (const Try& t : tries) {
      ++report->candidates;
      report->combinations += t.refused ? 0 : 1;
      if (!t.why.empty()) report->wrong.push_back(Finding(shape, t));
    }
    if (status.ok()) return;
    VerifyFinding all;
    all.row = absl::StrCat(sample_.text, " on mesh ", absl::StrJoin(shape, "x"));
    all.why = status.ToString();
    report->wrong.push_back(std::move(all));
  }

 private:
  struct Try {
    std::vector<Placements> inputs;
    std::string why = {};  // of the first rank that finds something
    bool refused = false;
  };

  // Each input alone in each way, and then all of them in ways that are drawn.
  std::vector<Try> Tries(IntSpan mesh) const {
    std::vector<Try> tries;
    const size_t n = sample_.inputs.size();
    const auto whole = [&] { return std::vector<Placements>(n, Placements(mesh.size())); };
    tries.push_back({whole()});
    std::mt19937_64 random(Numel(mesh) + mesh.size());
    const auto any = [&](const VerifyInput& in, int64_t ranks) {
      const std::vector<Placement> choices = Choices(in, ranks, options_.pending_extremes);
      return choices[random() % choices.size()];
    };
    for (size_t i = 0; i < n; ++i) {
      const VerifyInput& in = sample_.inputs[i];
      for (const Placement& p : Choices(in, mesh[0], options_.pending_extremes)) {
        tries.push_back({whole()});
        tries.back().inputs[i][0] = p;
        if (mesh.size() > 1) tries.back().inputs[i][1] = any(in, mesh[1]);
      }
    }
    const size_t alone = tries.size();
    while (n > 1 && tries.size() < 2 * alone) {
      tries.push_back({whole()});
      for (size_t i = 0; i < n; ++i) {
        for (size_t m = 0; m < mesh.size(); ++m) {
          tries.back().inputs[i][m] = any(sample_.inputs[i], mesh[m]);
        }
      }
    }
    const int64_t most = options_.most;
    if (static_cast<int64_t>(tries.size()) <= most) return tries;
    std::vector<Try> thinned;
    for (int64_t k = 0; k < most; ++k) {
      thinned.push_back(std::move(tries[k * static_cast<int64_t>(tries.size()) / most]));
    }
    return thinned;
  }

  // On one rank of those that go through all tries alike.
  void One(const DeviceMesh& mesh, int64_t rank, bool pending, Try* t) const {
    std::string why;
    bool refused = false;
    try {
      Dims at;
      mesh.Coordinate(rank, &at);
      why = Differs(Run(mesh, Legal(mesh, t->inputs), at, pending));
    } catch (const Error& error) {
      if (error.status().code() == absl::StatusCode::kAborted) throw;
      refused = options_.in_place && (absl::IsFailedPrecondition(error.status()) ||
                                      absl::IsInvalidArgument(error.status()));
      if (!refused) why = absl::StrCat("fails: ", error.what());
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    t->refused |= refused;
    if (t->why.empty() && !why.empty()) t->why = absl::StrCat("rank ", rank, ": ", why);
  }

  // Those that no spec has, as a flat piece of a pending value, are Replicate instead.
  std::vector<Placements> Legal(const DeviceMesh& mesh, std::vector<Placements> inputs) const {
    for (size_t i = 0; i < inputs.size(); ++i) {
      const VerifyInput& in = sample_.inputs[i];
      for (size_t m = inputs[i].size(); m-- > 0;) {
        auto& specs = RankContext::Current().specs();
        if (specs.Intern(mesh, inputs[i], in.shape, in.dtype).ok()) break;
        inputs[i][m] = Replicate();
      }
    }
    return inputs;
  }

  static DTensor Placed(const Tensor& part, const Shape& shape, const DeviceMesh& mesh,
                        const Placements& placements) {
    FromLocalOptions options;
    options.shape = shape;
    const DTensor local = DistributeTensor(part, DeviceMesh::Self(mesh.device()), {});
    return mesh.is_self() ? local : FromLocal(local, mesh, placements, options);
  }

  std::vector<DTensor> Inputs(const DeviceMesh& mesh, const std::vector<Placements>& placed,
                              IntSpan at) const {
    std::vector<DTensor> inputs;
    for (size_t i = 0; i < placed.size(); ++i) {
      const VerifyInput& in = sample_.inputs[i];
      const Tensor part = ValueOrThrow(internal::PartOf(in, i, Draw::kSigned, mesh, placed[i], at));
      inputs.push_back(Placed(part, in.shape, mesh, placed[i]));
      if (sample_.differentiable[i]) inputs.back().RequiresGrad();
    }
    return inputs;
  }

  // `pending`: gradients of results that are not sharded come as pending sums.
  Answer Run(const DeviceMesh& mesh, const std::vector<Placements>& placed, IntSpan at,
             bool pending) const {
    Answer answer;
    const std::vector<DTensor> given = Inputs(mesh, placed, at);
    const Values results = sample_.call(given);
    for (const DTensor& y : results) {
      answer.dtypes.push_back(y.defined() ? y.dtype() : DType::kBool);
      answer.layouts.push_back(LayoutOf(y, given));
      answer.values.push_back(y.defined() ? y.ToVector<double>() : WholeValues());
    }
    for (size_t o = 0; o < results.size(); ++o) {
      answer.gradients.emplace_back();
      if (!results[o].defined() || !results[o].requires_grad()) continue;
      const std::vector<DTensor> inputs = Inputs(mesh, placed, at);
      const DTensor y = sample_.call(inputs)[o];
      Placements terms(mesh.ndim());
      for (int m = 0; pending && m < mesh.ndim(); ++m) {
        if (y.placements()[m].is_replicate()) terms[m] = Partial();
      }
      const Tensor dy = ValueOrThrow(internal::PartOf({y.shape(), y.dtype()}, placed.size() + o,
                                                      Draw::kSigned, mesh, terms, at));
      y.Backward(Placed(dy, y.shape(), mesh, terms));
      for (const DTensor& x : inputs) {
        const bool has = x.requires_grad() && x.grad().defined();
        answer.gradients[o].push_back(has ? x.grad().ToVector<double>() : WholeValues());
      }
    }
    return answer;
  }

  std::string Differs(const Answer& got) const {
    if (got.dtypes != truth_.dtypes) {
      return absl::StrCat(got.dtypes.size(),
                          " results whose number or dtypes are not those of the ",
                          truth_.dtypes.size(), " on one rank");
    }
    for (size_t o = 0; o < got.values.size(); ++o) {
      const Layout &here = got.layouts[o], &there = truth_.layouts[o];
      if (!(here == there)) {
        const char* const kinds[] = {"no view", "a view"};
        return absl::StrCat("result ", o, " is ", kinds[here.is_view], " with dims [",
                            absl::StrJoin(here.dims, ","),
                            "] from the outermost in memory, must be ", kinds[there.is_view],
                            " with [", absl::StrJoin(there.dims, ","), "]");
      }
      const double tolerance = Tolerance(got.dtypes[o]);
      std::string why = dtensor::Differs(got.values[o], truth_.values[o], tolerance, false);
      if (!why.empty()) return absl::StrCat("result ", o, " ", why);
      if (got.gradients[o].size() != truth_.gradients[o].size()) {
        return absl::StrCat("result ", o, " has a gradient on a mesh or one rank alone");
      }
      for (size_t i = 0; i < got.gradients[o].size(); ++i) {
        why = dtensor::Differs(got.gradients[o][i], truth_.gradients[o][i],
                               std::max(tolerance, Tolerance(sample_.inputs[i].dtype)), true);
        if (!why.empty()) return absl::StrCat("gradient of result ", o, " in input ", i, " ", why);
      }
    }
    return "";
  }

  VerifyFinding Finding(const Dims& mesh, const Try& t) const {
    VerifyFinding finding;
    std::vector<std::string> placed;
    for (const Placements& p : t.inputs) placed.push_back(ToString(p));
    finding.pattern = absl::StrJoin(placed, ", ");
    finding.row =
        absl::StrCat(sample_.text, ": ", finding.pattern, " on mesh ", absl::StrJoin(mesh, "x"));
    finding.why = t.why;
    return finding;
  }

  const FunctionSample& sample_;
  const FunctionOptions& options_;
  Answer truth_;
  mutable std::mutex mutex_;  // guards the tries
};

}  // namespace

namespace {

absl::Status CheckSample(const std::string& name, const FunctionSample& sample) {
  if (!sample.call) {
    return absl::InvalidArgumentError(absl::StrCat(name, ": the function of a sample is null"));
  }
  if (sample.differentiable.size() != sample.inputs.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": a sample says of ", sample.differentiable.size(),
                     " inputs whether they are differentiable, and has ", sample.inputs.size()));
  }
  return internal::CheckValues(sample.inputs);
}

}  // namespace

absl::StatusOr<VerifyReport> VerifyFunction(const std::string& name,
                                            const std::vector<FunctionSample>& samples,
                                            const FunctionOptions& options) {
  VerifyReport report;
  for (const FunctionSample& sample : samples) {
    DT_RETURN_IF_ERROR(CheckSample(name, sample));
    FunctionJudge judge(sample, options);
    const absl::Status status = judge.Truth();
    if (!status.ok()) {
      return absl::Status(status.code(),
                          absl::StrCat(name, "(", sample.text, "): ", status.message()));
    }
    for (const Dims& mesh : options.meshes) judge.Judge(mesh, &report);
  }
  return report;
}

}  // namespace dtensor
