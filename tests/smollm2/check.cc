// A Llama or GPT-2 folder on 1, 2, 3 and 4 ranks: texts, logits, loss, gradients and memory while
// loading, against what transformers computed (a golden.json of scripts/make_smollm2), or without
// that against one rank. Not a part of ctest: the model is half a gigabyte.
//
//   smollm2_check --model DIR [--golden FILE] [--max_ranks N] [--steps N]
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "dtensor/mesh/program.h"
#include "dtensor/ops/ops.h"
#include "dtensor/parallel/generate/generate.h"
#include "dtensor/parallel/models/pretrained.h"
#include "dtensor/parallel/optim/optim.h"
#include "dtensor/parallel/plan/plan.h"
#include "dtensor/parallel/text/chat_template.h"
#include "dtensor/parallel/text/tokenizer.h"
#include "dtensor/tensor/file.h"
#include "dtensor/tensor/status.h"
#include "examples/flags.h"
#include "nlohmann/json.hpp"

ABSL_FLAG(std::string, model, "", "folder of the model");
ABSL_FLAG(std::string, golden, "",
          "what transformers computes for it; empty: compare with one rank");
ABSL_FLAG(int64_t, max_ranks, 4, "runs on 1 to this many ranks");
ABSL_FLAG(int64_t, steps, 10, "of training in bfloat16 at the end; 0: none");

namespace dtensor {
namespace {

using Json = nlohmann::json;

// What a model gives for one prompt: the columns of golden.json.
struct Answer {
  std::vector<int64_t> ids, greedy, argmax;
  std::string text;
  double loss = 0;
  std::vector<double> max, corner;  // of logits: per position, and the last 5 x first 8
  std::vector<std::pair<std::string, double>> norms;
};

class Report {
 public:
  void Line(bool good, const std::string& what) {
    std::printf("%s  %s\n", good ? "ok  " : "FAIL", what.c_str());
    std::fflush(stdout);
    failed_ += good ? 0 : 1;
  }
  // The largest difference, as a share of the largest expected number.
  void Compare(const std::string& what, const std::vector<double>& got,
               const std::vector<double>& expected, double tolerance) {
    double largest = 0, difference = got.size() == expected.size() ? 0 : INFINITY;
    for (size_t i = 0; i < std::min(got.size(), expected.size()); ++i) {
      largest = std::max(largest, std::abs(expected[i]));
      difference = std::max(difference, std::abs(got[i] - expected[i]));
      if (std::isnan(got[i])) difference = INFINITY;
    }
    Line(difference <= tolerance * largest, absl::StrCat(what, ": off by ", difference / largest,
                                                         " of the largest, at most ", tolerance));
  }
  int64_t failed() const { return failed_; }

 private:
  int64_t failed_ = 0;
};

absl::StatusOr<std::vector<int64_t>> Encode(const std::string& folder, const Tokenizer& tokenizer,
                                            const std::string& prompt) {
  const absl::StatusOr<ChatTemplate> chat = ChatTemplate::Read(folder);
  if (!chat.ok()) return tokenizer.Encode(prompt);  // no chat model
  DT_ASSIGN_OR_RETURN(const std::string text, chat->Render({ChatMessage{"user", prompt}}));
  return tokenizer.Encode(text, /*frame=*/false);
}

// The mean of what every token of a text costs, but for the first.
DTensor Loss(CausalLM& model, const std::vector<int64_t>& all, DTensor* logits) {
  const int64_t n = static_cast<int64_t>(all.size());
  const DeviceMesh& mesh = model.Parameters()[0]->mesh();
  *logits = model(FromVector(all, {1, n}, {.mesh = mesh}));
  const DTensor targets =
      FromVector(std::vector<int64_t>(all.begin() + 1, all.end()), {n - 1}, {.mesh = mesh});
  return cross_entropy(flatten(slice(to(*logits, DType::kF32), 1, 0, n - 1), 0, 1), targets);
}

// Logits, loss and gradients of the whole text, prompt and continuation.
void RunOnce(CausalLM& model, Answer* answer) {
  std::vector<int64_t> all = answer->ids;
  all.insert(all.end(), answer->greedy.begin(), answer->greedy.end());
  const int64_t n = static_cast<int64_t>(all.size());
  DTensor logits;
  const DTensor loss = Loss(model, all, &logits);
  answer->loss = loss.Item();
  {
    const NoGrad no_grad;
    const Values best = max(select(logits, 0, 0), 1);
    answer->max = best[0].ToVector<double>();
    answer->argmax = best[1].ToVector<int64_t>();
    answer->corner = slice(slice(logits, 1, n - 5, n), 2, 0, 8).ToVector<double>();
  }
  loss.Backward();
  const NoGrad no_grad;
  for (const NamedParameter& p : model.NamedParameters()) {
    const DTensor norm =
        linalg_vector_norm(p.parameter->tensor().grad(), 2, {}, false, DType::kF64);
    answer->norms.emplace_back(p.fqn, norm.Item());
  }
  model.ZeroGrad();
}

struct Loading {
  int64_t model_bytes = 0;
  std::vector<int64_t> peak, own;  // per rank: at most, and of its parameters in the end
};

absl::StatusOr<std::vector<Answer>> RunModel(const std::string& folder, int64_t ranks,
                                             const std::vector<std::vector<int64_t>>& prompts,
                                             const std::vector<int64_t>& max_new,
                                             Loading* loading) {
  std::vector<Answer> answers;
  loading->peak.assign(ranks, 0);
  loading->own.assign(ranks, 0);
  DT_RETURN_IF_ERROR(RunSpmd(ranks, [&](RankContext& rank) -> absl::Status {
    DT_ASSIGN_OR_RETURN(const ModelConfig config, ReadModelConfig(folder));
    const std::unique_ptr<CausalLM> model = MakeModel(config);
    DT_RETURN_IF_ERROR(ParallelizeModule(*model, DeviceMesh({1, ranks}, {"dp", "tp"}),
                                         PlanFor(config), {.warn = false}));
    DT_RETURN_IF_ERROR(LoadPretrained(*model, folder));
    loading->peak[rank.rank()] = rank.allocator()->stats().peak_bytes;
    const bool first = rank.rank() == 0;
    for (const NamedParameter& p : model->NamedParameters()) {
      const int64_t size = SizeOf(p.parameter->dtype());
      if (first) loading->model_bytes += p.parameter->numel() * size;
      loading->own[rank.rank()] += p.parameter->tensor().local().numel() * size;
    }
    for (size_t i = 0; i < prompts.size(); ++i) {
      Answer answer;
      answer.ids = prompts[i];
      answer.greedy =
          Generate(*model, {prompts[i]}, {.max_new = max_new[i], .stop = config.eos})[0];
      RunOnce(*model, &answer);
      if (first) answers.push_back(std::move(answer));
    }
    return absl::OkStatus();
  }));
  return answers;
}

// Steps on one text on two ranks, in bfloat16 with float32 masters.
absl::StatusOr<std::vector<double>> FineTune(const std::string& folder,
                                             const std::vector<int64_t>& text) {
  std::vector<double> losses;
  DT_RETURN_IF_ERROR(RunSpmd(2, [&](RankContext& rank) -> absl::Status {
    DT_ASSIGN_OR_RETURN(const ModelConfig config, ReadModelConfig(folder));
    const std::unique_ptr<CausalLM> model = MakeModel(config);
    SetDType(*model, DType::kBF16);
    DT_RETURN_IF_ERROR(ParallelizeModule(*model, DeviceMesh({1, 2}, {"dp", "tp"}), PlanFor(config),
                                         {.warn = false}));
    DT_RETURN_IF_ERROR(LoadPretrained(*model, folder));
    AdamW optim(model->NamedParameters(), {.lr = 1e-5}, [](const Parameter& p) {
      StateLayout state = LikeParameter(p);
      state.dtype = DType::kF32;
      return state;
    });
    for (int64_t step = 0; step < absl::GetFlag(FLAGS_steps); ++step) {
      DTensor logits;
      const DTensor loss = Loss(*model, text, &logits);
      loss.Backward();
      ClipGradNorm(model->NamedParameters(), 1.0);
      optim.Step();
      optim.ZeroGrad();
      const double value = loss.Item();
      if (rank.rank() == 0) losses.push_back(value);
    }
    return absl::OkStatus();
  }));
  return losses;
}

// From what transformers wrote.
Answer Expected(const Json& c) {
  Answer a;
  a.ids = c["ids"].get<std::vector<int64_t>>();
  a.greedy = c["greedy"].get<std::vector<int64_t>>();
  a.argmax = c["argmax_per_pos"].get<std::vector<int64_t>>();
  a.text = c["text"];
  a.loss = c["loss_of_whole"];
  a.max = c["logit_max_per_pos"].get<std::vector<double>>();
  for (const Json& row : c["logits_last5_first8"]) {
    for (const Json& value : row) a.corner.push_back(value);
  }
  for (const auto& [name, norm] : c["grad_norms"].items()) a.norms.emplace_back(name, norm);
  return a;
}

void CompareAnswers(const std::string& on, const Answer& got, const Answer& expected,
                    Report* report) {
  report->Line(got.text == expected.text,
               on + "the text word for word: \"..." +
                   got.text.substr(got.text.size() - std::min<size_t>(60, got.text.size())) + "\"");
  report->Line(got.greedy == expected.greedy && got.argmax == expected.argmax,
               on + "greedy tokens and the most likely token at every position");
  report->Compare(on + "logits, last 5 positions x first 8", got.corner, expected.corner, 2e-4);
  report->Compare(on + "largest logit per position", got.max, expected.max, 2e-4);
  report->Compare(on + absl::StrCat("loss ", got.loss), {got.loss}, {expected.loss}, 1e-5);
  double worst = 0;
  std::string which = "none";
  size_t found = 0;
  for (const auto& [name, norm] : expected.norms) {
    for (const auto& [mine, value] : got.norms) {
      if (mine != name) continue;
      ++found;
      const double off = std::abs(value - norm) / std::abs(norm);
      if (off > worst) which = absl::StrCat(name, " ", value, " for ", norm);
      worst = std::max(worst, off);
    }
  }
  report->Line(
      found == expected.norms.size() && found > 0 && worst <= 1e-4,
      absl::StrCat(on, found, " of ", expected.norms.size(), " gradient norms, the worst off by ",
                   worst, ", at most 0.0001 (", which, ")"));
}

absl::Status Main() {
  const std::string folder = absl::GetFlag(FLAGS_model), golden = absl::GetFlag(FLAGS_golden);
  if (folder.empty()) return absl::InvalidArgumentError("--model is missing");
  DT_RETURN_IF_ERROR(InRange("max_ranks", absl::GetFlag(FLAGS_max_ranks), 64));
  if (absl::GetFlag(FLAGS_steps) < 0 || absl::GetFlag(FLAGS_steps) == 1) {
    return absl::InvalidArgumentError("--steps is 0, or 2 and more, whose losses fall");
  }
  DT_ASSIGN_OR_RETURN(const Tokenizer tokenizer, Tokenizer::Read(folder));
  std::vector<std::string> prompts = {"Explain in two sentences why the sky is blue.",
                                      "Name three primes."};
  std::vector<Answer> expected;
  std::vector<int64_t> max_new = {32, 16};
  Report report;
  if (!golden.empty()) {
    DT_ASSIGN_OR_RETURN(const std::string text, ReadFile(golden));
    prompts.clear();
    max_new.clear();
    const Json known = Json::parse(text);
    for (const Json& c : known.at("cases")) {
      prompts.push_back(c["prompt"]);
      expected.push_back(Expected(c));
      max_new.push_back(static_cast<int64_t>(expected.back().greedy.size()));
    }
  }
  std::vector<std::vector<int64_t>> ids;
  for (size_t i = 0; i < prompts.size(); ++i) {
    DT_ASSIGN_OR_RETURN(std::vector<int64_t> encoded, Encode(folder, tokenizer, prompts[i]));
    if (!golden.empty())
      report.Line(encoded == expected[i].ids, absl::StrCat("tokens of \"", prompts[i], "\""));
    ids.push_back(std::move(encoded));
  }
  for (int64_t ranks = 1; ranks <= absl::GetFlag(FLAGS_max_ranks); ++ranks) {
    const std::string on = absl::StrCat(ranks, ranks == 1 ? " rank: " : " ranks: ");
    Loading loading;
    DT_ASSIGN_OR_RETURN(std::vector<Answer> answers,
                        RunModel(folder, ranks, ids, max_new, &loading));
    const int64_t peak = *std::max_element(loading.peak.begin(), loading.peak.end());
    const double share = static_cast<double>(peak) / static_cast<double>(loading.model_bytes);
    // The rank with most heads may have much more than others; none holds much beside its own.
    bool holds = golden.empty() || share <= 1.2 / static_cast<double>(ranks);
    for (int64_t r = 0; r < ranks; ++r) {
      holds &= loading.peak[r] <= loading.own[r] + loading.own[r] / 10 + (8 << 20);
    }
    report.Line(holds, on + absl::StrCat("loading held ", share, " of the model's ",
                                         loading.model_bytes, " bytes per rank at the peak"));
    for (size_t i = 0; i < answers.size(); ++i) {
      std::vector<int64_t> all = answers[i].ids;
      all.insert(all.end(), answers[i].greedy.begin(), answers[i].greedy.end());
      answers[i].text = tokenizer.Decode(all);
      if (i < expected.size()) CompareAnswers(on, answers[i], expected[i], &report);
    }
    if (golden.empty() && ranks == 1) expected = std::move(answers);
  }
  if (absl::GetFlag(FLAGS_steps) > 0) {
    DT_ASSIGN_OR_RETURN(const std::vector<double> losses, FineTune(folder, ids[0]));
    report.Line(losses.back() < losses.front(),
                absl::StrCat(losses.size(), " steps in bfloat16 with float32 masters: losses ",
                             absl::StrJoin(losses, " ")));
  }
  if (report.failed() == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(report.failed(), " checks failed"));
}

}  // namespace
}  // namespace dtensor

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage("checks a model folder on several ranks");
  return dtensor::RunProgram([&]() -> absl::Status {
    DT_RETURN_IF_ERROR(dtensor::CheckFlagNames(argc, argv, "check.cc"));
    absl::ParseCommandLine(argc, argv);
    return dtensor::Main();
  });
}
