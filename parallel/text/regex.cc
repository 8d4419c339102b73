#include "dtensor/parallel/text/regex.h"

#include "absl/strings/str_cat.h"
#include "dtensor/parallel/text/oniguruma.h"
#include "dtensor/parallel/text/utf8.h"
#include "dtensor/tensor/status.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

namespace dtensor {
namespace {

// Steps of one match, far beyond those of any tokenizer's pattern on a word.
constexpr uint32_t kMostMatchSteps = 50'000'000, kMostMatchDepth = 1'000'000;

std::string Message(int error) {
  PCRE2_UCHAR text[256];
  pcre2_get_error_message(error, text, sizeof text);
  return reinterpret_cast<const char*>(text);
}

PCRE2_SPTR Bytes(absl::string_view text) {
  return reinterpret_cast<PCRE2_SPTR>(text.data() == nullptr ? "" : text.data());
}

}  // namespace

struct Regex::Code {
  ~Code() { pcre2_code_free(code); }
  pcre2_code* code = nullptr;
};

absl::StatusOr<Regex> Regex::Compile(absl::string_view pattern, bool literal) {
  if (FirstBadUtf8(pattern) != absl::string_view::npos) {
    return absl::InvalidArgumentError("the pattern is not UTF-8");
  }
  int error = 0;
  PCRE2_SIZE at = 0;
  const uint32_t options =
      PCRE2_UTF | (literal ? PCRE2_LITERAL : PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C);
  std::string translated(pattern);
  if (!literal) {
    DT_ASSIGN_OR_RETURN(translated, text::OnigurumaToPcre2(pattern));
  }
  const std::unique_ptr<pcre2_compile_context, decltype(&pcre2_compile_context_free)> context(
      pcre2_compile_context_create(nullptr), &pcre2_compile_context_free);
  if (context == nullptr) return absl::ResourceExhaustedError("no memory for a pattern");
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  auto code = std::make_shared<Code>();
  code->code =
      pcre2_compile(Bytes(translated), translated.size(), options, &error, &at, context.get());
  if (code->code == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat("the pattern is not understood at byte ", at,
                                                   " of \"", translated,
                                                   "\", as PCRE2 writes it: ", Message(error)));
  }
  pcre2_jit_compile(code->code, PCRE2_JIT_COMPLETE);  // Where it cannot, matching is interpreted.
  Regex regex;
  regex.code_ = std::move(code);
  return regex;
}

absl::StatusOr<std::vector<std::pair<size_t, size_t>>> Regex::FindAll(
    absl::string_view text) const {
  const std::unique_ptr<pcre2_match_context, decltype(&pcre2_match_context_free)> context(
      pcre2_match_context_create(nullptr), &pcre2_match_context_free);
  const std::unique_ptr<pcre2_match_data, decltype(&pcre2_match_data_free)> data(
      pcre2_match_data_create_from_pattern(code_->code, nullptr), &pcre2_match_data_free);
  if (context == nullptr || data == nullptr) {
    return absl::ResourceExhaustedError("no memory to match a pattern");
  }
  pcre2_set_match_limit(context.get(), kMostMatchSteps);
  pcre2_set_depth_limit(context.get(), kMostMatchDepth);
  std::vector<std::pair<size_t, size_t>> found;
  for (size_t at = 0; at <= text.size();) {
    const auto match = [&](uint32_t options) {
      return pcre2_match(code_->code, Bytes(text), text.size(), at, PCRE2_NO_UTF_CHECK | options,
                         data.get(), context.get());
    };
    int n = match(0);
    // Its stack is small: a long run of what a set of PCRE2 cannot say fills it.
    if (n == PCRE2_ERROR_JIT_STACKLIMIT) n = match(PCRE2_NO_JIT);
    if (n == PCRE2_ERROR_NOMATCH) break;
    if (n < 0) {
      return absl::ResourceExhaustedError(
          absl::StrCat("matching a pattern failed at byte ", at, ": ", Message(n)));
    }
    const PCRE2_SIZE* range = pcre2_get_ovector_pointer(data.get());
    const bool empty = range[0] == range[1];
    if (!empty || found.empty() || found.back().second != range[0]) {
      found.emplace_back(range[0], range[1]);
    }
    at = range[1];
    if (!empty) continue;
    if (at == text.size()) break;
    at += static_cast<size_t>(Utf8Length(text.substr(at)));
  }
  return found;
}

}  // namespace dtensor
