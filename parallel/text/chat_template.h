// ChatTemplate: messages of a conversation as the one text that a chat model was trained on.
#pragma once

#include <map>
#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "dtensor/parallel/text/template.h"

namespace dtensor {

struct ChatMessage {
  std::string role, content;  // roles: "system", "user", "assistant"
};

// Immutable.
class ChatTemplate {
 public:
  // From chat_template.jinja of a Hugging Face folder, or chat_template of its
  // tokenizer_config.json. That and special_tokens_map.json, which may both be missing, name the
  // special tokens that templates use.
  //   Errors: NotFound where there is none; Unimplemented naming the part of Jinja that is not
  //   served (text::Template); InvalidArgument for what is broken. They name the file.
  static absl::StatusOr<ChatTemplate> Read(const std::string& folder);
  // `answer`: ends where the model's answer begins.
  //   Errors: those of text::Template::Render.
  absl::StatusOr<std::string> Render(absl::Span<const ChatMessage> messages,
                                     bool answer = true) const;

 private:
  text::Template template_;
  std::map<std::string, std::string> tokens_;  // "bos_token": "<s>"
};

}  // namespace dtensor
