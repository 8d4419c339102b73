// Headers and configs of any bytes: refused by name, or read within bounds. DT_THOROUGH=1 tries
// more.
#include <gmock/gmock.h>

#include <random>

#include "tests/common/thin.h"
#include "tests/parallel/hf_support.h"

namespace dtensor {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using testing::HfFolder;
using testing::Scratch;
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
  const Scratch scratch;
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

}  // namespace
}  // namespace dtensor
