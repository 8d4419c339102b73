// Random programs on 2 to 8 ranks give what one rank gives, bit for bit, and fail where it fails,
// on every rank with the same error. DT_PROGRAMS runs more of them, DT_PROGRAMS_SEED others,
// DT_PROGRAMS_FIRST those from that number on. A failure is printed as the shortest program that
// still fails.
#include "tests/ops/programs.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "dtensor/impl.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/mesh/limited.h"
#include "dtensor/rng/generator.h"
#include "dtensor/tensor/status.h"
#include "tests/common/random_layout.h"
#include "tests/common/thin.h"

namespace dtensor::testing {
namespace {

// Errors that only a mesh has, each the same on all its ranks: what was asked for would need a
// redistribution that cannot be. The program ends there.
constexpr const char* kRefusals[] = {
    "this was to be a view of a tensor that first had to be redistributed",
    "in-place op cannot keep",
    "has no meaning",  // random numbers in the terms of a pending maximum
    "would overlap",   // random numbers in a moved copy of an expanded tensor
    // What a function makes of several ops may end with a view on a mesh, and with one op on a
    // rank.
    "a view cannot be changed in place while recording",
};

bool IsRefusal(const absl::Status& status) {
  for (const char* text : kRefusals) {
    if (absl::StrContains(status.message(), text)) return true;
  }
  return false;
}

struct Setting {
  Dims mesh;
  bool packed = false;
  bool backward = true;  // else what was recorded is dropped: nothing of it may be left
};

// What a rank must have as all have it: errors, and gradients where one rank alone has none.
using Heard = std::vector<std::string>;

// An error without the rank that it was met on. What one rank alone meets its peers are told in
// other words, so of such a one only that it is one.
std::string WithoutRank(const absl::Status& status, int64_t rank, int64_t ranks) {
  if (IsRankLocal(status)) return "an error of one rank";
  return absl::StrReplaceAll(
      absl::StrCat(absl::StatusCodeToString(status.code()), ": ", status.message()),
      {{absl::StrCat("(rank ", rank, " of ", ranks, ")"), ""}});
}

struct Verdict {
  std::string wrong;              // "" if all agree
  bool only_one_refuses = false;  // the mesh has gradients that one rank refuses
  int refused = -1;               // the step that only the mesh refused
  std::string text;               // the program, with what rank 0 saw
};

std::string Show(const ValueBits& bits, DType dtype) {
  std::vector<std::string> texts;
  for (size_t i = 0; i < bits.size() && i < 24; ++i) {
    texts.push_back(IsFloating(dtype) ? absl::StrCat(std::bit_cast<double>(bits[i]))
                                      : absl::StrCat(bits[i]));
  }
  return absl::StrCat("{", absl::StrJoin(texts, ", "), bits.size() > 24 ? ", ..." : "", "}");
}

// One rank of the mesh repeats the reference.
class Replay {
 public:
  Replay(const Reference& want, const Setting& setting, std::string* text, Heard* heard)
      : want_(want),
        machine_(*DeviceMesh::Create(setting.mesh)),
        backward_(setting.backward && want.compare_gradients),
        text_(text),
        heard_(heard) {}

  bool only_one_refuses() const { return only_one_refuses_; }
  // "" or what is wrong. `refused` is set to a step that only the mesh refuses; it ends there.
  std::string Run(int* refused) {
    std::unique_ptr<NoGrad> no_grad;
    if (!want_.program.grad) no_grad = std::make_unique<NoGrad>();
    ManualSeed(1);
    for (size_t s = 0; s < want_.program.steps.size(); ++s) {
      const Outcome got = Do(want_.program.steps[s]);
      const Outcome& want = want_.outcomes[s];
      Hear(absl::StrCat("step ", s), got.error);
      const bool refuses = !got.error.ok() && IsRefusal(got.error);
      if (refuses && want.error.ok()) {
        *refused = static_cast<int>(s);
        return "";
      }
      if (!refuses && (got.error.code() != want.error.code() || got.results != want.results)) {
        return absl::StrCat("step ", s, " gives ", got.error.ToString(), ", must give ",
                            want.error.ToString());
      }
      for (const int v : want_.drops[s]) machine_.Drop(v);
    }
    for (size_t v = 0; v < machine_.values().size(); ++v) {
      std::string why = Compare(static_cast<int>(v));
      if (!why.empty()) return why;
    }
    return backward_ ? CompareGradients() : "";
  }

 private:
  Outcome Do(const Step& step) {
    if (text_ == nullptr) return machine_.Do(step);
    std::vector<std::string> names;
    for (const int i : step.in) names.push_back(absl::StrCat("v", i));
    const size_t first = machine_.values().size();
    std::string log = absl::StrJoin(names, ", ");
    const Outcome outcome = machine_.Do(step, &log);
    std::string line;
    for (int r = 0; r < outcome.results; ++r) absl::StrAppend(&line, r ? ", v" : "v", first + r);
    absl::StrAppend(&line, line.empty() ? "" : " = ", step.op, "(", log, ")");
    for (int r = 0; r < outcome.results; ++r) {
      absl::StrAppend(&line, r ? " and " : " -> ", machine_.values()[first + r].spec().ToString());
    }
    if (step.op == "leaf") absl::StrAppend(&line, " ", Show(step.values, step.dtype));
    if (!outcome.error.ok()) absl::StrAppend(&line, " fails: ", outcome.error.message());
    absl::StrAppend(text_, line, "\n");
    return outcome;
  }

  void Hear(absl::string_view where, const absl::Status& status) {
    if (status.ok()) return;
    const RankContext& context = RankContext::Current();
    heard_->push_back(
        absl::StrCat(where, ": ", WithoutRank(status, context.rank(), context.world_size())));
  }

  std::string Compare(int v) {
    const absl::StatusOr<ValueBits> got = machine_.Read(v);
    const absl::StatusOr<ValueBits>& want = want_.finals[v];
    Hear(absl::StrCat("reading v", v), got.status());
    if (!got.ok() && want.ok() && IsRefusal(got.status())) return "";
    if (got.status().code() != want.status().code()) {
      return absl::StrCat("reading v", v, " gives ", got.status().ToString(), ", must give ",
                          want.status().ToString());
    }
    if (!got.ok() || *got == *want) return "";
    const DType dtype = machine_.values()[v].dtype();
    return absl::StrCat("v", v, " is ", Show(*got, dtype), ", must be ", Show(*want, dtype));
  }

  std::string CompareGradients() {
    const auto got = machine_.Backward();
    const absl::Status& want = want_.gradients.status();
    Hear("backward", got.status());
    if (want.ok()) {
      if (got.ok()) return CompareTo(*want_.gradients, *got);
      return absl::StrCat("backward gives ", got.status().ToString(), ", must give gradients");
    }
    const bool saved_elsewhere = absl::StrContains(want.message(), kChangedSince);
    // Past what it saved a copy of a mesh may find another reason, which one rank does not come to.
    if (!got.ok() &&
        (got.status().code() == want.code() || (saved_elsewhere && !IsRankLocal(got.status())))) {
      return "";
    }
    if (!got.ok() || !saved_elsewhere) {
      return absl::StrCat("backward gives ", got.ok() ? "gradients" : got.status().ToString(),
                          ", must give ", want.ToString());
    }
    only_one_refuses_ = true;
    for (size_t g = 0; g < got->size(); ++g) {  // which no one rank may have to compare with
      heard_->push_back(absl::StrCat("gradient ", g, " of bits ", absl::StrJoin((*got)[g], ", ")));
    }
    return want_.gradients_of_copies.ok() ? CompareTo(*want_.gradients_of_copies, *got) : "";
  }

  static std::string CompareTo(const std::vector<ValueBits>& want,
                               const std::vector<ValueBits>& got) {
    if (got.size() != want.size()) return "gradients of another number of leaves";
    for (size_t g = 0; g < want.size(); ++g) {
      if (got[g] == want[g]) continue;
      return absl::StrCat("the gradient of leaf ", g, " is ", Show(got[g], DType::kF64),
                          ", must be ", Show(want[g], DType::kF64));
    }
    return "";
  }

  const Reference& want_;
  Machine machine_;
  const bool backward_;
  std::string* text_;
  Heard* heard_;
  bool only_one_refuses_ = false;
};

// "", or where a rank's errors are not those of rank 0.
std::string Disagreement(const std::vector<Heard>& heard) {
  for (size_t r = 1; r < heard.size(); ++r) {
    const size_t most = std::max(heard[0].size(), heard[r].size());
    const auto at = [&](size_t rank, size_t i) {
      return i < heard[rank].size() ? heard[rank][i] : "no error";
    };
    for (size_t i = 0; i < most; ++i) {
      if (at(0, i) == at(r, i)) continue;
      return absl::StrCat("ranks differ: rank 0 has ", at(0, i), ", rank ", r, " has ", at(r, i));
    }
  }
  return "";
}

Verdict Judge(const Reference& want, const Setting& setting, bool with_text) {
  Verdict verdict;
  std::mutex mutex;
  const int64_t ranks = Numel(setting.mesh);
  std::vector<int> refused(ranks, -1);
  std::vector<Heard> heard(ranks);
  SpmdOptions options;
  options.timeout = absl::Seconds(20);
  options.pin = false;
  if (setting.packed) options.wrap = Packed();
  const absl::Status status = RunSpmd(
      ranks,
      [&](RankContext& context) -> absl::Status {
        std::string* text = with_text && context.rank() == 0 ? &verdict.text : nullptr;
        std::string wrong;
        {
          Replay replay(want, setting, text, &heard[context.rank()]);
          wrong = replay.Run(&refused[context.rank()]);
          if (context.rank() == 0) verdict.only_one_refuses = replay.only_one_refuses();
        }
        const internal::Live& nodes = internal::State().nodes;
        if (wrong.empty() && nodes.after != &nodes) wrong = "the program is over, its tape is not";
        if (wrong.empty()) return absl::OkStatus();
        std::lock_guard<std::mutex> lock(mutex);
        if (verdict.wrong.empty())
          verdict.wrong = absl::StrCat("rank ", context.rank(), ": ", wrong);
        return absl::InternalError(wrong);
      },
      options);
  verdict.refused = refused[0];
  for (const int at : refused) {
    if (at != refused[0] && verdict.wrong.empty()) {
      verdict.wrong =
          absl::StrCat("a rank-dependent error: refused at steps ", absl::StrJoin(refused, ", "));
    }
  }
  if (verdict.wrong.empty()) verdict.wrong = Disagreement(heard);
  if (!status.ok() && verdict.wrong.empty()) verdict.wrong = std::string(status.message());
  return verdict;
}

// As Judge; where the mesh refuses a step, what came before it is compared.
Verdict JudgeAll(const Program& program, const Reference& want, const Setting& setting,
                 bool with_text = false) {
  Verdict verdict = Judge(want, setting, with_text);
  if (!verdict.wrong.empty() || verdict.refused < 0) return verdict;
  Program before = program;
  before.steps.resize(verdict.refused);
  const absl::StatusOr<Reference> prefix = RunReference(before);
  if (!prefix.ok()) {
    verdict.wrong = std::string(prefix.status().message());
    return verdict;
  }
  Verdict shorter = Judge(*prefix, setting, with_text);
  shorter.refused = verdict.refused;
  return shorter;
}

// The shortest program found by leaving out steps, on the smallest mesh, that still fails.
std::string Shrunk(Program program, Setting setting) {
  const auto fails = [](const Program& p, const Setting& s) {
    const absl::StatusOr<Reference> want = RunReference(p);
    return want.ok() && !JudgeAll(p, *want, s).wrong.empty();
  };
  for (const Dims& mesh : {Dims{2}, Dims{3}, Dims{2, 2}}) {
    if (Numel(mesh) < Numel(setting.mesh) &&
        fails(program, {mesh, setting.packed, setting.backward})) {
      setting.mesh = mesh;
      break;
    }
  }
  if (setting.packed && fails(program, {setting.mesh, false, setting.backward})) {
    setting.packed = false;
  }
  for (bool shorter = true; shorter;) {
    shorter = false;
    for (size_t s = program.steps.size(); s-- > 0;) {
      const absl::StatusOr<Reference> want = RunReference(program);
      if (!want.ok() || s >= program.steps.size()) continue;
      const Program rest = Without(program, want->outcomes, s);
      if (!fails(rest, setting)) continue;
      program = rest;
      shorter = true;
    }
  }
  const absl::StatusOr<Reference> want = RunReference(program);
  if (!want.ok()) return "does not fail again";
  const Verdict verdict = JudgeAll(program, *want, setting, true);
  return absl::StrCat("on a mesh ", ToString(setting.mesh), setting.packed ? ", packed" : "",
                      program.grad ? ", recording" : "", ":\n", verdict.text, verdict.wrong);
}

uint64_t FromEnvironment(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

TEST(Programs, AreOneRanksBitForBit) {
  const uint64_t count = FromEnvironment("DT_PROGRAMS", 2000 / testing::Thin(4));
  const uint64_t seed = FromEnvironment("DT_PROGRAMS_SEED", 1);
  int64_t steps = 0, errors = 0, refused = 0, gradients = 0, saved = 0, known = 0;
  std::map<int64_t, int64_t> of_ranks;  // programs
  uint64_t failures = 0;
  std::map<std::string, int64_t> well;  // calls of an op without error
  const uint64_t first = FromEnvironment("DT_PROGRAMS_FIRST", 0);
  for (uint64_t i = first; i < first + count && failures < 5; ++i) {
    const Reference want = DrawProgram(seed * 1000003 + i);
    Dice dice(seed * 7919 + i);
    Setting setting{RandomMesh(dice, 8), dice.Chance(20), !dice.Chance(20)};
    const Verdict verdict = JudgeAll(want.program, want, setting);
    if (!verdict.wrong.empty()) {
      ++failures;
      ADD_FAILURE() << "program " << i << " of seed " << seed << ": " << verdict.wrong << "\n"
                    << Shrunk(want.program, setting);
    }
    refused += verdict.refused >= 0 ? 1 : 0;
    gradients += want.compare_gradients && setting.backward ? 1 : 0;
    saved += verdict.only_one_refuses ? 1 : 0;
    known += verdict.only_one_refuses && want.gradients_of_copies.ok() ? 1 : 0;
    ++of_ranks[Numel(setting.mesh)];
    for (size_t s = 0; s < want.program.steps.size(); ++s) {
      ++steps;
      errors += want.outcomes[s].error.ok() ? 0 : 1;
      if (want.outcomes[s].error.ok()) ++well[want.program.steps[s].op];
    }
  }
  std::printf(
      "%llu programs of %lld steps: %lld errors alike, %lld refused by the mesh, %lld with "
      "gradients (%lld that one rank refuses, %lld of them known), %lld wrong\n",
      static_cast<unsigned long long>(count), static_cast<long long>(steps),
      static_cast<long long>(errors), static_cast<long long>(refused),
      static_cast<long long>(gradients), static_cast<long long>(saved),
      static_cast<long long>(known), static_cast<long long>(failures));
  if (count < 2000) return;
  EXPECT_LT(errors * 5, steps) << "programs test error paths only";
  EXPECT_LT(refused * 4, static_cast<int64_t>(count));
  EXPECT_GT(gradients * 8, static_cast<int64_t>(count));
  for (int64_t ranks = 2; ranks <= 8; ++ranks) {
    EXPECT_GT(of_ranks[ranks] * 40, static_cast<int64_t>(count)) << ranks << " ranks";
  }
  for (const auto& [op, calls] : well) {
    if (absl::StartsWith(op, "case ")) continue;
    EXPECT_GT(calls, 20) << op;
  }
  int64_t cases = 0;
  for (const auto& [op, calls] : well) cases += absl::StartsWith(op, "case ") ? 1 : 0;
  EXPECT_GT(cases, 150) << "most case lines take part";
}

}  // namespace
}  // namespace dtensor::testing
