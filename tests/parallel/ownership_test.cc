// A tensor belongs to the rank and the world that made it. The public functions are read from the
// headers: one that takes a tensor and has no case here, or no line in ops/, fails this test.
#include <filesystem>
#include <functional>
#include <latch>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "dtensor/ops/case_samples.h"
#include "dtensor/ops/cases.h"
#include "gtest/gtest.h"
#include "tests/common/pattern.h"
#include "tests/parallel/declared.h"
#include "tests/parallel/ownership_cases.h"
#include "tests/parallel/ownership_more_cases.h"

namespace dtensor {
namespace {

using testing::TensorFunction;

std::multimap<std::string, Call2> AllCases() {
  std::multimap<std::string, Call2> all;
  for (const Cases& some :
       {ElementwiseCases(), PointwiseCases(), MathCases(), ViewCases(), RandomCases(),
        TensorCases(), EngineCases(), ModuleCases(), OverloadCases(), InPlaceCases(), LocalCases(),
        PlacingCases(), ModelCases()}) {
    for (const auto& [function, call] : some) all.emplace(function, call);
  }
  return all;
}

std::map<std::string, TensorFunction> AllDeclared() {
  return testing::TensorFunctions(testing::PublicDeclarations(DT_TEST_DATA "/../../"));
}

// Line and operand, of which only the shape is read.
const std::set<std::pair<std::string, std::string>>& OnlyShapes() {
  static const std::set<std::pair<std::string, std::string>> shapes = {
      {"view_as", "other"}, {"reshape_as", "other"}, {"expand_as", "other"}};
  return shapes;
}

// The tensors of a line: CaseLinesRefuseTensorsOfADeadWorld tries them all but OnlyShapes().
std::set<std::string> TensorsOf(const OpCase& line) {
  std::set<std::string> names;
  for (const CaseSample& sample : SamplesOf(line)) {
    for (const CaseTensor& tensor : sample.tensors) names.insert(tensor.name);
  }
  return names;
}

// Functions that may be given any tensor, and why.
const std::map<std::string, std::string>& Excused() {
  const std::string handle = "handles are copied, kept and given back anywhere";
  const std::string spec = "reads the spec, which never changes";
  const std::string telling = "part of telling another error: shows the spec";
  static const std::map<std::string, std::string> excused = {
      {"DTensor::DTensor(const DTensor&)", handle},
      {"DTensor::DTensor(DTensor&&)", handle},
      {"DTensor::operator=(DTensor)", handle},
      {"DTensor::~DTensor()", handle},
      {"DTensor::defined()", handle},
      {"DTensor::impl()", handle},
      {"DTensor::Adopt(internal::DTensorImpl*)", handle},
      {"Values::Add(absl::string_view, DTensor)", handle},
      {"Values::Named(absl::string_view, size_t)", handle},
      {"Values::name(size_t)", "a text"},
      {"TensorIndex::TensorIndex(DTensor)", handle},
      {"SampleArgs::SampleArgs(const CaseSample&, std::vector<DTensor>, bool)", handle},
      {"DTensor::Absent(const Spec&, bool)", "makes a tensor"},
      {"DTensor::Absent(const DeviceMesh&, absl::Span<const Placement>, IntSpan, DType, bool)",
       "makes a tensor"},
      {"DTensor::spec()", spec},
      {"DTensor::spec_ref()", spec},
      {"DTensor::shape()", spec},
      {"DTensor::ndim()", spec},
      {"DTensor::size(int)", spec},
      {"DTensor::numel()", spec},
      {"DTensor::dtype()", spec},
      {"DTensor::mesh()", spec},
      {"DTensor::placements()", spec},
      {"Misfit(const DTensor&, const Spec&)", spec},
      {"Describe(const DTensor&)", spec},
      {"RequireFloating(absl::string_view, const DTensor&)", spec},
      {"RequireDefined(absl::string_view, std::initializer_list<NamedInput>)",
       "asks for null handles alone"},
      {"AsOp(absl::string_view, std::initializer_list<NamedInput>, const F&)",
       "names what fails in its body; reads nothing"},
      {"ExplainError(absl::string_view, absl::Span<const NamedInput>, const absl::Status&)",
       telling},
      {"ThrowAs(absl::string_view, std::initializer_list<NamedInput>, const absl::Status&)",
       telling},
      {"ThrowInvalid(absl::string_view, absl::string_view, std::initializer_list<NamedInput>)",
       telling},
      {"RequireHolds(absl::string_view, DType, const Scalar&, std::initializer_list<NamedInput>)",
       telling},
      {"ThrowNull(absl::string_view, std::initializer_list<NamedInput>)", telling},
      {"InterceptCalls::Run(const OpDef&, Inputs, absl::Span<const Attr>, const DispatchOptions&, "
       "absl::Span<DTensor>)",
       "dispatch's: the program sees its call as it made it, and InterceptedCall::Proceed checks"},
  };
  return excused;
}

TEST(Ownership, EveryPublicFunctionOfTensorsHasACase) {
  RegisterOps();
  const std::multimap<std::string, Call2> cases = AllCases();
  const std::map<std::string, TensorFunction> declared = AllDeclared();
  EXPECT_GT(declared.size(), 600u);  // the scanner reads the headers
  std::map<std::string, int> overloads;
  for (const auto& [signature, function] : declared) ++overloads[function.name];
  for (const auto& [signature, function] : declared) {
    const int64_t tried = cases.count(signature);
    if (Excused().contains(signature)) continue;
    if (tried > 0) {
      EXPECT_GE(tried, function.tensors) << signature << ": a case for every tensor";
      continue;
    }
    // A line of ops/ stands for its function where that is one: a case of every overload else.
    const OpCase* const line = FindCase(function.name);
    const bool by_line = line != nullptr && overloads[function.name] == 1 &&
                         static_cast<int64_t>(TensorsOf(*line).size()) >= function.tensors;
    EXPECT_TRUE(by_line) << signature
                         << " has no case here: what does it do with another world's tensor?";
  }
  for (const auto& [signature, call] : cases) {
    EXPECT_TRUE(declared.contains(signature)) << signature << " has a case and is in no header";
  }
  for (const auto& [signature, reason] : Excused()) {
    EXPECT_TRUE(declared.contains(signature)) << signature << " is excused and in no header";
    EXPECT_FALSE(cases.contains(signature)) << signature << " is excused and has a case";
  }
  for (const auto& [name, operand] : OnlyShapes()) {
    const OpCase* const line = FindCase(name);
    EXPECT_TRUE(line != nullptr && TensorsOf(*line).contains(operand)) << name << " " << operand;
  }
}

struct Refusal {
  std::string text;
  bool thrown = false;
  // The error says which tensor, too.
  bool ok() const {
    constexpr const char* kText =
        "the tensor \\w+ \\[.* belongs to another rank or world: tensors stay in the RunSpmd";
    return !testing::FirstMatch(text, kText).empty();
  }
};
Refusal RefusalOf(const std::function<absl::Status()>& call) {
  try {
    return {std::string(call().message())};
  } catch (const Error& error) {
    return {error.what(), true};
  }
}

void ExpectRefusals(const Tensors& foreign) {
  const std::map<std::string, TensorFunction> declared = AllDeclared();
  std::multimap<std::string, Call2> cases = AllCases();
  for (const auto& [call, run] : IdleCases()) cases.emplace(call, run);
  for (const auto& [function, call] : cases) {
    const Refusal refusal = RefusalOf([&] { return call(foreign, Make()); });
    EXPECT_TRUE(refusal.ok()) << function << ": " << refusal.text;
    // What returns a Status lets no exception out (docs/adr/0014-rank-local-errors.md).
    const auto at = declared.find(function);
    const bool returns = at != declared.end() && at->second.returns_status;
    EXPECT_FALSE(returns && refusal.thrown) << function << " threw: " << refusal.text;
  }
}

TEST(Ownership, TensorsOfADeadWorldAreRefused) {
  RegisterOps();
  Tensors foreign;
  ASSERT_TRUE(RunSpmd(1, [&](RankContext&) {
                foreign = Make();
                return absl::OkStatus();
              }).ok());
  const absl::Status status = RunSpmd(1, [&](RankContext&) {
    ExpectRefusals(foreign);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Another rank of the same world, on a mesh that both are in.
// (std::latch: the thread sanitizer does not see into what absl waits with.)
TEST(Ownership, TensorsOfAnotherRankAreRefused) {
  RegisterOps();
  Tensors made;
  std::latch is_made(1), is_tried(1);
  const absl::Status status = RunSpmd(2, [&](RankContext& context) {
    if (context.rank() == 0) {
      made = Make();
      is_made.count_down();
      is_tried.wait();
      made = {};
    } else {
      const absl::Cleanup tried = [&] { is_tried.count_down(); };
      is_made.wait();
      ExpectRefusals(made);
    }
    return absl::OkStatus();
  });
  // A function on the mesh of both tells the other rank, so the world ends with the refusal.
  EXPECT_TRUE((Refusal{status.ToString()}.ok())) << status;
}

// One rank gives another's tensor to what all call: nobody waits for it until the deadline.
TEST(Ownership, PeersOfARankThatIsRefusedAreTold) {
  const testing::TempFolder folder;
  DTensor of_first;
  std::latch is_made(1), is_tried(1);
  std::vector<absl::Status> written(2), compared(2);
  const absl::Status status = RunSpmd(2, [&](RankContext& context) {
    const int64_t rank = context.rank();
    DTensor mine = full({4, 4}, 0.5, {.mesh = EveryRank()});
    if (rank == 0) {
      of_first = full({4, 4}, 0.5, {.mesh = EveryRank()});
      is_made.count_down();
    } else {
      is_made.wait();
      mine = of_first;
    }
    // Handles are counted by one rank at a time: the first leaves its tensor alone meanwhile.
    const absl::Cleanup tried = [&] {
      mine = {};
      if (rank == 1) return is_tried.count_down();
      is_tried.wait();
      of_first = {};
    };
    written[rank] = WriteTensors({{"x", mine}}, folder.path());
    compared[rank] = CheckCopies({{"x", mine}});
    return absl::OkStatus();
  });
  for (const absl::Status& s : {written[0], written[1], compared[0], compared[1], status}) {
    EXPECT_TRUE((Refusal{s.ToString()}.ok())) << s;
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

// Every tensor of every sample of every case line (ops/cases.h), one at a time.
TEST(Ownership, CaseLinesRefuseTensorsOfADeadWorld) {
  struct Sampled {
    const OpCase* line;
    CaseSample sample;
    std::vector<DTensor> foreign;
  };
  std::vector<Sampled> all;
  ASSERT_TRUE(RunSpmd(1, [&](RankContext&) {
                for (const OpCase& line : dtensor::AllCases().cases) {
                  for (CaseSample& sample : SamplesOf(line)) {
                    std::vector<DTensor> foreign = sample.Make(1);
                    all.push_back({&line, std::move(sample), std::move(foreign)});
                  }
                }
                return absl::OkStatus();
              }).ok());
  int64_t refused = 0;
  const absl::Status status = RunSpmd(1, [&](RankContext&) {
    for (const auto& [line, sample, foreign] : all) {
      for (size_t i = 0; i < foreign.size(); ++i) {
        if (OnlyShapes().contains({line->name, sample.tensors[i].name})) continue;
        const Refusal refusal = RefusalOf([&] {
          std::vector<DTensor> tensors = sample.Make(1);
          tensors[i] = foreign[i];
          SampleArgs args(sample, tensors, /*writes=*/true);
          line->call(args);
          return absl::OkStatus();
        });
        EXPECT_TRUE(refusal.ok()) << line->name << " " << sample.tensors[i].name << " of "
                                  << sample.ToString() << ": " << refusal.text;
        ++refused;
      }
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_GT(refused, 1000);
}

}  // namespace
}  // namespace dtensor
