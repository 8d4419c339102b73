#include "dtensor/ops/case_samples.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "dtensor/distribute.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

// "6", "a" or "2a": the number, and the letter or 0.
bool IsSize(absl::string_view text, int64_t* factor, char* letter) {
  *factor = 1;
  *letter = 0;
  if (!text.empty() && absl::ascii_islower(text.back())) {
    *letter = text.back();
    text.remove_suffix(1);
    if (text.empty()) return true;
  }
  return absl::SimpleAtoi(text, factor);
}

// Apart from each other, so that finite differences do not cross a tie.
double Fraction(uint64_t seed, int64_t i) {
  uint64_t state =
      (seed + 1) * 0x9E3779B97F4A7C15u + static_cast<uint64_t>(i) * 0xBF58476D1CE4E5B9u;
  state ^= state >> 31;
  state *= 0x94D049BB133111EBu;
  state ^= state >> 29;
  return static_cast<double>(state >> 11) / 9007199254740992.0;
}

[[noreturn]] void Malformed(absl::string_view where, absl::string_view why) {
  Throw(absl::InvalidArgumentError(absl::StrCat("case ", where, ": ", why)));
}

}  // namespace

std::vector<double> CaseTensor::Values(uint64_t seed) const {
  std::vector<double> values;
  for (int64_t i = 0; i < Numel(shape); ++i) {
    const double at = Fraction(seed, i);
    if (below > 0) {
      values.push_back(std::floor(at * static_cast<double>(below)));
    } else if (dtype == DType::kBool) {
      values.push_back(at < 0.5 ? 0 : 1);
    } else if (IsFloating(dtype)) {
      values.push_back(low + (high - low) * at);
    } else {
      values.push_back(std::floor(4 * at));
    }
  }
  return values;
}

std::vector<DTensor> CaseSample::Make(uint64_t seed) const {
  std::vector<DTensor> all;
  for (const CaseTensor& t : tensors) {
    const std::vector<double> values = t.Values(seed + all.size());
    all.push_back(FromVector(values, t.shape, {t.dtype, DeviceMesh::Self(), {}}));
  }
  return all;
}

std::string CaseSample::ToString() const {
  std::vector<std::string> texts;
  for (const CaseTensor& t : tensors) {
    texts.push_back(
        absl::StrCat(t.name, " ", std::string(Name(t.dtype)), " ", dtensor::ToString(t.shape)));
  }
  for (const auto& [name, text] : others) texts.push_back(absl::StrCat(name, "=", text));
  return absl::StrJoin(texts, ", ");
}

// --- parsing

absl::Status CasePattern::AddDims(const std::string& text, TensorText* tensor) {
  tensor->dims.clear();
  if (!text.empty()) tensor->dims = absl::StrSplit(text, ',');
  for (size_t d = 0; d < tensor->dims.size(); ++d) {
    const std::string& dim = tensor->dims[d];
    int64_t factor;
    char letter;
    if (dim == "..." && d == 0) continue;
    if (!IsSize(dim, &factor, &letter) || factor < 0) {
      return absl::InvalidArgumentError(absl::StrCat("\"", dim,
                                                     "\" is no size: \"6\", \"a\", "
                                                     "\"2a\", or \"...\" as the first"));
    }
    if (letter != 0 && letters_.find(letter) == std::string::npos) letters_ += letter;
  }
  tensors_.push_back(*tensor);
  return absl::OkStatus();
}

absl::Status CasePattern::AddTensor(const std::string& text) {
  const size_t open = text.find('['), close = text.rfind(']');
  if (close == std::string::npos || close < open) {
    return absl::InvalidArgumentError(absl::StrCat("\"", text, "\" has no closing bracket"));
  }
  TensorText tensor;
  tensor.tensor.name = text.substr(0, open);
  absl::string_view rest = absl::string_view(text).substr(close + 1);
  while (!rest.empty()) {
    const char kind = rest[0];
    const size_t end = std::min(rest.find_first_of(":<@~", 1), rest.size());
    const std::string value(rest.substr(1, end - 1));
    rest.remove_prefix(end);
    const std::vector<std::string> range = absl::StrSplit(value, absl::MaxSplits("..", 1));
    const bool known = kind == ':'   ? ParseDType(value, &tensor.tensor.dtype)
                       : kind == '~' ? (tensor.tensor.constant = value.empty())
                       : kind == '<' ? !(tensor.below = value).empty()
                       : kind == '@'
                           ? range.size() == 2 && absl::SimpleAtod(range[0], &tensor.tensor.low) &&
                                 absl::SimpleAtod(range[1], &tensor.tensor.high)
                           : false;
    if (!known) {
      return absl::InvalidArgumentError(
          absl::StrCat("after \"]\": \"", value, "\" is none of :dtype, <size, @low..high and ~"));
    }
  }
  const std::string shapes = text.substr(open, close + 1 - open);
  const std::vector<std::string> list = absl::StrSplit(shapes, ';');
  tensor.tensor.in_list = list.size() > 1;
  for (const std::string& one : list) {
    if (one.size() < 2 || one.front() != '[' || one.back() != ']') {
      return absl::InvalidArgumentError(absl::StrCat("\"", one, "\" is no shape: \"[a,b]\""));
    }
    DT_RETURN_IF_ERROR(AddDims(one.substr(1, one.size() - 2), &tensor));
  }
  return absl::OkStatus();
}

absl::StatusOr<CasePattern> CasePattern::Parse(const std::string& text) {
  CasePattern pattern;
  for (absl::string_view item : absl::StrSplit(text, ' ', absl::SkipEmpty())) {
    const size_t bracket = item.find('['), equals = item.find('=');
    if (bracket != absl::string_view::npos && bracket < equals) {
      DT_RETURN_IF_ERROR(pattern.AddTensor(std::string(item)));
      pattern.names_.push_back(pattern.tensors_.back().tensor.name);
    } else if (equals != absl::string_view::npos) {
      pattern.others_.emplace_back(item.substr(0, equals), item.substr(equals + 1));
      pattern.names_.push_back(pattern.others_.back().first);
    } else {
      return absl::InvalidArgumentError(
          absl::StrCat("\"", item, "\" is neither a tensor, \"x[a,b]\", nor an argument, \"k=3\""));
    }
  }
  return pattern;
}

bool CasePattern::any_shape() const {
  return !tensors_.empty() && std::all_of(tensors_.begin(), tensors_.end(), [](const auto& t) {
    return t.dims == std::vector<std::string>{"..."};
  });
}

CaseSample CasePattern::At(absl::FunctionRef<int64_t(char)> size,
                           absl::FunctionRef<Shape(size_t)> leading) const {
  int64_t factor;
  char letter;
  // A letter that no tensor has is a text.
  const auto is_size = [&](const std::string& text) {
    return IsSize(text, &factor, &letter) &&
           (letter == 0 || letters_.find(letter) != std::string::npos);
  };
  const auto value = [&] { return letter == 0 ? factor : factor * size(letter); };
  CaseSample sample;
  sample.names = names_;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    CaseTensor tensor = tensors_[i].tensor;
    for (const std::string& dim : tensors_[i].dims) {
      if (dim == "...") {
        tensor.shape = leading(i);
      } else if (is_size(dim)) {
        tensor.shape.push_back(value());
      }
    }
    if (!tensors_[i].below.empty() && is_size(tensors_[i].below)) tensor.below = value();
    sample.tensors.push_back(std::move(tensor));
  }
  for (const auto& [name, text] : others_) {
    std::vector<std::string> parts = absl::StrSplit(text, ',');
    for (std::string& part : parts) {
      if (is_size(part) && letter != 0) part = absl::StrCat(value());
    }
    sample.others.emplace_back(name, absl::StrJoin(parts, ","));
  }
  return sample;
}

std::vector<CasePattern> PatternsOf(const OpCase& c) {
  std::vector<CasePattern> all;
  for (const std::string& text : std::vector<std::string>(absl::StrSplit(c.samples, " | "))) {
    absl::StatusOr<CasePattern> pattern = CasePattern::Parse(text);
    if (!pattern.ok()) Malformed(c.name, pattern.status().message());
    all.push_back(*std::move(pattern));
  }
  return all;
}

std::vector<CaseSample> SamplesOf(const OpCase& c) {
  static constexpr int64_t kSizes[2][6] = {{4, 6, 2, 8, 3, 5}, {5, 3, 2, 7, 4, 6}};
  std::vector<CaseSample> all;
  const std::vector<CasePattern> patterns = PatternsOf(c);
  for (size_t n = 0; n < patterns.size(); ++n) {
    for (const size_t uneven : {size_t{0}, size_t{1}}) {
      if (patterns.size() > 1 && n % 2 != uneven) continue;
      const auto size = [&](char letter) {
        return kSizes[uneven][patterns[n].letters().find(letter) % 6];
      };
      const auto leading = [&](size_t i) -> Shape {
        if (uneven == 0) return {4, 6};
        return i == 0 ? Shape{5, 3, 2} : i == 1 ? Shape{3, 1} : Shape{5, 1, 2};
      };
      all.push_back(patterns[n].At(size, leading));
    }
  }
  return all;
}

// --- arguments

std::optional<DType> CaseArgs::Type(const std::string& name) {
  if (!Has(name)) return {};
  DType type;
  if (!ParseDType(Text(name), &type)) Malformed(name, absl::StrCat(Text(name), " is no dtype"));
  return type;
}

const std::string* SampleArgs::Find(const std::string& name) const {
  for (const auto& [other, text] : sample_.others) {
    if (other == name) return &text;
  }
  return nullptr;
}

bool SampleArgs::IsTensor(const std::string& name) {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (sample_.tensors[i].name == name) return tensors_[i].defined();
  }
  return false;
}
bool SampleArgs::Has(const std::string& name) { return IsTensor(name) || Find(name) != nullptr; }
bool SampleArgs::IsList(const std::string& name) {
  const std::string* text = Find(name);
  return text != nullptr && text->find(',') != std::string::npos;
}

bool SampleArgs::IsText(const std::string& name) {
  const std::string* text = Find(name);
  return text != nullptr && !text->empty() && absl::ascii_isalpha((*text)[0]) && *text != "true" &&
         *text != "false";
}

std::string SampleArgs::NameAt(size_t i) {
  if (i >= sample_.names.size()) Malformed(sample_.ToString(), "too few arguments");
  return sample_.names[i];
}

DTensor SampleArgs::T(const std::string& name) {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (sample_.tensors[i].name == name) return tensors_[i];
  }
  Malformed(sample_.ToString(), absl::StrCat("there is no tensor ", name));
}

std::vector<DTensor> SampleArgs::List(const std::string& name) {
  std::vector<DTensor> list;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (sample_.tensors[i].name == name) list.push_back(tensors_[i]);
  }
  return list;
}

template <class Element>
std::vector<Element> SampleArgs::Numbers(const std::string& name,
                                         bool (*parse)(absl::string_view, Element*)) const {
  std::vector<Element> list;
  if (Find(name) == nullptr || Find(name)->empty()) return list;
  for (absl::string_view part : absl::StrSplit(*Find(name), ',')) {
    Element number;
    if (!parse(part, &number)) {
      Malformed(sample_.ToString(), absl::StrCat(name, " is no list of such numbers: ", part));
    }
    list.push_back(number);
  }
  return list;
}

Scalar SampleArgs::Number(const std::string& name) {
  const std::string text = Text(name);
  if (text == "true" || text == "false") return {text == "true"};
  int64_t whole;
  if (absl::SimpleAtoi(text, &whole)) return {whole};
  double number;
  if (absl::SimpleAtod(text, &number)) return {number};
  Malformed(sample_.ToString(), absl::StrCat(name, " is no number"));
}

DimList SampleArgs::Ints(const std::string& name) {
  return Numbers<int64_t>(
      name, [](absl::string_view part, int64_t* n) { return absl::SimpleAtoi(part, n); });
}

std::vector<double> SampleArgs::Floats(const std::string& name) {
  return Numbers<double>(
      name, [](absl::string_view part, double* n) { return absl::SimpleAtod(part, n); });
}

std::string SampleArgs::Text(const std::string& name) {
  const std::string* text = Find(name);
  if (text == nullptr) Malformed(sample_.ToString(), absl::StrCat("there is no argument ", name));
  return *text;
}

void SampleArgs::LeaveOut(const std::string& reason) {
  Throw(absl::UnimplementedError(absl::StrCat("left out: ", reason)));
}

}  // namespace dtensor
