// Every case line (ops/cases.h): its samples run, gradients agree with central differences, values
// and gradients under sharded inputs with one rank's. And nothing of ops/ is without a line.
#include "dtensor/ops/cases.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include "dtensor/ops/case_samples.h"
#include "dtensor/ops/rules.h"
#include "dtensor/rehearsal.h"
#include "dtensor/rng/generator.h"
#include "dtensor/watch.h"
#include "tests/common/message.h"
#include "tests/common/pattern.h"
#include "tests/common/thin.h"
#include "tests/ops/sharded.h"

namespace dtensor::cases_test {

void PrintTo(const OpCase& c, std::ostream* to) { *to << c.name; }

namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::MessageOf;
using testing::Operand;

std::vector<Operand> OperandsOf(const OpCase& c, const CaseSample& sample) {
  std::vector<Operand> operands;
  for (size_t i = 0; i < sample.tensors.size(); ++i) {
    const CaseTensor& t = sample.tensors[i];
    operands.push_back({t.shape, t.Values(i + 3), t.dtype, sample.WantsGradient(c, i)});
  }
  return operands;
}

// The case as a function of its tensors: its result, or of several one number. Random numbers are
// the same in every call.
testing::OpFn FunctionOf(const OpCase& c, const CaseSample& sample) {
  return [&c, &sample](const std::vector<DTensor>& in) {
    ManualSeed(5);
    SampleArgs args(sample, in);
    const Values outputs = c.call(args);
    if (outputs.size() == 1) return outputs[0];
    DTensor total;
    for (size_t i = 0; i < outputs.size(); ++i) {
      const DTensor part = sum(to(outputs[i], DType::kF64)) * static_cast<double>(i + 1);
      total = total.defined() ? total + part : part;
    }
    return total;
  };
}

// Whether the result has a gradient that differences can see: float32 is too coarse.
bool Differentiable(const DTensor& y) { return y.requires_grad() && y.dtype() == DType::kF64; }

class EveryCase : public ::testing::TestWithParam<OpCase> {
 protected:
  // Under a sanitizer the first.
  std::vector<CaseSample> Samples() const {
    std::vector<CaseSample> all = SamplesOf(GetParam());
    if (testing::Thin(2) != 1) all.resize(1);
    return all;
  }
};

TEST_P(EveryCase, GradientsAreThoseOfDifferences) {
  for (const CaseSample& sample : Samples()) {
    SCOPED_TRACE(sample.ToString());
    const testing::OpFn fn = FunctionOf(GetParam(), sample);
    const std::vector<Operand> operands = OperandsOf(GetParam(), sample);
    if (Differentiable(fn(testing::MakeAll(operands)))) testing::CheckGradients(fn, operands);
  }
}

// The judge on two ranks; ops_verify_test has more.
TEST_P(EveryCase, ShardedInputsGiveTheSame) {
  FunctionCase judged = JudgedCase(GetParam());
  if (testing::Thin(2) != 1 && !judged.samples.empty()) judged.samples.resize(1);
  judged.options.meshes = {{2}};
  judged.options.most = 8 / testing::Thin(4);
  const absl::StatusOr<VerifyReport> report =
      VerifyFunction(judged.name, judged.samples, judged.options);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_TRUE(report->wrong.empty()) << report->ToString(judged.name);
}

using Gradients = std::vector<std::vector<double>>;  // of each tensor; of none, empty

struct How {
  bool change = false;  // results are changed in place before they are used
  int only = -1;        // the only tensor that wants a gradient
};
Gradients GradientsOf(const OpCase& c, const CaseSample& sample, const How& how) {
  std::vector<Operand> operands = OperandsOf(c, sample);
  for (int i = 0; i < std::ssize(operands); ++i) operands[i].grad &= how.only < 0 || i == how.only;
  const std::vector<DTensor> in = testing::MakeAll(operands);
  ManualSeed(5);
  SampleArgs args(sample, in);
  const Values outputs = c.call(args);
  DTensor total;
  for (size_t i = 0; i < outputs.size(); ++i) {
    DTensor y = outputs[i];
    if (how.change && y.dtype() != DType::kBool) add_(y, 1);
    if (!y.requires_grad()) continue;
    const DTensor weights = FromVector(testing::Noise(y.numel(), i + 1), y.shape());
    const DTensor part = sum(mul(to(y, DType::kF64), weights));
    total = total.defined() ? total + part : part;
  }
  if (total.defined()) total.Backward();
  Gradients all(in.size());
  for (size_t i = 0; i < in.size(); ++i) {
    const DTensor& t = in[i];
    if (!t.requires_grad() || !t.is_leaf() || !t.grad().defined()) continue;
    all[i] = t.grad().ToVector<double>();
  }
  return all;
}

// What is kept for backward may depend on whose gradients are wanted ("x for w" in Vjp); what they
// are does not.
TEST_P(EveryCase, TheGradientOfOneTensorIsThatAmongAll) {
  for (const CaseSample& sample : Samples()) {
    SCOPED_TRACE(sample.ToString());
    const Gradients want = GradientsOf(GetParam(), sample, {});
    for (int i = 0; i < std::ssize(want); ++i) {
      if (want[i].empty()) continue;
      SCOPED_TRACE(i);
      // Attention whose mask wants a gradient is not the fused one.
      EXPECT_EQ(testing::Differs(GradientsOf(GetParam(), sample, {.only = i})[i], want[i], 1e-9),
                "");
    }
  }
}

// A gradient that reads the result, and finds it changed, refuses; it never reads other values.
TEST_P(EveryCase, ResultsThatWereChangedInPlaceGiveNoWrongGradients) {
  for (const CaseSample& sample : Samples()) {
    SCOPED_TRACE(sample.ToString());
    const Gradients want = GradientsOf(GetParam(), sample, {});
    Gradients got;
    const std::string refused =
        MessageOf([&] { got = GradientsOf(GetParam(), sample, {.change = true}); });
    if (!refused.empty()) continue;
    for (size_t i = 0; i < want.size(); ++i) EXPECT_EQ(testing::Differs(got[i], want[i], 0), "");
  }
}

// What a call gives on this rank, of tensors on ranks 0 and 1 that are sharded by their first dim;
// "" where it cannot (a rank outside does not know how many elements a mask is true of).
std::string SpecsOnTwo(const OpCase& c, const CaseSample& sample, int64_t rank) {
  const DeviceMesh mesh = *DeviceMesh::FromRanks({2}, {0, 1}, {"dp"});
  std::string specs;
  try {
    std::vector<DTensor> in;
    for (const Operand& o : OperandsOf(c, sample)) {
      const Placement p = o.shape.empty() ? Replicate() : Shard(0);
      in.push_back(testing::Place(o, mesh, {p}, rank, 1));
    }
    ManualSeed(5);
    SampleArgs args(sample, in);
    for (const DTensor& y : c.call(args)) {
      absl::StrAppend(&specs, y.spec().ToString(), y.requires_grad() ? " with gradient; " : "; ");
    }
  } catch (const Error&) {
    return "";
  }
  return specs;
}

// So that what follows (another op, a move to other ranks, a gradient) finds all ranks alike.
TEST_P(EveryCase, RanksOutsideOfTheMeshSeeTheSameSpecs) {
  const std::vector<CaseSample> samples = Samples();
  for (size_t i = 0; i < samples.size(); i += testing::Thin(2)) {
    if (samples[i].tensors.empty()) continue;
    std::string inside, outside;
    const absl::Status status = RunSpmd(3, [&](RankContext& context) {
      const std::string specs = SpecsOnTwo(GetParam(), samples[i], context.rank());
      if (context.rank() == 0) inside = specs;
      if (context.rank() == 2) outside = specs;
      return absl::OkStatus();
    });
    if (!status.ok() || outside.empty()) continue;
    EXPECT_EQ(outside, inside) << samples[i].ToString();
  }
}

INSTANTIATE_TEST_SUITE_P(All, EveryCase, ::testing::ValuesIn(AllCases().cases),
                         [](const auto& info) { return info.param.name; });

// --- completeness

void RunWithGradient(const OpCase& c, const CaseSample& sample) {
  std::vector<DTensor> in = testing::MakeAll(OperandsOf(c, sample));
  const DTensor y = FunctionOf(c, sample)(in);
  if (y.requires_grad()) sum(y).Backward();
}

TEST(Cases, ReachEveryRegisteredOp) {
  RegisterOps();
  std::set<std::string> missing;
  for (const OpDef* op : OpRegistry::All()) missing.insert(op->name());
  {
    const WatchCalls watch(
        [&](const OpDef& op, Inputs, absl::Span<const Attr>) { missing.erase(op.name()); });
    for (const OpCase& c : AllCases().cases) {
      for (const CaseSample& sample : SamplesOf(c)) RunWithGradient(c, sample);
    }
  }
  // Gradients of slices are put together in place, where they may be; sums of exps are asked for
  // where ranks have parts of the classes.
  EXPECT_THAT(missing, ElementsAre("slice_backward", "sum_exp")) << "no case line calls these ops";
}

// Functions that a header declares, "DTensor softmax(" at the start of a line.
std::set<std::string> FunctionsOf(const std::filesystem::path& header) {
  std::ifstream file(header);
  std::stringstream text;
  text << file.rdbuf();
  const auto names = testing::AllMatches(text.str(), "\n(?:DTensor|Values|void) (\\w+)\\(");
  std::set<std::string> found(names.begin(), names.end());
  found.erase("operator");
  return found;
}

TEST(Cases, AreThereForEveryFunction) {
  std::set<std::string> functions;
  for (const auto& folder : std::filesystem::directory_iterator(DT_TEST_DATA "/../../ops")) {
    const std::string name = folder.path().filename();
    functions.merge(FunctionsOf(folder.path() / (name + ".h")));  // the public one of a family
  }
  EXPECT_GT(functions.size(), 60u);
  for (const std::string& function : functions) {
    EXPECT_NE(FindCase(function), nullptr) << function << " has no case line";
  }
  std::set<std::string> names;
  for (const OpCase& c : AllCases().cases) {
    EXPECT_TRUE(names.insert(c.name).second) << c.name << " has two case lines";
  }
}

// --- what completeness rests on

WatchCalls::Fn NamesInto(std::vector<std::string>* names, const std::string& who) {
  return [names, who](const OpDef& op, Inputs inputs, absl::Span<const Attr>) {
    names->push_back(absl::StrCat(who, " ", op.name(), " of ", inputs.size()));
  };
}

TEST(WatchCalls, SeesGradientsAndNestsAndNoRehearsal) {
  RegisterOps();
  std::vector<std::string> names;
  DTensor x = ones({2, 3}, {.dtype = DType::kF64}).RequiresGrad();
  {
    const WatchCalls outer(NamesInto(&names, "outer"));
    DTensor y;
    {
      const WatchCalls inner(NamesInto(&names, "inner"));
      y = exp(x);
    }
    {
      const CostModel cost;
      const Rehearsal rehearsal(cost);
      tanh(x);
    }
    y.Backward(y);
  }
  neg(x);
  EXPECT_THAT(names, ElementsAre("inner exp of 1", "outer exp of 1", "outer mul of 2"));
}

// One that looks at values calls ops itself: it does not see those, and they may need the place of
// the plan of the call that it sees.
TEST(WatchCalls, MayCallOps) {
  RegisterOps();
  const DTensor x = full({2, 3}, -3.0, {.dtype = DType::kF64});
  int64_t seen = 0;
  double largest = 0;
  {
    const WatchCalls watch([&](const OpDef&, Inputs inputs, absl::Span<const Attr>) {
      ++seen;
      largest = amax(abs(*inputs[0])).Item();
      ClearDispatchCache();
    });
    for (int i = 0; i < 3; ++i) EXPECT_EQ(neg(x).ToVector<double>(), std::vector<double>(6, 3.0));
  }
  EXPECT_EQ(seen, 3);
  EXPECT_EQ(largest, 3);
}

// --- the text of samples

CaseSample First(const std::string& text) { return SamplesOf({"case", text, nullptr})[0]; }

TEST(CaseText, GivesShapesValuesAndArguments) {
  const CaseSample sample =
      First("x[a,2b] ids[n]:int64<b m[]:bool xs[a];[3,n]@0.5..2 dim=1 sizes=b,-1,2a p=0.5 by=sum");
  ASSERT_EQ(sample.tensors.size(), 5u);  // a, b, n: 4, 6, 2
  EXPECT_EQ(sample.tensors[0].shape, (Shape{4, 12}));
  EXPECT_EQ(sample.tensors[1].dtype, DType::kI64);
  for (double v : sample.tensors[1].Values(3)) EXPECT_TRUE(v >= 0 && v < 6) << v;
  EXPECT_EQ(sample.tensors[2].shape, Shape{});
  EXPECT_EQ(sample.tensors[2].dtype, DType::kBool);
  EXPECT_EQ(sample.tensors[4].shape, (Shape{3, 2}));
  for (double v : sample.tensors[4].Values(3)) EXPECT_TRUE(v >= 0.5 && v <= 2) << v;
  SampleArgs args(sample, sample.Make(0));
  EXPECT_EQ(args.List("xs").size(), 2u);
  EXPECT_EQ(args.Int("dim"), 1);
  EXPECT_EQ(args.Ints("sizes"), (DimList{6, -1, 8}));
  EXPECT_EQ(args.Float("p"), 0.5);
  EXPECT_EQ(args.Text("by"), "sum");
  EXPECT_EQ(args.NameAt(3), "xs");
  EXPECT_EQ(args.NameAt(4), "dim");
  EXPECT_FALSE(args.Has("q"));
}

TEST(CaseText, ErrorsSayWhatIsNotUnderstood) {
  EXPECT_THAT(MessageOf([] { First("x[a,B]"); }), HasSubstr("case case: \"B\" is no size"));
  EXPECT_THAT(MessageOf([] { First("x[a"); }), HasSubstr("no closing bracket"));
  EXPECT_THAT(MessageOf([] { First("x[a]:real"); }), HasSubstr("\"real\" is none of :dtype"));
  EXPECT_THAT(MessageOf([] { First("x[a]@3"); }), HasSubstr("\"3\" is none of :dtype"));
  EXPECT_THAT(MessageOf([] { First("keepdim"); }), HasSubstr("neither a tensor"));
}

}  // namespace
}  // namespace dtensor::cases_test
