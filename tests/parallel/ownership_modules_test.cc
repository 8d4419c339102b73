// A model and an optimizer hold tensors of the rank and the world that made them. The public
// functions that take one are read from the headers: one that has no case here and no reason why it
// may be given any fails this test.
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "dtensor/dtensor.h"
#include "dtensor/parallel/io/checkpoint.h"
#include "dtensor/parallel/models/pretrained.h"
#include "dtensor/parallel/train/check_copies.h"
#include "dtensor/parallel/train/trainer.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/common/temp_folder.h"
#include "tests/parallel/declared.h"
#include "tests/parallel/support.h"

namespace dtensor::ownership_modules_test {
namespace {

class Net final : public Module {
 public:
  Linear& up = AddChild<Linear>("up", 4, 4);
  Linear& down = AddChild<Linear>("down", 4, 4);
  Parameter& scale = AddBuffer("scale", {4}, Init::Ones());

 protected:
  Values Forward(const Values& x) override { return {down(up(x[0])) * scale.tensor()}; }
};

// After a step and a backward: values, gradients and states.
struct Trained {
  std::unique_ptr<Net> model = std::make_unique<Net>();
  std::unique_ptr<AdamW> optimizer;
  Trained() {
    Materialize(*model);
    optimizer = std::make_unique<AdamW>(model->NamedParameters(), AdamWOptions{});
    for (int i = 0; i < 2; ++i) {
      sum((*model)(ones({4, 4}))).Backward();
      if (i == 0) optimizer->Step();
    }
  }
  Parameter& weight() const { return model->up.weight(); }
  std::vector<NamedParameter> parameters() const { return model->NamedParameters(); }
};

// `f`: of another world; `o`: the caller's own; `folder` has a checkpoint of such a model.
struct Case {
  const char* function;
  std::function<absl::Status(Trained& f, Trained& o, const std::string& folder)> call;
};
#define CASE(signature, ...)                                          \
  {signature, [](Trained& f, Trained& o, const std::string& folder) { \
     (void)f, (void)o, (void)folder;                                  \
     __VA_ARGS__;                                                     \
     return absl::OkStatus();                                         \
   }}
#define STATUS(signature, ...)                                                        \
  {signature, [](Trained& f, Trained& o, const std::string& folder) -> absl::Status { \
     (void)f, (void)o, (void)folder;                                                  \
     return __VA_ARGS__;                                                              \
   }}
#define OPTIMIZER(type)                                                      \
  CASE(#type "::" #type "(const std::vector<NamedParameter>&, const " #type  \
             "Options&, const StateLayoutFn&, std::vector<ParameterGroup>)", \
       type(f.parameters(), type##Options{}))

#define PARALLELIZE(how) "ParallelizeModule(Module&, " how ", const ParallelizeOptions&)"
#define DISTRIBUTE(mesh)                                         \
  "DistributeModule(Module&, " mesh                              \
  "const PartitionFn&, const ValuesFn&, const ValuesFn&, const " \
  "PartitionFn&)"
constexpr const char* kCheckCopies = "CheckCopies(const Module&, const Optimizer&)";
constexpr const char* kSaveCheckpoint =
    "SaveCheckpoint(const std::string&, const Module&, const Optimizer&, const CheckpointInfo&, "
    "const SaveOptions&)";
constexpr const char* kLoadCheckpoint =
    "LoadCheckpoint(const std::string&, Module&, Optimizer&, const "
    "std::function<absl::Status(const CheckpointInfo&)>&)";

DeviceMesh OneRank() { return DeviceMesh({1}, {"tp"}); }
Plan APlan() { return {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}}; }
TPInfo Linears() {
  TPInfo info;
  info.ShardCol("up").ShardRow("down");
  return info;
}

std::vector<Case> AllCases() {
  return {
      OPTIMIZER(Adagrad),
      OPTIMIZER(Adam),
      OPTIMIZER(AdamW),
      OPTIMIZER(RMSprop),
      OPTIMIZER(SGD),
      STATUS(kCheckCopies, CheckCopies(*f.model, *o.optimizer)),
      STATUS(kCheckCopies, CheckCopies(*o.model, *f.optimizer)),
      CASE("ClipGradNorm(const std::vector<NamedParameter>&, double, double)",
           ClipGradNorm(f.parameters(), 1)),
      CASE("ClipGradValues(const std::vector<NamedParameter>&, double)",
           ClipGradValues(f.parameters(), 1)),
      CASE("ClipGradients(const std::vector<NamedParameter>&, double, double)",
           ClipGradients(f.parameters(), 1)),
      STATUS(DISTRIBUTE("const DeviceMesh&, "), DistributeModule(*f.model, OneRank())),
      STATUS(DISTRIBUTE(""), DistributeModule(*f.model)),
      CASE("Explain(Module&, const Values&, const ExplainOptions&)",
           ThrowIfError(Explain(*f.model, {ones({4, 4})}).status())),
      CASE("Module::operator()(const Values&)", (*f.model)(Values{ones({4, 4})})),
      CASE("Module::Recomputed(const Values&)", f.model->Recomputed({ones({4, 4})})),
      CASE("Module::operator()(std::initializer_list<DTensor>)", (*f.model)({ones({4, 4})})),
      CASE("Module::operator()(const DTensor&, const T&... rest)", (*f.model)(ones({4, 4}))),
      CASE("Module::LoadStateDict(const StateDict&)",
           f.model->LoadStateDict(o.model->GetStateDict())),
      CASE("Module::ZeroGrad()", f.model->ZeroGrad()),
      CASE("Module::RequiresGrad(bool)", f.model->RequiresGrad(false)),
      CASE("Optimizer::Step()", f.optimizer->Step()),
      CASE("Optimizer::ZeroGrad()", f.optimizer->ZeroGrad()),
      CASE("Optimizer::LoadStateDict(const StateDict&)",
           f.optimizer->LoadStateDict(o.optimizer->GetStateDict())),
      CASE("Parameter::Place(const DeviceMesh&, Placements, int64_t)",
           f.weight().Place(OneRank(), {Shard(0)})),
      CASE("Parameter::RequiresGrad(bool)", f.weight().RequiresGrad(false)),
      CASE("Parameter::Set(const DTensor&)", f.weight().Set(ones({4, 4}))),
      CASE("Parameter::Take(DTensor)", f.weight().Take(ones({4, 4}))),
      CASE("Tie(Parameter&, Parameter&)", Tie(f.weight(), o.weight())),
      CASE("Tie(Parameter&, Parameter&)", Tie(o.weight(), f.weight())),
      STATUS(PARALLELIZE("const DeviceMesh&, const Plan&"),
             ParallelizeModule(*f.model, OneRank(), APlan())),
      STATUS(PARALLELIZE("const DeviceMesh&, const Style&"),
             ParallelizeModule(f.model->up, OneRank(), ColwiseParallel())),
      STATUS(PARALLELIZE("const DeviceMesh&, const TPInfo&"),
             ParallelizeModule(*f.model, OneRank(), Linears())),
      STATUS(PARALLELIZE("const Plan&"), ParallelizeModule(*f.model, APlan())),
      STATUS(PARALLELIZE("const Style&"), ParallelizeModule(f.model->up, ColwiseParallel())),
      STATUS(PARALLELIZE("const TPInfo&"), ParallelizeModule(*f.model, Linears())),
      STATUS(kSaveCheckpoint, SaveCheckpoint(folder + "/1", *f.model, *o.optimizer, {}).status()),
      STATUS(kSaveCheckpoint, SaveCheckpoint(folder + "/2", *o.model, *f.optimizer, {}).status()),
      STATUS(kLoadCheckpoint, LoadCheckpoint(folder + "/saved", *f.model, *o.optimizer).status()),
      STATUS(kLoadCheckpoint, LoadCheckpoint(folder + "/saved", *o.model, *f.optimizer).status()),
      STATUS("LoadPretrained(Module&, const std::string&, const LoadPretrainedOptions&)",
             LoadPretrained(*f.model, folder + "/exported")),
      STATUS("SavePretrained(const Module&, const std::string&, const WriteOptions&)",
             SavePretrained(*f.model, folder + "/3")),
  };
}

// Functions that may be given any of them, by the reason why.
const std::map<std::string, std::set<std::string>>& Excused() {
  static const std::map<std::string, std::set<std::string>> excused = {
      {"handles, names, shapes, dtypes, places: what never changes, or is asked where it is used",
       {"DescribeParameters(const Module&)",
        "DescribePlan(Module&, const Plan&)",
        "Distinct(const std::vector<NamedParameter>&)",
        "FitInMemory(const Module&, int, const StateLayoutFn&, absl::string_view)",
        "LikeParameter(const Parameter&)",
        "MatchModules(Module&, absl::string_view)",
        "Module::FindModule(absl::string_view)",
        "Module::FindParameter(absl::string_view)",
        "Module::GetStateDict()",
        "Module::NamedBuffers()",
        "Module::NamedModules()",
        "Module::NamedParameters()",
        "Module::NamedTensors()",
        "Module::NumElements()",
        "Module::Parameters()",
        "Module::children()",
        "Module::fqn()",
        "Module::own_parameters()",
        "Module::training()",
        "Module::traits()",
        "Module::type_name()",
        "Optimizer::GetStateDict()",
        "Optimizer::GetStateDictOfAll()",
        "Optimizer::StateSpecs()",
        "Optimizer::StepCounts()",
        "Optimizer::Written()",
        "Optimizer::lr()",
        "Parameter::CheckPlace(const DeviceMesh&, absl::Span<const Placement>)",
        "Parameter::IsTiedTo(const Parameter&)",
        "Parameter::dtype()",
        "Parameter::fqn()",
        "Parameter::identity()",
        "Parameter::init()",
        "Parameter::is_buffer()",
        "Parameter::materialized()",
        "Parameter::mesh()",
        "Parameter::name()",
        "Parameter::numel()",
        "Parameter::persistent()",
        "Parameter::placements()",
        "Parameter::requires_grad()",
        "Parameter::shape()",
        "Parameter::tensor()",
        "TensorParallelTree(Module&, const TPInfo&)",
        "TiedInfoOf(const NamedParameter&)"}},
      {"made and ended by whoever has it",
       {"Module::Module()", "Module::Module(const Module&)", "Module::operator=(const Module&)",
        "Module::~Module()", "Optimizer::Optimizer(const Optimizer&)",
        "Optimizer::operator=(const Optimizer&)", "Optimizer::~Optimizer()",
        "Parameter::Parameter(const Parameter&)",
        "Parameter::Parameter(std::string, Shape, Init, DType, Role)", "Parameter::~Parameter()"}},
      {"a flag, a hook or a number",
       {"Module::AddBuildHook(BuildHook)", "Module::AddBuiltHook(BuildHook)",
        "Module::AddPostHook(PostHook)", "Module::AddPreHook(PreHook)",
        "Module::SetRecompute(bool)", "Module::Train(bool)", "Module::WarnOfImplicit(bool)",
        "Optimizer::SetStepCounts(absl::Span<const int64_t>)", "Optimizer::set_lr(double)",
        "RecomputeModules(Module&, const std::vector<std::string>&)"}},
      {"of recipes: leaves what has values as it is, or refuses it",
       {"Materialize(Module&)",
        "Materialize(Module&, const std::function<bool(const std::string& fqn)>&)",
        "Parameter::Materialize()", "Parameter::SetDType(DType)", "Parameter::SkipMaterialize()",
        "ParallelizeStages(Module&, const DeviceMesh&, absl::Span<const PipelineStage>, const "
        "Plan&, const ParallelizeOptions&, absl::string_view)",
        "SetDType(Module&, DType)"}},
      {"keeps it, and what it runs asks: Module::operator(), Optimizer::Step",
       {"GraphedStep::GraphedStep(Optimizer&, std::function<DTensor()>)",
        "StageOf(std::vector<Module*>)",
        "Trainer::Create(Module&, Optimizer&, TokenSampler&, TrainerOptions)"}},
  };
  return excused;
}

// Whose tensors no field shows.
const std::set<std::string>& Holders() {
  static const std::set<std::string> holders = {"Module", "Optimizer", "Parameter",
                                                "NamedParameter"};
  return holders;
}

TEST(OwnershipOfModules, EveryPublicFunctionOfThemHasACase) {
  const testing::Declarations all = testing::PublicDeclarations(DT_TEST_DATA "/../../");
  std::set<std::string> known, declared;
  for (const Case& c : AllCases()) known.insert(c.function);
  for (const auto& [why, functions] : Excused()) {
    for (const std::string& f : functions)
      EXPECT_TRUE(known.insert(f).second) << f << " has a case";
  }
  for (const testing::Function& function : all.functions) {
    const std::string owner = function.name.substr(0, function.name.find("::"));
    bool holds = owner != function.name && Holders().contains(owner);
    for (const std::string& type : function.types) {
      holds = holds || testing::Mentions(testing::Scanner::WithoutCallbacks(type), Holders());
    }
    if (holds) declared.insert(function.Signature());
  }
  EXPECT_GT(declared.size(), 100u);  // the headers were read
  for (const std::string& f : declared) {
    EXPECT_TRUE(known.contains(f)) << f << ": what does it do with what is another world's?";
  }
  for (const std::string& f : known) EXPECT_TRUE(declared.contains(f)) << f << " is in no header";
}

absl::Status Refusal(const Case& c, Trained& f, Trained& o, const std::string& folder) {
  try {
    return c.call(f, o, folder);
  } catch (const Error& error) {
    return error.status();
  }
}

TEST(OwnershipOfModules, ThoseOfADeadWorldAreRefusedAndNothingIsChanged) {
  const testing::TempFolder folder;
  std::unique_ptr<Trained> foreign;
  ASSERT_TRUE(RunSpmd(1, [&](RankContext&) -> absl::Status {
                foreign = std::make_unique<Trained>();
                DT_RETURN_IF_ERROR(
                    SaveCheckpoint(folder.Path("saved"), *foreign->model, *foreign->optimizer, {})
                        .status());
                return SavePretrained(*foreign->model, folder.Path("exported"));
              }).ok());
  for (const Case& c : AllCases()) {
    const absl::Status status = RunSpmd(1, [&](RankContext&) -> absl::Status {
      const MeshScope scope(OneRank());
      Trained own;
      const std::vector<float> before = own.weight().tensor().local().ToVector<float>();
      const absl::Status refused = Refusal(c, *foreign, own, folder.Path("."));
      EXPECT_THAT(std::string(refused.message()),
                  ::testing::ContainsRegex("the tensor float32 \\[4.*\\] on self \\[\\] belongs to "
                                           "another rank or world"))
          << c.function;
      EXPECT_EQ(own.weight().tensor().local().ToVector<float>(), before) << c.function;
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << c.function << ": " << status;
  }
  for (const char* made : {"1", "2", "3"}) {
    EXPECT_FALSE(std::filesystem::exists(folder.Path(made))) << made;
  }
}

}  // namespace
}  // namespace dtensor::ownership_modules_test
