// Tokenizer: text to the ids that a model reads, and back, as tokenizer.json of a Hugging Face
// folder says.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace dtensor {

// Byte-level BPE. Immutable and cheap to copy; may be used by many threads at once.
class Tokenizer {
 public:
  // From a folder's tokenizer.json. Served are the model BPE; pre-tokenizers ByteLevel, Digits,
  // Split and sequences of them; post-processors ByteLevel, TemplateProcessing and sequences of
  // them; the decoder ByteLevel; no normalizer. The file's truncation and padding are left, as
  // transformers does neither unless a call asks for it. Of tokenizer_config.json, which may be
  // missing, two fields change ids: split_special_tokens, with which special tokens in a text are
  // text, and, of the classes GPT2Tokenizer, CodeGenTokenizer and GPTNeoXTokenizer,
  // add_prefix_space, which goes before that of tokenizer.json and is false where it is missing.
  // Others are passed over: tokenizer.json says what frames a text, not add_bos_token and
  // add_eos_token.
  //   Errors: NotFound for a missing tokenizer.json; InvalidArgument and Unimplemented naming file
  //   and field for what is broken and what is not served.
  //   Source: AutoTokenizer of transformers 5.
  static absl::StatusOr<Tokenizer> Read(const std::string& folder);
  // From the text of such a file, which errors call `where`.
  static absl::StatusOr<Tokenizer> Parse(absl::string_view json,
                                         const std::string& where = "tokenizer.json");

  // Added tokens ("<|im_start|>") are found first, of several the longest; `frame`: with the tokens
  // that the model expects around a text, if the file names any.
  //   Errors: InvalidArgument for a text that is not UTF-8, with the place; ResourceExhausted for
  //   one on which a pattern of the file tries too much.
  absl::StatusOr<std::vector<int64_t>> Encode(absl::string_view text, bool frame = true) const;
  // The text of the tokens; ids that are none give nothing. U+FFFD stands for bytes that are no
  // characters. `skip_special`: without special tokens.
  std::string Decode(absl::Span<const int64_t> ids, bool skip_special = false) const;
  // The bytes that a token stands for, which may be part of a character. Empty for ids that are
  // none.
  absl::string_view Bytes(int64_t id) const;
  bool IsSpecial(int64_t id) const;
  // The id of a token as the file writes it.
  std::optional<int64_t> Find(absl::string_view token) const;
  int64_t size() const;  // the largest id and one more

 private:
  struct Data;
  std::shared_ptr<const Data> data_;
};

// The text of tokens that come one by one: what Add returned so far and Finish returns is what
// Decode gives of all, and no call returns part of a character.
class TokenStream {
 public:
  explicit TokenStream(Tokenizer tokenizer, bool skip_special = false)
      : tokenizer_(std::move(tokenizer)), skip_special_(skip_special) {}
  std::string Add(int64_t id);
  // What was kept back.
  std::string Finish();

 private:
  Tokenizer tokenizer_;
  bool skip_special_;
  std::string kept_;
};

}  // namespace dtensor
