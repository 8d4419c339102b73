// The samples of a case line (ops/cases.h): text in, tensors and arguments out.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "dtensor/ops/cases.h"

namespace dtensor {

struct CaseTensor {
  std::string name;  // the tensors of a list have one name
  bool in_list = false;
  Shape shape;
  DType dtype = DType::kF64;
  double low = -1, high = 1;  // of its values
  int64_t below = 0;          // positive: they are indices below it
  bool constant = false;      // takes no gradient
  // The same for the same seed.
  std::vector<double> Values(uint64_t seed) const;
};
struct CaseSample {
  std::vector<std::string> names;  // of all arguments, in the order of the text
  std::vector<CaseTensor> tensors;
  std::vector<std::pair<std::string, std::string>> others;  // name and text, sizes as numbers
  bool WantsGradient(const OpCase& c, size_t tensor) const {
    return IsFloating(tensors[tensor].dtype) && !tensors[tensor].constant &&
           (c.is & kNoGradient) == 0;
  }
  std::string ToString() const;
  std::vector<DTensor> Make(uint64_t seed) const;  // on this rank alone
};

// One sample whose sizes are open.
class CasePattern {
 public:
  // Errors: InvalidArgument saying what of the text is not understood.
  static absl::StatusOr<CasePattern> Parse(const std::string& text);

  const std::string& letters() const { return letters_; }  // in order of appearance
  bool any_shape() const;                                  // every tensor is "x[...]"
  // Sizes by letter, and what "..." of tensor i is.
  CaseSample At(absl::FunctionRef<int64_t(char letter)> size,
                absl::FunctionRef<Shape(size_t i)> leading) const;

 private:
  struct TensorText {
    CaseTensor tensor;
    std::vector<std::string> dims;
    std::string below;
  };
  absl::Status AddTensor(const std::string& text);
  absl::Status AddDims(const std::string& text, TensorText* tensor);
  std::vector<TensorText> tensors_;
  std::vector<std::pair<std::string, std::string>> others_;
  std::vector<std::string> names_;
  std::string letters_;
};

// Throws Error(InvalidArgument) naming the case.
std::vector<CasePattern> PatternsOf(const OpCase& c);
// Every sample of the case: at sizes that divide by 2, at others, or (one sample alone) at both.
std::vector<CaseSample> SamplesOf(const OpCase& c);
// The case before the judge of functions; without samples if it takes no tensors.
FunctionCase JudgedCase(const OpCase& c);

// Arguments from a sample; a null tensor counts as not given.
class SampleArgs : public CaseArgs {
 public:
  // `writes`: Written() is the tensor itself. `sample` must outlive this.
  SampleArgs(const CaseSample& sample, std::vector<DTensor> tensors, bool writes = false)
      : sample_(sample), tensors_(std::move(tensors)), writes_(writes) {}

  bool Has(const std::string& name) override;
  bool IsTensor(const std::string& name) override;
  bool IsList(const std::string& name) override;
  bool IsText(const std::string& name) override;
  std::string NameAt(size_t i) override;
  DTensor T(const std::string& name) override;
  std::vector<DTensor> List(const std::string& name) override;
  Scalar Number(const std::string& name) override;
  DimList Ints(const std::string& name) override;
  std::vector<double> Floats(const std::string& name) override;
  std::string Text(const std::string& name) override;
  [[noreturn]] void LeaveOut(const std::string& reason) override;
  DTensor Written(const std::string& name) override {
    return writes_ ? T(name) : CaseArgs::Written(name);
  }

 private:
  const std::string* Find(const std::string& name) const;
  // Those of a list that `parse` reads.
  template <class Element>
  std::vector<Element> Numbers(const std::string& name,
                               bool (*parse)(absl::string_view, Element*)) const;
  const CaseSample& sample_;
  const std::vector<DTensor> tensors_;
  const bool writes_;
};

}  // namespace dtensor
