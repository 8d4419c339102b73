// A model from a Hugging Face folder (Llama or GPT-2) continues a text, on a mesh of ranks: threads
// of this process, or one for each process that a launcher started.
//
//   generate --model DIR --ranks 2 --chat --prompt "Why is the sky blue?" --max-new 64
//
// The continuation alone goes to stdout, as it comes; what else there is to say to stderr.
#include "dtensor/parallel/generate/generate.h"

#include <chrono>
#include <cstdio>
#include <optional>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/strings/str_cat.h"
#include "dtensor/mesh/program.h"
#include "dtensor/parallel/models/pretrained.h"
#include "dtensor/parallel/plan/plan.h"
#include "dtensor/parallel/text/chat_template.h"
#include "dtensor/parallel/text/tokenizer.h"
#include "dtensor/rng/generator.h"
#include "dtensor/tensor/cpu/gemm.h"
#include "dtensor/tensor/status.h"
#include "examples/flags.h"

ABSL_FLAG(std::string, model, "", "folder with config.json, tokenizer.json and safetensors files");
ABSL_FLAG(std::string, prompt, "", "text to continue, or with --chat to answer");
ABSL_FLAG(bool, chat, false, "the prompt is a user's message, put into the model's chat template");
ABSL_FLAG(std::string, system, "", "with --chat: a system message before it");
ABSL_FLAG(int64_t, max_new, 128, "tokens to generate, at most");
ABSL_FLAG(int64_t, ranks, 0,
          "number of ranks; default: what --mesh needs, or one for each process");
ABSL_FLAG(std::string, mesh, "", "mesh such as dp=1,tp=2; default: tp=RANKS");
ABSL_FLAG(std::string, device, "",
          "cpu, cuda, or auto: cuda where there is one; default: DTENSOR_DEVICE, or cpu");
ABSL_FLAG(std::string, dtype, "",
          "float32 or bfloat16 (f32, bf16), of weights and activations; default: as the files");
ABSL_FLAG(double, temperature, 0, "0 takes the most likely token; above, tokens are drawn");
ABSL_FLAG(int64_t, top_k, 0,
          "with --temperature: draw from this many most likely tokens; 0: from all");
ABSL_FLAG(double, top_p, 1,
          "with --temperature: draw from the most likely tokens that have this share together");
ABSL_FLAG(std::optional<double>, repetition_penalty, std::nullopt,
          "above 1 makes tokens less likely that are there already; default: as "
          "generation_config.json, or 1");
ABSL_FLAG(int64_t, seed, 0, "of the draws: the same on every mesh");

namespace dtensor {
namespace {

using Clock = std::chrono::steady_clock;

double Seconds(Clock::time_point from) {
  return std::chrono::duration<double>(Clock::now() - from).count();
}

struct Job {
  std::string folder;
  ModelConfig config;
  Tokenizer tokenizer;
  std::vector<int64_t> prompt;
  GenerateOptions options;
  uint64_t seed = 0;
  DeviceMesh mesh;
  std::optional<DeviceType> device;
  std::optional<DType> dtype;
};

absl::StatusOr<std::vector<int64_t>> ReadPrompt(const Job& job) {
  const std::string prompt = absl::GetFlag(FLAGS_prompt), system = absl::GetFlag(FLAGS_system);
  if (prompt.empty()) return absl::InvalidArgumentError("--prompt is empty; say what to continue");
  std::string text = prompt;
  const bool chat = absl::GetFlag(FLAGS_chat);
  if (chat) {
    std::vector<ChatMessage> messages;
    if (!system.empty()) messages.push_back({"system", system});
    messages.push_back({"user", prompt});
    const absl::StatusOr<ChatTemplate> form = ChatTemplate::Read(job.folder);
    const absl::StatusOr<std::string> filled = form.ok() ? form->Render(messages) : form.status();
    if (!filled.ok()) {
      return absl::Status(
          filled.status().code(),
          absl::StrCat("--chat: ", filled.status().message(), "; --prompt without --chat works"));
    }
    text = *filled;
  } else if (!system.empty()) {
    return absl::InvalidArgumentError("--system needs --chat");
  }
  // A template writes the tokens around a text itself.
  absl::StatusOr<std::vector<int64_t>> ids = job.tokenizer.Encode(text, /*frame=*/!chat);
  if (!ids.ok()) return Prefixed("--prompt", ids.status());
  if (ids->empty()) {
    return absl::InvalidArgumentError(
        chat ? absl::StrCat("--chat: the chat template of ", job.folder,
                            " makes a text without tokens; --prompt without --chat works")
             : absl::StrCat("--prompt: the tokenizer of ", job.folder, " finds no tokens in it"));
  }
  return ids;
}

// At temperature 0 the library passes over what says how to draw; who says it here wants draws.
absl::Status CheckDraws(const SamplingOptions& sampling) {
  if (sampling.temperature > 0) return absl::OkStatus();
  const char* flag = sampling.top_k > 1 ? "top_k" : sampling.top_p < 1 ? "top_p" : nullptr;
  if (flag == nullptr) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("--", flag,
                   " changes nothing at temperature 0, which takes the most likely token; add "
                   "--temperature above 0, such as --temperature 1"));
}

absl::StatusOr<Job> ReadFlags(const std::vector<char*>& rest) {
  if (rest.size() > 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("unexpected argument \"", rest[1], "\"; see --help"));
  }
  Job job;
  job.folder = absl::GetFlag(FLAGS_model);
  if (job.folder.empty()) {
    return absl::InvalidArgumentError("--model is missing: a folder with a Hugging Face model");
  }
  job.options.max_new = absl::GetFlag(FLAGS_max_new);
  DT_RETURN_IF_ERROR(InRange("max_new", job.options.max_new, int64_t{1} << 24));
  job.options.sampling = {
      .temperature = absl::GetFlag(FLAGS_temperature),
      .top_k = absl::GetFlag(FLAGS_top_k),
      .top_p = absl::GetFlag(FLAGS_top_p),
      .repetition_penalty = absl::GetFlag(FLAGS_repetition_penalty).value_or(1)};
  const absl::Status sampling = CheckSampling(job.options.sampling);
  if (!sampling.ok()) {
    return absl::Status(sampling.code(), absl::StrCat("--", sampling.message()));
  }
  DT_RETURN_IF_ERROR(CheckDraws(job.options.sampling));
  job.seed = static_cast<uint64_t>(absl::GetFlag(FLAGS_seed));
  const std::string dtype = absl::GetFlag(FLAGS_dtype);
  if (dtype == "f32" || dtype == "float32") {
    job.dtype = DType::kF32;
  } else if (dtype == "bf16" || dtype == "bfloat16") {
    job.dtype = DType::kBF16;
  } else if (!dtype.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--dtype must be float32 or bfloat16, got \"", dtype, "\""));
  }
  DT_ASSIGN_OR_RETURN(job.device, ReadDevice("--device", absl::GetFlag(FLAGS_device)));
  DT_ASSIGN_OR_RETURN(job.mesh, ReadMesh(absl::GetFlag(FLAGS_ranks), absl::GetFlag(FLAGS_mesh),
                                         /*alone=*/"tp", job.device));
  DT_ASSIGN_OR_RETURN(job.config, ReadModelConfig(job.folder));
  DT_RETURN_IF_ERROR(job.config.generates);
  if (!absl::GetFlag(FLAGS_repetition_penalty)) {
    job.options.sampling.repetition_penalty = job.config.repetition_penalty;
  }
  job.options.stop = job.config.eos;
  DT_ASSIGN_OR_RETURN(job.tokenizer, Tokenizer::Read(job.folder));
  DT_ASSIGN_OR_RETURN(job.prompt, ReadPrompt(job));
  return job;
}

// Prints text as its tokens come, and when they came.
class Printer {
 public:
  explicit Printer(const Tokenizer& tokenizer) : stream_(tokenizer, /*skip_special=*/true) {}
  void Add(int64_t token) {
    if (++tokens_ == 1) first_ = Clock::now();
    Print(stream_.Add(token));
  }
  void Finish(int64_t prompt_tokens, Clock::time_point start) {
    Print(stream_.Finish() + "\n");
    const double prompt = std::chrono::duration<double>(first_ - start).count();
    std::fprintf(stderr, "prompt: %lld tokens, %.1f tokens/s; decode: %lld tokens, %.1f tokens/s\n",
                 static_cast<long long>(prompt_tokens), static_cast<double>(prompt_tokens) / prompt,
                 static_cast<long long>(tokens_),
                 static_cast<double>(tokens_ - 1) / Seconds(first_));
  }

 private:
  static void Print(const std::string& text) {
    std::fwrite(text.data(), 1, text.size(), stdout);
    std::fflush(stdout);
  }
  TokenStream stream_;
  int64_t tokens_ = 0;
  Clock::time_point first_;
};

absl::Status Run(const Job& job, RankContext& rank) {
  const bool first = rank.rank() == 0;
  rank.allocator()->SetLimit(AvailableMemory() / job.mesh.size());
  auto start = Clock::now();
  const std::unique_ptr<CausalLM> model = MakeModel(job.config);
  if (job.dtype) SetDType(*model, *job.dtype);
  DT_RETURN_IF_ERROR(ParallelizeModule(*model, job.mesh, PlanFor(job.config)));
  DT_RETURN_IF_ERROR(LoadPretrained(*model, job.folder));
  if (first) {
    std::fprintf(stderr, "%s, %.1f million parameters in %s on %s, loaded in %.2f s\n",
                 model->type_name().c_str(), static_cast<double>(model->NumElements()) / 1e6,
                 std::string(Name(model->Parameters()[0]->dtype())).c_str(),
                 job.mesh.ToString().c_str(), Seconds(start));
  }
  ManualSeed(job.seed);
  Printer printer(job.tokenizer);
  GenerateOptions options = job.options;
  if (first) options.on_tokens = [&](absl::Span<const int64_t> next) { printer.Add(next[0]); };
  start = Clock::now();
  const std::vector<int64_t> text = Generate(*model, {job.prompt}, options)[0];
  const int64_t prompt = static_cast<int64_t>(job.prompt.size());
  if (!first) return absl::OkStatus();
  printer.Finish(prompt, start);
  if (std::ssize(text) < options.max_new && !absl::c_linear_search(options.stop, text.back())) {
    std::fprintf(stderr,
                 "ended after %lld of --max-new %lld tokens: the model has %lld positions, by %s "
                 "of %s/config.json, and the prompt took %lld\n",
                 static_cast<long long>(text.size()), static_cast<long long>(options.max_new),
                 static_cast<long long>(model->max_tokens()),
                 std::holds_alternative<LlamaConfig>(job.config.model) ? "max_position_embeddings"
                                                                       : "n_positions",
                 job.folder.c_str(), static_cast<long long>(prompt));
  }
  return absl::OkStatus();
}

absl::Status Main(const std::vector<char*>& rest) {
  DT_ASSIGN_OR_RETURN(const Job job, ReadFlags(rest));
  const std::jthread while_files_are_read(WarmUpGemm);
  return RunSpmd(job.mesh.size(), [&](RankContext& rank) { return Run(job, rank); },
                 {.device = job.device});
}

}  // namespace
}  // namespace dtensor

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage("continues a text with a Llama or GPT-2 from a Hugging Face folder");
  return dtensor::RunProgram([&]() -> absl::Status {
    DT_RETURN_IF_ERROR(dtensor::CheckFlagNames(argc, argv, "generate.cc"));
    return dtensor::Main(absl::ParseCommandLine(argc, argv));
  });
}
