// Tokenizers and chat templates against what Hugging Face's libraries give (tests/data/text, made
// by scripts/make_text_answers.py), and files that are refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <random>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "dtensor/parallel/text/bpe.h"
#include "dtensor/parallel/text/chat_template.h"
#include "dtensor/parallel/text/pre_tokenizer.h"
#include "dtensor/parallel/text/regex.h"
#include "dtensor/parallel/text/template.h"
#include "dtensor/parallel/text/tokenizer.h"
#include "dtensor/parallel/text/utf8.h"
#include "dtensor/tensor/file.h"
#include "dtensor/tensor/status.h"
#include "nlohmann/json.hpp"
#include "tests/common/temp_folder.h"

namespace dtensor::text_test {
namespace {

using ::testing::HasSubstr;
using Json = nlohmann::json;

Json ReadData(const std::string& name) {
  return Json::parse(ValueOrThrow(ReadFile(absl::StrCat(DT_TEST_DATA, "/text/", name))));
}

class TokenizerTest : public ::testing::TestWithParam<const char*> {
 protected:
  const Json data_ = ReadData(absl::StrCat("tokenizer_", GetParam(), ".json"));
  const Tokenizer tokenizer_ = ValueOrThrow(Tokenizer::Parse(data_["tokenizer"].dump()));
};

TEST_P(TokenizerTest, EncodesAsHuggingFace) {
  ASSERT_GE(data_["cases"].size(), 20u);
  for (const Json& c : data_["cases"]) {
    const std::string text = c["text"];
    EXPECT_EQ(ValueOrThrow(tokenizer_.Encode(text)), c["ids"].get<std::vector<int64_t>>()) << text;
    EXPECT_EQ(ValueOrThrow(tokenizer_.Encode(text, /*frame=*/false)),
              c["bare"].get<std::vector<int64_t>>())
        << text;
  }
}

TEST_P(TokenizerTest, DecodesAsHuggingFaceAlsoInAStream) {
  for (const Json& c : data_["cases"]) {
    const auto ids = c["ids"].get<std::vector<int64_t>>();
    EXPECT_EQ(tokenizer_.Decode(ids), c["decoded"].get<std::string>());
    EXPECT_EQ(tokenizer_.Decode(ids, /*skip_special=*/true), c["skipped"].get<std::string>());
    TokenStream stream(tokenizer_);
    std::string streamed;
    for (const int64_t id : ids) {
      const std::string part = stream.Add(id);
      EXPECT_EQ(FirstBadUtf8(part), absl::string_view::npos);
      streamed += part;
    }
    EXPECT_EQ(streamed + stream.Finish(), tokenizer_.Decode(ids));
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, TokenizerTest,
                         ::testing::Values("gpt2", "prefix", "digits", "runs", "split", "removed",
                                           "previous", "next", "contiguous", "inverted"));

TEST(Tokenizer, AStreamKeepsBackHalfACharacter) {
  const Json data = ReadData("tokenizer_gpt2.json");
  const Tokenizer t = ValueOrThrow(Tokenizer::Parse(data["tokenizer"].dump()));
  // The bytes of U+1F642, one token each, then one that is none.
  std::vector<int64_t> ids;
  for (const char* byte : {"\xF0", "\x9F", "\x99", "\x82", "\xF0", "\x9F", "A"}) {
    ids.push_back(*t.Find(text::BytesToCharacters(byte)));
  }
  TokenStream stream(t);
  std::vector<std::string> parts;
  for (const int64_t id : ids) parts.push_back(stream.Add(id));
  EXPECT_THAT(parts, ::testing::ElementsAre("", "", "", "\xF0\x9F\x99\x82", "", "",
                                            "\xEF\xBF\xBD"
                                            "A"));
  EXPECT_EQ(stream.Finish(), "");
  stream.Add(ids[0]);
  EXPECT_EQ(stream.Finish(), "\xEF\xBF\xBD");
}

TEST(Tokenizer, RandomTextComesBackAndIdsOfNobodyAreNothing) {
  const Json data = ReadData("tokenizer_split.json");
  const Tokenizer t = ValueOrThrow(Tokenizer::Parse(data["tokenizer"].dump()));
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    std::string text;
    for (int i = 0; i < 30; ++i) {
      char32_t c = random() % (random() % 2 == 0 ? 0x80 : 0x110000);
      if (c >= 0xD800 && c < 0xE000) c = ' ';
      Utf8Append(c, &text);
    }
    EXPECT_EQ(t.Decode(ValueOrThrow(t.Encode(text, false))), text);
  }
  EXPECT_EQ(t.Decode({-1, t.size(), int64_t{1} << 60}), "");
  EXPECT_EQ(t.Find("no such token"), std::nullopt);
  const auto bad = t.Encode("ab\xC3(");
  EXPECT_EQ(bad.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(bad.status().message(), HasSubstr("not UTF-8 at byte 2"));
}

TEST(Tokenizer, ALongWordTakesNoSquareOfItsLength) {
  const Json data = ReadData("tokenizer_gpt2.json");
  const Tokenizer t = ValueOrThrow(Tokenizer::Parse(data["tokenizer"].dump()));
  const std::string text(1 << 18, 'a');
  EXPECT_EQ(t.Decode(ValueOrThrow(t.Encode(text))), text);
}

TEST(Tokenizer, WhatIsBrokenOrNotServedIsNamed) {
  const Json good = ReadData("tokenizer_digits.json")["tokenizer"];
  const auto refused = [&](const char* pointer, Json value, const char* message) {
    Json json = good;
    json[Json::json_pointer(pointer)] = std::move(value);
    const auto parsed = Tokenizer::Parse(json.dump());
    ASSERT_FALSE(parsed.ok()) << pointer;
    EXPECT_THAT(parsed.status().message(), HasSubstr(message));
  };
  refused("/model/type", "Unigram", "model.type is \"Unigram\"; this library has BPE");
  refused("/model/byte_fallback", true, "model.byte_fallback is true");
  refused("/model/dropout", 0.1, "model.dropout is 0.1");
  refused("/model/unk_token", "<unk>", "model.unk_token \"<unk>\" is not in the vocabulary");
  refused("/model/vocab", Json::array(), "model.vocab must be an object, is an array");
  refused("/model/vocab/zz", -1, "model.vocab[\"zz\"] must be from 0");
  refused("/model/vocab/zz", 1e30, "model.vocab[\"zz\"] must be a whole number");
  refused("/model/vocab/zz", 1ull << 40, "model.vocab[\"zz\"] must be from 0 to 16777215");
  refused("/model/vocab/zz", 7, "another token has the id 7");
  refused("/model/vocab/zz", 16777215, "tokens and the id 16777215");
  refused("/model/merges/0", "a", "model.merges[0] must be two tokens");
  refused("/model/merges/0", Json::array({"qq", "zz"}), "\"qq\" is not in the vocabulary");
  refused("/model/merges", 3, "model.merges must be an array");
  refused("/normalizer", Json{{"type", "NFC"}}, "normalizer.type is \"NFC\"");
  Json unchanged = good;
  unchanged["normalizer"] = {{"type", "Sequence"}, {"normalizers", Json::array()}};
  EXPECT_TRUE(Tokenizer::Parse(unchanged.dump()).ok()) << "it does nothing";
  refused("/decoder", Json{{"type", "WordPiece"}}, "decoder.type is \"WordPiece\"");
  refused("/decoder", nullptr, "decoder is null");
  refused("/pre_tokenizer", Json{{"type", "Whitespace"}}, "pre_tokenizer.type is \"Whitespace\"");
  refused("/pre_tokenizer", nullptr, "pre_tokenizer is missing");
  refused("/pre_tokenizer/pretokenizers", Json::array(), "has no ByteLevel");
  refused("/pre_tokenizer/pretokenizers/0",
          Json{{"type", "Split"}, {"behavior", "Isolate"}, {"pattern", {{"Regex", "a"}}}},
          "pretokenizers[0].behavior is \"Isolate\"; nearest: Isolated");
  refused("/pre_tokenizer/pretokenizers/0",
          Json{{"type", "Split"}, {"behavior", "Isolated"}, {"pattern", {{"Regex", "a("}}}},
          "pretokenizers[0].pattern: the pattern is not understood at byte 2");
  refused("/post_processor", Json{{"type", "BertProcessing"}}, "post_processor.type is");
  refused("/added_tokens/0/content", "", "added_tokens[0].content is empty");
  refused("/added_tokens/0/special", 1, "added_tokens[0].special must be true or false");
  EXPECT_THAT(Tokenizer::Parse("{\"a\": [").status().message(), HasSubstr("not JSON"));
  EXPECT_THAT(Tokenizer::Parse("[]").status().message(), HasSubstr("does not begin with"));
  EXPECT_THAT(Tokenizer::Parse("{\"model\": 1, \"model\": 2}").status().message(),
              HasSubstr("\"model\" is there twice"));
  EXPECT_THAT(Tokenizer::Parse(std::string(100000, '[')).status().message(), HasSubstr("JSON"));
  EXPECT_THAT(Tokenizer::Read("/no/such/folder").status().message(),
              HasSubstr("/no/such/folder/tokenizer.json"));
}

// A tokenizer of bytes and these added tokens, the first of which has the id 256.
Json ByteTokenizer(Json added) {
  Json vocab = Json::object();
  for (int b = 0; b < 256; ++b) {
    vocab[text::BytesToCharacters(std::string(1, static_cast<char>(b)))] = b;
  }
  for (size_t i = 0; i < added.size(); ++i) added[i]["id"] = 256 + i;
  const Json byte_level = {{"type", "ByteLevel"}, {"add_prefix_space", false}};
  return {{"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", Json::array()}}},
          {"pre_tokenizer", byte_level},
          {"decoder", byte_level},
          {"added_tokens", added}};
}

// As tokenizers 0.23 finds them: in the text as it stands, from the left, of several the longest.
TEST(Tokenizer, AddedTokensAreFoundBeforeWordsAndBlanksCount) {
  const Json words = {{{"content", "foobar"}, {"single_word", true}},
                      {{"content", "foo"}, {"single_word", true}},
                      {{"content", "oo"}},
                      {{"content", "bar"}}};
  const Json blanks = {{{"content", "<x>"}, {"rstrip", true}},
                       {{"content", " y"}},
                       {{"content", "\n"}},
                       {{"content", " z"}, {"lstrip", true}},
                       {{"content", "\n\n"}}};
  const struct {
    const Json& added;
    const char* text;
    std::vector<std::string> tokens;
  } cases[] = {// One that is no single word leaves nothing to the shorter ones in it.
               {words, "efoo foo", {"e", "f", "o", "o", " ", "foo"}},
               {words, "xfoox oo", {"x", "f", "o", "o", "x", " ", "oo"}},
               {words, "xfoobar", {"x", "f", "o", "o", "b", "a", "r"}},
               {words, "foobar bar", {"foobar", " ", "bar"}},
               // Blanks that one takes along may be those of the next.
               {blanks, "<x> y <x>\n", {"<x>", " y", " ", "<x>", "\n"}},
               {blanks, "<x>  y", {"<x>", " y"}},
               {blanks, "<x>\n\n\na", {"<x>", "\n\n", "\n", "a"}},
               {blanks, "<x>\n \nb", {"<x>", "\n", " ", "\n", "b"}},
               {blanks, "<x>  z", {"<x>", " z"}},
               {blanks, "<x>   ", {"<x>"}}};
  for (const auto& c : cases) {
    const Tokenizer t = ValueOrThrow(Tokenizer::Parse(ByteTokenizer(c.added).dump()));
    std::vector<std::string> tokens;
    for (const int64_t id : ValueOrThrow(t.Encode(c.text))) tokens.emplace_back(t.Bytes(id));
    EXPECT_EQ(tokens, c.tokens) << c.text;
  }
}

TEST(Tokenizer, ALongRunOfBlanksTakesNoSquareOfItsLength) {
  const Json breaks = Json::array({{{"content", "\n"}, {"rstrip", true}}});
  const Tokenizer t = ValueOrThrow(Tokenizer::Parse(ByteTokenizer(breaks).dump()));
  EXPECT_EQ(ValueOrThrow(t.Encode(std::string(1 << 17, '\n'))).size(), size_t{1} << 17);
}

TEST(Tokenizer, AnIdIsThatOfOneAddedToken) {
  Json json = ByteTokenizer({{{"content", "<x>"}}, {{"content", "<yy>"}}, {{"content", "<x>"}}});
  json["added_tokens"][2]["id"] = 256;  // said twice
  EXPECT_TRUE(Tokenizer::Parse(json.dump()).ok());
  json["added_tokens"][1]["id"] = 256;
  EXPECT_THAT(Tokenizer::Parse(json.dump()).status().message(),
              HasSubstr("\"<yy>\" and \"<x>\" have the same id 256"));
}

// transformers asks tokenizers for neither unless a call does.
TEST(Tokenizer, TheFileCutsAndPadsNothing) {
  Json json = ByteTokenizer(Json::array());
  json["truncation"] = {{"direction", "Right"}, {"max_length", 2}};
  json["padding"] = {{"strategy", {{"Fixed", 6}}}, {"pad_id", 0}};
  const Tokenizer t = ValueOrThrow(Tokenizer::Parse(json.dump()));
  EXPECT_THAT(ValueOrThrow(t.Encode("abc")), ::testing::ElementsAre('a', 'b', 'c'));
}

// The tokens of a text, by the tokenizer of a folder with these files.
std::vector<std::string> TokensOf(const Json& tokenizer, const Json& config, const Json& model,
                                  const char* text) {
  const testing::TempFolder folder;
  folder.Write("tokenizer.json", tokenizer.dump());
  if (!config.is_null()) folder.Write("tokenizer_config.json", config.dump());
  if (!model.is_null()) folder.Write("config.json", model.dump());
  const Tokenizer t = ValueOrThrow(Tokenizer::Read(folder.path()));
  std::vector<std::string> tokens;
  for (const int64_t id : ValueOrThrow(t.Encode(text))) tokens.emplace_back(t.Bytes(id));
  return tokens;
}

// As transformers 5.24 takes them: a special token is still the longest where it stands.
TEST(Tokenizer, TheConfigMakesSpecialTokensText) {
  const Json tokenizer = ByteTokenizer({{{"content", "<|x|>"}, {"special", true}, {"lstrip", true}},
                                        {{"content", "x|"}, {"normalized", false}},
                                        {{"content", "|>"}, {"normalized", true}},
                                        {{"content", "yy"}}});
  const std::vector<std::string> whole = {"a", "<|x|>", "x|"},
                                 split = {"a", " ", "<", "|", "x", "|>", "x|"};
  for (const char* name : {"PreTrainedTokenizerFast", "GPT2Tokenizer", "LlamaTokenizerFast"}) {
    const auto tokens = [&](Json config) {
      config["tokenizer_class"] = name;
      return TokensOf(tokenizer, config, nullptr, "a <|x|>x|");
    };
    EXPECT_EQ(tokens({{"split_special_tokens", true}}), split) << name;
    EXPECT_EQ(tokens({{"split_special_tokens", false}}), whole) << name;
    // The file says what frames a text.
    EXPECT_EQ(tokens({{"bos_token", "yy"}, {"add_bos_token", true}, {"add_eos_token", true}}),
              whole)
        << name;
  }
  EXPECT_EQ(TokensOf(tokenizer, nullptr, nullptr, "a <|x|>x|"), whole);
}

// As transformers 5.24, whose other classes go by tokenizer.json.
TEST(Tokenizer, TheConfigOfGpt2sClassSaysThePrefixSpace) {
  const std::vector<std::string> with = {" ", "a", "1", "2", "yy", " ", "3"},
                                 without = {"a", "1", "2", "yy", "3"};
  for (const bool in_file : {false, true}) {
    Json alone = ByteTokenizer({{{"content", "yy"}}}), digits = alone;
    alone["pre_tokenizer"]["add_prefix_space"] = in_file;
    digits["pre_tokenizer"] = {
        {"type", "Sequence"},
        {"pretokenizers",
         {{{"type", "Digits"}, {"individual_digits", true}}, alone["pre_tokenizer"]}}};
    const auto tokens = [&](const Json& config, const Json& model = nullptr) {
      return TokensOf(alone, config, model, "a12yy3");
    };
    for (const char* name :
         {"GPT2Tokenizer", "GPT2TokenizerFast", "CodeGenTokenizer", "GPTNeoXTokenizerFast"}) {
      const Json adds = {{"tokenizer_class", name}, {"add_prefix_space", true}},
                 adds_none = {{"tokenizer_class", name}};
      EXPECT_EQ(tokens(adds), with) << name;
      EXPECT_EQ(tokens(adds_none), without) << name;
      EXPECT_EQ(TokensOf(digits, adds, nullptr, "a12yy3"), with) << name;
      EXPECT_EQ(TokensOf(digits, adds_none, nullptr, "a12yy3"), without) << name;
    }
    EXPECT_EQ(tokens(nullptr, {{"model_type", "gpt2"}}), without);
    EXPECT_EQ(tokens({{"add_prefix_space", true}}, {{"tokenizer_class", "GPT2TokenizerFast"}}),
              with);
    for (const char* name : {"PreTrainedTokenizerFast", "LlamaTokenizerFast"}) {
      EXPECT_EQ(tokens({{"tokenizer_class", name}, {"add_prefix_space", !in_file}},
                       {{"model_type", "gpt2"}}),
                in_file ? with : without)
          << name;
    }
    EXPECT_EQ(tokens(nullptr), in_file ? with : without);
  }
  const testing::TempFolder folder;
  folder.Write("tokenizer.json", ByteTokenizer(Json::array()).dump());
  folder.Write("tokenizer_config.json", "{\"split_special_tokens\": 1}");
  EXPECT_THAT(Tokenizer::Read(folder.path()).status().message(),
              HasSubstr("tokenizer_config.json.split_special_tokens must be true or false"));
}

TEST(Tokenizer, APatternThatTriesTooMuchIsAnError) {
  Json json = ReadData("tokenizer_digits.json")["tokenizer"];
  json["pre_tokenizer"]["pretokenizers"][0] = {
      {"type", "Split"}, {"behavior", "Isolated"}, {"pattern", {{"Regex", "(x+x+)+[yz]"}}}};
  const Tokenizer t = ValueOrThrow(Tokenizer::Parse(json.dump()));
  EXPECT_EQ(t.Encode(std::string(60, 'x')).status().code(), absl::StatusCode::kResourceExhausted);
}

// The words that tokenizers 0.23 makes with these patterns, which PCRE2 reads otherwise.
TEST(Pattern, MeansWhatItMeansToOniguruma) {
  const struct {
    const char *pattern, *text;
    std::vector<std::string> words;
  } cases[] = {
      {R"(^b)", "ab\nbb", {"ab\n", "b", "b"}},
      {R"(a$)", "a\nba", {"a", "\nb", "a"}},
      {R"(.+)", "a\nb", {"a", "\n", "b"}},
      {R"((?m:.+))", "a\nb", {"a\nb"}},
      {R"(a\Z)", "a\na\n", {"a\n", "a", "\n"}},
      {R"(\Aa)", "aa\na", {"a", "a\na"}},
      {R"([a-z&&[^b-d]]+)", "abcdxy", {"a", "bcd", "xy"}},
      {R"([\p{L}&&[^\p{Han}]]+)",
       "ab\344\270\255c\343\200\201d",
       {"ab", "\344\270\255", "c", "\343\200\201", "d"}},
      {R"([^a-c&&b]+)", "abc", {"a", "b", "c"}},
      {R"(\p{Han}+)",
       "\344\270\255\343\200\201\346\226\207",
       {"\344\270\255", "\343\200\201", "\346\226\207"}},
      {R"(\h+)", "fgAx 1", {"f", "g", "A", "x ", "1"}},
      {R"([\h-]+)", "g-f", {"g", "-f"}},
      {R"(\H+)", "agga", {"a", "gg", "a"}},
      {R"(\s+)", "a\341\240\216b c\302\205d", {"a\341\240\216b", " ", "c", "\302\205", "d"}},
      {R"([^\s]+)", "a\341\240\216b c", {"a\341\240\216b", " ", "c"}},
      {R"([\S]+)", "a\341\240\216b c", {"a\341\240\216b", " ", "c"}},
      {R"(\w+)", "a\302\262_\342\200\277\314\201-", {"a\302\262_\342\200\277\314\201", "-"}},
      {R"([\w]+)", "a\302\262b", {"a", "\302\262", "b"}},
      {R"(\b)", "a\314\201 b", {"a\314\201", " ", "b"}},
      {R"(\R)", "a\r\n\013b", {"a", "\r\n", "\013", "b"}},
      {R"(x(?i)a|b)", "xA xB ab", {"xA", " ", "xB", " ab"}},
      {R"((?=[A-Z]))", "aBcD", {"a", "Bc", "D"}},
      {R"([a[bc]]+)", "xabc]", {"x", "abc", "]"}},
      {R"([[:punct:]]+)", "a$.b", {"a", "$.", "b"}},
      {R"([[:^alpha:]]+)", "a1b", {"a", "1", "b"}},
      {R"(\p{^L}+)", "a1b", {"a", "1", "b"}},
      {R"(\P{^L}+)", "1ab", {"1", "ab"}},
      {R"(a{,2})", "aaab", {"aa", "a", "b"}},
      {R"((?:a{1,2}+)b)", "aaab", {"aaab"}},
      {R"((?i:s)+)", "s\305\277Sx", {"s\305\277S", "x"}},
      {R"(\v)", "\n\013", {"\n", "\013"}},
      {R"(a{b)", "a{b}", {"a{b", "}"}},
      {R"(\u0062)", "abc", {"a", "b", "c"}},
      {R"(\D+)", "1ab\331\243", {"1", "ab", "\331\243"}}};
  for (const auto& c : cases) {
    const Json json = {
        {"type", "Sequence"},
        {"pretokenizers",
         {{{"type", "Split"}, {"behavior", "Isolated"}, {"pattern", {{"Regex", c.pattern}}}},
          {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}}}}};
    auto words =
        ValueOrThrow(ValueOrThrow(text::PreTokenizer::Read(json, "pre_tokenizer")).Words(c.text));
    for (std::string& word : words) word = text::CharactersToBytes(word);
    EXPECT_EQ(words, c.words) << c.pattern;
  }
}

// The empty string, which is found everywhere, as the empty pattern.
TEST(Pattern, NothingCutsEverywhere) {
  for (const char* kind : {"String", "Regex"}) {
    for (const char* behavior : {"Isolated", "Removed", "MergedWithNext"}) {
      Json json = ByteTokenizer(Json::array());
      json["pre_tokenizer"] = {
          {"type", "Sequence"},
          {"pretokenizers",
           {{{"type", "Split"}, {"behavior", behavior}, {"pattern", {{kind, ""}}}},
            {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}}}}};
      EXPECT_THAT(
          ValueOrThrow(
              ValueOrThrow(text::PreTokenizer::Read(json["pre_tokenizer"], "p")).Words("aab")),
          ::testing::ElementsAre("a", "a", "b"))
          << kind << " " << behavior;
    }
  }
}

TEST(Pattern, WhatWouldMeanSomethingElseIsNamed) {
  const std::pair<const char*, const char*> cases[] = {{R"(\X)", R"("\X")"},
                                                       {R"(a\K)", R"("\K")"},
                                                       {R"(\G)", R"("\G")"},
                                                       {R"(\Qa)", R"("\Q")"},
                                                       {"(?i)ss", "\"ss\" in any"},
                                                       {"(?i)[\\p{Lu}]", "by kind"},
                                                       {"(?x)a", "\"(?x\""},
                                                       {"(?s)a", "\"(?s\""},
                                                       {"a**", "quantifier of"},
                                                       {R"(\pL)", "\"\\p\" without"},
                                                       {"[a&&]", "behind \"&&\""},
                                                       {"(*UTF)a", "\"(*\""},
                                                       {"[[:x:]]", "\"[:x"},
                                                       {"a{2}?", "\"{n}?\""},
                                                       {R"([\w-.])", "\"-\""},
                                                       {R"(\p{Graph})", R"("\p{Graph}")"},
                                                       {R"([\p{^Print}])", R"("\p{^Print}")"}};
  for (const auto& [pattern, message] : cases) {
    const auto status = Regex::Compile(pattern).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << pattern;
    EXPECT_THAT(status.message(), HasSubstr(message)) << pattern;
  }
  for (const char* wrong : {"a)", "(a", "[a", "*a", "^*", "{2}", R"(\p{sc=Han})", R"(\u12)"}) {
    EXPECT_FALSE(Regex::Compile(wrong).ok()) << wrong;
  }
  EXPECT_FALSE(Regex::Compile(std::string(100000, '(')).ok());
  EXPECT_FALSE(Regex::Compile(std::string(100000, '[')).ok());
}

TEST(Pattern, ALongRunOfAnIntersectionFits) {
  const Regex regex = ValueOrThrow(Regex::Compile("[a-z&&[^b]]+"));
  const std::string text(200000, 'a');
  EXPECT_THAT(ValueOrThrow(regex.FindAll(text)),
              ::testing::ElementsAre(std::make_pair(size_t{0}, text.size())));
}

// A word, to Rust's \w, goes on over marks, connectors, joiners and circled letters alone.
TEST(Tokenizer, ASingleWordEndsWhereRustsDoes) {
  Json json = ReadData("tokenizer_gpt2.json")["tokenizer"];
  for (Json& token : json["added_tokens"]) {
    if (token["content"] == "word") token["content"] = "zqxj";  // what merges do not make
  }
  const Tokenizer t = ValueOrThrow(Tokenizer::Parse(json.dump()));
  const int64_t word = *t.Find("zqxj");
  const auto found = [&](const std::string& text) {
    const auto ids = ValueOrThrow(t.Encode(text, false));
    return std::find(ids.begin(), ids.end(), word) != ids.end();
  };
  for (const char* on : {"\u0301", "\u203f", "\u200d", "\u24b6", "\u0903", "\u0663", "_"}) {
    EXPECT_FALSE(found(absl::StrCat("zqxj", on))) << on;
  }
  for (const char* apart : {"\u00b2", "\u2460", "\u180e", "-"}) {
    EXPECT_TRUE(found(absl::StrCat("zqxj", apart))) << apart;
  }
}

TEST(Utf8, FindsWhatIsNoCharacter) {
  for (const char* bad : {"\x80", "\xC0\x80", "\xE0\x80\x80", "\xED\xA0\x80", "\xF4\x90\x80\x80",
                          "\xF5\x80\x80\x80", "\xE2\x82", "\xFF"}) {
    EXPECT_EQ(FirstBadUtf8(absl::StrCat("ok", bad)), 2u) << bad;
  }
  EXPECT_EQ(FirstBadUtf8("\xED\x9F\xBF\xEE\x80\x80\xF4\x8F\xBF\xBF\xC2\x80"),
            absl::string_view::npos);
  EXPECT_EQ(UnfinishedUtf8("a\xE2\x82"), 2u);
  EXPECT_EQ(UnfinishedUtf8("a\xE2\x82\xAC"), 0u);
  EXPECT_EQ(UnfinishedUtf8("a\xED\xA0"), 0u);  // can become nothing
  EXPECT_EQ(Utf8Lossy("a\xE2\x82z\xED\xA0"), "a\xEF\xBF\xBDz\xEF\xBF\xBD\xEF\xBF\xBD");
}

// The chat template of a folder with these files.
absl::StatusOr<ChatTemplate> ReadTemplate(
    const std::vector<std::pair<std::string, std::string>>& files) {
  const testing::TempFolder folder;
  for (const auto& [file, text] : files) folder.Write(file, text);
  return ChatTemplate::Read(folder.path());
}

TEST(ChatTemplate, RendersAsJinja) {
  const Json data = ReadData("chat.json");
  const Json config = {{"bos_token", "<s>"}, {"eos_token", {{"content", "</s>"}}}};
  int texts = 0, errors = 0;
  for (const Json& c : data["cases"]) {
    const std::string name = c["name"];
    const ChatTemplate chat =
        ValueOrThrow(ReadTemplate({{"tokenizer_config.json", config.dump()},
                                   {"chat_template.jinja", c["template"].get<std::string>()}}));
    std::vector<ChatMessage> messages;
    for (const Json& m : c["messages"]) messages.push_back({m["role"], m["content"]});
    const auto text = chat.Render(messages, c["answer"]);
    if (c.contains("text")) {
      ++texts;
      ASSERT_TRUE(text.ok()) << name << ": " << text.status();
      EXPECT_EQ(*text, c["text"].get<std::string>()) << name;
    } else {
      ++errors;
      EXPECT_FALSE(text.ok()) << name << ": " << *text;
      // The template's own words; Jinja's are others than ours.
      const std::string said = c["raised"].get<bool>() ? c["error"].get<std::string>() : "";
      EXPECT_THAT(text.status().message(), HasSubstr(said)) << name;
    }
  }
  EXPECT_GE(texts, 80);
  EXPECT_GE(errors, 40);
}

const std::vector<ChatMessage> kHi = {ChatMessage{"user", "hi"}};

TEST(ChatTemplate, IsFoundInTheConfigAndWhatIsNotServedIsNamed) {
  const auto read = [](const std::string& source) {
    return ReadTemplate({{"tokenizer_config.json", Json{{"chat_template", source}}.dump()}});
  };
  const ChatTemplate chat = ValueOrThrow(read("{{ messages[0].content }}!"));
  EXPECT_EQ(*chat.Render(kHi), "hi!");
  const auto message = [&](const std::string& source) {
    const auto parsed = read(source);
    const auto text = parsed.ok() ? parsed->Render(kHi) : parsed.status();
    return std::string(text.status().message());
  };
  EXPECT_THAT(message("{% macro f() %}{% endmacro %}"),
              HasSubstr("{% macro f ( ) %} are not served"));
  EXPECT_THAT(message("{% for a, b in messages %}{% endfor %}"),
              HasSubstr("{% for a , b in %} are not served"));
  EXPECT_THAT(message("{% for k in messages[0] %}{% endfor %}"),
              HasSubstr("\"for k\" over a mapping are not served"));
  EXPECT_THAT(message("{% for c in 'ab' %}{% endfor %}"),
              HasSubstr("\"for c\" over a text are not served"));
  EXPECT_THAT(message("{% for c in 5 %}{% endfor %}"), HasSubstr("goes over number, not a list"));
  // What is not come to is not asked for.
  EXPECT_EQ(message("{% if tools %}{% for a, b in tools | items %}{{ a | tojson(indent=4) "
                    "}}{% endfor %}{{ range(3) }}{% endif %}"),
            "");
  EXPECT_THAT(message("{{ range(3) }}"), HasSubstr("the function \"range\""));
  EXPECT_THAT(message("{{ range }}"), HasSubstr("the function \"range\" as a value"));
  EXPECT_THAT(message("{{ messages | tojson }}"), HasSubstr("tojson"));
  // A method that is not called is there in Python.
  EXPECT_THAT(message("{% if messages[0].content.strip %}x{% endif %}"),
              HasSubstr("\"strip\" of string"));
  EXPECT_THAT(message("{{ messages.count is defined }}"), HasSubstr("\"count\" of array"));
  EXPECT_EQ(message("{{ messages[0].count }}"), "");
  EXPECT_THAT(message("{% if x %}"), HasSubstr("\"endif\" is missing"));
  EXPECT_THAT(message("{{ 'a }}"), HasSubstr("is not closed"));
  EXPECT_THAT(message("{{ 1 + }}"), HasSubstr("ends too early"));
  EXPECT_THAT(message("{{ 1 +}}"), HasSubstr("ends too early"));
  EXPECT_THAT(message("{% if x %}{% endif y %}"), HasSubstr("\"endif\" is followed by \"y\""));
  EXPECT_THAT(message("{% if x %}{% else y %}{% endif %}"), HasSubstr("\"else\" is followed by"));
  EXPECT_THAT(message("{% for m in messages %}{% endfor m %}"),
              HasSubstr("\"endfor\" is followed by \"m\""));
  EXPECT_EQ(message("{% if x %}{% else: %}b{% endif %}"), "");
  EXPECT_THAT(message("{{ 1 + 'a' }}"), HasSubstr("number + string has no value"));
  EXPECT_THAT(message(absl::StrCat("{{ ", std::string(500, '('), "1 }}")), HasSubstr("too deep"));
  EXPECT_THAT(ReadTemplate({{"tokenizer_config.json", "{}"}}).status().message(),
              HasSubstr("this is no chat model"));
  const ChatTemplate several =
      ValueOrThrow(ReadTemplate({{"tokenizer_config.json",
                                  R"({"chat_template": [{"name": "tools", "template": "t"},
                                           {"name": "default", "template": "d"}]})"}}));
  EXPECT_EQ(*several.Render({}), "d");
}

// As transformers 5.24 finds them, in files of which each may be missing.
TEST(ChatTemplate, SpecialTokensAreThoseOfTransformers) {
  const Json token = {{"content", "<img>"}};
  const Json all = {
      {"tokenizer_class", "PreTrainedTokenizerFast"}, {"bos_token", "<s>"}, {"eos_token", "</s>"}};
  const auto with = [&](const Json& more) {
    Json config = all;
    config.update(more);
    return config;
  };
  const Json list = {{"added_tokens_decoder", Json::object()}},
             map = {{"bos_token", "<b>"}, {"pad_token", {{"content", "<pad>"}}}},
             gpt2 = {{"tokenizer_class", "GPT2Tokenizer"}};
  const std::string end = "<|endoftext|>";
  const struct {
    Json model, config, map;  // null: there is no such file
    std::string text;
  } cases[] = {
      {nullptr, nullptr, nullptr, "||||"},
      {nullptr, nullptr, map, "<b>|||<pad>|"},
      {nullptr, all, map, "<b>|</s>||<pad>|"},
      {nullptr, all, {{"bos_token", nullptr}}, "|</s>|||"},
      {nullptr, with(list), map, "<s>|</s>|||"},  // a config that lists all tokens
      // Those of the classes, where no file names them.
      {nullptr, gpt2, nullptr, end + "|" + end + "|" + end + "||"},
      {nullptr,
       {{"tokenizer_class", "Qwen2TokenizerFast"}},
       nullptr,
       "|" + end + "|" + end + "|" + end + "|"},
      {nullptr,
       {{"tokenizer_class", "GPT2TokenizerFast"}, {"bos_token", nullptr}},
       {{"eos_token", "</s>"}},
       "|</s>|" + end + "||"},
      {{{"model_type", "gpt2"}}, nullptr, {{"bos_token", "<s>"}}, "<s>|" + end + "|" + end + "||"},
      {{{"model_type", "gpt2"}}, all, nullptr, "<s>|</s>|||"},
      {{{"tokenizer_class", "GPT2Tokenizer"}},
       Json::object(),
       nullptr,
       end + "|" + end + "|" + end + "||"},
      // What else is called a token.
      {nullptr, with({{"max_token", 5}, {"add_bos_token", true}}), nullptr, "<s>|</s>|||"},
      {nullptr, with({{"image_token", token}}), {{"image_token", "<i>"}}, "<s>|</s>|||<img>"},
      {nullptr, all, {{"image_token", "<i>"}}, "<s>|</s>|||<i>"},
      {nullptr, with({{"extra_special_tokens", {{"image_token", "<img>"}}}}), nullptr,
       "<s>|</s>|||<img>"},
      {nullptr, with({{"model_specific_special_tokens", {{"image_token", token}}}}), nullptr,
       "<s>|</s>|||<img>"},
      {nullptr,
       with({{"model_specific_special_tokens", {{"image_token", token}}},
             {"extra_special_tokens", {{"bos_token", "<x>"}}}}),
       nullptr, "<x>|</s>|||"},
      {nullptr,
       with({{"extra_special_tokens", Json::array({"<img>"})}}),
       {{"extra_special_tokens", {{"image_token", "<i>"}}}},
       "<s>|</s>|||<i>"}};
  for (const auto& c : cases) {
    std::vector<std::pair<std::string, std::string>> files = {
        {"chat_template.jinja",
         "{{ bos_token }}|{{ eos_token }}|{{ unk_token }}|{{ pad_token }}|{{ image_token }}"}};
    const std::string said = Json{c.model, c.config, c.map}.dump();
    if (!c.model.is_null()) files.emplace_back("config.json", c.model.dump());
    if (!c.config.is_null()) files.emplace_back("tokenizer_config.json", c.config.dump());
    if (!c.map.is_null()) files.emplace_back("special_tokens_map.json", c.map.dump());
    const auto chat = ReadTemplate(files);
    ASSERT_TRUE(chat.ok()) << said << ": " << chat.status();
    EXPECT_EQ(*chat->Render(kHi), c.text) << said;
  }
  for (const Json& bad : {Json{{"bos_token", 5}}, Json{{"extra_special_tokens", {{"x", 5}}}}}) {
    const auto chat =
        ReadTemplate({{"chat_template.jinja", ""}, {"special_tokens_map.json", bad.dump()}});
    EXPECT_THAT(chat.status().message(), HasSubstr("must be a string, is the number 5"));
  }
}

// As Jinja: what "else" sets is its own, and `loop` there that of the loop around.
TEST(ChatTemplate, NamesThatElseOfALoopSetsEndWithIt) {
  const auto render = [](const std::string& source) {
    return *ValueOrThrow(text::Template::Parse(source)).Render(Json::object());
  };
  EXPECT_EQ(render("{% for i in [] %}{% else %}{% set n = 1 %}{% endfor %}{{ n }}"), "");
  EXPECT_EQ(render("{% set n = 0 %}{% for i in [] %}{% else %}{% set n = 1 %}{{ n }}{% endfor %}"
                   "{{ n }}"),
            "10");
  EXPECT_EQ(render("{% for a in [1, 2] %}{% for i in [] %}{% else %}{% set a = 9 %}"
                   "{{ loop.index }}{{ a }}{% endfor %}{{ a }}{% endfor %}"),
            "191292");
}

// As Jinja renders them, with trim_blocks and lstrip_blocks.
TEST(ChatTemplate, APlusKeepsBlanksAndLineBreaks) {
  const auto render = [](const std::string& source) {
    return *ValueOrThrow(text::Template::Parse(source)).Render(Json::object());
  };
  EXPECT_EQ(render("{%+ if true %} a{% endif +%}\nb"), " a\nb");
  EXPECT_EQ(render("  {%+ if true +%}\n  {% endif %}\nb"), "  \nb");
  EXPECT_EQ(render("{# c +#}\n{# c #}\nb"), "\nb");
  EXPECT_EQ(render("{% set x = 1 +%}  {% set y = 2 %}\n{{+ x }}"), "  1");
}

// A minus, and a block at the start of a line, take Python's white space along.
TEST(ChatTemplate, BlanksAreThoseOfPython) {
  const auto render = [](const std::string& source) {
    return *ValueOrThrow(text::Template::Parse(source)).Render(Json::object());
  };
  EXPECT_EQ(render("a\u00a0\u3000{{- 'b' -}}\u0085\u2028\x1c c"), "abc");
  EXPECT_EQ(render("a\u180e\u200b{{- 'b' -}}\u200b"), "a\u180e\u200bb\u200b");
  EXPECT_EQ(render("a\n\u00a0\t\f{% if 1 %}b{% endif %}"), "a\nb");
  EXPECT_EQ(render("\u2003{# c #}x\u2003{% set y = 1 %}"), "x\u2003");
  EXPECT_EQ(render("{{\u00a0'b'\x1f}}"), "b");
  // Bytes of such characters that begin none are no blanks; and parsing ends.
  const absl::StatusOr<text::Template> stray = text::Template::Parse("{{ \xa0 }}");
  EXPECT_FALSE(stray.ok() && stray->Render(Json::object()).ok());
  EXPECT_EQ(LeadingSpace("\x85 a"), 0u);
  EXPECT_EQ(TrailingSpace("a \xa0"), 0u);
}

// What transformers gives every template, used or not: no tools, no documents, its functions.
TEST(ChatTemplate, HasWhatHuggingFaceGivesEveryTemplate) {
  const auto render = [](const std::string& source) {
    return ValueOrThrow(ValueOrThrow(ReadTemplate({{"tokenizer_config.json",
                                                    Json{{"chat_template", source}}.dump()}}))
                            .Render(kHi));
  };
  EXPECT_EQ(render("{% if tools is defined and tools is none %}none{% endif %}"), "none");
  EXPECT_EQ(render("{% if documents is not none %}some{% else %}none{% endif %}"), "none");
  EXPECT_EQ(render("{% if strftime_now is defined %}{{ strftime_now('%d %b %%') | length > 5 }}"
                   "{% else %}26 Jul 2024{% endif %}"),
            "True");
  EXPECT_EQ(render("{% if raise_exception is undefined or range is not defined %}no{% endif %}"),
            "");
  EXPECT_EQ(render("{% set range = 3 %}{{ range }}"), "3");
  const auto now = [] { return absl::FormatTime("%Y-%m", absl::Now(), absl::LocalTimeZone()); };
  const std::string before = now(), text = render("{{ strftime_now('%Y-%m') }}"), after = now();
  EXPECT_TRUE(text == before || text == after) << text;
}

// Whoever wrote the template: it costs bounded time, memory and stack, and gives no number that
// Python would not.
TEST(ChatTemplate, AHostileOneIsBounded) {
  const auto render = [](const std::string& source) -> absl::StatusOr<std::string> {
    DT_ASSIGN_OR_RETURN(const text::Template parsed, text::Template::Parse(source));
    Json messages = Json::array();
    for (int i = 0; i < 40; ++i) messages.push_back({{"role", "user"}, {"content", "hi"}});
    return parsed.Render({{"messages", messages}});
  };
  const auto times = [](int n, absl::string_view piece) {
    std::string all;
    for (int i = 0; i < n; ++i) absl::StrAppend(&all, piece);
    return all;
  };
  EXPECT_EQ(*render("{{ 0 + " + times(200000, "-") + "1 }}"), "1");
  EXPECT_EQ(*render("{{ " + times(200001, "not ") + "1 }}"), "False");
  EXPECT_EQ(*render("{{ 0" + times(100000, " + 1") + " }}"), "100000");
  EXPECT_EQ(*render("{{ messages" + times(100000, "[1:2]") + "|length }}"), "0");
  EXPECT_EQ(*render("{{ 5 % 9223372036854775807 }}"), "5");
  EXPECT_EQ(*render("{{ messages[9223372036854775807] is defined }}"), "False");
  EXPECT_EQ(*render("{{ messages[-9223372036854775807:]|length }}"), "40");
  const auto bounded = [&](const std::string& source) {
    const auto text = render(source);
    EXPECT_EQ(text.status().code(), absl::StatusCode::kResourceExhausted) << source.substr(0, 60);
  };
  bounded("{% set x = 'aaaaaaaaaaaaaaaa' %}" + times(40, "{% set x = x ~ x %}"));
  bounded("{% set x = messages %}" + times(40, "{% set x = x + x %}"));
  bounded(times(8, "{% for a in messages %}") + "x" + times(8, "{% endfor %}"));
  bounded("{{ " + times(100000, "(") + "1 }}");
  bounded("{{ " + times(100000, "[") + "1 }}");
  bounded("{{ 1" + times(100000, " if 1 else 1") + " }}");
  bounded(times(100000, "{% if 1 %}"));
  bounded("{% if 1 %}" + times(100000, "{% elif 1 %}") + "{% endif %}");
  EXPECT_EQ(render("{{ 9223372036854775807 + 1 }}").status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(render("{% set x = [1] %}{% set x = [x] %}").status().code(),
            absl::StatusCode::kUnimplemented);
  // What Python and this library would write differently is no text here.
  for (const char* refused : {"{{ messages }}", "{{ 'é'|upper }}", "{{ loop }}{{ loop.x }}",
                              "{% for m in messages %}{{ loop.cycle('a', 'b') }}{% endfor %}",
                              "{% for m in messages %}{{ loop.depth }}{% endfor %}"}) {
    EXPECT_FALSE(render(refused).ok() && *render(refused) != "") << refused;
  }
}

}  // namespace
}  // namespace dtensor::text_test
