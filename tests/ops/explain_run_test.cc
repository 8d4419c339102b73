// Explain(op) is the run: collectives, bytes and outputs, for the ops and samples of the judge
// under placements that fit and placements that do not. And it leaves nothing behind.
// Half of the placements are some of those that the judge enumerates (others with every DT_PART),
// half are drawn, an input's apart from another's. DT_EXPLAIN_CALLS: placements per sample and mesh
// (default few). DT_THOROUGH: all that the judge enumerates, told on every rank; a minute for one
// mesh dim, ten for two.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <set>

#include "absl/strings/str_join.h"
#include "dtensor/explain.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/ops/ops.h"
#include "dtensor/ops/rules.h"
#include "dtensor/ops/verify_samples.h"
#include "dtensor/tensor/status.h"
#include "dtensor/verify/claims.h"
#include "tests/common/message.h"
#include "tests/common/thin.h"

namespace dtensor::testing::explain_run_test {
namespace {

using ::testing::HasSubstr;

std::string Line(const CommEvent& e) {
  return absl::StrCat(std::string(Name(e.kind)), " ", e.mesh_dims, " ",
                      e.implicit ? "implicit " : "", e.bytes, " of ", e.payload_bytes, " ", e.op);
}
std::string Lines(const std::vector<CommEvent>& events) {
  std::string text;
  for (const CommEvent& e : events) absl::StrAppend(&text, Line(e), "\n");
  return text;
}

// One input, on this rank's side of the placements.
DTensor Make(const VerifyInput& in, const DeviceMesh& mesh, const Placements& placements) {
  std::vector<double> values = in.values;
  for (int64_t i = 0; values.size() < static_cast<size_t>(Numel(in.shape)); ++i) {
    values.push_back(static_cast<double>(1 + i * 7 % 5));
  }
  const DTensor whole = FromVector(values, in.shape, {.dtype = in.dtype, .mesh = mesh});
  return whole.Redistribute(placements);
}

// One of all kinds that the judge knows.
Placement DrawnFor(std::mt19937_64& random, const VerifyInput& in, int64_t n) {
  const uint64_t dims = in.shape.size(), choice = random() % (4 * dims + 5);
  if (choice < 4 * dims) {
    const auto d = static_cast<int>(choice / 4);
    switch (choice % 4) {
      case 0:
        return Shard(d);
      case 1:
        return Shard(d, 2);
      case 2:
        return internal::HalvesOf(in.shape[d], d, 1);
      default:
        return internal::HalvesOf(in.shape[d], d, 2);
    }
  }
  switch (choice - 4 * dims) {
    case 0:
      return Replicate();
    case 1:
      return Partial();
    case 2:
      return Partial(ReduceOp::kMax);
    case 3:
      return Partial(ReduceOp::kMin);
    default:
      return internal::FlatPieces(Numel(in.shape), n);
  }
}

bool Legal(const DeviceMesh& mesh, const VerifySample& sample, const std::vector<Placements>& p) {
  return internal::SpecsOf(mesh, sample, p).ok();  // not: e.g. bools that are pending
}

// Each input's placements are drawn until they are legal.
std::vector<Placements> Drawn(std::mt19937_64& random, const VerifySample& sample,
                              const DeviceMesh& mesh) {
  std::vector<Placements> all(sample.inputs.size(), Placements(mesh.ndim()));
  for (size_t i = 0; i < all.size(); ++i) {
    do {
      for (int m = 0; m < mesh.ndim(); ++m) {
        all[i][m] = DrawnFor(random, sample.inputs[i], mesh.size(m));
      }
    } while (!Legal(mesh, sample, all));
  }
  return all;
}

// What the judge enumerates on a mesh of one or two dims. On two it asks for pairs of what it
// claims on one, which fit as they are: in a thorough test all these. Always pairs of all that it
// asks for on one, most of which do not fit; as thinned as the judge's.
std::vector<std::vector<Placements>> Judged(const OpDef& op, const VerifySample& sample,
                                            const DeviceMesh& mesh) {
  const int64_t most = VerifyOptions().most;
  std::vector<std::vector<Placements>> all, legal;
  if (mesh.ndim() == 1) {
    all = internal::AskedOnOneDim(op, sample, mesh, most);
  } else {
    const std::vector<std::vector<Placements>> outer =
        internal::AskedOnOneDim(op, sample, DeviceMesh({mesh.size(0)}), most);
    const std::vector<std::vector<Placements>> inner =
        internal::AskedOnOneDim(op, sample, DeviceMesh({mesh.size(1)}), most);
    const auto add = [&](size_t a, size_t b) {
      all.push_back(outer[a]);
      for (size_t i = 0; i < outer[a].size(); ++i) all.back()[i].push_back(inner[b][i][0]);
    };
    for (size_t a = 0; a < std::min(outer.size(), inner.size()); ++a) add(a, a);  // nested cuts
    const size_t total = outer.size() * inner.size(), many = static_cast<size_t>(most);
    const size_t step = total <= many ? 1 : (total / many) | 1;
    for (size_t c = 0; c < total; c += step) add(c / inner.size(), c % inner.size());
    if (Thorough()) {  // it takes long to find these
      const absl::StatusOr<internal::ClaimSet> claims = internal::ClaimsOf(op, sample, most);
      EXPECT_TRUE(claims.ok()) << claims.status();
      for (const auto& list : {claims->all, claims->refused}) {
        for (const internal::Claim& c : list) {
          if (c.mesh == mesh) all.push_back(c.call.inputs);
        }
      }
    }
  }
  std::set<std::string> seen;
  for (std::vector<Placements>& p : all) {
    const std::string text = absl::StrJoin(
        p, ";", [](std::string* out, const Placements& of) { absl::StrAppend(out, ToString(of)); });
    if (Legal(mesh, sample, p) && seen.insert(text).second) legal.push_back(std::move(p));
  }
  return legal;
}

enum class Outcome { kStays, kMoved, kRefused };

// "" where the explanation is what then happens.
std::string Compare(const OpDef& op, const VerifySample& sample, const std::vector<DTensor>& made,
                    Outcome* outcome) {
  const Attrs attrs = internal::AttrsOf(sample);
  std::vector<const DTensor*> inputs;
  for (const DTensor& t : made) inputs.push_back(&t);
  const absl::StatusOr<Explanation> told = Explain(op, inputs, attrs);
  const CommTrace trace;
  const absl::StatusOr<Values> outputs = Dispatch(op, inputs, attrs);
  *outcome = !outputs.ok()            ? Outcome::kRefused
             : trace.events().empty() ? Outcome::kStays
                                      : Outcome::kMoved;
  if (told.ok() != outputs.ok()) {
    return absl::StrCat("told ", told.status().ToString(), ", got ", outputs.status().ToString());
  }
  if (!told.ok()) return told.status() == outputs.status() ? "" : "another error";
  std::string specs, told_specs = absl::StrJoin(told->output_specs, "\n");
  for (const DTensor& y : *outputs) {
    absl::StrAppend(&specs, specs.empty() ? "" : "\n", y.spec().ToString());
  }
  if (specs != told_specs) return absl::StrCat("outputs: told ", told_specs, ", got ", specs);
  const std::string events = Lines(trace.events()), told_events = Lines(told->events);
  if (events != told_events) return absl::StrCat("told\n", told_events, "got\n", events);
  return "";
}

size_t CallsPerSample() {
  const char* text = std::getenv("DT_EXPLAIN_CALLS");
  return text == nullptr ? 4 : std::strtoull(text, nullptr, 10);
}

// What a test goes through on one mesh.
struct Placed {
  const VerifyCase* of;
  const VerifySample* sample;
  std::vector<Placements> inputs;
};
std::vector<Placed> CallsOn(const Dims& mesh_shape, const std::vector<VerifyCase>& cases,
                            size_t per_sample) {
  std::vector<Placed> calls;
  const char* const part = std::getenv("DT_PART");
  const size_t turn = part == nullptr ? 0 : std::strtoull(part, nullptr, 10);
  const absl::Status status = RunFake({.world = 16}, [&](RankContext&) -> absl::Status {
    const DeviceMesh mesh = *DeviceMesh::Create(mesh_shape);
    std::mt19937_64 random(11 + turn);
    size_t number = 0, samples = 0;
    for (const VerifyCase& c : cases) {
      if (!testing::InTurn(number++, 4)) continue;
      for (const VerifySample& sample : c.samples) {
        // To find them takes longer than to run some: for every fourth sample, four times as many.
        if (Thorough() || (samples + turn) % 4 == 0) {
          const std::vector<std::vector<Placements>> judged = Judged(GetOp(c.op), sample, mesh);
          const size_t n = judged.size(), some = Thorough() ? n : std::min(n, 2 * per_sample);
          for (size_t k = 0; k < some; ++k) {  // from all over, others for the next sample
            calls.push_back({&c, &sample, judged[(k * n / some + turn / 4 + samples) % n]});
          }
        }
        for (size_t k = 0; k < per_sample - per_sample / 2; ++k) {
          calls.push_back({&c, &sample, Drawn(random, sample, mesh)});
        }
        ++samples;
      }
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  return calls;
}

enum class Kind { kSum, kMaxOrMin, kUnit, kSegmented, kFlat };
void CountKinds(const std::vector<Placements>& inputs, std::map<Kind, int64_t>* counts) {
  for (const Placements& of_input : inputs) {
    for (const Placement& p : of_input) {
      if (p.is_partial())
        ++(*counts)[p.reduce_op() == ReduceOp::kSum ? Kind::kSum : Kind::kMaxOrMin];
      if (p.is_shard() && p.unit() > 1) ++(*counts)[Kind::kUnit];
      if (p.cuts_dim() && !p.is_shard()) ++(*counts)[Kind::kSegmented];
      if (p.is_flat()) ++(*counts)[Kind::kFlat];
    }
  }
}

// All ranks run; one explains, or all of them.
void CheckSamples(const Dims& mesh_shape, size_t per_sample) {
  const std::vector<VerifyCase> cases = VerifyCases();
  const std::vector<Placed> calls = CallsOn(mesh_shape, cases, per_sample);
  std::map<Kind, int64_t> kinds;
  std::atomic<int64_t> compared = 0, moved = 0, refused = 0;
  const absl::Status status = RunSpmd(Numel(mesh_shape), [&](RankContext& rank) -> absl::Status {
    const DeviceMesh mesh = *DeviceMesh::Create(mesh_shape);
    std::mt19937_64 random(12);
    for (const Placed& call : calls) {
      std::vector<DTensor> inputs;
      std::string text;
      for (size_t i = 0; i < call.inputs.size(); ++i) {
        inputs.push_back(Make(call.sample->inputs[i], mesh, call.inputs[i]));
        absl::StrAppend(&text, " ", inputs.back().spec().ToString());
      }
      const bool drawn = static_cast<int64_t>(random() % mesh.size()) == rank.rank();
      const OpDef& op = GetOp(call.of->op);
      if (drawn || Thorough()) {
        Outcome outcome;
        EXPECT_EQ(Compare(op, *call.sample, inputs, &outcome), "")
            << call.of->op << text << " on rank " << rank.rank();
        ++compared;
        moved += outcome == Outcome::kMoved ? 1 : 0;
        refused += outcome == Outcome::kRefused ? 1 : 0;
      } else {
        const Attrs attrs = internal::AttrsOf(*call.sample);
        std::vector<const DTensor*> pointers;
        for (const DTensor& t : inputs) pointers.push_back(&t);
        Dispatch(op, pointers, attrs).status().IgnoreError();
      }
      if (rank.rank() == 0) CountKinds(call.inputs, &kinds);
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  const int64_t told = compared, ranks = Thorough() ? Numel(mesh_shape) : 1;
  EXPECT_EQ(told, static_cast<int64_t>(calls.size()) * ranks);
  std::printf("%lld told: %lld communicate, %lld are errors\n", static_cast<long long>(told),
              static_cast<long long>(moved), static_cast<long long>(refused));
  // Not by chance: enough of every kind, and neither without moves nor only errors.
  EXPECT_GT(told, 250 / testing::Thin(8));
  EXPECT_GT(moved, told / 10);
  EXPECT_LT(refused, told / 10);
  for (const Kind kind :
       {Kind::kSum, Kind::kMaxOrMin, Kind::kUnit, Kind::kSegmented, Kind::kFlat}) {
    EXPECT_GT(kinds[kind], told / (20 * ranks)) << static_cast<int>(kind);
  }
}

TEST(ExplainRun, SamplesOfTheJudgeOnTwoRanks) { CheckSamples({2}, CallsPerSample()); }
TEST(ExplainRun, SamplesOfTheJudgeOnThreeRanks) { CheckSamples({3}, CallsPerSample() / 2); }
TEST(ExplainRun, SamplesOfTheJudgeOnTwoByTwo) { CheckSamples({2, 2}, CallsPerSample() / 2); }

TEST(ExplainRun, Decompositions) {
  const absl::Status status = RunSpmd(2, [](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2});
    const DTensor x = ones({4, 1024}, {.mesh = mesh, .placements = {Shard(1)}});
    const DTensor* inputs[] = {&x};
    const Attr dim[] = {IntAttr(1)};
    DT_ASSIGN_OR_RETURN(const Explanation e, Explain(GetOp("log_softmax"), inputs, dim));
    CommTrace trace;
    const DTensor y = log_softmax(x, 1);
    EXPECT_EQ(Lines(e.events), Lines(trace.events()));
    EXPECT_GT(trace.TotalCount(), 1);
    EXPECT_LT(trace.TotalBytes(), 200);
    EXPECT_EQ(e.chosen.outputs[0], Placements({Shard(1)}));
    EXPECT_GT(e.made_of.size(), 3u);
    EXPECT_THAT(e.why, HasSubstr("as other ops"));
    EXPECT_LE(e.chosen.bytes, e.alternatives[0].bytes);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(ExplainRun, WhatIsThereFromAnEarlierCallIsNotMovedAgain) {
  const absl::Status status = RunSpmd(2, [](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2});
    const DTensor x = ones({4, 6}, {.mesh = mesh, .placements = {Shard(0)}});
    const DTensor w = ones({6, 4}, {.mesh = mesh, .placements = {Shard(0)}});
    const DTensor* inputs[] = {&x, &w};
    for (int k = 0; k < 2; ++k) {
      DT_ASSIGN_OR_RETURN(const Explanation e, Explain(GetOp("matmul"), inputs));
      DT_ASSIGN_OR_RETURN(const Explanation again, Explain(GetOp("matmul"), inputs));
      EXPECT_EQ(Lines(e.events), Lines(again.events));  // the first left nothing
      CommTrace trace;
      const DTensor y = matmul(x, w);
      EXPECT_EQ(Lines(e.events), Lines(trace.events()));
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(ExplainRun, ErrorsAreThoseOfTheCall) {
  const DTensor x = ones({2, 3}), w = ones({2, 3}), null;
  const DTensor* bad[] = {&x, &w};
  EXPECT_EQ(Explain(GetOp("matmul"), bad).status(), Dispatch(GetOp("matmul"), bad).status());
  const DTensor* without[] = {&x, &null};
  EXPECT_EQ(Explain(GetOp("matmul"), without).status(),
            Dispatch(GetOp("matmul"), without).status());
  DTensor leaf = ones({2});
  leaf.RequiresGrad();
  const DTensor* in_place[] = {&leaf, &leaf};
  const Attr one[] = {IntAttr(1)};
  EXPECT_THAT(std::string(Explain(GetOp("add_"), in_place, one).status().message()),
              HasSubstr("a leaf that requires grad cannot be changed in place"));
}

}  // namespace
}  // namespace dtensor::testing::explain_run_test
