#include "dtensor/parallel/text/chat_template.h"

#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "dtensor/parallel/io/json.h"
#include "dtensor/parallel/io/json_fields.h"
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

// "bos_token": "<s>", or {"content": "<s>", ...}
absl::Status ReadTokens(const JsonFields& config, const Json& json,
                        std::map<std::string, std::string>* tokens) {
  for (const auto& [name, value] : json.items()) {
    if (!absl::EndsWith(name, "_token") || value.is_null() || value.is_boolean()) continue;
    if (value.is_object()) {
      DT_ASSIGN_OR_RETURN(const JsonFields token, config.Object(name));
      DT_ASSIGN_OR_RETURN((*tokens)[name], token.String("content"));
    } else {
      DT_ASSIGN_OR_RETURN((*tokens)[name], config.String(name));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ChatTemplate> ChatTemplate::Read(const std::string& folder) {
  std::string path = absl::StrCat(folder, "/tokenizer_config.json");
  DT_ASSIGN_OR_RETURN(const std::string config_text, ReadFile(path, kMostChatBytes));
  ChatTemplate made;
  const auto read_config = [&]() -> absl::StatusOr<std::optional<std::string>> {
    DT_ASSIGN_OR_RETURN(const Json json, ParseJsonObject(config_text, path));
    DT_ASSIGN_OR_RETURN(const JsonFields config, JsonFields::Of(json, path));
    DT_RETURN_IF_ERROR(ReadTokens(config, json, &made.tokens_));
    return SourceIn(config);
  };
  absl::StatusOr<std::optional<std::string>> source = read_config();
  if (!source.ok()) return source.status();
  const std::string own = absl::StrCat(folder, "/chat_template.jinja");
  absl::StatusOr<std::string> file = ReadFile(own, kMostChatBytes);
  if (file.ok()) {
    path = own;
    *source = *std::move(file);
  } else if (!absl::IsNotFound(file.status())) {
    return file.status();
  }
  if (!source->has_value()) {
    return absl::NotFoundError(absl::StrCat(
        path, " has no chat_template, and there is no chat_template.jinja: this is no chat model"));
  }
  if (FirstBadUtf8(**source) != absl::string_view::npos) {
    return absl::InvalidArgumentError(absl::StrCat(path, " is not UTF-8"));
  }
  absl::StatusOr<text::Template> parsed = text::Template::Parse(**source);
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
  for (const auto& [name, token] : tokens_) context[name] = token;
  return template_.Render(context);
}

}  // namespace dtensor
