// Trains a byte-level GPT on a text file, on a mesh of ranks: threads of this process, or one for
// each process that a launcher started.
//
//   train_gpt --mesh dp=2,tp=2 --steps 50 --verify --summary out.json
//
// The model is written for one device; the plan alone spreads it over "tp", and the batch is cut
// over "dp". With --verify the same training runs again on one rank and the two are compared.
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <optional>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/reflection.h"
#include "absl/flags/usage.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "dtensor/mesh/program.h"
#include "dtensor/ops/ops.h"
#include "dtensor/parallel/models/gpt.h"
#include "dtensor/parallel/models/gpt_plan.h"
#include "dtensor/parallel/optim/optim.h"
#include "dtensor/parallel/train/trainer.h"
#include "dtensor/rng/generator.h"
#include "dtensor/tensor/file.h"
#include "dtensor/timeline.h"
#include "examples/flags.h"
#include "examples/output_files.h"
#include "examples/resume.h"
#include "examples/stop_signal.h"
#include "examples/verify.h"
#include "nlohmann/json.hpp"

ABSL_FLAG(std::string, data, "/usr/share/common-licenses/GPL-3", "text file to train on");
ABSL_FLAG(int64_t, ranks, 0,
          "number of ranks; default: what --mesh needs, or one for each process");
ABSL_FLAG(std::string, mesh, "", "mesh such as dp=2,tp=2; default: dp=RANKS");
ABSL_FLAG(std::string, device, "",
          "cpu, cuda, or auto: cuda where there is one; default: DTENSOR_DEVICE, or cpu");
ABSL_FLAG(int64_t, steps, 50, "training steps");
ABSL_FLAG(int64_t, seed, 0, "of initial weights and batches");
ABSL_FLAG(int64_t, layers, 2, "transformer blocks");
ABSL_FLAG(int64_t, hidden, 128, "width of the residual stream");
ABSL_FLAG(int64_t, heads, 4, "attention heads; must divide --hidden");
ABSL_FLAG(int64_t, seq, 64, "tokens per sequence");
ABSL_FLAG(int64_t, batch, 8, "sequences per step, over all ranks");
ABSL_FLAG(double, lr, 1e-3, "learning rate of AdamW");
ABSL_FLAG(std::string, dtype, "float32", "float32 or float64");
ABSL_FLAG(double, dropout, 0, "probability of dropout, in [0, 1)");
ABSL_FLAG(bool, recompute, false, "run blocks again in backward instead of keeping their values");
ABSL_FLAG(bool, mask_hashes, false, "print a hash of every dropout mask: the same on every mesh");
ABSL_FLAG(int64_t, microbatches, 1,
          "parts of a batch that run one after the other; must divide it");
ABSL_FLAG(std::string, schedule, "constant", "of the learning rate: constant, linear or cosine");
ABSL_FLAG(int64_t, warmup, 0, "steps over which the learning rate rises to --lr");
ABSL_FLAG(std::string, save, "", "folder for checkpoints: DIR/step-N, two are kept");
ABSL_FLAG(int64_t, save_every, 0, "steps between checkpoints; default: one at the end");
ABSL_FLAG(
    std::string, resume, "",
    "go on from the last checkpoint in this folder; begin if there is none and it is --save's");
ABSL_FLAG(std::string, log, "", "add a line of JSON per step to this file");
ABSL_FLAG(std::string, tensorboard, "", "write TensorBoard events into this folder");
ABSL_FLAG(bool, verify, false, "train again on one rank and compare; fails above the tolerance");
ABSL_FLAG(std::string, trace, "",
          "write what all ranks did when in step 2 (1 if there is one) to this JSON file, for "
          "ui.perfetto.dev");
ABSL_FLAG(std::string, summary, "", "write a summary to this JSON file");

namespace dtensor {
namespace {

struct Config {
  GPTConfig model;
  int64_t ranks = 1, steps = 0, batch = 0, microbatches = 1;
  uint64_t seed = 0;
  LearningRate lr;
  DType dtype = DType::kF32;
  DeviceMesh mesh;  // null: one device, no plan
  std::optional<DeviceType> device = {};
};

absl::Status ReadSchedule(Config* c) {
  LearningRate& lr = c->lr;
  if (!(lr.peak > 0) || !std::isfinite(lr.peak)) {
    return absl::InvalidArgumentError(absl::StrCat("--lr must be positive, got ", lr.peak));
  }
  const absl::StatusOr<LearningRate::Decay> decay = ParseDecay(absl::GetFlag(FLAGS_schedule));
  if (!decay.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("--schedule: ", decay.status().message()));
  }
  lr.decay = *decay;
  lr.warmup = absl::GetFlag(FLAGS_warmup);
  lr.steps = c->steps;
  DT_RETURN_IF_ERROR(lr.Check());
  DT_RETURN_IF_ERROR(InRange("microbatches", c->microbatches, c->batch));
  if (c->batch % c->microbatches != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("--microbatches ", c->microbatches, " does not divide --batch ", c->batch));
  }
  const int64_t every = absl::GetFlag(FLAGS_save_every);
  if (every != 0) DT_RETURN_IF_ERROR(InRange("save_every", every, int64_t{1} << 40));
  if (every != 0 && absl::GetFlag(FLAGS_save).empty()) {
    return absl::InvalidArgumentError("--save_every needs --save, the folder to save in");
  }
  if (absl::GetFlag(FLAGS_verify) && !absl::GetFlag(FLAGS_resume).empty()) {
    return absl::InvalidArgumentError(
        "--verify trains on one rank from the start: it cannot be used with --resume");
  }
  return absl::OkStatus();
}

absl::StatusOr<Config> ReadFlags(const std::vector<char*>& rest) {
  if (rest.size() > 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("unexpected argument \"", rest[1], "\"; see --help"));
  }
  Config c;
  c.model = {.vocab = 256,
             .seq = absl::GetFlag(FLAGS_seq),
             .layers = absl::GetFlag(FLAGS_layers),
             .hidden = absl::GetFlag(FLAGS_hidden),
             .heads = absl::GetFlag(FLAGS_heads),
             .dropout = absl::GetFlag(FLAGS_dropout),
             .recompute = absl::GetFlag(FLAGS_recompute)};
  c.steps = absl::GetFlag(FLAGS_steps);
  c.batch = absl::GetFlag(FLAGS_batch);
  c.seed = static_cast<uint64_t>(absl::GetFlag(FLAGS_seed));
  c.microbatches = absl::GetFlag(FLAGS_microbatches);
  c.lr.peak = absl::GetFlag(FLAGS_lr);
  DT_RETURN_IF_ERROR(InRange("seq", c.model.seq, 1 << 20));
  DT_RETURN_IF_ERROR(InRange("layers", c.model.layers, 1000));
  DT_RETURN_IF_ERROR(InRange("hidden", c.model.hidden, 1 << 16));
  DT_RETURN_IF_ERROR(InRange("heads", c.model.heads, 1 << 16));
  DT_RETURN_IF_ERROR(InRange("steps", c.steps, int64_t{1} << 40));
  DT_RETURN_IF_ERROR(InRange("batch", c.batch, 1 << 20));
  if (c.model.hidden % c.model.heads != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("--heads ", c.model.heads, " does not divide --hidden ", c.model.hidden));
  }
  if (!(c.model.dropout >= 0 && c.model.dropout < 1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--dropout must be in [0, 1), got ", c.model.dropout));
  }
  DT_RETURN_IF_ERROR(ReadSchedule(&c));
  const std::string dtype = absl::GetFlag(FLAGS_dtype);
  if (dtype != "float32" && dtype != "float64") {
    return absl::InvalidArgumentError(
        absl::StrCat("--dtype must be float32 or float64, got \"", dtype, "\""));
  }
  c.dtype = dtype == "float32" ? DType::kF32 : DType::kF64;
  DT_ASSIGN_OR_RETURN(c.device, ReadDevice("--device", absl::GetFlag(FLAGS_device)));
  DT_ASSIGN_OR_RETURN(c.mesh, ReadMesh(absl::GetFlag(FLAGS_ranks), absl::GetFlag(FLAGS_mesh),
                                       /*alone=*/"dp", c.device));
  c.ranks = c.mesh.size(0) * c.mesh.size(1);
  return c;
}

// One line per dropout layer. All ranks gather, one prints.
void PrintMaskHashes(GPT& model, int64_t step, bool print) {
  if (print && isatty(STDOUT_FILENO) != 0) std::printf("\n");  // the step's line is rewritten there
  for (const NamedModule& m : model.NamedModules()) {
    const auto* layer = dynamic_cast<Dropout*>(m.module);
    if (layer == nullptr || !layer->last_mask().defined()) continue;
    uint64_t hash = 14695981039346656037u;  // FNV-1a
    for (int64_t kept : layer->last_mask().ToVector<int64_t>()) {
      hash = (hash ^ static_cast<uint64_t>(kept)) * 1099511628211u;
    }
    if (print) {
      std::printf("mask step %lld %s %016llx\n", static_cast<long long>(step), m.fqn.c_str(),
                  static_cast<unsigned long long>(hash));
    }
  }
}

// All ranks gather, one keeps.
void Collect(const GPT& model, bool keep, TrainResult* result) {
  for (const auto& [fqn, value] : model.GetStateDict()) {
    std::vector<double> values = value.ToVector<double>();
    if (keep) result->parameters.emplace_back(fqn, std::move(values));
  }
}

// Most memory of each rank. All ranks exchange, one keeps: others may be other processes.
absl::Status CollectPeaks(RankContext& rank, TrainResult* result) {
  const DeviceMesh world({rank.world_size()}, {"world"});
  DT_ASSIGN_OR_RETURN(const std::vector<std::string> peaks,
                      rank.Exchange(world, {0}, "peak_bytes",
                                    absl::StrCat(rank.device_allocator()->stats().peak_bytes)));
  if (rank.rank() != 0) return absl::OkStatus();
  for (const std::string& peak : peaks) {
    result->peak_bytes.push_back(0);
    if (!absl::SimpleAtoi(peak, &result->peak_bytes.back())) {
      return absl::InternalError(absl::StrCat("a rank's peak is \"", peak, "\""));
    }
  }
  return absl::OkStatus();
}

// What one training is to leave besides its numbers; the reference of --verify leaves nothing.
// Read from the flags before there are ranks: these only read this.
struct Outputs {
  const char* name;
  Timeline* timeline = nullptr;
  const std::atomic<bool>* stop = nullptr;
  bool mask_hashes = false;
  std::string resume = {};
  TrainerOptions files = {};  // which are written, and what stands in them
};

TrainerOptions FilesOf(const GPTConfig& m) {
  TrainerOptions o = {.save = absl::GetFlag(FLAGS_save),
                      .save_every = absl::GetFlag(FLAGS_save_every),
                      .log = absl::GetFlag(FLAGS_log),
                      .tensorboard = absl::GetFlag(FLAGS_tensorboard)};
  o.model = {{"layers", absl::StrCat(m.layers)},
             {"hidden", absl::StrCat(m.hidden)},
             {"heads", absl::StrCat(m.heads)},
             {"seq", absl::StrCat(m.seq)}};
  for (const char* name :
       {"steps", "batch", "microbatches", "lr", "schedule", "warmup", "dropout", "seed", "dtype"}) {
    o.settings[name] = absl::FindCommandLineFlag(name)->CurrentValue();
  }
  return o;
}

TrainerOptions OptionsOf(const Config& c, const Outputs& outputs) {
  TrainerOptions o = outputs.files;
  o.steps = c.steps;
  o.batch = c.batch;
  o.microbatches = c.microbatches;
  o.lr = c.lr;
  o.name = outputs.name;
  o.timeline = outputs.timeline;
  o.stop = outputs.stop;
  if (c.mesh.defined()) {
    o.mesh = c.mesh;
    for (const std::string& name : c.mesh.names()) {
      o.placements.push_back(name == "dp" ? Placement(Shard(0)) : Replicate());
    }
  }
  return o;
}

absl::Status TrainOnRank(RankContext& rank, const Config& c, TokenSampler data,
                         const Outputs& outputs, TrainResult* result) {
  ManualSeed(c.seed);
  GPT model(c.model);
  SetDType(model, c.dtype);
  if (c.mesh.defined()) {
    DT_RETURN_IF_ERROR(ParallelizeModule(model, c.mesh, GPTPlan(c.model)));
  }
  DT_RETURN_IF_ERROR(FitInMemory(model, /*states=*/2, LikeParameter,
                                 "make --layers or --hidden smaller, or --mesh with a larger tp"));
  Materialize(model);
  const bool hashes = outputs.mask_hashes, first = rank.rank() == 0;
  for (const NamedModule& m : model.NamedModules()) {
    if (auto* layer = dynamic_cast<Dropout*>(m.module)) layer->KeepMask(hashes);
  }
  AdamW optim(model.NamedParameters(), {.lr = c.lr.peak});
  TrainerOptions options = OptionsOf(c, outputs);
  options.after_step = [&](const StepReport& report) -> absl::Status {
    if (hashes) PrintMaskHashes(model, report.step, first);
    if (first) result->losses.push_back(report.loss);
    return absl::OkStatus();
  };
  DT_ASSIGN_OR_RETURN(const std::unique_ptr<Trainer> trainer,
                      Trainer::Create(model, optim, data, std::move(options)));
  DT_RETURN_IF_ERROR(ResumeOrBegin(*trainer, outputs.resume, outputs.files.save));
  const auto start = std::chrono::steady_clock::now();
  CommTrace trace;
  DT_RETURN_IF_ERROR(trainer->Run());
  if (first) {
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    result->tokens_per_s =
        static_cast<double>(std::ssize(result->losses) * c.batch * c.model.seq) / seconds.count();
    result->collectives = trace.Rows();
    if (trainer->stopped())
      std::printf("stopped after step %d\n", static_cast<int>(trainer->step()));
  }
  Collect(model, first, result);
  return CollectPeaks(rank, result);
}

absl::StatusOr<TrainResult> Train(const Config& c, const TokenSampler& data,
                                  const Outputs& outputs) {
  TrainResult result;
  DT_RETURN_IF_ERROR(RunSpmd(
      c.ranks, [&](RankContext& rank) { return TrainOnRank(rank, c, data, outputs, &result); },
      {.device = c.device}));
  return result;
}

// The windows of --data, in an order that --seed picks.
absl::StatusOr<TokenSampler> OpenData(const Config& c) {
  const auto named = [](const absl::Status& status) {
    return absl::Status(status.code(), absl::StrCat("--data ", status.message()));
  };
  absl::StatusOr<TokenFile> file = TokenFile::Open(absl::GetFlag(FLAGS_data));
  if (!file.ok()) return named(file.status());
  if (file->largest() >= c.model.vocab) {
    return absl::InvalidArgumentError(
        absl::StrCat("--data ", file->path(), " has token ", file->largest(),
                     "; this model knows bytes, 0 to ", c.model.vocab - 1));
  }
  absl::StatusOr<TokenSampler> data =
      TokenSampler::Create(*std::move(file), {.seq = c.model.seq, .seed = c.seed});
  if (!data.ok()) return named(data.status());
  return data;
}

void PrintTotals(const TrainResult& r) {
  std::printf("collectives of rank 0:\n  %-16s %-8s %-10s %8s %14s\n", "kind", "mesh dim", "phase",
              "count", "bytes");
  for (const CommRow& row : r.collectives) {
    std::printf("  %-16s %-8s %-10s %8lld %14lld\n", std::string(Name(row.kind)).c_str(),
                row.mesh_dims.c_str(), std::string(Name(row.phase)).c_str(),
                static_cast<long long>(row.count), static_cast<long long>(row.bytes));
  }
  if (r.collectives.empty()) std::printf("  none\n");
  std::printf("peak bytes per rank: %s\n", absl::StrJoin(r.peak_bytes, " ").c_str());
  if (r.losses.empty()) return;  // resumed at its end
  std::printf("loss %.4f -> %.4f, %.0f tokens/s\n", r.losses.front(), r.losses.back(),
              r.tokens_per_s);
}

absl::Status WriteSummary(const std::string& path, const TrainResult& r, const Comparison* diff) {
  nlohmann::json collectives = nlohmann::json::array();
  for (const CommRow& row : r.collectives) {
    collectives.push_back({{"kind", Name(row.kind)},
                           {"mesh_dim", row.mesh_dims},
                           {"phase", Name(row.phase)},
                           {"count", row.count},
                           {"bytes", row.bytes}});
  }
  const nlohmann::json summary = {
      {"losses", r.losses},
      {"loss_rel_diff", diff ? nlohmann::json(diff->loss_rel_diff) : nlohmann::json()},
      {"param_rel_diff", diff ? nlohmann::json(diff->param_rel_diff) : nlohmann::json()},
      {"collectives", collectives},
      {"peak_bytes", r.peak_bytes},
      {"tokens_per_s", r.tokens_per_s}};
  return WriteFile(path, summary.dump(2) + "\n");
}

// Files are checked before the work, not after it, and written when it is done.
absl::Status CheckFiles() {
  return CheckOutputs({.reads = {{"--data", absl::GetFlag(FLAGS_data)}},
                       .files = {{"--trace", absl::GetFlag(FLAGS_trace)},
                                 {"--summary", absl::GetFlag(FLAGS_summary)},
                                 {"--log", absl::GetFlag(FLAGS_log)}},
                       .folders = {{"--save", absl::GetFlag(FLAGS_save)},
                                   {"--tensorboard", absl::GetFlag(FLAGS_tensorboard)}}});
}

absl::Status Main(const std::vector<char*>& rest) {
  DT_ASSIGN_OR_RETURN(Config c, ReadFlags(rest));
  DT_ASSIGN_OR_RETURN(const TokenSampler data, OpenData(c));
  const std::string summary = absl::GetFlag(FLAGS_summary), trace = absl::GetFlag(FLAGS_trace);
  DT_RETURN_IF_ERROR(CheckFiles());
  const bool speaks = ThisProcess() == 0;  // of several the first does, for all
  if (absl::GetFlag(FLAGS_verify) && LaunchedProcesses() > 1) {
    return absl::InvalidArgumentError(
        "--verify compares with one rank, which is another program; run it with threads: --ranks");
  }
  Timeline timeline;
  if (speaks) {
    std::printf("training on mesh %s, %lld tokens, %s\n", c.mesh.ToString().c_str(),
                static_cast<long long>(data.state().tokens), std::string(Name(c.dtype)).c_str());
  }
  const bool hashes = absl::GetFlag(FLAGS_mask_hashes);
  Outputs outputs = {.name = "mesh",
                     .timeline = trace.empty() ? nullptr : &timeline,
                     .mask_hashes = hashes,
                     .resume = absl::GetFlag(FLAGS_resume),
                     .files = FilesOf(c.model)};
  if (!outputs.files.save.empty()) outputs.stop = StopOnSignal();
  DT_ASSIGN_OR_RETURN(TrainResult result, Train(c, data, outputs));
  if (!speaks) return absl::OkStatus();
  if (!trace.empty()) DT_RETURN_IF_ERROR(timeline.Write(trace));
  PrintTotals(result);
  std::optional<Comparison> diff;
  const bool whole = std::ssize(result.losses) == c.steps;
  if (absl::GetFlag(FLAGS_verify) && !whole) {
    std::printf("--verify: the training was told to stop, and is not compared\n");
  } else if (absl::GetFlag(FLAGS_verify)) {
    Config one = c;
    one.ranks = 1;
    one.mesh = DeviceMesh();
    DT_ASSIGN_OR_RETURN(TrainResult reference,
                        Train(one, data, {.name = "one rank", .mask_hashes = hashes}));
    diff = Compare(result, reference);
  }
  if (!summary.empty()) DT_RETURN_IF_ERROR(WriteSummary(summary, result, diff ? &*diff : nullptr));
  return diff ? Judge(*diff, c.dtype) : absl::OkStatus();
}

}  // namespace
}  // namespace dtensor

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage("trains a byte-level GPT on a mesh of ranks");
  return dtensor::RunProgram([&]() -> absl::Status {
    DT_RETURN_IF_ERROR(dtensor::CheckFlagNames(argc, argv, "train_gpt.cc"));
    return dtensor::Main(absl::ParseCommandLine(argc, argv));
  });
}
