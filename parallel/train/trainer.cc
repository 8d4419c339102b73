#include "dtensor/parallel/train/trainer.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "dtensor/mesh/comm_time.h"
#include "dtensor/mesh/flight.h"
#include "dtensor/mesh/hash.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/mesh/program.h"
#include "dtensor/ops/ops.h"
#include "dtensor/parallel/io/checkpoint.h"
#include "dtensor/parallel/module/mode_scope.h"
#include "dtensor/parallel/train/check_alike.h"
#include "dtensor/parallel/train/check_copies.h"
#include "dtensor/parallel/train/kept_buffers.h"
#include "dtensor/rng/tracker.h"
#include "dtensor/tensor/status.h"
#include "dtensor/timeline.h"
#include "nlohmann/json.hpp"

namespace dtensor {
namespace {

using Clock = std::chrono::steady_clock;

double Seconds(Clock::duration d) { return std::chrono::duration<double>(d).count(); }

// The mesh dims that cut the batch: over these gradients are summed once per step, not once per
// microbatch.
std::vector<std::string> CuttingDims(const TrainerOptions& o) {
  std::vector<std::string> names;
  for (int m = 0; m < o.mesh.ndim(); ++m) {
    if (o.placements[m].cuts() && o.mesh.size(m) > 1) names.push_back(o.mesh.names()[m]);
  }
  return names;
}

void Warn(const absl::Status& status) {
  absl::FPrintF(stderr, "\nwarning: %s\n", status.message());
  std::fflush(stderr);
}

// Written to until it fails.
template <class File>
void AddOrLeave(File* file, const absl::Status& status) {
  if (status.ok()) return;
  Warn(status);
  *file = File();
}

}  // namespace

DTensor NextTokenLoss(const DTensor& logits, const DTensor& targets) {
  const DTensor wide = IsNarrow(logits.dtype()) ? to(logits, DType::kF32) : logits;
  return cross_entropy(flatten(wide, 0, 1), flatten(targets, 0, 1));
}

std::vector<LogItem> StepReport::Items() const {
  using Format = LogItem::Format;
  return {{"loss", loss, Format::kFixed, 6},
          {"grad_norm", grad_norm, Format::kFixed, 4},
          {"lr", lr, Format::kExponent, 2},
          {"tokens_per_s", tokens_per_s},
          {"flops_per_s", flops_per_s},
          {"step_seconds", seconds},
          {"peak_bytes", static_cast<double>(peak_bytes)},
          {"comm_share", comm_share, Format::kFixed, 3},
          {"skew_seconds", skew_seconds}};
}

// Where rank 0 tells how it goes.
struct Trainer::Outputs {
  LineFile log;
  EventFile events;
  // Where somebody looks: mpirun gives its ranks terminals too.
  const bool terminal = isatty(STDOUT_FILENO) != 0 && LaunchedProcesses() <= 1;
  bool line_is_open = false;
  const Clock::time_point start = Clock::now();
  int64_t told = 0;  // steps

  absl::Status Open(const TrainerOptions& o) {
    if (!o.log.empty()) {
      DT_ASSIGN_OR_RETURN(log, LineFile::Open(o.log));
    }
    if (!o.tensorboard.empty()) {
      DT_ASSIGN_OR_RETURN(events, EventFile::Open(o.tensorboard));
    }
    return absl::OkStatus();
  }

  void Log(int64_t step, const std::vector<LogItem>& items) {
    if (log.is_open()) AddOrLeave(&log, log.Add(ToJson(step, items) + "\n"));
    if (events.is_open()) AddOrLeave(&events, events.Add(step, items));
  }

  // With the prefixes of units: "17.1 G".
  static std::string Prefixed(double value) {
    std::string text = HumanFormat(value);
    if (text.back() < 'A') return text + " ";
    if (text.back() == 'B') text.back() = 'G';
    return text.insert(text.size() - 1, " ");
  }

  // A line of a step: rewritten on a terminal, with the time that is left, and as much of the rest
  // as one line has room for.
  void Print(const std::string& name, const StepReport& r) {
    line_is_open = terminal && r.step < r.steps;
    const double left = Seconds(Clock::now() - start) / static_cast<double>(told) *
                        static_cast<double>(r.steps - r.step);
    std::string line = absl::StrFormat(
        "%s step %d/%d%s  loss %.6f  grad norm %.4f  %.0f tokens/s  %sFLOP/s  peak %sB  comm "
        "%.0f%%  skew %.1f ms  lr %.2e",
        name, r.step, r.steps, line_is_open ? absl::StrCat("  ETA ", HumanSeconds(left)) : "",
        r.loss, r.grad_norm, r.tokens_per_s, Prefixed(r.flops_per_s),
        Prefixed(static_cast<double>(r.peak_bytes)), 100 * r.comm_share, 1e3 * r.skew_seconds,
        r.lr);
    winsize window = {};
    if (line_is_open && ioctl(STDOUT_FILENO, TIOCGWINSZ, &window) == 0 && window.ws_col > 0) {
      line.resize(std::min<size_t>(line.size(), window.ws_col - 1));
    }
    std::printf("%s%s%s", terminal ? "\r\033[K" : "", line.c_str(), line_is_open ? "" : "\n");
    std::fflush(stdout);
  }
  // What is printed next is not the trainer's.
  void EndLine() {
    if (std::exchange(line_is_open, false)) std::printf("\n");
  }
};

Trainer::Trainer(Module& model, Optimizer& optimizer, TokenSampler& data, TrainerOptions options)
    : model_(model),
      optimizer_(optimizer),
      data_(data),
      o_(std::move(options)),
      parameters_(model.NamedParameters()),
      buffers_(std::make_unique<internal::KeptBuffers>(model)) {}
Trainer::~Trainer() = default;

namespace {

// Every rank trains: one without a part of the batch has no loss to tell.
absl::Status CheckMesh(const DeviceMesh& mesh) {
  if (!mesh.defined()) return absl::InvalidArgumentError("[trainer] the batch's mesh is null");
  const int64_t ranks = RankContext::Current().world_size();
  if (mesh.is_self() || mesh.device() == DeviceType::kMeta || mesh.size() == ranks) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("[trainer] the batch's mesh ", mesh.ToString(), " has ", mesh.size(),
                   " ranks, the world has ", ranks, ": all of them train, so it must have all"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Trainer>> Trainer::Create(Module& model, Optimizer& optimizer,
                                                         TokenSampler& data,
                                                         TrainerOptions options) {
  if (options.batch < 1 || options.microbatches < 1 || options.batch % options.microbatches != 0) {
    return absl::InvalidArgumentError(absl::StrCat("[trainer] a batch of ", options.batch,
                                                   " sequences cannot be cut into ",
                                                   options.microbatches, " equal microbatches"));
  }
  for (const auto& [name, count] : {std::pair<absl::string_view, int64_t>{"steps", options.steps},
                                    {"eval_every", options.eval_every},
                                    {"check_every", options.check_every},
                                    {"save_every", options.save_every}}) {
    if (count >= 0) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("[trainer] ", name, " must not be negative, is ", count));
  }
  if (options.eval_batches < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("[trainer] eval_batches must be positive, is ", options.eval_batches));
  }
  if (!(options.max_norm >= 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("[trainer] max_norm must not be negative, is ", options.max_norm));
  }
  if (options.lr.steps == 0) options.lr.steps = std::max<int64_t>(options.steps, 1);
  DT_RETURN_IF_ERROR(options.lr.Check());
  DT_RETURN_IF_ERROR(CheckMesh(options.mesh));
  if (static_cast<int>(options.placements.size()) != options.mesh.ndim()) {
    return absl::InvalidArgumentError(
        absl::StrCat("[trainer] ", options.placements.size(), " placements for a mesh of ",
                     options.mesh.ndim(), " dims: one says for each how it cuts the batch"));
  }
  if (!options.loss) {
    options.loss = [](Module& m, const TokenBatch& b) {
      return NextTokenLoss(m(b.ids), b.targets);
    };
  }
  if (options.flops_per_token == 0) {
    options.flops_per_token = 6.0 * static_cast<double>(model.NumElements());
  }
  std::unique_ptr<Trainer> trainer(new Trainer(model, optimizer, data, std::move(options)));
  if (RankContext::Current().rank() == 0) {
    trainer->outputs_ = std::make_unique<Outputs>();
    DT_RETURN_IF_ERROR(trainer->outputs_->Open(trainer->o_));
  }
  return trainer;
}

namespace {

// Settings as a note of a checkpoint, and which of them are others now.
std::string ToNote(const std::map<std::string, std::string>& settings) {
  return nlohmann::json(settings).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}
std::string WhatChanged(const CheckpointInfo& info, const char* name,
                        const std::map<std::string, std::string>& now) {
  const auto note = info.notes.find(name);
  if (note == info.notes.end()) return "";
  const nlohmann::json was = nlohmann::json::parse(note->second, nullptr, false);
  std::vector<std::string> changes;
  for (const auto& [key, value] : now) {
    if (!was.is_object() || !was.contains(key) || was[key] == value) continue;
    const std::string before = was[key].is_string() ? was[key].get<std::string>() : was[key].dump();
    changes.push_back(absl::StrCat(key, " was ", before, ", is ", value));
  }
  return absl::StrJoin(changes, "; ");
}

// The streams of all ranks as a note: a list with an object of names and hexadecimal states for
// each rank. And this rank's out of it.
absl::StatusOr<std::string> StreamsNote(const RngTracker& tracker) {
  nlohmann::json mine = nlohmann::json::object();
  for (const auto& [name, state] : tracker.GetStates()) {
    mine[name] = absl::BytesToHexString(
        absl::string_view(reinterpret_cast<const char*>(state.data()), state.size()));
  }
  RankContext& rank = RankContext::Current();
  const DeviceMesh world({rank.world_size()}, {"world"});
  DT_ASSIGN_OR_RETURN(const std::vector<std::string> all,
                      rank.Exchange(world, {0}, "train_streams", mine.dump()));
  return absl::StrCat("[", absl::StrJoin(all, ", "), "]");
}
absl::StatusOr<std::map<std::string, GeneratorState>> StreamsOf(const std::string& note) {
  const RankContext& rank = RankContext::Current();
  const nlohmann::json all = nlohmann::json::parse(note, nullptr, false);
  if (!all.is_array() || std::ssize(all) != rank.world_size()) {
    return absl::InvalidArgumentError(absl::StrCat("it has the streams of random numbers of ",
                                                   all.is_array() ? all.size() : 0,
                                                   " ranks, here there are ", rank.world_size()));
  }
  std::map<std::string, GeneratorState> streams;
  for (const auto& [name, state] : all[static_cast<size_t>(rank.rank())].items()) {
    const std::string bytes =
        state.is_string() ? absl::HexStringToBytes(state.get<std::string>()) : "";
    GeneratorState& to = streams[name];
    if (bytes.size() != to.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("its stream \"", name, "\" is ", state.dump()));
    }
    std::copy(bytes.begin(), bytes.end(), to.begin());
  }
  return streams;
}

}  // namespace

absl::StatusOr<Trainer::Resumed> Trainer::Accepts(const CheckpointInfo& info) const {
  const auto note = info.notes.find("sampler");
  if (note == info.notes.end()) {
    return absl::InvalidArgumentError("it does not say where the data stood");
  }
  if (info.step > o_.steps) {
    return absl::InvalidArgumentError(absl::StrCat("it is of step ", info.step, ", beyond the ",
                                                   o_.steps, " steps of this training"));
  }
  Resumed resumed;
  DT_ASSIGN_OR_RETURN(resumed.data, TokenSampler::State::Parse(note->second));
  DT_RETURN_IF_ERROR(data_.CheckState(resumed.data));  // a model may be made for its sequences
  const std::string other = WhatChanged(info, "model", o_.model);
  if (!other.empty()) return absl::InvalidArgumentError("it is of another model: " + other);
  if (o_.streams != nullptr) {
    const auto streams = info.notes.find("streams");
    DT_ASSIGN_OR_RETURN(resumed.streams,
                        StreamsOf(streams == info.notes.end() ? "" : streams->second));
    RngTracker& tracker = *o_.streams;
    const std::map<std::string, GeneratorState> before = tracker.GetStates();
    DT_RETURN_IF_ERROR(tracker.SetStates(resumed.streams));  // whether it could
    DT_RETURN_IF_ERROR(tracker.SetStates(before));
  }
  return resumed;
}

absl::Status Trainer::Resume(const std::string& path) {
  absl::StatusOr<Resumed> resumed = Resumed{};
  const auto accepts = [&](const CheckpointInfo& info) {
    resumed = Accepts(info);
    return resumed.status();
  };
  DT_ASSIGN_OR_RETURN(const LoadedCheckpoint loaded,
                      LoadCheckpoint(path, model_, optimizer_, accepts));
  DT_RETURN_IF_ERROR(data_.SetState(resumed->data));
  if (o_.streams != nullptr) DT_RETURN_IF_ERROR(o_.streams->SetStates(resumed->streams));
  step_ = loaded.info.step;
  checked_step_ = -1;
  resumed_from_ = line_ = loaded.path;
  if (!loaded.ignored.empty()) {
    absl::StrAppend(&resumed_from_, " (no whole checkpoints: ", absl::StrJoin(loaded.ignored, ", "),
                    ")");
  }
  const std::string changed = WhatChanged(loaded.info, "settings", o_.settings);
  if (!changed.empty()) absl::StrAppend(&resumed_from_, ", with other settings: ", changed);
  return absl::OkStatus();
}

// Ranks that train one model by other settings would train none.
absl::Status Trainer::CheckStart() const {
  RankContext& rank = RankContext::Current();
  if (o_.mesh.is_self() || o_.mesh.device() == DeviceType::kMeta || rank.world_size() == 1) {
    return absl::OkStatus();
  }
  std::map<std::string, std::string> mine = o_.settings;
  mine.insert(o_.model.begin(), o_.model.end());
  const auto add = [&](const char* name, const auto& value) {
    mine.emplace(name, absl::StrCat(value));  // a setting of that name says more
  };
  add("steps", o_.steps);
  add("batch", o_.batch);
  add("microbatches", o_.microbatches);
  add("step", step_);
  add("mesh", o_.mesh.ToString());
  add("placements", ToString(o_.placements));
  add("lr", o_.lr.peak);
  add("schedule", absl::StrCat(static_cast<int>(o_.lr.decay), " over ", o_.lr.steps, " after ",
                               o_.lr.warmup, " to ", o_.lr.least));
  add("max_norm", o_.max_norm);
  add("evaluation",
      absl::StrCat(o_.eval != nullptr, " every ", o_.eval_every, " by ", o_.eval_batches));
  add("check_every", o_.check_every);
  add("save", absl::StrCat(!o_.save.empty(), " every ", o_.save_every));
  const TokenSampler::State data = data_.state();
  add("data of hash", data.data);
  add("tokens of data", data.tokens);
  add("sequences of length", data.seq);
  add("sequences read", data.samples);
  add("order of data by seed", data.shuffle ? absl::StrCat(data.seed) : "none");
  if (CurrentRngMode() == RngMode::kThreadBased) add("random seed", DefaultGenerator().seed());
  uint64_t hash = 0;
  for (const NamedParameter& p : parameters_) {
    const DTensor& t = p.parameter->tensor();
    hash = HashRange(HashRange(hash, p.fqn), t.shape());
    hash = HashMix(hash, static_cast<uint64_t>(t.dtype()));
  }
  add("parameters", absl::StrCat(parameters_.size(), " (", absl::Hex(hash), ")"));
  const HiddenCommTraces hidden(rank.trace());
  return internal::CheckAlike("trainer", mine);
}

absl::Status Trainer::Run() {
  const int64_t first = step_;
  const absl::Cleanup ended = [this] {
    if (outputs_) outputs_->EndLine();
  };
  DT_RETURN_IF_ERROR(CheckStart());
  if (!o_.save.empty()) {
    const HiddenCommTraces hidden(RankContext::Current().trace());
    DT_ASSIGN_OR_RETURN(saved_step_, CheckSaveFolder(o_.save, step_, line_));
  }
  while (step_ < o_.steps && !stopped_) {
    std::optional<RecordTimeline> record;
    if (o_.timeline != nullptr && step_ == first + std::min<int64_t>(1, o_.steps - first - 1)) {
      record.emplace(*o_.timeline);
    }
    const Span span(SpanKind::kStep, absl::StrCat("step ", step_ + 1));
    DT_ASSIGN_OR_RETURN(const StepReport report, Step());
    DT_RETURN_IF_ERROR(AfterStep(report));
  }
  if (!o_.save.empty() && saved_step_ != step_) DT_RETURN_IF_ERROR(Save());
  return saved_;
}

// Of all that clipping counts, and of what else the optimizer has: it may have some of them only.
void Trainer::ForgetGradients() {
  optimizer_.ZeroGrad();
  for (const NamedParameter& p : parameters_) DTensor(p.parameter->tensor()).ZeroGrad();
}

// What happens to the numbers.
absl::StatusOr<StepReport> Trainer::Step() {
  const WatchCommTime watched;
  const auto start = Clock::now();
  CommTime& comm = RankContext::Current().Slot<CommTime>();
  const int64_t before = comm.ns;
  const TokenSampler::State data = data_.state();
  const RngSnapshot random = RngSnapshot::Take();
  buffers_->Keep();
  absl::Cleanup undo = [&] {
    ForgetGradients();
    buffers_->Restore();
    data_.SetState(data).IgnoreError();  // it was that of this sampler
    random.Restore();
  };
  optimizer_.set_lr(o_.lr.At(step_));
  DT_ASSIGN_OR_RETURN(const DTensor loss, ForwardBackward());
  StepReport report = {.step = step_ + 1, .steps = o_.steps, .lr = optimizer_.lr()};
  report.grad_norm = ClipGradNorm(parameters_, o_.max_norm);
  report.loss = loss.Item();
  if (!std::isfinite(report.loss) || !std::isfinite(report.grad_norm)) {
    return NotFinite(loss, report.loss, data, random);
  }
  optimizer_.Step();
  ForgetGradients();
  std::move(undo).Cancel();
  buffers_->Pass();
  ++step_;
  const double comm_seconds = 1e-9 * static_cast<double>(comm.ns - before);
  DT_RETURN_IF_ERROR(Measure(Seconds(Clock::now() - start), comm_seconds, &report));
  return report;
}

absl::StatusOr<DTensor> Trainer::ForwardBackward() {
  const std::vector<std::string> cutting = CuttingDims(o_);
  DTensor total;
  for (int64_t micro = 0; micro < o_.microbatches; ++micro) {
    DT_ASSIGN_OR_RETURN(const TokenBatch batch,
                        data_.Next(o_.batch / o_.microbatches, o_.mesh, o_.placements));
    std::optional<NoGradSync> later;
    if (micro + 1 < o_.microbatches && !cutting.empty()) later.emplace(cutting);
    DTensor loss = o_.loss(model_, batch);
    if (o_.microbatches > 1) loss = loss * (1.0 / static_cast<double>(o_.microbatches));
    loss.Backward();
    const NoGrad no_grad;
    total = total.defined() ? total + loss.Detach() : loss.Detach();
  }
  return total;
}

namespace {

// The ranks on which a pending sum's own term is no finite number.
absl::StatusOr<std::vector<int64_t>> RanksNotFinite(const DTensor& sum) {
  RankContext& rank = RankContext::Current();
  bool finite = true;
  if (sum.spec().in_mesh()) {
    for (const double x : sum.local().ToVector<double>()) finite = finite && std::isfinite(x);
  }
  const DeviceMesh world({rank.world_size()}, {"world"});
  DT_ASSIGN_OR_RETURN(const std::vector<std::string> all,
                      rank.Exchange(world, {0}, "not_finite", std::string(1, finite ? 'y' : 'n')));
  std::vector<int64_t> ranks;
  for (size_t r = 0; r < all.size(); ++r) {
    if (all[r] == "n") ranks.push_back(static_cast<int64_t>(r));
  }
  return ranks;
}

}  // namespace

absl::Status Trainer::NotFinite(const DTensor& sum, double loss, const TokenSampler::State& data,
                                const RngSnapshot& random) {
  if (!std::isfinite(loss)) {
    DT_ASSIGN_OR_RETURN(const std::vector<int64_t> ranks, RanksNotFinite(sum));
    const bool some =
        !ranks.empty() && ranks.size() < static_cast<size_t>(RankContext::Current().world_size());
    const absl::Status status = absl::OutOfRangeError(
        absl::StrCat("the loss is ", loss, " at step ", step_ + 1,
                     some ? absl::StrCat(", by the part of ", RankNames(ranks)) : "",
                     "; a smaller learning rate may help"));
    return ranks.size() == 1 && some ? WithCulprit(status, ranks[0]) : status;
  }
  ForgetGradients();
  DT_RETURN_IF_ERROR(data_.SetState(data));
  random.Restore();
  buffers_->Restore();
  DT_RETURN_IF_ERROR(ForwardBackward().status());
  const NoGrad no_grad;
  std::string whose = "some parameter";
  for (const NamedParameter& p : parameters_) {
    const DTensor grad = p.parameter->tensor().grad();
    if (!p.parameter->requires_grad() || !grad.defined()) continue;  // as ClipGradNorm
    if (std::isfinite(get_total_norm({grad}).Item())) continue;
    whose = p.fqn;
    break;
  }
  return absl::OutOfRangeError(absl::StrCat("the gradient of ", whose, " is not finite at step ",
                                            step_ + 1, "; a smaller learning rate may help"));
}

namespace {
// What ranks tell each other after a step.
struct Told {
  double busy_seconds, comm_share;
  int64_t peak_bytes;
  int64_t stop;
};
}  // namespace

absl::Status Trainer::Measure(double seconds, double comm_seconds, StepReport* report) {
  RankContext& rank = RankContext::Current();
  const Told mine = {std::max(seconds - comm_seconds, 0.0), std::min(comm_seconds / seconds, 1.0),
                     rank.device_allocator()->stats().peak_bytes,
                     o_.stop != nullptr && o_.stop->load()};
  std::string bytes(sizeof(mine), '\0');
  std::memcpy(bytes.data(), &mine, sizeof(mine));
  const HiddenCommTraces hidden(rank.trace());  // it is not the program's communication
  const DeviceMesh world({rank.world_size()}, {"world"});
  DT_ASSIGN_OR_RETURN(const std::vector<std::string> all,
                      rank.Exchange(world, {0}, "train_step", std::move(bytes)));
  double least = std::numeric_limits<double>::infinity(), most = 0;
  for (const std::string& one : all) {
    Told theirs;
    std::memcpy(&theirs, one.data(), sizeof(theirs));
    least = std::min(least, theirs.busy_seconds);
    most = std::max(most, theirs.busy_seconds);
    report->comm_share += theirs.comm_share / static_cast<double>(all.size());
    report->peak_bytes = std::max(report->peak_bytes, theirs.peak_bytes);
    stopped_ |= theirs.stop != 0;
  }
  report->skew_seconds = most - least;
  report->seconds = seconds;
  const double tokens = static_cast<double>(o_.batch * data_.state().seq);
  report->tokens_per_s = tokens / seconds;
  report->flops_per_s = report->tokens_per_s * o_.flops_per_token;
  return absl::OkStatus();
}

absl::Status Trainer::AfterStep(const StepReport& report) {
  if (o_.after_step) DT_RETURN_IF_ERROR(o_.after_step(report));
  if (outputs_) Tell(report);
  const bool last = step_ == o_.steps;
  if (o_.check_every > 0 && (last || step_ % o_.check_every == 0)) DT_RETURN_IF_ERROR(Check());
  const bool due = o_.save_every > 0 && step_ % o_.save_every == 0;
  if (!o_.save.empty() && (due || last)) {
    const absl::Status saved = Save();
    if (!saved.ok() && outputs_ && !last) Warn(saved);
  }
  if (o_.eval && (last || (o_.eval_every > 0 && step_ % o_.eval_every == 0))) {
    DT_ASSIGN_OR_RETURN(const double loss, Evaluate());
    if (outputs_) TellEvaluation(loss);
  }
  return absl::OkStatus();
}

absl::Status Trainer::Check() {
  if (checked_step_ == step_) return absl::OkStatus();
  const HiddenCommTraces hidden(RankContext::Current().trace());
  DT_RETURN_IF_ERROR(CheckCopies(model_, optimizer_));
  checked_step_ = step_;
  return absl::OkStatus();
}

// Of copies that differ one would be saved, and all would go on from it: as though nothing were
// wrong, and not as they are.
absl::Status Trainer::Save() {
  const absl::Status alike = Check();
  if (!alike.ok()) {
    saved_step_ = step_;
    return saved_ = Prefixed(absl::StrCat("step ", step_, " is not saved"), alike);
  }
  CheckpointInfo info = {.step = step_, .notes = {{"sampler", data_.state().ToString()}}};
  if (!o_.model.empty()) info.notes["model"] = ToNote(o_.model);
  if (!o_.settings.empty()) info.notes["settings"] = ToNote(o_.settings);
  const HiddenCommTraces hidden(RankContext::Current().trace());
  if (o_.streams != nullptr) {
    DT_ASSIGN_OR_RETURN(info.notes["streams"], StreamsNote(*o_.streams));
  }
  const absl::StatusOr<std::string> path =
      SaveCheckpoint(o_.save, model_, optimizer_, info, {.keep = o_.keep});
  if (path.ok()) line_ = *path;
  saved_ = path.status();
  saved_step_ = step_;
  return saved_;
}

void Trainer::Tell(const StepReport& report) {
  ++outputs_->told;
  if (!o_.name.empty()) outputs_->Print(o_.name, report);
  outputs_->Log(report.step, report.Items());
}

void Trainer::TellEvaluation(double loss) {
  if (!o_.name.empty()) {
    std::printf("%s%s eval %lld/%lld  loss %.6f\n", outputs_->terminal ? "\r\033[K" : "",
                o_.name.c_str(), static_cast<long long>(step_), static_cast<long long>(o_.steps),
                loss);
    std::fflush(stdout);
  }
  outputs_->Log(step_, {{"eval_loss", loss, LogItem::Format::kFixed, 6}});
}

absl::StatusOr<double> Trainer::Evaluate() {
  if (!o_.eval) return absl::FailedPreconditionError("[trainer] there is nothing to evaluate on");
  TokenSampler sampler = *o_.eval;
  const NoGrad no_grad;
  const RngSnapshot random = RngSnapshot::Take();  // an evaluation changes nothing that follows
  const absl::Cleanup restore = [&] { random.Restore(); };
  const EvaluationScope evaluation(model_);
  const int64_t parts = o_.eval_batches * o_.microbatches;
  double sum = 0;
  for (int64_t i = 0; i < parts; ++i) {
    DT_ASSIGN_OR_RETURN(const TokenBatch batch,
                        sampler.Next(o_.batch / o_.microbatches, o_.mesh, o_.placements));
    sum += o_.loss(model_, batch).Item();
  }
  return sum / static_cast<double>(parts);
}

absl::Status FitInMemory(const Module& model, int states, const StateLayoutFn& layout,
                         absl::string_view advice) {
  RankContext& rank = RankContext::Current();
  const int64_t mine = AvailableMemory() / rank.world_size();
  double bytes = 0;
  for (const NamedParameter& named : model.NamedParameters()) {
    const Parameter& p = *named.parameter;
    const auto count = [&](int copies, const StateLayout& as, DType dtype) -> absl::Status {
      DT_ASSIGN_OR_RETURN(const SpecRef spec,
                          rank.specs().Intern(as.mesh, as.placements, p.shape(), dtype));
      bytes += copies * static_cast<double>(spec->local_bytes());
      return absl::OkStatus();
    };
    DT_RETURN_IF_ERROR(count(1, LikeParameter(p), p.dtype()));
    if (!p.requires_grad()) continue;
    const StateLayout state = layout(p);
    const int masters = state.dtype == p.dtype() ? 0 : 1;
    DT_RETURN_IF_ERROR(count(1, state, state.reduce_dtype.value_or(state.dtype)));
    DT_RETURN_IF_ERROR(count(states + masters, state, state.dtype));
  }
  if (bytes > static_cast<double>(mine)) {
    return absl::ResourceExhaustedError(absl::StrFormat(
        "this model takes %.1f GB on each of %d ranks, and there are %.1f GB for each; %s",
        bytes / 1e9, rank.world_size(), static_cast<double>(mine) / 1e9, advice));
  }
  rank.allocator()->SetLimit(mine);
  return absl::OkStatus();
}

}  // namespace dtensor
