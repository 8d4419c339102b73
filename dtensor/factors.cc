#include "dtensor/factors.h"

#include <algorithm>
#include <cctype>
#include <numeric>

#include "absl/container/node_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/tensor/status.h"
#include "dtensor/tensor/text.h"

namespace dtensor {
namespace {

class NestBuilder {
 public:
  NestBuilder(const ParsedFactors& parsed, absl::Span<const EllipsisDims> ellipsis)
      : parsed_(parsed), ellipsis_(ellipsis) {
    for (const EllipsisDims& dims : ellipsis) all_.count = std::max(all_.count, dims.count);
  }

  // `sized` may have new names: they come after those of the inputs.
  std::shared_ptr<const FactorNest> Build(const SizedNames& sized) {
    NumberFactors();
    for (const auto& [name, size] : sized) IndexOf(name);
    nest_.inputs.reserve(parsed_.inputs.size());
    nest_.outputs.reserve(parsed_.outputs.size());
    for (size_t i = 0; i < ellipsis_.size(); ++i) {
      nest_.inputs.push_back(Operand(parsed_.inputs[i], ellipsis_[i]));
    }
    for (const auto& tokens : parsed_.outputs) nest_.outputs.push_back(Operand(tokens, all_));
    FindCutDims();
    FindHolding();
    return std::make_shared<const FactorNest>(std::move(nest_));
  }

 private:
  // Those of the `...` lie where it is read first.
  void NumberFactors() {
    const auto first = parsed_.names.begin(), after = first + parsed_.before_ellipsis;
    nest_.names.reserve(parsed_.names.size() + all_.count);
    nest_.names.assign(first, after);
    for (int j = all_.count; j-- > 0;) nest_.names.push_back(absl::StrCat("...", j));
    nest_.names.insert(nest_.names.end(), after, first + parsed_.of_inputs);
    Resize();
  }
  void Resize() {
    const size_t factors = nest_.names.size();
    nest_.whole.resize(factors, false);
    nest_.parts.resize(factors);
    nest_.part_of.resize(factors, -1);
  }
  // Of a factor that may be new.
  int IndexOf(const std::string& name) {
    const int known = nest_.IndexOf(name);
    if (known >= 0) return known;
    nest_.names.push_back(name);
    Resize();
    return static_cast<int>(nest_.names.size()) - 1;
  }
  // Of a name, as the text numbers it.
  int Index(int name) {
    if (name >= parsed_.of_inputs) return IndexOf(parsed_.names[name]);
    return name < parsed_.before_ellipsis ? name : name + all_.count;
  }

  FactorOperand Operand(const std::vector<FactorToken>& tokens, const EllipsisDims& ellipsis) {
    FactorOperand operand;
    for (const FactorToken& token : tokens) {
      switch (token.kind) {
        case FactorToken::Kind::kEllipsis:
          AddEllipsis(ellipsis, &operand);
          break;
        case FactorToken::Kind::kOne:
          operand.emplace_back();
          break;
        case FactorToken::Kind::kDim:
          operand.push_back(Parts(token));
          break;
      }
    }
    ReadRepeatedWhole(operand);
    return operand;
  }
  // What one operand has in two dims (the diagonal of a matrix) would be cut in one of them.
  void ReadRepeatedWhole(const FactorOperand& operand) {
    for (size_t d = 1; d < operand.size(); ++d) {
      for (const int f : operand[d]) {
        if (nest_.DimOf(operand, f) < static_cast<int>(d)) nest_.whole[f] = true;
      }
    }
  }
  void AddEllipsis(const EllipsisDims& ellipsis, FactorOperand* operand) const {
    for (int j = ellipsis.count; j-- > 0;) {
      FactorDim& dim = operand->emplace_back();
      const bool repeats = ((ellipsis.repeats >> j) & 1) != 0;
      if (!repeats) dim.push_back(parsed_.before_ellipsis + all_.count - 1 - j);
    }
  }
  FactorDim Parts(const FactorToken& token) {
    FactorDim dim;
    for (size_t p = 0; p < token.names.size(); ++p) {
      const int f = Index(token.names[p]);
      if (token.whole[p]) nest_.whole[f] = true;
      dim.push_back(f);
    }
    if (token.parts.empty() || !nest_.parts[dim[0]].empty()) return dim;
    for (const int name : token.parts) {
      const int part = Index(name);
      nest_.parts[dim[0]].push_back(part);
      nest_.part_of[part] = dim[0];
    }
    return dim;
  }

  void FindCutDims() {
    const size_t factors = nest_.names.size();
    nest_.cut_dims.assign((nest_.inputs.size() + nest_.outputs.size()) * factors, -1);
    int* dims = nest_.cut_dims.data();
    for (const auto* operands : {&nest_.inputs, &nest_.outputs}) {
      for (const FactorOperand& operand : *operands) {
        for (size_t d = operand.size(); d-- > 0;) {
          for (const int f : operand[d]) dims[f] = static_cast<int>(d);
        }
        for (size_t f = 0; f < factors; ++f) {
          const FactorDim& parts = nest_.parts[f];
          for (auto part = parts.begin(); part != parts.end() && dims[f] < 0;) {
            dims[f] = dims[*part++];
          }
        }
        dims += factors;
      }
    }
  }

  void FindHolding() {
    const int factors = static_cast<int>(nest_.names.size());
    nest_.holding.resize(factors);
    for (int i = 0; i < static_cast<int>(nest_.inputs.size()); ++i) {
      for (int f = 0; f < factors; ++f) {
        if (nest_.CutDim(i, f) >= 0) nest_.holding[f] |= BitOf(i);
      }
    }
    for (const auto* operands : {&nest_.inputs, &nest_.outputs}) {
      for (const FactorOperand& operand : *operands) {
        for (const FactorDim& dim : operand) {
          if (dim.size() == 1) continue;
          for (const int f : dim) nest_.composed |= BitOf(f);
        }
      }
    }
  }

  const ParsedFactors& parsed_;
  const absl::Span<const EllipsisDims> ellipsis_;  // by input
  EllipsisDims all_;                               // in outputs
  FactorNest nest_;
};

class FactorParser {
 public:
  explicit FactorParser(absl::string_view text) : text_(text) {}

  absl::StatusOr<ParsedFactors> Parse() {
    DT_RETURN_IF_ERROR(ParseSide(&parsed_.inputs));
    parsed_.of_inputs = static_cast<int>(parsed_.names.size());
    if (!ellipsis_) parsed_.before_ellipsis = parsed_.of_inputs;
    if (!Eat("->")) return Bad("expected ->");
    DT_RETURN_IF_ERROR(ParseSide(&parsed_.outputs));
    if (Peek() != '\0') return Bad("unexpected text");
    for (const auto& tokens : parsed_.inputs) {
      parsed_.fixed.push_back(static_cast<int>(std::count_if(
          tokens.begin(), tokens.end(),
          [](const FactorToken& token) { return token.kind != FactorToken::Kind::kEllipsis; })));
    }
    return std::move(parsed_);
  }

 private:
  absl::Status ParseSide(std::vector<std::vector<FactorToken>>* operands) {
    operands->emplace_back();
    while (true) {
      const char c = Peek();
      if (c == '\0' || c == '-') return absl::OkStatus();
      if (c == ',') {
        ++at_;
        operands->emplace_back();
        continue;
      }
      FactorToken token;
      DT_RETURN_IF_ERROR(Token(c, &token));
      operands->back().push_back(std::move(token));
    }
  }

  absl::Status Token(char c, FactorToken* token) {
    if (Eat("...")) {
      token->kind = FactorToken::Kind::kEllipsis;
      if (!std::exchange(ellipsis_, true)) {
        parsed_.before_ellipsis = static_cast<int>(parsed_.names.size());
      }
    } else if (c == '1') {
      ++at_;
      token->kind = FactorToken::Kind::kOne;
    } else if (c == '(') {
      ++at_;
      while (Peek() != ')') {
        if (Peek() == '\0') return Bad("unclosed (");
        DT_RETURN_IF_ERROR(Name(token));
      }
      ++at_;
    } else if (c == '{') {
      return Joined(token);
    } else {
      return Name(token);
    }
    return absl::OkStatus();
  }

  // The whole is numbered before its parts.
  absl::Status Joined(FactorToken* token) {
    std::vector<absl::string_view> parts;
    ++at_;
    while (Peek() != '}') {
      if (Peek() == '\0') return Bad("unclosed {");
      if (Peek() == '[') return Bad("expected a name");
      DT_ASSIGN_OR_RETURN(parts.emplace_back(), Word());
    }
    ++at_;
    token->names = {Number(absl::StrCat("{", absl::StrJoin(parts, " "), "}"))};
    token->whole = {false};
    for (const absl::string_view part : parts) token->parts.push_back(Number(part));
    return absl::OkStatus();
  }

  absl::Status Name(FactorToken* token) {
    const bool whole = Peek() == '[';
    if (whole) ++at_;
    DT_ASSIGN_OR_RETURN(const absl::string_view word, Word());
    token->names.push_back(Number(word));
    token->whole.push_back(whole);
    if (whole) {
      if (Peek() != ']') return Bad("expected ]");
      ++at_;
    }
    return absl::OkStatus();
  }

  absl::StatusOr<absl::string_view> Word() {
    const size_t start = at_;
    while (at_ < text_.size() && (std::isalnum(text_[at_]) || text_[at_] == '_')) ++at_;
    if (at_ == start) return Bad("expected a name");
    return text_.substr(start, at_ - start);
  }

  int Number(absl::string_view name) {
    std::vector<std::string>& names = parsed_.names;
    const auto at = std::find(names.begin(), names.end(), name) - names.begin();
    if (at == static_cast<int64_t>(names.size())) names.emplace_back(name);
    return static_cast<int>(at);
  }

  char Peek() {
    while (at_ < text_.size() && text_[at_] == ' ') ++at_;
    return at_ < text_.size() ? text_[at_] : '\0';
  }
  bool Eat(absl::string_view what) {
    Peek();
    if (text_.substr(at_, what.size()) != what) return false;
    at_ += what.size();
    return true;
  }
  absl::Status Bad(absl::string_view why) const {
    return absl::InvalidArgumentError(
        absl::StrCat("factor string \"", text_, "\": ", why, " at character ", at_));
  }

  absl::string_view text_;
  size_t at_ = 0;
  bool ellipsis_ = false;  // one was read
  ParsedFactors parsed_;
};

// Binds one parsed string to the global shapes of a call.
class Binder {
 public:
  Binder(const OpCall& call, const ParsedFactors& parsed) : call_(call), parsed_(parsed) {}

  absl::StatusOr<FactorMap> Bind(const SizedNames& sizes) {
    if (parsed_.inputs.size() != static_cast<size_t>(call_.num_inputs())) {
      const bool none = call_.num_inputs() == 0 && parsed_.inputs.size() == 1;
      if (!none || !parsed_.inputs[0].empty()) {
        return Fail(absl::StrCat("factor string has ", parsed_.inputs.size(), " operands, got ",
                                 call_.num_inputs()));
      }
    }
    const auto results = static_cast<size_t>(call_.op().num_outputs());
    if (parsed_.outputs.size() != results) {
      return Fail(
          absl::StrCat("factor string has ", parsed_.outputs.size(), " results, the op ", results));
    }
    DT_RETURN_IF_ERROR(EllipsisSizes());
    map_.nest = NestOf(sizes);
    map_.sizes.resize(map_->names.size(), -1);
    source_.resize(map_.sizes.size());
    for (const auto& [name, size] : sizes) map_.sizes[map_->IndexOf(name)] = size;
    for (int j = 0; j < static_cast<int>(ellipsis_.size()); ++j) {
      map_.sizes[EllipsisIndex(j)] = ellipsis_[j].size;
    }
    for (int i = 0; i < call_.num_inputs(); ++i) DT_RETURN_IF_ERROR(BindInput(i));
    if (map_->composed != 0) DT_RETURN_IF_ERROR(SolveComposites());
    for (size_t f = 0; f < map_.sizes.size(); ++f) {
      if (map_->parts[f].empty()) continue;
      DT_RETURN_IF_ERROR(SolveJoined(f));
    }
    DT_RETURN_IF_ERROR(CheckOutputs());
    return std::move(map_);
  }

 private:
  std::shared_ptr<const FactorNest> NestOf(const SizedNames& sized) const {
    absl::InlinedVector<EllipsisDims, 4> dims;
    for (int i = 0; i < call_.num_inputs(); ++i) dims.push_back(EllipsisOf(i));
    const auto same = [](const auto& a, const auto& b) { return a.first == b.first; };
    if (parsed_.nest == nullptr || parsed_.ellipsis != dims ||
        !std::equal(sized.begin(), sized.end(), parsed_.sized.begin(), parsed_.sized.end(), same)) {
      parsed_.nest = NestBuilder(parsed_, dims).Build(sized);
      parsed_.ellipsis = dims;
      parsed_.sized = sized;
    }
    return parsed_.nest;
  }
  EllipsisDims EllipsisOf(int input) const {
    if (!HasEllipsis(input)) return {};
    EllipsisDims dims = {call_.in(input).ndim() - parsed_.fixed[input]};
    const int last = FirstEllipsisDim(parsed_.inputs[input]) + dims.count - 1;
    for (int j = 0; j < dims.count; ++j) {
      const bool repeats = call_.shape(input)[last - j] != ellipsis_[j].size;
      dims.repeats |= uint64_t{repeats} << j;
    }
    return dims;
  }
  bool HasEllipsis(int input) const {
    return parsed_.fixed[input] != static_cast<int>(parsed_.inputs[input].size());
  }
  // Of dim j of the `...`, counted from the right.
  int EllipsisIndex(int j) const {
    return parsed_.before_ellipsis + static_cast<int>(ellipsis_.size()) - 1 - j;
  }

  // Broadcast sizes of the `...` dims, counted from the right.
  absl::Status EllipsisSizes() {
    for (int i = 0; i < call_.num_inputs(); ++i) {
      const int fixed = parsed_.fixed[i], rest = call_.in(i).ndim() - fixed;
      const bool any = HasEllipsis(i);
      if (rest < 0 || (rest > 0 && !any)) {
        return Fail(absl::StrCat(call_.op().InputName(i), " must have ", any ? "at least " : "",
                                 fixed, " dims, has ", call_.in(i).ndim()));
      }
      if (!any) continue;
      const int first = FirstEllipsisDim(parsed_.inputs[i]);
      for (int j = 0; j < rest; ++j) {  // j counts from the right
        const int64_t size = call_.shape(i)[first + rest - 1 - j];
        if (j >= static_cast<int>(ellipsis_.size())) {
          ellipsis_.push_back({size, i, first + rest - 1 - j});
        } else if (ellipsis_[j].size == 1) {
          if (size != 1) ellipsis_[j] = {size, i, first + rest - 1 - j};
        } else if (size != 1 && size != ellipsis_[j].size) {
          return Fail(
              absl::StrCat("shapes do not broadcast: ", call_.op().InputName(ellipsis_[j].input),
                           " dim ", ellipsis_[j].dim, " is ", ellipsis_[j].size, ", ",
                           call_.op().InputName(i), " dim ", first + rest - 1 - j, " is ", size));
        }
      }
    }
    return absl::OkStatus();
  }

  static int FirstEllipsisDim(const std::vector<FactorToken>& tokens) {
    int n = 0;
    while (tokens[n].kind != FactorToken::Kind::kEllipsis) ++n;
    return n;
  }

  absl::Status BindInput(int i) {
    const Shape& shape = call_.shape(i);
    int d = 0;
    for (const FactorToken& token : parsed_.inputs[i]) {
      if (token.kind == FactorToken::Kind::kEllipsis) {
        d += call_.in(i).ndim() - parsed_.fixed[i];
        continue;
      }
      if (token.kind == FactorToken::Kind::kOne && shape[d] != 1) {
        return Fail(absl::StrCat(call_.op().InputName(i), " dim ", d, " must be 1, is ", shape[d]));
      }
      if (token.names.size() == 1) {
        DT_RETURN_IF_ERROR(SetSize(map_->inputs[i][d][0], shape[d], i, d));
      }
      ++d;
    }
    return absl::OkStatus();
  }

  // A joined factor and its parts give each other's sizes.
  absl::Status SolveJoined(size_t joined) {
    if (map_->parts[joined].empty()) return absl::OkStatus();
    int64_t sum = 0;
    int unknown = -1;
    for (const int part : map_->parts[joined]) {
      if (map_.sizes[part] >= 0) {
        sum += map_.sizes[part];
      } else if (unknown >= 0) {
        return absl::OkStatus();  // an output will miss one of them
      } else {
        unknown = part;
      }
    }
    int64_t& size = map_.sizes[joined];
    if (size < 0 && unknown < 0) size = sum;
    if (unknown >= 0 && size >= sum) map_.sizes[unknown] = size - sum;
    if (unknown < 0 ? size == sum : size < 0 || size >= sum) return absl::OkStatus();
    return Fail(absl::StrCat(SourceOf(joined), " is ", size, ", its parts ", map_->names[joined],
                             " are ", sum));
  }

  absl::Status SetSize(int factor, int64_t size, int input, int dim) {
    if (map_.sizes[factor] >= 0 && map_.sizes[factor] != size) {
      return Fail(absl::StrCat(
          "factor ", map_->names[factor], " differs: ",
          source_[factor].input < 0 ? "the attributes give " : SourceOf(factor) + " is ",
          map_.sizes[factor], ", ", call_.op().InputName(input), " dim ", dim, " is ", size));
    }
    map_.sizes[factor] = size;
    if (source_[factor].input < 0) source_[factor] = {input, dim};
    return absl::OkStatus();
  }
  // "x dim 0"; nothing where no dim gave the size.
  std::string SourceOf(size_t factor) const {
    const auto& [input, dim] = source_[factor];
    return input < 0 ? "" : absl::StrCat(call_.op().InputName(input), " dim ", dim);
  }

  absl::Status SolveComposites() {
    for (bool again = true; again;) {
      again = false;
      for (int i = 0; i < call_.num_inputs(); ++i) {
        for (size_t d = 0; d < map_->inputs[i].size(); ++d) {
          if (map_->inputs[i][d].size() < 2) continue;
          absl::StatusOr<bool> solved = SolveOne(i, static_cast<int>(d));
          if (!solved.ok()) return solved.status();
          again |= *solved;
        }
      }
    }
    return absl::OkStatus();
  }

  absl::StatusOr<bool> SolveOne(int input, int d) {
    const FactorDim& dim = map_->inputs[input][d];
    int64_t known = 1;
    int unknown = -1, unknowns = 0;
    for (int f : dim) {
      if (map_.sizes[f] < 0) {
        unknown = f;
        ++unknowns;
      } else {
        known *= map_.sizes[f];
      }
    }
    const int64_t size = call_.shape(input)[d];
    if (unknowns > 1) return false;
    if (unknowns == 1 && known > 0 && size % known == 0) {
      map_.sizes[unknown] = size / known;
      source_[unknown] = {input, d};
      return true;
    }
    if (unknowns == 1 && known == 0) {
      map_.sizes[unknown] = 1;
      return true;
    }
    if (unknowns == 1 || known != size) {
      return Fail(absl::StrCat(call_.op().InputName(input), " dim ", d, " is ", size,
                               unknowns ? ", not a multiple of " : ", must be ", known));
    }
    return false;
  }

  absl::Status CheckOutputs() {
    for (const FactorOperand& operand : map_->outputs) {
      for (const FactorDim& dim : operand) {
        for (const int f : dim) {
          DT_RETURN_IF_ERROR(SolveJoined(f));
          if (map_.sizes[f] < 0) {
            return Fail(absl::StrCat("no input gives the size of factor ", map_->names[f]));
          }
        }
      }
    }
    return absl::OkStatus();
  }

  absl::Status Fail(std::string why) const {
    return absl::InvalidArgumentError(absl::StrCat(why, ": ", DescribeShapes(call_)));
  }

  struct EllipsisDim {
    int64_t size;
    int input, dim;
  };
  const OpCall& call_;
  const ParsedFactors& parsed_;
  FactorMap map_;
  struct Source {
    int input = -1, dim = -1;
  };
  absl::InlinedVector<Source, 16> source_;  // of the factors' sizes
  std::vector<EllipsisDim> ellipsis_;
};

// Parsed once per rank, but for texts that a function writes ever anew.
class ParseCache {
 public:
  absl::StatusOr<const ParsedFactors*> Find(const std::string& text) {
    const auto known = parsed_.find(text);
    if (known != parsed_.end()) return &known->second;
    DT_ASSIGN_OR_RETURN(ParsedFactors fresh, ParseFactors(text));
    if (parsed_.size() >= kMost) parsed_.clear();
    return &parsed_.emplace(text, std::move(fresh)).first->second;
  }

 private:
  static constexpr size_t kMost = 1024;
  absl::node_hash_map<std::string, ParsedFactors> parsed_;
};

}  // namespace

int FactorNest::DimOf(const FactorOperand& operand, int factor) {
  for (size_t d = 0; d < operand.size(); ++d) {
    for (int f : operand[d]) {
      if (f == factor) return static_cast<int>(d);
    }
  }
  return -1;
}

int FactorNest::CutIn(const FactorOperand& operand, int factor) const {
  if (DimOf(operand, factor) >= 0) return factor;
  for (const int part : parts[factor]) {
    if (DimOf(operand, part) >= 0) return part;
  }
  return -1;
}

int FactorNest::IndexOf(absl::string_view name) const {
  for (size_t i = 0; i < names.size(); ++i) {
    if (name == names[i]) return static_cast<int>(i);
  }
  return -1;
}

Shape FactorMap::OutputShape(int output) const {
  Shape shape;
  for (const FactorDim& dim : nest->outputs[output]) {
    int64_t size = 1;
    for (int f : dim) size *= sizes[f];
    shape.push_back(size);
  }
  return shape;
}

absl::StatusOr<ParsedFactors> ParseFactors(absl::string_view text) {
  return FactorParser(text).Parse();
}

absl::StatusOr<FactorMap> BindFactors(const OpCall& call, const ParsedFactors& parsed,
                                      const SizedNames& sizes) {
  return Binder(call, parsed).Bind(sizes);
}

absl::StatusOr<std::vector<FactorMap>> FactorMapsOf(const OpCall& call) {
  std::vector<FactorMap> maps;
  absl::Status first_error;
  ParseCache& cache = RankContext::Current().Slot<ParseCache>();
  for (const OpDef::FactorSource& source : call.op().factor_sources()) {
    FactorText from_call;
    if (source.fn) {
      DT_ASSIGN_OR_RETURN(from_call, source.fn(call));
    }
    DT_ASSIGN_OR_RETURN(const ParsedFactors* parsed,
                        cache.Find(source.fn ? from_call.text : source.text));
    absl::StatusOr<FactorMap> map = BindFactors(call, *parsed, from_call.sizes);
    if (map.ok()) {
      maps.push_back(*std::move(map));
    } else if (source.fn) {
      return map.status();
    } else if (first_error.ok()) {
      first_error = map.status();
    }
  }
  if (maps.empty() && !first_error.ok()) return first_error;
  return maps;
}

std::string DescribeShapes(const OpCall& call) {
  std::vector<int> inputs(call.num_inputs());
  std::iota(inputs.begin(), inputs.end(), 0);
  return JoinSome(inputs, [&](std::string* out, int i) {
    absl::StrAppend(out, call.op().InputName(i), " ", ToString(call.shape(i)));
  });
}

}  // namespace dtensor
