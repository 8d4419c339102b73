#include "dtensor/parallel/text/pre_tokenizer.h"

#include <array>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "dtensor/names.h"
#include "dtensor/parallel/text/utf8.h"
#include "dtensor/tensor/status.h"

namespace dtensor::text {
namespace {

// GPT-2's words: English contractions, then letters, numbers and others with a space before them,
// then white space, of which the last one goes to the word that follows.
constexpr char kGpt2Words[] =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

struct ByteTable {
  std::array<std::string, 256> characters;
  absl::flat_hash_map<char32_t, char> bytes;
};

const ByteTable& Table() {
  static const ByteTable* table = [] {
    auto* made = new ByteTable;
    char32_t other = 0x100;
    for (int b = 0; b < 256; ++b) {
      const bool seen = (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
      const char32_t c = seen ? static_cast<char32_t>(b) : other++;
      Utf8Append(c, &made->characters[static_cast<size_t>(b)]);
      made->bytes[c] = static_cast<char>(b);
    }
    return made;
  }();
  return *table;
}

// A part of a text, and whether it is a match.
struct WordPart {
  size_t start, end;
  bool match;
};

}  // namespace

std::string BytesToCharacters(absl::string_view bytes) {
  std::string out;
  for (const char b : bytes) out += Table().characters[static_cast<uint8_t>(b)];
  return out;
}

std::string CharactersToBytes(absl::string_view characters) {
  std::string out;
  for (absl::string_view rest = characters; !rest.empty();) {
    const int length = Utf8Length(rest);
    if (length == 0) return std::string(characters);
    const auto it = Table().bytes.find(Utf8Decode(rest));
    if (it == Table().bytes.end()) return std::string(characters);
    out.push_back(it->second);
    rest.remove_prefix(static_cast<size_t>(length));
  }
  return out;
}

absl::StatusOr<PreTokenizer> PreTokenizer::Read(const Json& json, const std::string& path) {
  PreTokenizer made;
  DT_RETURN_IF_ERROR(made.Add(json, path));
  for (const Step& step : made.steps_) {
    if (step.bytes_to_characters) return made;
  }
  return absl::UnimplementedError(
      absl::StrCat(path, " has no ByteLevel; only byte-level tokenizers are served"));
}

absl::Status PreTokenizer::Add(const Json& json, const std::string& path) {
  DT_ASSIGN_OR_RETURN(const JsonFields fields, JsonFields::Of(json, path));
  DT_ASSIGN_OR_RETURN(const std::string type, fields.String("type"));
  if (type == "Sequence") {
    DT_ASSIGN_OR_RETURN(const Json* parts, fields.Array("pretokenizers"));
    for (size_t i = 0; i < parts->size(); ++i) {
      DT_RETURN_IF_ERROR(
          Add((*parts)[i], absl::StrCat(fields.PathOf("pretokenizers"), "[", i, "]")));
    }
    return absl::OkStatus();
  }
  if (type == "ByteLevel") return AddByteLevel(fields);
  if (type == "Split") {
    DT_ASSIGN_OR_RETURN(Step step, ReadSplit(fields));
    steps_.push_back(std::move(step));
    return absl::OkStatus();
  }
  if (type == "Digits") {
    DT_ASSIGN_OR_RETURN(Step step, ReadDigits(fields));
    steps_.push_back(std::move(step));
    return absl::OkStatus();
  }
  return absl::UnimplementedError(
      absl::StrCat(fields.PathOf("type"), " is \"", type,
                   "\"; served are Sequence, ByteLevel, Split and Digits"));
}

absl::Status PreTokenizer::AddByteLevel(const JsonFields& fields) {
  Step step;
  DT_ASSIGN_OR_RETURN(step.add_prefix_space, fields.Bool("add_prefix_space", true));
  DT_ASSIGN_OR_RETURN(step.split, fields.Bool("use_regex", true));
  if (step.split) {
    DT_ASSIGN_OR_RETURN(step.pattern, Regex::Compile(kGpt2Words));
  }
  step.bytes_to_characters = true;
  steps_.push_back(std::move(step));
  return absl::OkStatus();
}

absl::StatusOr<PreTokenizer::Step> PreTokenizer::ReadSplit(const JsonFields& fields) {
  const std::pair<const char*, Behavior> behaviors[] = {
      {"Removed", Behavior::kRemoved},
      {"Isolated", Behavior::kIsolated},
      {"MergedWithPrevious", Behavior::kMergedWithPrevious},
      {"MergedWithNext", Behavior::kMergedWithNext},
      {"Contiguous", Behavior::kContiguous}};
  Step step;
  step.split = true;
  DT_ASSIGN_OR_RETURN(const std::string name, fields.String("behavior"));
  std::vector<std::string> known;
  for (const auto& [text, behavior] : behaviors) {
    known.emplace_back(text);
    if (name == text) step.behavior = behavior;
  }
  if (!absl::c_linear_search(known, name)) {
    return fields.Bad("behavior", absl::StrCat("is \"", name, "\"; nearest: ",
                                               absl::StrJoin(NearestNames(name, known), ", ")));
  }
  DT_ASSIGN_OR_RETURN(step.invert, fields.Bool("invert", false));
  DT_ASSIGN_OR_RETURN(const JsonFields pattern, fields.Object("pattern"));
  const bool literal = pattern.Find("String") != nullptr;
  DT_ASSIGN_OR_RETURN(const std::string text, pattern.String(literal ? "String" : "Regex"));
  absl::StatusOr<Regex> regex = Regex::Compile(text, literal);
  if (!regex.ok()) return Prefixed(pattern.path(), regex.status());
  step.pattern = *std::move(regex);
  return step;
}

absl::StatusOr<PreTokenizer::Step> PreTokenizer::ReadDigits(const JsonFields& fields) {
  Step step;
  step.split = true;
  DT_ASSIGN_OR_RETURN(const bool individual, fields.Bool("individual_digits", false));
  DT_ASSIGN_OR_RETURN(step.pattern, Regex::Compile("\\p{N}"));
  step.behavior = individual ? Behavior::kIsolated : Behavior::kContiguous;
  return step;
}

// What Hugging Face's library does with the parts between and at the matches of a pattern.
absl::Status PreTokenizer::Split(const Step& step, absl::string_view text,
                                 std::vector<std::string>* words) {
  DT_ASSIGN_OR_RETURN(const auto matches, step.pattern.FindAll(text));
  std::vector<WordPart> parts;
  size_t end = 0;
  for (const auto& [from, to] : matches) {
    if (from > end) parts.push_back({end, from, step.invert});
    parts.push_back({from, to, !step.invert});
    end = to;
  }
  if (end < text.size()) parts.push_back({end, text.size(), step.invert});
  std::vector<WordPart> kept;
  for (size_t i = 0; i < parts.size(); ++i) {
    const WordPart& part = parts[i];
    const bool after = i > 0 && parts[i - 1].match;  // a match stands before it
    bool joins = false;                              // what was kept last
    switch (step.behavior) {
      case Behavior::kRemoved:
        if (part.match) continue;
        break;
      case Behavior::kIsolated:
        break;
      case Behavior::kMergedWithPrevious:
        joins = part.match && !after;
        break;
      case Behavior::kMergedWithNext:
        // A match takes what follows, unless that is a match too.
        joins = !part.match && after;
        break;
      case Behavior::kContiguous:
        joins = i > 0 && part.match == after;
        break;
    }
    if (joins && !kept.empty()) {
      kept.back().end = part.end;
    } else {
      kept.push_back(part);
    }
  }
  for (const WordPart& part : kept) {
    // Empty matches have cut, and are no words.
    if (part.end > part.start) words->emplace_back(text.substr(part.start, part.end - part.start));
  }
  return absl::OkStatus();
}

// Once, before the text is cut: GPT-2's class has ByteLevel alone.
void PreTokenizer::SetPrefixSpace(bool add) {
  for (Step& step : steps_) step.add_prefix_space = false;
  steps_.front().add_prefix_space = add;
}

absl::StatusOr<std::vector<std::string>> PreTokenizer::Words(absl::string_view text) const {
  std::vector<std::string> words;
  if (!text.empty()) words.emplace_back(text);
  for (const Step& step : steps_) {
    std::vector<std::string> cut;
    for (std::string& word : words) {
      if (step.add_prefix_space && !absl::StartsWith(word, " ")) word.insert(0, " ");
      if (step.split) {
        DT_RETURN_IF_ERROR(Split(step, word, &cut));
      } else {
        cut.push_back(std::move(word));
      }
    }
    words = std::move(cut);
    if (!step.bytes_to_characters) continue;
    for (std::string& word : words) word = BytesToCharacters(word);
  }
  return words;
}

}  // namespace dtensor::text
