// Trainer: the loop around a model, an optimizer and data. What it does to numbers is written out
// in a page (Trainer::Step); the rest is telling, saving and stopping.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dtensor/mesh/mesh.h"
#include "dtensor/mesh/placement.h"
#include "dtensor/parallel/data/sampler.h"
#include "dtensor/parallel/module/module.h"
#include "dtensor/parallel/optim/optim.h"
#include "dtensor/parallel/train/log.h"
#include "dtensor/parallel/train/schedule.h"
#include "dtensor/rng/tracker.h"

namespace dtensor {

namespace internal {
class KeptBuffers;
}
class Timeline;
struct CheckpointInfo;

// The mean cross entropy of the next token: logits [batch, seq, classes], targets [batch, seq].
// 16-bit logits are widened first.
DTensor NextTokenLoss(const DTensor& logits, const DTensor& targets);

// What a step was like. The same on every rank.
struct StepReport {
  int64_t step = 0, steps = 0;  // from 1 on, and how many there will be
  double loss = 0, grad_norm = 0, lr = 0;
  double seconds = 0, tokens_per_s = 0, flops_per_s = 0;
  int64_t peak_bytes = 0;   // of the rank that has used most at one time since the start
  double comm_share = 0;    // of the step's time in collectives: the mean of the ranks
  double skew_seconds = 0;  // by how much the busiest rank computes longer than the idlest

  std::vector<LogItem> Items() const;
};

struct TrainerOptions {
  int64_t steps = 0;
  // Sequences per step over all ranks, in so many equal parts, one after the other, whose gradients
  // are added up.
  int64_t batch = 1, microbatches = 1;
  DeviceMesh mesh = DeviceMesh::Self();  // of the batch
  Placements placements = {};            // of [batch, seq]
  // The optimizer's own is replaced at every step. Without steps of its own (0) it has the above.
  LearningRate lr = {};
  // Of the gradients of all of the model's parameters; infinity: they are not clipped.
  double max_norm = 1;
  // Default: NextTokenLoss. Microbatches count alike: one that leaves tokens out gives the mean of
  // their means, unless it divides a sum by a number that is the same for all.
  std::function<DTensor(Module& model, const TokenBatch& batch)> loss = nullptr;
  double flops_per_token = 0;  // forward and backward; 0: six per parameter

  // Evaluated after every so many steps and at the end, from the sampler's first batch on; after
  // that step was saved. In microbatches, as a step is.
  std::shared_ptr<const TokenSampler> eval = nullptr;
  int64_t eval_every = 0, eval_batches = 8;

  // CheckCopies after every so many steps and at the end, before that step is saved; its error is
  // Run's. 0: before each save only, which fails by it: nothing that differs is saved.
  int64_t check_every = 0;

  // Saved after every so many steps (0: at the end only) and at the end, also where that is the
  // step that Resume read, unless it is there. A save that fails is told, and the training goes on;
  // the last one's error is Run's. The folder is of one training: it has no checkpoints, or is the
  // one that Resume read and has none beyond that step.
  std::string save = {};
  int64_t save_every = 0;
  int keep = 2;
  // Into the checkpoint: what the model is, which Resume refuses to change, and other settings,
  // whose changes it tells (Trainer::resumed_from). For a setting that was not known then nothing
  // is said.
  std::map<std::string, std::string> model = {}, settings = {};

  // Streams that the model draws from besides the default generator (rng/tracker.h), each rank its
  // own: into the checkpoint, and out of it where the world has as many ranks.
  RngTracker* streams = nullptr;

  // Told by rank 0: lines on stdout that begin with `name` (none: no lines), rewritten on a
  // terminal; JSON lines; TensorBoard events. A file that cannot be written is told once and left.
  std::string name = {}, log = {}, tensorboard = {};
  std::function<absl::Status(const StepReport&)> after_step = nullptr;  // on every rank
  Timeline* timeline = nullptr;  // where all ranks record the second step (or the only one)
  // Set from elsewhere (a signal): finish the step, save, and return.
  const std::atomic<bool>* stop = nullptr;
};

// Of one rank; all ranks of the world go through it alike.
class Trainer {
 public:
  // All must outlive it. Errors: InvalidArgument for a batch that microbatches do not divide,
  // negative numbers of steps, eval_batches < 1, a max_norm that is negative or NaN, a mesh that
  // has not all ranks of the world, and placements that are not one per mesh dim; those of
  // LearningRate::Check; on rank 0 Unavailable for a log or TensorBoard folder that cannot be
  // opened.
  static absl::StatusOr<std::unique_ptr<Trainer>> Create(Module& model, Optimizer& optimizer,
                                                         TokenSampler& data,
                                                         TrainerOptions options);
  ~Trainer();

  // Goes on from a checkpoint (parallel/io/checkpoint.h): bit for bit as if the program had not
  // ended. Errors: those of LoadCheckpoint; InvalidArgument for a sampler's state that does not fit
  // the data, for another model (each setting, what it was and what it is), for a step beyond the
  // last one here, and for streams of other names or of a world of another size. Nothing is changed
  // then.
  absl::Status Resume(const std::string& path);
  // From where it stands to the last step, or until it is stopped.
  //   Errors: FailedPrecondition, before the first step, for ranks that have other settings, data,
  //   parameters or seeds than rank 0, naming rank and difference, and for a folder to save in that
  //   has the checkpoints of another training; OutOfRange for a loss or a gradient that is not
  //   finite, naming the step, and the ranks that made the loss so or the parameter; those of data,
  //   of after_step, and of the last save. After an error in a step there are no gradients, data,
  //   random numbers and buffers are where they were before it, and Run goes on with that step.
  //   (Buffers that the first step does not change are not kept, until a later one has.)
  absl::Status Run();
  // The mean loss of the eval sampler's first batches. The model, each module's mode and the random
  // numbers that follow are as they were, also where the loss throws.
  absl::StatusOr<double> Evaluate();

  int64_t step() const { return step_; }  // steps done
  bool stopped() const { return stopped_; }
  // The path that Resume took, ignored folders, and settings that are others now, for people.
  const std::string& resumed_from() const { return resumed_from_; }

 private:
  struct Outputs;
  Trainer(Module& model, Optimizer& optimizer, TokenSampler& data, TrainerOptions options);
  absl::Status CheckStart() const;
  absl::StatusOr<StepReport> Step();
  void ForgetGradients();
  absl::StatusOr<DTensor> ForwardBackward();
  // What Resume will need besides tensors, if all of it fits.
  struct Resumed {
    TokenSampler::State data = {};
    std::map<std::string, GeneratorState> streams = {};
  };
  absl::StatusOr<Resumed> Accepts(const CheckpointInfo& info) const;
  // Whose part of the loss is not finite; else which parameter's gradient: the step is run again,
  // without clipping.
  absl::Status NotFinite(const DTensor& sum, double loss, const TokenSampler::State& data,
                         const RngSnapshot& random);
  absl::Status Measure(double seconds, double comm_seconds, StepReport* report);
  absl::Status AfterStep(const StepReport& report);
  absl::Status Check();
  absl::Status Save();
  void Tell(const StepReport& report);
  void TellEvaluation(double loss);

  Module& model_;
  Optimizer& optimizer_;
  TokenSampler& data_;
  const TrainerOptions o_;
  const std::vector<NamedParameter> parameters_;
  const std::unique_ptr<internal::KeptBuffers> buffers_;
  std::unique_ptr<Outputs> outputs_;  // of rank 0
  int64_t step_ = 0, saved_step_ = -1, checked_step_ = -1;
  bool stopped_ = false;
  absl::Status saved_;  // the last time
  std::string resumed_from_;
  std::string line_;  // the checkpoint that it was resumed from, or saved last
};

// Refuses sizes that are beyond this machine before anything is made, and has the allocator refuse
// what comes later, so that no system ends the program. Counted are the parameters, and of each
// that is trained its gradient and `states` states of an optimizer (Adam: 2) as `layout` has them,
// masters included. `advice` ends the message.
//   Errors: ResourceExhausted; those of layouts that do not fit.
absl::Status FitInMemory(const Module& model, int states, const StateLayoutFn& layout,
                         absl::string_view advice);

}  // namespace dtensor
