// The patterns of tokenizer.json are Oniguruma's; this library has PCRE2.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace dtensor::text {

// The pattern of PCRE2, to be compiled with UTF, UCP, MULTILINE and "\n" alone as newline, that
// matches what `pattern` (UTF-8) matches in Oniguruma's own syntax, as Hugging Face's tokenizers
// runs it. Source: Oniguruma 6.9's "RE", and tokenizers 0.23, compared over all characters.
//   Errors: InvalidArgument with the place for what Oniguruma refuses, too; Unimplemented naming
//   what would mean something else.
absl::StatusOr<std::string> OnigurumaToPcre2(absl::string_view pattern);

}  // namespace dtensor::text
