// Trains a byte-level GPT on a text file, on a mesh of ranks that are threads of this process.
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
#include "absl/flags/usage.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "dtensor/mesh/program.h"
#include "dtensor/ops/ops.h"
#include "dtensor/parallel/models/gpt.h"
#include "dtensor/parallel/models/gpt_plan.h"
#include "dtensor/parallel/optim/optim.h"
#include "dtensor/rng/generator.h"
#include "dtensor/tensor/file.h"
#include "dtensor/timeline.h"
#include "examples/flags.h"
#include "examples/text_data.h"
#include "examples/verify.h"
#include "nlohmann/json.hpp"

ABSL_FLAG(std::string, data, "/usr/share/common-licenses/GPL-3", "text file to train on");
ABSL_FLAG(int64_t, ranks, 0,
          "number of ranks; default: what --mesh needs, or one for each process");
ABSL_FLAG(std::string, mesh, "", "mesh such as dp=2,tp=2; default: dp=RANKS");
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
ABSL_FLAG(bool, verify, false, "train again on one rank and compare; fails above the tolerance");
ABSL_FLAG(std::string, trace, "",
          "write what all ranks did when in step 2 (1 if there is one) to this JSON file, for "
          "ui.perfetto.dev");
ABSL_FLAG(std::string, summary, "", "write a summary to this JSON file");

namespace dtensor {
namespace {

struct Config {
  GPTConfig model;
  int64_t ranks = 1, steps = 0, batch = 0;
  uint64_t seed = 0;
  double lr = 0;
  DType dtype = DType::kF32;
  DeviceMesh mesh;  // null: one device, no plan
};

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
  c.lr = absl::GetFlag(FLAGS_lr);
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
  if (!(c.lr > 0) || !std::isfinite(c.lr)) {
    return absl::InvalidArgumentError(absl::StrCat("--lr must be positive, got ", c.lr));
  }
  const std::string dtype = absl::GetFlag(FLAGS_dtype);
  if (dtype != "float32" && dtype != "float64") {
    return absl::InvalidArgumentError(
        absl::StrCat("--dtype must be float32 or float64, got \"", dtype, "\""));
  }
  c.dtype = dtype == "float32" ? DType::kF32 : DType::kF64;
  DT_ASSIGN_OR_RETURN(
      c.mesh, ReadMesh(absl::GetFlag(FLAGS_ranks), absl::GetFlag(FLAGS_mesh), /*alone=*/"dp"));
  c.ranks = c.mesh.size(0) * c.mesh.size(1);
  return c;
}

// One line per step: rewritten on a terminal, plain in a log.
class Progress {
 public:
  explicit Progress(const char* what) : what_(what), terminal_(isatty(STDOUT_FILENO) != 0) {}
  void Step(int64_t step, int64_t steps, double loss, double norm, double tokens_per_s) const {
    std::printf("%s%s step %lld/%lld  loss %.6f  grad norm %.4f  %.0f tokens/s%s",
                terminal_ ? "\r\033[K" : "", what_, static_cast<long long>(step),
                static_cast<long long>(steps), loss, norm, tokens_per_s,
                terminal_ && step < steps ? "" : "\n");
    std::fflush(stdout);
  }

 private:
  const char* what_;
  bool terminal_;
};

// One line per dropout layer. All ranks gather, one prints.
void PrintMaskHashes(GPT& model, int64_t step, bool print) {
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

class Trainer {
 public:
  // `timeline`: where the ranks record a step; null: nowhere.
  Trainer(const Config& config, const TextData& text, Timeline* timeline)
      : c_(config), text_(text), timeline_(timeline) {}

  absl::Status Run(RankContext& rank, const char* what, TrainResult* result) {
    ManualSeed(c_.seed);
    GPT model(c_.model);
    SetDType(model, c_.dtype);
    if (c_.mesh.defined()) {
      DT_RETURN_IF_ERROR(ParallelizeModule(model, c_.mesh, GPTPlan(c_.model)));
    }
    DT_RETURN_IF_ERROR(CheckMemory(model, rank));
    Materialize(model);
    const bool hashes = absl::GetFlag(FLAGS_mask_hashes);
    for (const NamedModule& m : model.NamedModules()) {
      if (auto* layer = dynamic_cast<Dropout*>(m.module)) layer->KeepMask(hashes);
    }
    AdamW optim(model.NamedParameters(), {.lr = c_.lr});
    const bool first = rank.rank() == 0;
    CommTrace trace;
    const Progress progress(what);
    const auto start = Clock::now();
    for (int64_t step = 0; step < c_.steps; ++step) {
      const auto step_start = Clock::now();
      double norm = 0;
      std::optional<RecordTimeline> record;
      if (timeline_ != nullptr && step == std::min<int64_t>(1, c_.steps - 1)) {
        record.emplace(*timeline_);
      }
      const Span span(SpanKind::kStep, absl::StrCat("step ", step + 1));
      const double loss = Step(model, optim, step, &norm);
      if (!std::isfinite(loss)) {
        return absl::OutOfRangeError(
            absl::StrCat("the loss is ", loss, " at step ", step + 1, "; a smaller --lr may help"));
      }
      if (hashes) PrintMaskHashes(model, step + 1, first);
      if (!first) continue;
      result->losses.push_back(loss);
      progress.Step(step + 1, c_.steps, loss, norm, Tokens(1) / Seconds(step_start));
    }
    if (first) {
      result->tokens_per_s = Tokens(c_.steps) / Seconds(start);
      result->collectives = trace.Rows();
    }
    result->peak_bytes[rank.rank()] = rank.allocator()->stats().peak_bytes;
    Collect(model, first, result);
    return absl::OkStatus();
  }

 private:
  // Sizes beyond this machine are refused, not tried until the system ends the program: parameters
  // before any is made, everything else by the allocator's limit.
  absl::Status CheckMemory(const GPT& model, RankContext& rank) const {
    const int64_t mine = AvailableMemory() / c_.ranks;
    double bytes = 0;
    for (const NamedParameter& p : model.NamedParameters()) {
      const SpecRef spec = ValueOrThrow(rank.specs().Intern(
          p.parameter->mesh(), p.parameter->placements(), p.parameter->shape(), c_.dtype));
      // The parameter, its gradient and the two moments of AdamW.
      bytes += 4.0 * static_cast<double>(Numel(spec->local_shape()) * SizeOf(c_.dtype));
    }
    if (bytes > static_cast<double>(mine)) {
      return absl::ResourceExhaustedError(absl::StrFormat(
          "this model takes %.1f GB on each of %d ranks, and there are %.1f GB for each; make "
          "--layers or --hidden smaller, or --mesh with a larger tp",
          bytes / 1e9, c_.ranks, static_cast<double>(mine) / 1e9));
    }
    rank.allocator()->SetLimit(mine);
    return absl::OkStatus();
  }

  using Clock = std::chrono::steady_clock;
  static double Seconds(Clock::time_point from) {
    return std::chrono::duration<double>(Clock::now() - from).count();
  }
  double Tokens(int64_t steps) const {
    return static_cast<double>(steps * c_.batch * c_.model.seq);
  }

  DTensor Distribute(const Tensor& whole) const {
    if (!c_.mesh.defined()) return OnSelf(whole);
    return DistributeTensor(whole, c_.mesh, {Shard(0), Replicate()});
  }

  double Step(GPT& model, Optimizer& optim, int64_t step, double* norm) const {
    const Batch batch = text_.Sample(c_.seed, step, c_.batch, c_.model.seq);
    const DTensor logits = model(Distribute(batch.ids));
    const DTensor loss =
        cross_entropy(flatten(logits, 0, 1), flatten(Distribute(batch.targets), 0, 1));
    loss.Backward();
    *norm = ClipGradNorm(model.NamedParameters(), 1.0);
    optim.Step();
    optim.ZeroGrad();
    return loss.Item();
  }

  // All ranks gather, one keeps.
  static void Collect(const GPT& model, bool keep, TrainResult* result) {
    for (const auto& [fqn, value] : model.GetStateDict()) {
      std::vector<double> values = value.ToVector<double>();
      if (keep) result->parameters.emplace_back(fqn, std::move(values));
    }
  }

  const Config& c_;
  const TextData& text_;
  Timeline* timeline_;
};

absl::StatusOr<TrainResult> Train(const Config& c, const TextData& text, const char* what,
                                  Timeline* timeline = nullptr) {
  TrainResult result;
  result.peak_bytes.resize(c.ranks);
  DT_RETURN_IF_ERROR(RunSpmd(c.ranks, [&](RankContext& rank) {
    return Trainer(c, text, timeline).Run(rank, what, &result);
  }));
  return result;
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
absl::Status CheckFiles(const std::string& data, const std::string& trace,
                        const std::string& summary) {
  const std::pair<const char*, std::string> files[] = {
      {"data", data}, {"trace", trace}, {"summary", summary}};
  for (size_t i = 0; i < std::size(files); ++i) {
    const auto& [flag, path] = files[i];
    if (i == 0 || path.empty()) continue;
    const absl::Status writable = CheckWritable(path);
    if (!writable.ok()) {
      return absl::Status(writable.code(), absl::StrCat("--", flag, " ", writable.message()));
    }
    for (size_t j = 0; j < i; ++j) {
      if (files[j].second.empty() || !SameFile(path, files[j].second)) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("--", flag, " and --", files[j].first, " name the same file, ", path));
    }
  }
  return absl::OkStatus();
}

absl::Status Main(const std::vector<char*>& rest) {
  DT_ASSIGN_OR_RETURN(Config c, ReadFlags(rest));
  DT_ASSIGN_OR_RETURN(TextData text, TextData::Read(absl::GetFlag(FLAGS_data), c.model.seq));
  const std::string summary = absl::GetFlag(FLAGS_summary), trace = absl::GetFlag(FLAGS_trace);
  DT_RETURN_IF_ERROR(CheckFiles(absl::GetFlag(FLAGS_data), trace, summary));
  const bool speaks = ThisProcess() == 0;  // of several the first does, for all
  if (absl::GetFlag(FLAGS_verify) && LaunchedProcesses() > 1) {
    return absl::InvalidArgumentError(
        "--verify compares with one rank, which is another program; run it with threads: --ranks");
  }
  Timeline timeline;
  if (speaks) {
    std::printf("training on mesh %s, %lld bytes of text, %s\n", c.mesh.ToString().c_str(),
                static_cast<long long>(text.size()), std::string(Name(c.dtype)).c_str());
  }
  DT_ASSIGN_OR_RETURN(TrainResult result,
                      Train(c, text, "mesh", trace.empty() ? nullptr : &timeline));
  if (!speaks) return absl::OkStatus();
  if (!trace.empty()) DT_RETURN_IF_ERROR(timeline.Write(trace));
  PrintTotals(result);
  std::optional<Comparison> diff;
  if (absl::GetFlag(FLAGS_verify)) {
    Config one = c;
    one.ranks = 1;
    one.mesh = DeviceMesh();
    DT_ASSIGN_OR_RETURN(TrainResult reference, Train(one, text, "one rank"));
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
