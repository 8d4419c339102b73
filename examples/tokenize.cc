// Makes a token file of a text: the ids that a model's tokenizer gives for it, as train_llama and
// TokenFile read them.
//
//   tokenize --model DIR --text book.txt --out book.bin
#include "dtensor/parallel/data/tokenize.h"

#include <cstdio>
#include <string>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/strings/str_cat.h"
#include "dtensor/mesh/program.h"
#include "dtensor/parallel/data/token_file.h"
#include "dtensor/tensor/status.h"
#include "examples/flags.h"
#include "examples/output_files.h"

ABSL_FLAG(std::string, model, "", "folder with the model's tokenizer.json");
ABSL_FLAG(std::string, text, "", "file to read, in UTF-8");
ABSL_FLAG(std::string, out, "", "file to write");

namespace dtensor {
namespace {

absl::Status Main(const std::vector<char*>& rest) {
  if (rest.size() > 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("unexpected argument \"", rest[1], "\"; see --help"));
  }
  const std::string model = absl::GetFlag(FLAGS_model), text = absl::GetFlag(FLAGS_text),
                    out = absl::GetFlag(FLAGS_out);
  for (const auto& [flag, value] : {NamedPath("model", model), {"text", text}, {"out", out}}) {
    if (value.empty()) return absl::InvalidArgumentError(absl::StrCat("--", flag, " is missing"));
  }
  DT_RETURN_IF_ERROR(CheckOutputs({.reads = {{"--text", text}}, .files = {{"--out", out}}}));
  DT_ASSIGN_OR_RETURN(const Tokenizer tokenizer, Tokenizer::Read(model));
  DT_ASSIGN_OR_RETURN(const std::vector<int64_t> tokens, TokenizeFile(tokenizer, text));
  DT_RETURN_IF_ERROR(WriteTokens(out, tokens, tokenizer.size() <= 1 << 16 ? 2 : 4));
  const absl::flat_hash_set<int64_t> kinds(tokens.begin(), tokens.end());
  std::printf("%lld tokens, %lld kinds of the tokenizer's %lld\n",
              static_cast<long long>(tokens.size()), static_cast<long long>(kinds.size()),
              static_cast<long long>(tokenizer.size()));
  return absl::OkStatus();
}

}  // namespace
}  // namespace dtensor

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage("makes a token file of a text");
  return dtensor::RunProgram([&]() -> absl::Status {
    DT_RETURN_IF_ERROR(dtensor::CheckFlagNames(argc, argv, "tokenize.cc"));
    return dtensor::Main(absl::ParseCommandLine(argc, argv));
  });
}
