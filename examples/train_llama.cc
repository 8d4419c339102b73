// Trains a Llama on a file of tokens or text, on a mesh of ranks: threads of this process, or one
// for each process that a launcher started.
//
//   train_llama settings.toml --training.steps=100 --parallel.tp=2 --parallel.sequence=true
//
// The model is written for one device. A plan spreads it over "tp", and the batch is cut over "dp".
// Every setting stands in the file, on the command line, or is its default; all are printed. With
// model.pretrained it goes on from a Hugging Face folder (a Llama or a GPT-2), whose tokenizer then
// makes tokens of a text, and with checkpoint.export it writes one.
#include <unistd.h>

#include <cstdio>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <variant>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/mesh/program.h"
#include "dtensor/parallel/data/tokenize.h"
#include "dtensor/parallel/models/pretrained.h"
#include "dtensor/parallel/optim/optim.h"
#include "dtensor/parallel/plan/plan.h"
#include "dtensor/parallel/text/pre_tokenizer.h"
#include "dtensor/parallel/train/describe.h"
#include "dtensor/parallel/train/recompute.h"
#include "dtensor/parallel/train/trainer.h"
#include "dtensor/rng/generator.h"
#include "dtensor/tensor/status.h"
#include "examples/config_table.h"
#include "examples/flags.h"
#include "examples/output_files.h"
#include "examples/resume.h"
#include "examples/stop_signal.h"
#include "nlohmann/json.hpp"

namespace dtensor {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

struct Settings {
  LlamaConfig model = {.vocab = 256,
                       .hidden = 128,
                       .inner = 352,
                       .layers = 2,
                       .heads = 4,
                       .kv_heads = 2,
                       .max_positions = 2048,
                       .tied = false};
  double rope_theta = 10000;
  std::string pretrained, export_to;
  std::string data, eval_data;
  bool bytes = false;
  int64_t seq = 64, steps = 50, batch = 8, microbatches = 1, seed = 0;
  std::string dtype = "float32", state = "like-parameters";
  double max_norm = 1;
  std::string recompute;
  AdamWOptions adamw = {.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1};
  std::string decay = "cosine";
  int64_t warmup = 0;
  double least_lr = 0;
  int64_t dp = 1, tp = 1;
  std::string device;
  bool sequence = false, loss = true, strict = false;
  std::string save, resume;
  int64_t save_every = 0, keep = 2;
  std::string log, tensorboard;
  int64_t eval_every = 0, eval_batches = 8, check_every = 0;
};

// The list of all settings, their ranges and choices.
ConfigTable TableOf(Settings* s) {
  constexpr int64_t kMany = int64_t{1} << 40;
  ConfigTable t;
  LlamaConfig& m = s->model;
  t.Add("model.vocab", &m.vocab, 1, 1 << 24);
  t.Add("model.hidden", &m.hidden, 1, 1 << 20);
  t.Add("model.inner", &m.inner, 1, 1 << 22);
  t.Add("model.layers", &m.layers, 1, 10000);
  t.Add("model.heads", &m.heads, 1, 1 << 16);
  t.Add("model.kv_heads", &m.kv_heads, 1, 1 << 16);
  t.Add("model.norm_eps", &m.norm_eps, 0, 1);
  t.Add("model.rope_theta", &s->rope_theta, 1, 1e12);
  t.Add("model.tied", &m.tied);
  t.Add("model.pretrained", &s->pretrained);
  t.Add("data.path", &s->data);
  t.Add("data.eval_path", &s->eval_data);
  t.Add("data.bytes", &s->bytes);
  t.Add("data.seq", &s->seq, 1, 1 << 24);
  t.Add("training.steps", &s->steps, 1, kMany);
  t.Add("training.batch", &s->batch, 1, 1 << 24);
  t.Add("training.microbatches", &s->microbatches, 1, 1 << 24);
  t.Add("training.seed", &s->seed, 0, std::numeric_limits<int64_t>::max());
  t.Add("training.dtype", &s->dtype, {"float32", "bfloat16", "float64"});
  t.Add("training.max_norm", &s->max_norm, 0, kInf);
  t.Add("training.recompute", &s->recompute);
  t.Add("optimizer.lr", &s->adamw.lr, 0, 1e6);
  t.Add("optimizer.beta1", &s->adamw.beta1, 0, 1);
  t.Add("optimizer.beta2", &s->adamw.beta2, 0, 1);
  t.Add("optimizer.eps", &s->adamw.eps, 0, 1);
  t.Add("optimizer.weight_decay", &s->adamw.weight_decay, 0, 1e6);
  t.Add("optimizer.schedule", &s->decay, {"constant", "linear", "cosine"});
  t.Add("optimizer.warmup", &s->warmup, 0, kMany);
  t.Add("optimizer.least_lr", &s->least_lr, 0, 1e6);
  t.Add("optimizer.state", &s->state, {"like-parameters", "float32", "flat-over-dp"});
  t.Add("parallel.dp", &s->dp, 1, 256);
  t.Add("parallel.tp", &s->tp, 1, 256);
  t.Add("parallel.device", &s->device);
  t.Add("parallel.sequence", &s->sequence);
  t.Add("parallel.loss", &s->loss);
  t.Add("parallel.strict", &s->strict);
  t.Add("checkpoint.save", &s->save);
  t.Add("checkpoint.every", &s->save_every, 0, kMany);
  t.Add("checkpoint.keep", &s->keep, 1, 1 << 20);
  t.Add("checkpoint.resume", &s->resume);
  t.Add("checkpoint.export", &s->export_to);
  t.Add("metrics.log", &s->log);
  t.Add("metrics.tensorboard", &s->tensorboard);
  t.Add("metrics.eval_every", &s->eval_every, 0, kMany);
  t.Add("metrics.eval_batches", &s->eval_batches, 1, kMany);
  t.Add("metrics.check_every", &s->check_every, 0, kMany);
  return t;
}

template <class... Words>
absl::Status Wrong(const Words&... words) {
  return absl::InvalidArgumentError(absl::StrCat(words...));
}

// The model that the settings or the folder describe.
absl::StatusOr<ModelConfig> ModelOf(const Settings& s) {
  if (!s.pretrained.empty()) return ReadModelConfig(s.pretrained);
  LlamaConfig m = s.model;
  if (m.hidden % m.heads != 0) {
    return Wrong("model.heads ", m.heads, " does not divide model.hidden ", m.hidden);
  }
  m.head_size = m.hidden / m.heads;
  m.max_positions = s.seq;
  m.rope.theta = s.rope_theta;
  DT_RETURN_IF_ERROR(CheckConfig(m));
  return ModelConfig{.model = m};
}

// What no single setting shows.
absl::Status Resolve(const ConfigTable& table, Settings* s) {
  // An argument takes the place of the file's whole [model].
  const bool replaces = !table.Given("model.pretrained", /*in_argument=*/true).empty();
  for (const std::string& given :
       s->pretrained.empty() ? std::vector<std::string>() : table.Given("model.", replaces)) {
    if (given == "model.pretrained") continue;
    return Wrong(given,
                 " is given beside model.pretrained, whose config.json says what the model "
                 "is; leave out one of them");
  }
  if (s->max_norm <= 0) {
    return Wrong("training.max_norm must be positive, got ", s->max_norm,
                 "; inf does not clip gradients");
  }
  if (s->batch % s->microbatches != 0) {
    return Wrong("training.microbatches ", s->microbatches, " does not divide training.batch ",
                 s->batch);
  }
  if (s->warmup > s->steps) {
    return Wrong("optimizer.warmup ", s->warmup, " is beyond training.steps ", s->steps);
  }
  if (s->adamw.lr <= 0) return Wrong("optimizer.lr must be positive");
  if (s->adamw.beta1 >= 1) return Wrong("optimizer.beta1 must be below 1, got ", s->adamw.beta1);
  if (s->adamw.beta2 >= 1) return Wrong("optimizer.beta2 must be below 1, got ", s->adamw.beta2);
  if (s->adamw.eps <= 0) {
    return Wrong("optimizer.eps must be positive, got ", s->adamw.eps,
                 ": what has had no gradient yet, as tokens that were not seen, is divided by it");
  }
  if (s->least_lr > s->adamw.lr) {
    return Wrong("optimizer.least_lr ", s->least_lr, " is above optimizer.lr ", s->adamw.lr);
  }
  if (s->dp * s->tp > 256) {
    return Wrong("parallel.dp ", s->dp, " times parallel.tp ", s->tp, " is above 256 ranks");
  }
  if (s->data.empty()) return Wrong("data.path is needed: a file of tokens, or any text");
  if (s->save_every > 0 && s->save.empty()) {
    return Wrong("checkpoint.every needs checkpoint.save, the folder to save in");
  }
  if (s->eval_every > 0 && s->eval_data.empty()) {
    return Wrong("metrics.eval_every needs data.eval_path, the tokens to evaluate on");
  }
  return absl::OkStatus();
}

// A token file, or what the pretrained model's tokenizer makes of a text. A model of bytes, and one
// that begins with random values, learns a text's bytes.
absl::StatusOr<TokenFile> OpenTokens(const std::string& path, int64_t vocab, const Settings& s) {
  if (s.bytes) return TokenFile::OpenBytes(path);
  DT_ASSIGN_OR_RETURN(TokenFile file, TokenFile::Open(path));
  if (!file.is_bytes() || s.pretrained.empty()) return file;
  const std::string tokenizer_path = s.pretrained + "/tokenizer.json";
  if (access(tokenizer_path.c_str(), F_OK) == 0) {
    DT_ASSIGN_OR_RETURN(const Tokenizer tokenizer, Tokenizer::Read(s.pretrained));
    DT_ASSIGN_OR_RETURN(const std::vector<int64_t> tokens, TokenizeFile(tokenizer, path));
    return TokenFile::Of(path, tokens);
  }
  if (vocab == 256) return file;
  return Wrong(path, " is no token file, and there is no ", tokenizer_path,
               " that makes tokens of a text; the program tokenize writes token files, and "
               "data.bytes=true takes bytes for tokens");
}

absl::StatusOr<TokenSampler> OpenData(const char* key, const std::string& path, int64_t vocab,
                                      const Settings& s, bool* bytes = nullptr) {
  const auto named = [&](const absl::Status& status) { return Prefixed(key, status); };
  absl::StatusOr<TokenFile> file = OpenTokens(path, vocab, s);
  if (!file.ok()) return named(file.status());
  if (file->is_bytes() && vocab < 256) {
    return Wrong(key, ": ", path,
                 " is taken as bytes, which are tokens from 0 to 255; the model's ",
                 "vocabulary is ", vocab, ", at least 256 are needed");
  }
  if (file->largest() >= vocab) {
    return Wrong(key, ": ", path, " has token ", file->largest(), ", the model's vocabulary is ",
                 vocab);
  }
  if (bytes != nullptr) *bytes = file->is_bytes();
  if (ThisProcess() == 0) {
    std::printf("%s: %s, %s %s\n", key, path.c_str(),
                HumanFormat(static_cast<double>(file->size())).c_str(),
                file->is_bytes() ? "bytes" : "tokens");
  }
  absl::StatusOr<TokenSampler> data =
      TokenSampler::Create(*std::move(file), {.seq = s.seq, .seed = static_cast<uint64_t>(s.seed)});
  if (!data.ok()) return named(data.status());
  return data;
}

// The tokenizer.json of a model whose tokens are bytes, so that what is exported generates.
std::string ByteTokenizer() {
  nlohmann::json vocab;
  for (int b = 0; b < 256; ++b) {
    vocab[text::BytesToCharacters(std::string(1, static_cast<char>(b)))] = b;
  }
  const nlohmann::json none = nlohmann::json::array();
  const nlohmann::json level = {{"type", "ByteLevel"},
                                {"add_prefix_space", false},
                                {"trim_offsets", true},
                                {"use_regex", false}};
  return nlohmann::json{{"version", "1.0"},
                        {"added_tokens", none},
                        {"pre_tokenizer", level},
                        {"decoder", level},
                        {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", none}}}}
             .dump(1) +
         "\n";
}

struct Data {
  TokenSampler train;
  std::shared_ptr<const TokenSampler> eval;
};

StateLayoutFn StateOf(const Settings& s, DType dtype) {
  if (s.state == "flat-over-dp") return FlatState("dp", PromoteTypes(dtype, DType::kF32));
  if (s.state == "like-parameters") return LikeParameter;
  return [](const Parameter& p) {
    StateLayout layout = LikeParameter(p);
    layout.dtype = DType::kF32;
    return layout;
  };
}

// What every rank is given.
struct Job {
  Settings settings;
  ModelConfig config;
  std::map<std::string, std::string>
      notes;  // settings that are told where a resumed run has others
  const std::atomic<bool>* stop = nullptr;
};

// What makes numbers of a model's parameters, from its config.json: not its dtype, which tensors
// show, and not which tokens end a text.
std::map<std::string, std::string> NotesOf(const ModelConfig& config) {
  std::map<std::string, std::string> notes;
  const auto fields = nlohmann::json::parse(ModelConfigJson(config));
  for (const auto& [name, value] : fields.items()) {
    if (name != "dtype" && !absl::EndsWith(name, "_token_id")) notes[name] = value.dump();
  }
  return notes;
}

TrainerOptions OptionsOf(const Job& job, const DeviceMesh& mesh, const Data& data) {
  const Settings& s = job.settings;
  TrainerOptions o = {.steps = s.steps,
                      .batch = s.batch,
                      .microbatches = s.microbatches,
                      .mesh = mesh,
                      .placements = {Shard(0), Replicate()},
                      .lr = {.peak = s.adamw.lr,
                             .decay = *ParseDecay(s.decay),
                             .warmup = s.warmup,
                             .steps = s.steps,
                             .least = s.least_lr},
                      .max_norm = s.max_norm};
  o.eval = data.eval;
  o.eval_every = s.eval_every;
  o.eval_batches = s.eval_batches;
  o.check_every = s.check_every;
  o.save = s.save;
  o.save_every = s.save_every;
  o.keep = static_cast<int>(s.keep);
  o.model = NotesOf(job.config);
  o.settings = job.notes;
  o.name = "train";
  o.log = s.log;
  o.tensorboard = s.tensorboard;
  o.stop = job.stop;
  return o;
}

// Six per parameter that is multiplied with (a tied table is, by the head), and what attention
// does with the sequence.
double FlopsPerToken(const Settings& s, CausalLM& model) {
  double multiplied = 0, table = 0, width = 0;
  bool has_table = false;
  for (const NamedModule& m : model.NamedModules()) {
    const std::optional<ModuleTraits> traits = m.module->traits();
    if (!traits || !traits->looks_up || std::exchange(has_table, true)) continue;
    table = static_cast<double>(traits->weight->numel());
    width = static_cast<double>(traits->weight->shape()[1]);
  }
  for (const NamedParameter& p : model.NamedParameters()) {
    multiplied += static_cast<double>(p.parameter->numel());
    if (!p.aliases.empty()) table = 0;
  }
  const double attention = 12 * static_cast<double>(model.layers() * s.seq) * width;
  return 6 * (multiplied - table) + attention;
}

// The model on its mesh, with values.
absl::StatusOr<std::unique_ptr<CausalLM>> Build(const Job& job, const DeviceMesh& mesh,
                                                bool tells) {
  const Settings& s = job.settings;
  DType dtype = DType::kF32;
  ParseDType(s.dtype, &dtype);
  std::unique_ptr<CausalLM> model = MakeModel(job.config);
  SetDType(*model, dtype);
  const Plan plan = PlanFor(job.config, {.sequence_parallel = s.sequence, .loss_parallel = s.loss});
  DT_RETURN_IF_ERROR(ParallelizeModule(*model, mesh, plan));
  if (!s.recompute.empty()) {
    DT_RETURN_IF_ERROR(RecomputeModules(*model, absl::StrSplit(s.recompute, ',')));
  }
  DT_RETURN_IF_ERROR(
      FitInMemory(*model, /*states=*/2, StateOf(s, dtype),
                  "make model.layers or model.hidden smaller, or parallel.tp larger"));
  if (s.pretrained.empty()) {
    Materialize(*model);
  } else {
    DT_RETURN_IF_ERROR(LoadPretrained(*model, s.pretrained));
  }
  if (tells) {
    DT_ASSIGN_OR_RETURN(const std::string tree, DescribePlan(*model, plan));
    std::printf("%s\n%s\n", tree.c_str(), DescribeParameters(*model).c_str());
  }
  return model;
}

absl::Status TrainOnRank(RankContext& rank, const Job& job, Data data) {
  const Settings& s = job.settings;
  const bool first = rank.rank() == 0;
  const DeviceMesh mesh({s.dp, s.tp}, {"dp", "tp"});
  ManualSeed(static_cast<uint64_t>(s.seed));
  std::optional<StrictRedistribute> strict;
  if (s.strict) strict.emplace();
  DT_ASSIGN_OR_RETURN(const std::unique_ptr<CausalLM> made, Build(job, mesh, first));
  CausalLM& model = *made;
  const DType dtype = model.Parameters()[0]->dtype();
  AdamW optimizer(model.NamedParameters(), s.adamw, StateOf(s, dtype));
  TrainerOptions options = OptionsOf(job, mesh, data);
  options.flops_per_token = FlopsPerToken(s, model);
  DT_ASSIGN_OR_RETURN(const std::unique_ptr<Trainer> trainer,
                      Trainer::Create(model, optimizer, data.train, std::move(options)));
  DT_RETURN_IF_ERROR(ResumeOrBegin(*trainer, s.resume, s.save));
  DT_RETURN_IF_ERROR(trainer->Run());
  if (first && trainer->stopped()) {
    std::printf("stopped after step %lld\n", static_cast<long long>(trainer->step()));
  }
  return s.export_to.empty() ? absl::OkStatus() : SavePretrained(model, s.export_to);
}

absl::Status CheckFiles(const Settings& s) {
  return CheckOutputs({.reads = {{"data.path", s.data},
                                 {"data.eval_path", s.eval_data},
                                 {"model.pretrained", s.pretrained}},
                       .files = {{"metrics.log", s.log}},
                       .folders = {{"checkpoint.save", s.save},
                                   {"checkpoint.export", s.export_to},
                                   {"metrics.tensorboard", s.tensorboard}}});
}

// What goes into checkpoint.export besides the weights, and whether it may.
absl::Status CheckExport(const Settings& s, bool of_bytes, ModelConfig* config) {
  if (s.export_to.empty()) return absl::OkStatus();
  if (s.pretrained.empty()) {
    config->files = {{"config.json", ModelConfigJson(*config)}};
    if (of_bytes) config->files.emplace_back("tokenizer.json", ByteTokenizer());
  }
  std::set<std::string> names;
  for (const auto& [name, text] : config->files) names.insert(name);
  return Prefixed("checkpoint.export", CheckExportFolder(s.export_to, names));
}

// As TOML, and of a pretrained model its config, in whose place model.* would be.
void PrintSettings(const ConfigTable& table, const Job& job) {
  const bool pretrained = !job.settings.pretrained.empty();
  std::vector<std::string> without;
  if (pretrained) {
    for (const auto& [key, value] : table.Values()) {
      if (absl::StartsWith(key, "model.") && key != "model.pretrained") without.push_back(key);
    }
  }
  std::printf("%s\n", table.ToString(without).c_str());
  if (pretrained) {
    std::printf("%s/config.json:\n%s\n", job.settings.pretrained.c_str(),
                ModelConfigJson(job.config).c_str());
  }
}

absl::Status Main(int argc, char** argv) {
  Job job;
  Settings& s = job.settings;
  ConfigTable table = TableOf(&s);
  if (absl::c_linear_search(absl::MakeSpan(argv, argc), absl::string_view("--help"))) {
    std::printf("train_llama [SETTINGS.toml] [--section.key=value]...\n\n%s",
                table.ToString().c_str());
    return absl::OkStatus();
  }
  DT_RETURN_IF_ERROR(table.ReadArguments(argc, argv));
  DT_RETURN_IF_ERROR(Resolve(table, &s));
  DT_ASSIGN_OR_RETURN(job.config, ModelOf(s));
  // Where and on how many ranks it runs, what it is called and where it goes is no matter.
  job.notes = table.Values(
      {"model.", "data.path", "data.eval_path", "parallel.", "checkpoint.", "metrics."});
  const auto [vocab, positions] = std::visit(
      [](const auto& m) { return std::pair(m.vocab, m.max_positions); }, job.config.model);
  if (s.seq > positions) {
    return Wrong("data.seq ", s.seq, " is beyond the model's ", positions, " positions");
  }
  DT_RETURN_IF_ERROR(CheckFiles(s));
  DT_ASSIGN_OR_RETURN(const std::optional<DeviceType> device,
                      ReadDevice("parallel.device", s.device));
  if (ThisProcess() == 0) PrintSettings(table, job);
  bool bytes = false;
  DT_ASSIGN_OR_RETURN(TokenSampler train, OpenData("data.path", s.data, vocab, s, &bytes));
  DT_RETURN_IF_ERROR(CheckExport(s, bytes && vocab == 256, &job.config));
  Data data = {std::move(train), nullptr};
  if (!s.eval_data.empty()) {
    DT_ASSIGN_OR_RETURN(TokenSampler eval, OpenData("data.eval_path", s.eval_data, vocab, s));
    data.eval = std::make_shared<const TokenSampler>(std::move(eval));
  }
  job.stop = s.save.empty() ? nullptr : StopOnSignal();
  return RunSpmd(s.dp * s.tp, [&](RankContext& rank) { return TrainOnRank(rank, job, data); },
                 {.device = device});
}

}  // namespace
}  // namespace dtensor

int main(int argc, char** argv) {
  return dtensor::RunProgram([&] { return dtensor::Main(argc, argv); });
}
