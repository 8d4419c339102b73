#include "dtensor/parallel/text/chat_template.h"

#include <optional>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "dtensor/parallel/io/json_fields.h"
#include "dtensor/parallel/text/tokenizer_config.h"
#include "dtensor/parallel/text/utf8.h"
#include "dtensor/tensor/file.h"
#include "dtensor/tensor/status.h"

namespace dtensor {

namespace {

constexpr int64_t kMostChatBytes = int64_t{16} << 20;

// One template, or several with names, of which "default" is the one.
absl::StatusOr<std::optional<std::string>> SourceIn(const JsonFields& config) {
  const Json* field = config.Find("chat_template");
  if (field == nullptr) return std::nullopt;
  if (!field->is_array()) {
    DT_ASSIGN_OR_RETURN(std::string source, config.String("chat_template"));
    return source;
  }
  for (size_t i = 0; i < field->size(); ++i) {
    DT_ASSIGN_OR_RETURN(
        const JsonFields entry,
        JsonFields::Of((*field)[i], absl::StrCat(config.PathOf("chat_template"), "[", i, "]")));
    DT_ASSIGN_OR_RETURN(const std::string name, entry.String("name"));
    if (name != "default") continue;
    DT_ASSIGN_OR_RETURN(std::string source, entry.String("template"));
    return source;
  }
  return config.Bad("chat_template", "has no \"default\"");
}

using NamedTokens = std::map<std::string, std::string>;

// "bos_token": "<s>", or {"content": "<s>", ...}
absl::StatusOr<std::string> TokenOf(const JsonFields& fields, const std::string& name) {
  const Json* value = fields.Find(name);
  if (value == nullptr || !value->is_object()) return fields.String(name);
  DT_ASSIGN_OR_RETURN(const JsonFields token, fields.Object(name));
  return token.String("content");
}

// The fields of a file that name special tokens: those that every tokenizer has, where null takes
// one away, and whatever else is a token and called so.
absl::Status ReadTokens(const JsonFields& fields, const Json& json, NamedTokens* standard,
                        NamedTokens* more) {
  constexpr absl::string_view kStandard[] = {"bos_token", "eos_token", "unk_token", "sep_token",
                                             "pad_token", "cls_token", "mask_token"};
  for (const auto& [name, value] : json.items()) {
    if (absl::c_linear_search(kStandard, name)) {
      standard->erase(name);
      if (value.is_null()) continue;
      DT_ASSIGN_OR_RETURN((*standard)[name], TokenOf(fields, name));
    } else if (absl::EndsWith(name, "_token") && (value.is_string() || value.contains("content"))) {
      DT_ASSIGN_OR_RETURN((*more)[name], TokenOf(fields, name));
    }
  }
  return absl::OkStatus();
}

// "extra_special_tokens": {"image_token": "<image>"}; a list names none.
absl::Status ReadMore(const JsonFields& fields, const std::string& field, NamedTokens* more) {
  const Json* value = fields.Find(field);
  if (value == nullptr || !value->is_object()) return absl::OkStatus();
  DT_ASSIGN_OR_RETURN(const JsonFields tokens, fields.Object(field));
  for (const auto& [name, token] : value->items()) {
    DT_ASSIGN_OR_RETURN((*more)[name], TokenOf(tokens, name));
  }
  return absl::OkStatus();
}

// What transformers' class of a tokenizer has where the files name no token: of byte-level classes
// those that are common.
absl::StatusOr<NamedTokens> TokensOfClass(const std::string& folder, const JsonFields& tokenizer) {
  DT_ASSIGN_OR_RETURN(const std::string name, text::TokenizerClass(folder, tokenizer));
  constexpr char kEnd[] = "<|endoftext|>";
  if (name == "GPT2Tokenizer") {
    return NamedTokens{{"bos_token", kEnd}, {"eos_token", kEnd}, {"unk_token", kEnd}};
  }
  if (name == "Qwen2Tokenizer") {
    return NamedTokens{{"eos_token", kEnd}, {"pad_token", kEnd}, {"unk_token", kEnd}};
  }
  return NamedTokens();
}

// As transformers 5 takes them from tokenizer_config.json and, for a config that does not list all
// added tokens as newer ones do, from special_tokens_map.json, which goes first for the standard
// ones alone.
absl::StatusOr<NamedTokens> TokensOf(const std::string& folder, const JsonFields& config,
                                     const Json& json) {
  NamedTokens more, of_map;
  DT_ASSIGN_OR_RETURN(NamedTokens standard, TokensOfClass(folder, config));
  DT_RETURN_IF_ERROR(ReadTokens(config, json, &standard, &more));
  DT_RETURN_IF_ERROR(ReadMore(config, "extra_special_tokens", &more));
  // transformers forgets these beside others.
  if (more.empty()) DT_RETURN_IF_ERROR(ReadMore(config, "model_specific_special_tokens", &more));
  if (config.Find("added_tokens_decoder") == nullptr) {
    const std::string path = absl::StrCat(folder, "/special_tokens_map.json");
    DT_ASSIGN_OR_RETURN(const Json map_json, text::ObjectIn(path));
    DT_ASSIGN_OR_RETURN(const JsonFields map, JsonFields::Of(map_json, path));
    DT_RETURN_IF_ERROR(ReadTokens(map, map_json, &standard, &of_map));
    DT_RETURN_IF_ERROR(ReadMore(map, "extra_special_tokens", &more));
  }
  more.merge(of_map);
  more.merge(standard);
  return more;
}

}  // namespace

absl::StatusOr<ChatTemplate> ChatTemplate::Read(const std::string& folder) {
  std::string path = absl::StrCat(folder, "/tokenizer_config.json");
  DT_ASSIGN_OR_RETURN(const Json json, text::ObjectIn(path));
  DT_ASSIGN_OR_RETURN(const JsonFields config, JsonFields::Of(json, path));
  ChatTemplate made;
  DT_ASSIGN_OR_RETURN(made.tokens_, TokensOf(folder, config, json));
  DT_ASSIGN_OR_RETURN(std::optional<std::string> source, SourceIn(config));
  const std::string own = absl::StrCat(folder, "/chat_template.jinja");
  absl::StatusOr<std::string> file = ReadFile(own, kMostChatBytes);
  if (file.ok()) {
    path = own;
    source = *std::move(file);
  } else if (!absl::IsNotFound(file.status())) {
    return file.status();
  }
  if (!source.has_value()) {
    return absl::NotFoundError(
        absl::StrCat(folder,
                     " has no chat_template.jinja, and no chat_template in its "
                     "tokenizer_config.json: this is no chat model"));
  }
  if (FirstBadUtf8(*source) != absl::string_view::npos) {
    return absl::InvalidArgumentError(absl::StrCat(path, " is not UTF-8"));
  }
  absl::StatusOr<text::Template> parsed = text::Template::Parse(*source);
  if (!parsed.ok()) return Prefixed(path, parsed.status());
  made.template_ = *std::move(parsed);
  return made;
}

absl::StatusOr<std::string> ChatTemplate::Render(absl::Span<const ChatMessage> messages,
                                                 bool answer) const {
  // As Hugging Face's library gives them: there, and none.
  Json context = {{"messages", Json::array()},
                  {"add_generation_prompt", answer},
                  {"tools", nullptr},
                  {"documents", nullptr}};
  for (const ChatMessage& message : messages) {
    if (FirstBadUtf8(message.role) != absl::string_view::npos ||
        FirstBadUtf8(message.content) != absl::string_view::npos) {
      return absl::InvalidArgumentError("a message is not UTF-8");
    }
    context["messages"].push_back({{"role", message.role}, {"content", message.content}});
  }
  // A token that is called as one of these is none here, and an error in that library.
  for (const auto& [name, token] : tokens_) context.emplace(name, token);
  return template_.Render(context);
}

}  // namespace dtensor
