#include "tests/fuzz/fuzz_calls.h"

#include <algorithm>
#include <set>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "dtensor/ops/rules.h"

namespace dtensor::testing {
namespace {

int64_t Size(Bytes& b) { return b.Chance(20) ? 0 : b.Between(1, 6); }

Shape AnyShape(Bytes& b) {
  Shape shape;
  for (int64_t n = b.Between(0, 4); n > 0; --n) shape.push_back(Size(b));
  return shape;
}

// Broadcasts to `shape`.
Shape Narrowed(const Shape& shape, Bytes& b) {
  Shape out = shape;
  if (b.Chance(64))
    out.erase(out.begin(), out.begin() + b.Below(static_cast<int64_t>(out.size()) + 1));
  for (int64_t& s : out) {
    if (b.Chance(40)) s = 1;
  }
  return out;
}

DType SomeType(Bytes& b) { return static_cast<DType>(b.Below(kNumDTypes)); }

std::string SomeInts(Bytes& b) {
  std::vector<int64_t> ints;
  for (int64_t n = b.Below(4); n > 0; --n) ints.push_back(b.Int());
  return absl::StrJoin(ints, ",");
}

// Another argument of the kind of `text`; a word stays as it is.
std::string Another(const std::string& text, Bytes& b) {
  int64_t whole;
  double number;
  DType type;
  if (text == "true" || text == "false") return b.Chance(128) ? "true" : "false";
  if (text.find(',') != std::string::npos) return SomeInts(b);
  if (absl::SimpleAtoi(text, &whole))
    return b.Chance(224) ? absl::StrCat(b.Int()) : absl::StrCat(b.Float());
  if (absl::SimpleAtod(text, &number)) return absl::StrCat(b.Float());
  if (ParseDType(text, &type)) return std::string(Name(SomeType(b)));
  return text;
}

void AddLines(std::vector<FuzzCall>* all) {
  for (const OpCase& c : AllCases().cases) all->push_back({c.name, &c, nullptr, PatternsOf(c)});
}

void AddRegistered(std::vector<FuzzCall>* all) {
  RegisterOps();
  const std::set<std::string> of_dims = {"axes",  "dim",  "dims", "shape",    "a",          "b",
                                         "index", "size", "step", "num_rows", "num_classes"};
  for (const OpDef* op : OpRegistry::All()) {
    const auto& names = op->attr_names();
    if (std::any_of(names.begin(), names.end(),
                    [&](const std::string& n) { return of_dims.count(n) > 0; })) {
      continue;
    }
    std::string text;
    for (size_t i = 0; i < (op->variadic() ? 2 : op->input_names().size()); ++i) {
      absl::StrAppend(&text, op->InputName(static_cast<int>(i)), "[...] ");
    }
    all->push_back({"op " + op->name(), nullptr, op, {ValueOrThrow(CasePattern::Parse(text))}});
  }
}

}  // namespace

CaseSample FuzzCall::Draw(Bytes& b) const {
  const CasePattern& pattern = patterns[b.Below(static_cast<int64_t>(patterns.size()))];
  const bool nothing_fits = b.Chance(24);
  std::vector<int64_t> sizes;
  for (size_t i = 0; i < pattern.letters().size(); ++i) sizes.push_back(Size(b));
  const Shape first = AnyShape(b);
  CaseSample sample = pattern.At([&](char letter) { return sizes[pattern.letters().find(letter)]; },
                                 [&](size_t i) { return i == 0 ? first : Narrowed(first, b); });
  for (CaseTensor& t : sample.tensors) {
    if (nothing_fits) t.shape = AnyShape(b);
  }
  for (auto& [name, text] : sample.others) {
    if (b.Chance(96)) text = Another(text, b);
  }
  return sample;
}

Values FuzzCall::Run(const CaseSample& sample, const std::vector<DTensor>& inputs,
                     Bytes& attrs) const {
  if (line != nullptr) {
    SampleArgs args(sample, inputs, /*writes=*/true);
    return line->call(args);
  }
  std::vector<const DTensor*> pointers;
  for (const DTensor& t : inputs) pointers.push_back(&t);
  Attrs given;
  for (const std::string& name : op->attr_names()) {
    given.push_back(name == "dtype"          ? DTypeAttr(SomeType(attrs))
                    : name == "ignore_index" ? IntAttr(attrs.Int())
                                             : FloatAttr(attrs.Float()));
  }
  return Call(*op, pointers, given);
}

const std::vector<FuzzCall>& FuzzCalls() {
  static const std::vector<FuzzCall>* calls = [] {
    auto* all = new std::vector<FuzzCall>;
    AddLines(all);
    AddRegistered(all);
    return all;
  }();
  return *calls;
}

}  // namespace dtensor::testing
