// Headers and configs of any bytes: refused by name, or read within bounds. DT_THOROUGH=1 tries
// more.
#include <gmock/gmock.h>

#include <random>

#include "absl/strings/match.h"
#include "dtensor/parallel/io/json_reader.h"
#include "dtensor/parallel/text/template.h"
#include "dtensor/parallel/text/tokenizer.h"
#include "tests/common/thin.h"
#include "tests/parallel/hf_support.h"

namespace dtensor::hf_fuzz_test {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
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

// Of a form that is no JSON behind the place where too much is: who says that it is too much has
// read no further.
constexpr char kNoJson[] = "!!!";

std::string RefusalOf(const std::string& header) {
  const testing::TempFolder scratch;
  const std::string path = (scratch / "f.safetensors").string();
  const uint64_t length = header.size();
  std::ofstream(path, std::ios::binary)
      << std::string(reinterpret_cast<const char*>(&length), 8) << header;
  const auto file = SafetensorsFile::Open(path);
  EXPECT_THAT(std::string(file.status().message()), HasSubstr(path));
  return std::string(file.status().message());
}

TEST(HfFuzz, AHeaderOfTooMuchIsRefusedWhereItIsTooMuch) {
  std::string dims = R"({"a":{"dtype":"F32","shape":[0)";
  for (int i = 0; i < 64; ++i) dims += ",0";
  EXPECT_THAT(RefusalOf(dims + kNoJson),
              AllOf(HasSubstr("tensor \"a\""), HasSubstr("shape"), HasSubstr("more than 64 dims")));
  std::string items = R"({"__metadata__":{)";
  for (int i = 0; i <= 100'000; ++i) absl::StrAppend(&items, i == 0 ? "" : ",", "\"", i, "\":\"\"");
  EXPECT_THAT(RefusalOf(items + kNoJson),
              AllOf(HasSubstr("__metadata__"), HasSubstr("more than 100000 items")));
  const std::string half(8'000'000, 'x');
  EXPECT_THAT(RefusalOf(absl::StrCat(R"({"__metadata__":{"a":")", half, R"(","b":")", half, "y")),
              AllOf(HasSubstr("__metadata__: \"b\""), HasSubstr("more than 8000000 bytes")));
  EXPECT_THAT(RefusalOf(absl::StrCat("{\"", std::string(4097, 'n'))),
              HasSubstr("more than 4096 bytes"));
  EXPECT_THAT(RefusalOf(absl::StrCat(R"({"a":{"dtype":")", std::string(81, 'F'))),
              AllOf(HasSubstr("dtype"), HasSubstr("more than 80 bytes")));
  EXPECT_THAT(
      RefusalOf(absl::StrCat(R"({"a":{"dtype":"F32","shape":[],"data_offsets":[0,4,8)", kNoJson)),
      HasSubstr("more than the two numbers [begin, end]"));
}

TEST(HfFuzz, AnIndexOfTooMuchIsRefusedWhereItIsTooMuch) {
  const testing::TempFolder scratch;
  const auto refusal = [&](const std::string& text) {
    std::ofstream(scratch / "model.safetensors.index.json") << text;
    return std::string(TensorFolder::Open(scratch.path()).status().message());
  };
  std::string map = R"({"weight_map":{)";
  for (int i = 0; i <= 1'000'000; ++i) absl::StrAppend(&map, i == 0 ? "" : ",", "\"", i, "\":\"\"");
  EXPECT_THAT(refusal(map + kNoJson),
              AllOf(HasSubstr("index.json: weight_map"), HasSubstr("more than 1000000 tensors")));
  std::string other = R"({"metadata":[)";
  for (int i = 0; i <= 100'000; ++i) other += "0,";
  EXPECT_THAT(refusal(other + kNoJson), HasSubstr("more than 100000 values"));
  EXPECT_THAT(refusal(absl::StrCat(R"({"metadata":)", std::string(1000, '['))),
              HasSubstr("levels of JSON"));
}

// The reader takes what another parser takes, bar what is there twice, and reads the same.
TEST(HfFuzz, JsonReaderIsStrict) {
  const auto read = [](const std::string& text) {
    JsonReader reader(text);
    const absl::Status skipped = reader.Skip(32).status();
    return skipped.ok() ? reader.End() : skipped;
  };
  std::vector<std::string> seeds = {
      R"({"a":[1,-2.5e+3,true,false,null,"\u00e9\ud83d\ude00\n\"é"],"b":{"":{}} , "c" : 0 })",
      TextOf(HfFolder("gpt2") + "/config.json"),
      TextOf(HfFolder("llama-uneven") + "/model.safetensors.index.json").substr(0, 400)};
  Mutator mutate(19);
  int taken = 0;
  const int runs = testing::Thorough() ? 200'000 : 20'000;
  for (int i = 0; i < runs; ++i) {
    const std::string text = mutate(seeds[mutate.Below(seeds.size())]);
    const absl::Status mine = read(text);
    taken += mine.ok();
    const std::string why(mine.message());
    if (absl::StrContains(why, "there twice") || absl::StrContains(why, "levels of JSON")) continue;
    const bool other = text.find('\0') == std::string::npos && nlohmann::json::accept(text);
    ASSERT_EQ(mine.ok(), other) << text << "\n" << why;
  }
  EXPECT_GT(taken, runs / 50);
  EXPECT_LT(taken, runs);
  for (const std::string text :
       {R"("")", R"("plain")", R"("\"\\\/\b\f\n\r\t")", R"("\u0041\u00e9\u20AC\ud83d\uDE00")",
        "\"\x7F é € 😀\"", R"("\u0000")"}) {
    JsonReader reader(text);
    EXPECT_EQ(ValueOrThrow(reader.String(100)), nlohmann::json::parse(text).get<std::string>());
    EXPECT_TRUE(reader.End().ok());
  }
  for (const char* const text : {"-1", "1.0", "1e2", "01", "9223372036854775808", "1x", "+1", ""}) {
    const std::string list = absl::StrCat("[", text, "]");
    JsonReader reader(list);
    EXPECT_FALSE(reader.List([&] { return reader.WholeNumber().status(); }).ok() && text[0] != '\0')
        << text;
  }
  JsonReader most("9223372036854775807 ");
  EXPECT_EQ(ValueOrThrow(most.WholeNumber()), INT64_MAX);
  JsonReader fits("\"four\""), long_one("\"fours\"");
  EXPECT_EQ(ValueOrThrow(fits.String(4)), "four");
  EXPECT_FALSE(long_one.String(4).ok());
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
