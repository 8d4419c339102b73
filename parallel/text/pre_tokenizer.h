// What happens to a text before it is encoded: it is cut into words, whose bytes are then written
// as characters.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "dtensor/parallel/io/json_fields.h"
#include "dtensor/parallel/text/regex.h"

namespace dtensor::text {

// Each byte as a character that can be seen: those of Latin-1 that can stand for themselves, the
// others U+0100 and on, as GPT-2 has it.
std::string BytesToCharacters(absl::string_view bytes);
// The inverse; a text with any other character stands for its own bytes.
std::string CharactersToBytes(absl::string_view characters);

// The object "pre_tokenizer" of a tokenizer.json: ByteLevel, Digits, Split, and sequences of them.
// Immutable.
class PreTokenizer {
 public:
  //   Errors: InvalidArgument naming the field; Unimplemented for another type, and where no
  //   ByteLevel is among them.
  static absl::StatusOr<PreTokenizer> Read(const Json& json, const std::string& path);
  // Whether a text that begins with no space gets one, whatever the object says of it.
  void SetPrefixSpace(bool add);
  // The words of a well-formed text, in characters that stand for bytes.
  absl::StatusOr<std::vector<std::string>> Words(absl::string_view text) const;

 private:
  enum class Behavior { kRemoved, kIsolated, kMergedWithPrevious, kMergedWithNext, kContiguous };
  struct Step {
    bool split = false;  // cuts at the pattern
    Regex pattern;
    Behavior behavior = Behavior::kIsolated;
    bool invert = false;
    bool bytes_to_characters = false, add_prefix_space = false;
  };
  absl::Status Add(const Json& json, const std::string& path);
  static absl::StatusOr<Step> ReadSplit(const JsonFields& fields);
  static absl::StatusOr<Step> ReadDigits(const JsonFields& fields);
  absl::Status AddByteLevel(const JsonFields& fields);
  static absl::Status Split(const Step& step, absl::string_view text,
                            std::vector<std::string>* words);
  std::vector<Step> steps_;
};

}  // namespace dtensor::text
