// Case lines: one line per function of ops/. From it come its calls with PyTorch's samples, the
// samples of the judge, gradient checks, calls of the fuzzer, steps of random programs and a bench
// (docs/guide/ops.md).
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dtensor/ops/ops.h"
#include "dtensor/ops/verify_samples.h"

namespace dtensor {

// The arguments of one call by PyTorch's names, wherever they come from.
class CaseArgs {
 public:
  virtual ~CaseArgs() = default;

  virtual bool Has(const std::string& name) = 0;  // given, and not null
  virtual bool IsTensor(const std::string& name) = 0;
  virtual bool IsList(const std::string& name) = 0;
  virtual bool IsText(const std::string& name) = 0;  // a word, and no number
  virtual std::string NameAt(size_t i) = 0;          // of the i-th argument of the call
  virtual DTensor T(const std::string& name) = 0;
  virtual std::vector<DTensor> List(const std::string& name) = 0;
  virtual Scalar Number(const std::string& name) = 0;
  virtual DimList Ints(const std::string& name) = 0;  // one counts as a list; absent: empty
  virtual std::vector<double> Floats(const std::string& name) = 0;  // as Ints
  virtual std::string Text(const std::string& name) = 0;
  // What an indexing takes; by default a list of tensors.
  virtual std::vector<TensorIndex> Indices(const std::string& name) {
    const std::vector<DTensor> list = List(name);
    return {list.begin(), list.end()};
  }
  // Ends a call that we do not take, for a reason that is counted.
  [[noreturn]] virtual void LeaveOut(const std::string& reason) = 0;
  // A tensor that the call writes to: by default a copy, which may have a history.
  virtual DTensor Written(const std::string& name) { return clone(T(name)); }

  bool TensorAt(size_t i) { return IsTensor(NameAt(i)); }
  DTensor At(size_t i) { return T(NameAt(i)); }
  DTensor Optional(const std::string& name) { return Has(name) ? T(name) : DTensor(); }
  int64_t Int(const std::string& name, int64_t otherwise = 0) {
    return Has(name) ? Number(name).i : otherwise;
  }
  std::optional<int64_t> Dim() {
    return Has("dim") ? std::optional<int64_t>(Int("dim")) : std::nullopt;
  }
  bool Bool(const std::string& name) { return Has(name) && Number(name).i != 0; }
  double Float(const std::string& name, double otherwise = 0) {
    return Has(name) ? Number(name).d : otherwise;
  }
  std::string TextOr(const std::string& name, const std::string& otherwise) {
    return Has(name) ? Text(name) : otherwise;
  }
  std::optional<DType> Type(const std::string& name);
};

enum CaseFlags : uint32_t {
  kDraws = 1,   // takes random numbers
  kFinite = 2,  // masks by multiplying: no infinities and NaN, where it is judged
  kNoGradient = 4,
  kWrites = 8,  // to an argument, though the name has no "_"
};

struct OpCase {
  std::string name;  // PyTorch's, if it has such a function
  // Calls that stand for all, separated by " | ", their arguments by blanks:
  //   x[a,b]        a tensor of floats; one letter is one size, 6 and 2a are sizes, too
  //   x[...,k]      any leading dims, with which other operands' broadcast
  //   m[a]:bool     another dtype     ids[n]:int64<v   indices below v
  //   x[a]@0.5..2   values between    xs[a];[b]        a list of tensors
  //   x[a]~         takes no gradient
  //   k=3 keepdim=true dims=0,2 p=0.5 reduction=sum shape=2a,b   other arguments
  std::string samples;
  Values (*call)(CaseArgs&);
  uint32_t is = 0;
  // More of them, for the judge of functions alone: as large as it takes until a function goes
  // another way on a mesh.
  std::string large = "";
};

// `DT_CASE(softmax, "input[a,b] dim=1", softmax(a.T("input"), a.Int("dim")))`: the calls, in `a`.
#define DT_CASE(name, samples, ...)                                     \
  OpCase {                                                              \
    #name, samples, [](CaseArgs& a) -> Values { return {__VA_ARGS__}; } \
  }
// With flags.
#define DT_CASE_IS(flags, name, samples, ...)                                  \
  OpCase {                                                                     \
    #name, samples, [](CaseArgs& a) -> Values { return {__VA_ARGS__}; }, flags \
  }

// What a family gives: void Add<Name>Cases(CaseTable*) in ops/<family>/cases.cc, for every
// DT_OP_CASES of ops/families.inc.
struct CaseTable {
  std::vector<OpCase> cases;
  // Calls that the judge should see and that no call on one rank in float64 makes: other dtypes,
  // and groups of attributes that make other rows true.
  std::vector<VerifyCase> judged;

  void Add(std::vector<OpCase> more) { cases.insert(cases.end(), more.begin(), more.end()); }
  // Of functions that were added, by name.
  void Large(const std::vector<std::pair<std::string, std::string>>& samples);
  void Judge(std::vector<VerifyCase> more) {
    judged.insert(judged.end(), more.begin(), more.end());
  }
};
const CaseTable& AllCases();
// Null: there is none.
const OpCase* FindCase(const std::string& name);

// Functions of PyTorch's that there are not, with the reason: ten at most.
struct DecidedAgainst {
  std::string name, reason;
};
const std::vector<DecidedAgainst>& OpsDecidedAgainst();

}  // namespace dtensor
