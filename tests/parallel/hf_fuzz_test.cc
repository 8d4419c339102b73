// Headers and configs of any bytes: refused by name, or read within bounds. DT_THOROUGH=1 tries
// more.
#include <gmock/gmock.h>
#include <sys/resource.h>

#include <random>

#include "dtensor/parallel/text/template.h"
#include "dtensor/parallel/text/tokenizer.h"
#include "tests/common/thin.h"
#include "tests/parallel/hf_support.h"

namespace dtensor::hf_fuzz_test {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using testing::HfFolder;
using testing::TempFolder;
using testing::TextOf;

class Mutator {
 public:
  explicit Mutator(uint64_t seed) : random_(seed) {}
  size_t Below(size_t n) { return static_cast<size_t>(random_() % n); }
  // One to three changes: a byte, a piece of JSON put in, a few bytes taken out or said again.
  std::string operator()(std::string bytes) {
    static const char* const kPieces[] = {"{",
                                          "}",
                                          "[",
                                          "]",
                                          ",",
                                          ":",
                                          "\"",
                                          "0",
                                          "-1",
                                          "1.5",
                                          "1e9",
                                          "1e400",
                                          "null",
                                          "true",
                                          "NaN",
                                          "9223372036854775807",
                                          "18446744073709551616",
                                          "\\u0000",
                                          "\\ud800",
                                          "\"dtype\"",
                                          "\"shape\"",
                                          "\"data_offsets\"",
                                          "\"F32\"",
                                          "\"linear\"",
                                          "{% if 1 %}",
                                          "{% for m in messages %}",
                                          "{% endfor %}{% endif %}",
                                          "{{ loop.last ~ m.role }}",
                                          "|length",
                                          " is ",
                                          " not in ",
                                          "[1:]",
                                          "\"Split\"",
                                          "\"Regex\"",
                                          "\xff"};
    for (size_t k = 1 + Below(3); k > 0; --k) {
      if (bytes.empty()) bytes = "x";
      const size_t at = Below(bytes.size());
      switch (Below(5)) {
        case 0:
          bytes[at] = static_cast<char>(random_());
          break;
        case 1:
          bytes.insert(at, kPieces[Below(std::size(kPieces))]);
          break;
        case 2:
          bytes.erase(at, 1 + Below(8));
          break;
        case 3:  // where a file has the length of its header
          bytes[at % std::min<size_t>(8, bytes.size())] = static_cast<char>(random_());
          break;
        default:
          bytes += bytes.substr(at, 16);
      }
    }
    return bytes;
  }

 private:
  std::mt19937_64 random_;
};

TEST(HfFuzz, HeadersOfAnyBytes) {
  const testing::TempFolder scratch;
  const std::string path = (scratch / "f.safetensors").string();
  std::vector<std::string> seeds;
  for (const fs::directory_entry& e : fs::directory_iterator(HfFolder("bad") + "/ok")) {
    seeds.push_back(TextOf(e.path()));
  }
  std::sort(seeds.begin(), seeds.end());
  Mutator mutate(7);
  int opened = 0;
  const int runs = testing::Thorough() ? 200'000 : 4'000;
  for (int i = 0; i < runs; ++i) {
    std::ofstream(path, std::ios::binary) << mutate(seeds[mutate.Below(seeds.size())]);
    const auto file = SafetensorsFile::Open(path);
    if (!file.ok()) {
      EXPECT_THAT(std::string(file.status().message()), HasSubstr(path));
      continue;
    }
    ++opened;
    int64_t covered = 0;
    for (const auto& [name, e] : (*file)->tensors()) {
      std::string data(e.end - e.begin, '\0');
      EXPECT_TRUE((*file)->Read(e.begin, e.end - e.begin, data.data()).ok()) << name;
      covered += e.end - e.begin;
    }
    char one;
    EXPECT_FALSE((*file)->Read(covered, 1, &one).ok());
  }
  EXPECT_GT(opened, runs / 100);
  EXPECT_LT(opened, runs);
}

// What is taken is small enough to be made a model of recipes.
TEST(HfFuzz, ConfigsOfAnyBytes) {
  Mutator mutate(11);
  int made = 0;
  for (const std::string name : {"llama-uneven", "gpt2"}) {
    const std::string text = TextOf(HfFolder(name) + "/config.json");
    for (int i = 0; i < (testing::Thorough() ? 50'000 : 1'000); ++i) {
      const auto config = ParseModelConfig(mutate(text), "c.json");
      if (!config.ok()) {
        EXPECT_THAT(std::string(config.status().message()), HasSubstr("c.json"));
        continue;
      }
      ++made;
      if (std::visit([](const auto& c) { return c.layers; }, config->model) < 100) {
        EXPECT_FALSE(MakeModel(*config)->NamedParameters().empty());
      }
    }
  }
  EXPECT_GT(made, 10);
}

// A header is looked at before memory is taken for what it says.
TEST(HfFuzz, AHeaderOfManyValuesTakesNoManyTimesItsSize) {
  const testing::TempFolder scratch;
  const std::string path = (scratch / "f.safetensors").string();
  std::string header = R"({"a":{"dtype":"F32","shape":[0)";
  while (header.size() < 20'000'000) header += ",0";
  header += R"(],"data_offsets":[0,0]}})";
  const uint64_t length = header.size();
  std::ofstream(path, std::ios::binary)
      << std::string(reinterpret_cast<const char*>(&length), 8) << header;
  rusage before, after;
  getrusage(RUSAGE_SELF, &before);
  const auto file = SafetensorsFile::Open(path);
  getrusage(RUSAGE_SELF, &after);
  EXPECT_THAT(std::string(file.status().message()), HasSubstr("values of JSON"));
  EXPECT_LT(after.ru_maxrss - before.ru_maxrss, 60'000);  // KiB
}

nlohmann::json TextData(const std::string& name) {
  return nlohmann::json::parse(TextOf(absl::StrCat(DT_TEST_DATA, "/text/", name)));
}

TEST(HfFuzz, TemplatesOfAnyBytes) {
  std::vector<std::string> seeds;
  const nlohmann::json data = TextData("chat.json");
  for (const nlohmann::json& c : data["cases"]) seeds.push_back(c["template"]);
  const nlohmann::json context = {{"messages", data["cases"][0]["messages"]},
                                  {"add_generation_prompt", true},
                                  {"bos_token", "<s>"}};
  Mutator mutate(13);
  int rendered = 0;
  const int runs = testing::Thorough() ? 500'000 : 20'000;
  for (int i = 0; i < runs; ++i) {
    const auto made = text::Template::Parse(mutate(seeds[mutate.Below(seeds.size())]));
    if (!made.ok()) {
      EXPECT_NE(made.status().message(), "");
      continue;
    }
    const auto out = made->Render(context);
    rendered += out.ok();
    EXPECT_NE(out.status().code(), absl::StatusCode::kInternal) << out.status();
  }
  EXPECT_GT(rendered, runs / 50);
}

// What is taken encodes and decodes.
TEST(HfFuzz, TokenizersOfAnyBytes) {
  Mutator mutate(17);
  int made = 0;
  for (const char* name : {"tokenizer_split.json", "tokenizer_digits.json"}) {
    const std::string text = TextData(name)["tokenizer"].dump();
    for (int i = 0; i < (testing::Thorough() ? 50'000 : 400); ++i) {
      const auto tokenizer = Tokenizer::Parse(mutate(text), "t.json");
      if (!tokenizer.ok()) {
        EXPECT_THAT(std::string(tokenizer.status().message()), HasSubstr("t.json"));
        continue;
      }
      ++made;
      const auto ids = tokenizer->Encode("the word <|start|> jumps over 12 é");
      if (ids.ok()) tokenizer->Decode(*ids);
    }
  }
  EXPECT_GT(made, 10);
}

}  // namespace
}  // namespace dtensor::hf_fuzz_test
