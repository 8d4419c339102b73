#include "dtensor/parallel/text/tokenizer.h"

#include <algorithm>
#include <array>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "dtensor/parallel/io/json.h"
#include "dtensor/parallel/io/json_fields.h"
#include "dtensor/parallel/text/bpe.h"
#include "dtensor/parallel/text/pre_tokenizer.h"
#include "dtensor/parallel/text/regex.h"
#include "dtensor/parallel/text/tokenizer_config.h"
#include "dtensor/parallel/text/utf8.h"
#include "dtensor/tensor/file.h"
#include "dtensor/tensor/status.h"

namespace dtensor {

namespace {

constexpr int64_t kMostTokenizerBytes = int64_t{256} << 20;
constexpr int64_t kMostId = (1 << 24) - 1;

// A token that is found in a text as it stands.
struct AddedToken {
  std::string content;
  int64_t id = 0;
  bool special = false, single_word = false, lstrip = false, rstrip = false, normalized = false;
};

// The characters before and at a place of a text; empty at its ends.
absl::string_view CharacterBefore(absl::string_view text, size_t at) {
  size_t start = at;
  while (start > 0) {
    if ((static_cast<uint8_t>(text[--start]) & 0xC0) != 0x80) break;
  }
  return text.substr(start, at - start);
}
absl::string_view CharacterAt(absl::string_view text, size_t at) {
  return text.substr(at, static_cast<size_t>(Utf8Length(text.substr(at))));
}

bool Matches(const Regex& regex, absl::string_view character) {
  const auto found = regex.FindAll(character);
  return found.ok() && !found->empty();
}

}  // namespace

struct Tokenizer::Data {
  static absl::StatusOr<std::shared_ptr<Data>> Parse(absl::string_view json,
                                                     const std::string& where);
  absl::Status Read(const Json& json);
  absl::Status ReadConfig(const std::string& folder);
  absl::Status ReadAdded(const Json& tokens);
  absl::Status ReadPostProcessor(const Json& json, const std::string& path);
  absl::Status ReadTemplate(const JsonFields& fields);
  absl::Status MakeTokens();
  // The added token that starts at `at`, the longest of those of this pass; null if there is none.
  const AddedToken* AddedAt(absl::string_view text, size_t at, bool normalized) const;
  // No word goes on before `start` or behind `end`.
  bool StandsAlone(absl::string_view text, size_t start, size_t end) const;
  absl::Status EncodeText(absl::string_view text, bool normalized, std::vector<int64_t>* ids) const;

  text::Bpe bpe;
  text::PreTokenizer pre_tokenizer;
  Regex space, word;                                              // characters of these kinds
  std::vector<AddedToken> added;                                  // longest first
  std::array<std::vector<const AddedToken*>, 256> by_first_byte;  // of them
  bool split_special = false;                                     // in a text they are text
  std::vector<int64_t> before, after;                             // what frames a text
  std::vector<std::string> bytes;                                 // by id
  std::vector<bool> special;                                      // by id
};

absl::Status Tokenizer::Data::ReadAdded(const Json& tokens) {
  for (size_t i = 0; i < tokens.size(); ++i) {
    DT_ASSIGN_OR_RETURN(const JsonFields fields,
                        JsonFields::Of(tokens[i], absl::StrCat("added_tokens[", i, "]")));
    AddedToken token;
    DT_ASSIGN_OR_RETURN(token.content, fields.String("content"));
    if (token.content.empty()) return fields.Bad("content", "is empty");
    const Json* id = fields.Find("id");
    if (id == nullptr) return fields.Bad("id", "is missing");
    DT_ASSIGN_OR_RETURN(token.id, JsonIndex(*id, kMostId, fields.PathOf("id")));
    DT_ASSIGN_OR_RETURN(token.special, fields.Bool("special", false));
    DT_ASSIGN_OR_RETURN(token.single_word, fields.Bool("single_word", false));
    DT_ASSIGN_OR_RETURN(token.lstrip, fields.Bool("lstrip", false));
    DT_ASSIGN_OR_RETURN(token.rstrip, fields.Bool("rstrip", false));
    DT_ASSIGN_OR_RETURN(token.normalized, fields.Bool("normalized", !token.special));
    added.push_back(std::move(token));
  }
  std::stable_sort(added.begin(), added.end(), [](const AddedToken& a, const AddedToken& b) {
    return a.content.size() > b.content.size();
  });
  for (const AddedToken& token : added) {
    by_first_byte[static_cast<uint8_t>(token.content[0])].push_back(&token);
  }
  return absl::OkStatus();
}

absl::Status Tokenizer::Data::MakeTokens() {
  int64_t most = 0;
  for (const auto& [token, id] : bpe.vocab()) most = std::max<int64_t>(most, id);
  for (const AddedToken& token : added) most = std::max(most, token.id);
  // Ids may have gaps, and a single one must not ask for half a gigabyte.
  const auto tokens = static_cast<int64_t>(bpe.vocab().size() + added.size());
  if (most > 4 * tokens + (1 << 16)) {
    return absl::InvalidArgumentError(
        absl::StrCat("model.vocab and added_tokens have ", tokens, " tokens and the id ", most));
  }
  bytes.resize(static_cast<size_t>(most) + 1);
  special.resize(bytes.size());
  for (const auto& [token, id] : bpe.vocab()) {
    bytes[static_cast<size_t>(id)] = text::CharactersToBytes(token);
  }
  absl::flat_hash_map<int64_t, const AddedToken*> by_id;
  for (const AddedToken& token : added) {
    const auto it = bpe.vocab().find(token.content);
    if (it != bpe.vocab().end() && it->second != token.id) {
      return absl::InvalidArgumentError(absl::StrCat("added_tokens: \"", token.content,
                                                     "\" has the id ", token.id, ", and ",
                                                     it->second, " in model.vocab"));
    }
    const AddedToken*& other = by_id[token.id];
    if (other != nullptr && other->content != token.content) {
      return absl::InvalidArgumentError(
          absl::StrCat("added_tokens: \"", other->content, "\" and \"", token.content,
                       "\" have the same id ", token.id, "; each needs its own"));
    }
    other = &token;
    bytes[static_cast<size_t>(token.id)] = text::CharactersToBytes(token.content);
    special[static_cast<size_t>(token.id)] = token.special;
  }
  return absl::OkStatus();
}

absl::Status Tokenizer::Data::ReadPostProcessor(const Json& json, const std::string& path) {
  DT_ASSIGN_OR_RETURN(const JsonFields fields, JsonFields::Of(json, path));
  DT_ASSIGN_OR_RETURN(const std::string type, fields.String("type"));
  if (type == "ByteLevel")
    return absl::OkStatus();  // It moves offsets, which nobody asks for here.
  if (type == "TemplateProcessing") return ReadTemplate(fields);
  if (type == "Sequence") {
    DT_ASSIGN_OR_RETURN(const Json* parts, fields.Array("processors"));
    for (size_t i = 0; i < parts->size(); ++i) {
      DT_RETURN_IF_ERROR(
          ReadPostProcessor((*parts)[i], absl::StrCat(fields.PathOf("processors"), "[", i, "]")));
    }
    return absl::OkStatus();
  }
  return absl::UnimplementedError(
      absl::StrCat(fields.PathOf("type"), " is \"", type,
                   "\"; served are Sequence, ByteLevel and TemplateProcessing"));
}

// "single": parts {"SpecialToken": {"id": "<s>"}} around one {"Sequence": {"id": "A"}}.
absl::Status Tokenizer::Data::ReadTemplate(const JsonFields& fields) {
  DT_ASSIGN_OR_RETURN(const Json* single, fields.Array("single"));
  bool behind = false;
  for (size_t i = 0; i < single->size(); ++i) {
    DT_ASSIGN_OR_RETURN(
        const JsonFields part,
        JsonFields::Of((*single)[i], absl::StrCat(fields.PathOf("single"), "[", i, "]")));
    if (part.Find("Sequence") != nullptr) {
      if (behind) return part.Bad("Sequence", "comes twice");
      behind = true;
      continue;
    }
    DT_ASSIGN_OR_RETURN(const JsonFields token, part.Object("SpecialToken"));
    DT_ASSIGN_OR_RETURN(const std::string name, token.String("id"));
    DT_ASSIGN_OR_RETURN(const JsonFields all, fields.Object("special_tokens"));
    if (all.Find(name) == nullptr) {
      return token.Bad("id", absl::StrCat("\"", name, "\" is not in ", all.path()));
    }
    DT_ASSIGN_OR_RETURN(const JsonFields entry, all.Object(name));
    DT_ASSIGN_OR_RETURN(const Json* ids, entry.Array("ids"));
    for (const Json& id : *ids) {
      DT_ASSIGN_OR_RETURN(const int64_t value, JsonIndex(id, kMostId, entry.PathOf("ids")));
      (behind ? after : before).push_back(value);
    }
  }
  if (!behind) return fields.Bad("single", "has no Sequence");
  return absl::OkStatus();
}

absl::Status Tokenizer::Data::Read(const Json& json) {
  DT_ASSIGN_OR_RETURN(const JsonFields file, JsonFields::Of(json, ""));
  DT_ASSIGN_OR_RETURN(space, Regex::Compile("\\s"));
  // What \w is to Rust's expressions, which look around added tokens.
  DT_ASSIGN_OR_RETURN(word,
                      Regex::Compile("[\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\x{200C}\\x{200D}]"));
  DT_ASSIGN_OR_RETURN(const JsonFields model, file.Object("model"));
  DT_ASSIGN_OR_RETURN(bpe, text::Bpe::Read(model));
  if (const Json* normalizer = file.Find("normalizer")) {
    DT_ASSIGN_OR_RETURN(const JsonFields fields, JsonFields::Of(*normalizer, "normalizer"));
    DT_ASSIGN_OR_RETURN(const std::string type, fields.String("type"));
    const Json* const list = type == "Sequence" ? fields.Find("normalizers") : nullptr;
    if (list == nullptr || !list->is_array() || !list->empty()) {  // an empty one does nothing
      return absl::UnimplementedError(
          absl::StrCat("normalizer.type is \"", type, "\"; only none is served"));
    }
  }
  const Json* pre = file.Find("pre_tokenizer");
  if (pre == nullptr) return file.Bad("pre_tokenizer", "is missing; ByteLevel is needed");
  DT_ASSIGN_OR_RETURN(pre_tokenizer, text::PreTokenizer::Read(*pre, "pre_tokenizer"));
  if (const Json* post = file.Find("post_processor")) {
    DT_RETURN_IF_ERROR(ReadPostProcessor(*post, "post_processor"));
  }
  DT_ASSIGN_OR_RETURN(const JsonFields decoder, file.Object("decoder"));
  DT_ASSIGN_OR_RETURN(const std::string type, decoder.String("type"));
  if (type != "ByteLevel") {
    return absl::UnimplementedError(
        absl::StrCat("decoder.type is \"", type, "\"; served is ByteLevel"));
  }
  if (file.Find("added_tokens") != nullptr) {
    DT_ASSIGN_OR_RETURN(const Json* tokens, file.Array("added_tokens"));
    DT_RETURN_IF_ERROR(ReadAdded(*tokens));
  }
  return MakeTokens();
}

// Classes of transformers that have ByteLevel in the place of the file's pre-tokenizer hear the
// config; the others go by the file.
absl::Status Tokenizer::Data::ReadConfig(const std::string& folder) {
  const std::string path = absl::StrCat(folder, "/tokenizer_config.json");
  DT_ASSIGN_OR_RETURN(const Json json, text::ObjectIn(path));
  DT_ASSIGN_OR_RETURN(const JsonFields config, JsonFields::Of(json, path));
  DT_ASSIGN_OR_RETURN(split_special, config.Bool("split_special_tokens", false));
  DT_ASSIGN_OR_RETURN(const std::string name, text::TokenizerClass(folder, config));
  if (name == "GPT2Tokenizer" || name == "CodeGenTokenizer" || name == "GPTNeoXTokenizer") {
    DT_ASSIGN_OR_RETURN(const bool add, config.Bool("add_prefix_space", false));
    pre_tokenizer.SetPrefixSpace(add);
  }
  return absl::OkStatus();
}

const AddedToken* Tokenizer::Data::AddedAt(absl::string_view text, size_t at,
                                           bool normalized) const {
  for (const AddedToken* token : by_first_byte[static_cast<uint8_t>(text[at])]) {
    if (token->normalized != normalized) continue;
    if (absl::StartsWith(text.substr(at), token->content)) return token;
  }
  return nullptr;
}

bool Tokenizer::Data::StandsAlone(absl::string_view text, size_t start, size_t end) const {
  return !Matches(word, CharacterBefore(text, start)) && !Matches(word, CharacterAt(text, end));
}

// Added tokens are found in two passes, those that a normalizer would change after the others. They
// are found in the text as it stands: one that is no single word, or special where those are split,
// takes the place of shorter ones, and the blanks that one takes along may be those that the next
// begins with.
absl::Status Tokenizer::Data::EncodeText(absl::string_view text, bool normalized,
                                         std::vector<int64_t>* ids) const {
  const auto between = [&](size_t start, size_t end) -> absl::Status {
    const absl::string_view part = text.substr(start, end - start);
    if (part.empty()) return absl::OkStatus();
    if (!normalized) return EncodeText(part, true, ids);
    DT_ASSIGN_OR_RETURN(const std::vector<std::string> words, pre_tokenizer.Words(part));
    for (const std::string& word : words) bpe.Encode(word, ids);
    return absl::OkStatus();
  };
  const auto blank = [&](absl::string_view c) { return Matches(space, c) ? c.size() : size_t{0}; };
  size_t done = 0, blank_until = 0;  // what the last one took along need not be looked at again
  for (size_t at = 0; at < text.size();) {
    const AddedToken* token = AddedAt(text, at, normalized);
    if (token == nullptr) {
      ++at;
      continue;
    }
    size_t start = at, end = at + token->content.size();
    at = end;
    if (split_special && token->special) continue;
    if (token->single_word && !StandsAlone(text, start, end)) continue;
    while (token->lstrip && start > done) {
      const size_t size = blank(CharacterBefore(text, start));
      if (size == 0) break;
      start -= size;
    }
    if (token->rstrip) end = std::max(end, blank_until);
    while (token->rstrip && end < text.size()) {
      const size_t size = blank(CharacterAt(text, end));
      if (size == 0) break;
      blank_until = end += size;
    }
    if (start > done) DT_RETURN_IF_ERROR(between(done, start));
    ids->push_back(token->id);
    done = end;
  }
  return between(done, text.size());
}

absl::StatusOr<std::shared_ptr<Tokenizer::Data>> Tokenizer::Data::Parse(absl::string_view json,
                                                                        const std::string& where) {
  DT_ASSIGN_OR_RETURN(const Json parsed, ParseJsonObject(json, where));
  auto data = std::make_shared<Data>();
  const absl::Status status = data->Read(parsed);
  if (!status.ok()) return Prefixed(where, status);
  return data;
}

absl::StatusOr<Tokenizer> Tokenizer::Parse(absl::string_view json, const std::string& where) {
  Tokenizer tokenizer;
  DT_ASSIGN_OR_RETURN(tokenizer.data_, Data::Parse(json, where));
  return tokenizer;
}

absl::StatusOr<Tokenizer> Tokenizer::Read(const std::string& folder) {
  const std::string path = absl::StrCat(folder, "/tokenizer.json");
  DT_ASSIGN_OR_RETURN(const std::string json, ReadFile(path, kMostTokenizerBytes));
  DT_ASSIGN_OR_RETURN(const std::shared_ptr<Data> data, Data::Parse(json, path));
  DT_RETURN_IF_ERROR(data->ReadConfig(folder));
  Tokenizer tokenizer;
  tokenizer.data_ = data;
  return tokenizer;
}

absl::StatusOr<std::vector<int64_t>> Tokenizer::Encode(absl::string_view text, bool frame) const {
  const size_t bad = FirstBadUtf8(text);
  if (bad != absl::string_view::npos) {
    return absl::InvalidArgumentError(absl::StrCat("the text is not UTF-8 at byte ", bad));
  }
  std::vector<int64_t> ids;
  if (frame) ids = data_->before;
  DT_RETURN_IF_ERROR(data_->EncodeText(text, false, &ids));
  if (frame) ids.insert(ids.end(), data_->after.begin(), data_->after.end());
  return ids;
}

std::string Tokenizer::Decode(absl::Span<const int64_t> ids, bool skip_special) const {
  std::string all;
  for (const int64_t id : ids) {
    if (!skip_special || !IsSpecial(id)) absl::StrAppend(&all, Bytes(id));
  }
  return Utf8Lossy(all);
}

absl::string_view Tokenizer::Bytes(int64_t id) const {
  return id >= 0 && id < size() ? absl::string_view(data_->bytes[static_cast<size_t>(id)]) : "";
}

bool Tokenizer::IsSpecial(int64_t id) const {
  return id >= 0 && id < size() && data_->special[static_cast<size_t>(id)];
}

std::optional<int64_t> Tokenizer::Find(absl::string_view token) const {
  for (const AddedToken& added : data_->added) {
    if (added.content == token) return added.id;
  }
  const auto it = data_->bpe.vocab().find(token);
  if (it == data_->bpe.vocab().end()) return std::nullopt;
  return it->second;
}

int64_t Tokenizer::size() const { return static_cast<int64_t>(data_->bytes.size()); }

std::string TokenStream::Add(int64_t id) {
  if (skip_special_ && tokenizer_.IsSpecial(id)) return "";
  absl::StrAppend(&kept_, tokenizer_.Bytes(id));
  const size_t whole = kept_.size() - UnfinishedUtf8(kept_);
  std::string text = Utf8Lossy(absl::string_view(kept_).substr(0, whole));
  kept_.erase(0, whole);
  return text;
}

std::string TokenStream::Finish() { return Utf8Lossy(std::exchange(kept_, "")); }

}  // namespace dtensor
