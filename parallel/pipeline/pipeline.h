// Pipeline: the stages of a model on different ranks, microbatches going through them by a
// schedule.
//
//   const DeviceMesh mesh({2, 4}, {"pp", "tp"});
//   Model model(config);  // every rank does all of this
//   const std::vector<PipelineStage> stages = {StageOf({&model.a}), StageOf({&model.b})};
//   ParallelizeStages(model, mesh, stages, plan);
//   Materialize(model);  // each rank its stage
//   Pipeline pipeline(mesh, stages, {.microbatches = 8});
//   const DTensor loss = pipeline.Step(inputs, [&](int64_t k, const Values& y) { ... });
//   optimizer.Step();
//
// Numbers are those of one device that runs the microbatches one after the other: each forward
// draws the random numbers that it would draw there, gradients add up in their order. Only values
// between stages and their gradients are sent, each from a rank to the one at its place in the
// next stage's mesh.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "dtensor/distributed_tensor.h"
#include "dtensor/mesh/mesh.h"
#include "dtensor/mesh/world.h"
#include "dtensor/parallel/module/module.h"
#include "dtensor/parallel/pipeline/schedule.h"
#include "dtensor/parallel/pipeline/transfers.h"
#include "dtensor/parallel/plan/plan.h"

namespace dtensor {

// The ranks of a stage: those at coordinate stage % size of `mesh_dim`, with the mesh's other dims.
// Where it has none, one rank in a dim of size 1.
//   Errors, thrown: NotFound naming the dims there are; InvalidArgument for a negative stage.
DeviceMesh StageMesh(const DeviceMesh& mesh, absl::string_view mesh_dim, int stage);

// A part of a model: what runs, and the modules whose parameters it reads. A function of its inputs
// and those parameters, all on the mesh of the stage.
struct PipelineStage {
  std::function<Values(const Values&)> forward;
  std::vector<Module*> modules;
  // Parameters of other stages that this one reads too (the table of a tied head). Their values are
  // brought here before a step, cut as they are there, and follow what `forward` takes; their
  // gradients go back after the last microbatch, in one message each.
  std::vector<Parameter*> borrows = {};
};
// Modules one after the other. What a module gives takes the place of as many of its inputs; the
// others go on to the next one (a mask, positions). Errors, thrown: InvalidArgument for a null.
PipelineStage StageOf(std::vector<Module*> modules);
// Each stage's modules on the mesh of the stage: by their part of a plan of the whole model
// (ParallelizeModule), or replicated where the plan is empty. The style of a tied head, whose stage
// borrows the table, is not applied: the table is cut as its owner's style says.
//   Errors: those of ParallelizeModule; InvalidArgument for a parameter or buffer of `model` that
//   is in no stage or in two, for a null, and for a style on any other module that is in none.
//   Nothing is changed then but by an error of a later stage.
absl::Status ParallelizeStages(Module& model, const DeviceMesh& mesh,
                               absl::Span<const PipelineStage> stages, const Plan& plan = {},
                               const ParallelizeOptions& options = {},
                               absl::string_view mesh_dim = "pp");

struct PipelineOptions {
  int64_t microbatches = 1;
  std::string schedule = "1F1B";  // MakePipelineSchedule; with several stages per rank another one
  std::optional<PipelineSchedule> own_schedule = {};  // in its place, with its microbatches
  std::string mesh_dim = "pp";
  // Over which mesh dims of its stage the gradients of parameters are added up with the stage's
  // last microbatch only (NoGradSync); none named: over all.
  std::vector<std::string> sync_last = {};
  // Of the two ranks between which a message of one stage to the next goes.
  GroupOptions group = {};
};

// Belongs to one rank; all ranks of the mesh make theirs alike.
class Pipeline {
 public:
  // Stage s runs on StageMesh(mesh, options.mesh_dim, s).
  //   Errors, thrown: InvalidArgument for a number of stages that the mesh dim's size does not
  //   divide, stages without a function, nulls, parameters that a stage borrows and none has, and
  //   those of MakePipelineSchedule and CheckPipelineSchedule; NotFound for mesh dims that there
  //   are not; FailedPrecondition on a rank outside of the mesh.
  Pipeline(const DeviceMesh& mesh, std::vector<PipelineStage> stages,
           const PipelineOptions& options = {});
  Pipeline(const Pipeline&) = delete;

  // Of one microbatch, from what the last stage gives. Called by the last stage's ranks only. Draws
  // no random numbers.
  using Loss = std::function<DTensor(int64_t microbatch, const Values& outputs)>;
  // Forward and backward of all microbatches; gradients are added to those that are there.
  //   inputs: what stage 0 takes, per microbatch: on its mesh, and elsewhere what stands for it
  //           (DTensor::Absent; factories, FromLocal and DistributeTensor give it by themselves).
  //   Returns: the sum of all losses, a float64 tensor without dims, on all of the mesh. For a mean
  //            over microbatches divide in `loss`.
  //   Comm:    per microbatch and edge one message of the stage's results, and one of their
  //            gradients; per borrowed parameter one each way; what the stages do; at the end one
  //            number, and a byte per parameter over `mesh_dim`: whether it has a gradient.
  //   Errors, thrown: InvalidArgument for another number of inputs, inputs and results on another
  //   mesh, and a loss of more than one element; FailedPrecondition inside of NoGrad and of another
  //   step of this pipeline; what stages and `loss` throw, with stage and microbatch in front,
  //   which all ranks are told. Source: torch.distributed.pipelining (ScheduleGPipe, Schedule1F1B,
  //   ScheduleInterleaved1F1B)
  DTensor Step(absl::Span<const Values> inputs, const Loss& loss);
  // The forwards alone, in the same order, without gradients: returns what Step does.
  DTensor Evaluate(absl::Span<const Values> inputs, const Loss& loss);

  const PipelineSchedule& schedule() const { return schedule_; }
  int stages() const { return static_cast<int>(stages_.size()); }

 private:
  class Run;
  // A parameter that stage `to` borrows of stage `from`.
  struct Loaned {
    Parameter* parameter;
    int from, to;
  };
  // Of one kind of input: what each stage gives, and how far it moves the generator.
  struct Shapes {
    std::vector<internal::StagePort> inputs;
    std::vector<bool> modes;
    std::vector<std::vector<internal::StagePort>> ports;
    std::vector<uint64_t> words;
  };
  int Owner(const Parameter& parameter) const;  // which stage has it
  // What else a stage's results depend on: whether gradients are recorded, of which parameters, and
  // which modules train.
  std::vector<bool> Modes() const;
  DTensor Go(absl::Span<const Values> inputs, const Loss& loss, bool train);
  const Shapes& ShapesOf(const Values& inputs, const std::vector<bool>& modes);
  Values RunStage(int stage, const Values& inputs) const;
  // As `spec`, on the mesh of a stage.
  SpecRef On(int stage, const Spec& spec) const;

  const DeviceMesh mesh_;
  const std::vector<PipelineStage> stages_;
  const std::vector<std::string> sync_last_;
  const GroupOptions group_;
  int mesh_dim_;
  std::vector<DeviceMesh> meshes_;  // of the stages
  PipelineSchedule schedule_;
  std::vector<PipelineAction> actions_;  // of this rank
  std::vector<Loaned> loaned_;
  std::vector<std::unique_ptr<Shapes>> shapes_;
  bool runs_ = false;
};

}  // namespace dtensor
