// Settings of any bytes: refused by name, or what is printed reads back as the same.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <random>

#include "absl/strings/str_cat.h"
#include "examples/config_table.h"
#include "tests/common/thin.h"

namespace dtensor::settings_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

struct Fields {
  int64_t whole = 3;
  double number = 0.5, open = std::numeric_limits<double>::infinity();
  std::string word = "a", text;
  bool flag = true;
  bool operator==(const Fields&) const = default;
};

ConfigTable TableOf(Fields* f) {
  ConfigTable t;
  t.Add("one.whole", &f->whole, -5, int64_t{1} << 40);
  t.Add("one.number", &f->number, -1e300, 1e300);
  t.Add("one.open", &f->open, 0, std::numeric_limits<double>::infinity());
  t.Add("two.word", &f->word, {"a", "b"});
  t.Add("two.text", &f->text);
  t.Add("two.flag", &f->flag);
  return t;
}

class Settings : public ::testing::Test {
 protected:
  ~Settings() override { std::filesystem::remove(path_); }
  absl::Status Read(const std::string& toml, Fields* f) {
    std::ofstream(path_, std::ios::binary | std::ios::trunc) << toml;
    return TableOf(f).ReadToml(path_);
  }
  const std::string path_ =
      (std::filesystem::temp_directory_path() / absl::StrCat("dtensor_settings_", getpid()))
          .string();
};

TEST_F(Settings, WhatIsPrintedReadsBackAsTheSame) {
  std::mt19937_64 random(5);
  for (int i = 0; i < 300; ++i) {
    Fields f;
    f.whole = static_cast<int64_t>(random() >> 25);
    f.number = std::ldexp(static_cast<double>(static_cast<int64_t>(random())),
                          static_cast<int>(random() % 400) - 200);
    f.open = i % 3 == 0 ? f.open : std::abs(f.number);
    f.word = i % 2 == 0 ? "a" : "b";
    f.flag = i % 5 == 0;
    for (int k = 0; k < 8; ++k) f.text += static_cast<char>(1 + random() % 127);
    Fields again;
    const std::string printed = TableOf(&f).ToString();
    const absl::Status status = Read(printed, &again);
    ASSERT_TRUE(status.ok()) << status << printed;
    EXPECT_TRUE(again == f) << printed;
  }
}

// Also where no double is the whole number.
TEST_F(Settings, NumbersMayBeWhole) {
  for (const int64_t whole :
       {int64_t{0}, int64_t{3}, (int64_t{1} << 53) + 1, std::numeric_limits<int64_t>::max()}) {
    Fields f;
    ASSERT_TRUE(Read(absl::StrCat("[one]\nnumber = ", whole, "\n"), &f).ok());
    EXPECT_EQ(f.number, static_cast<double>(whole));
  }
}

TEST_F(Settings, WhatWasGivenIsKnownAndPartsCanBeLeftOut) {
  Fields f;
  ConfigTable t = TableOf(&f);
  ASSERT_TRUE(t.Set("one.whole", "7", "here").ok());
  ASSERT_TRUE(t.Set("two.flag", "false", "here").ok());
  EXPECT_THAT(t.Given("one."), ElementsAre("one.whole"));
  EXPECT_THAT(t.Given(""), ElementsAre("one.whole", "two.flag"));
  EXPECT_EQ(t.ToString({"two.", "one.number"}), "[one]\nwhole = 7\nopen = inf\n");
  EXPECT_EQ(t.Values({"one."}).at("two.word"), "\"a\"");
}

TEST_F(Settings, FilesOfAnyBytes) {
  const std::string good =
      "[one]\nwhole = 4\nnumber = 1.5e3 # here\nopen = inf\n\n[two]\n"
      "word = \"b\"\ntext = '''x'''\nflag = false\n";
  static const char* const kPieces[] = {"[",  "]", "[[",   "=",   "\"", "'''", "{",
                                        "}",  ",", "nan",  "-",   "#",  "\\u", "1e999",
                                        "\n", ".", "\xff", "one", "00", "_",   "2001-01-01"};
  std::mt19937_64 random(3);
  int read = 0;
  const int runs = testing::Thorough() ? 200'000 : 3'000;
  for (int i = 0; i < runs; ++i) {
    std::string bytes = good;
    for (size_t k = 1 + random() % 3; k > 0; --k) {
      const size_t at = random() % bytes.size();
      if (random() % 3 == 0) {
        bytes[at] = static_cast<char>(random());
      } else if (random() % 2 == 0) {
        bytes.insert(at, kPieces[random() % std::size(kPieces)]);
      } else {
        bytes.erase(at, 1 + random() % 4);
      }
      if (bytes.empty()) bytes = "x";
    }
    Fields f;
    const absl::Status status = Read(bytes, &f);
    if (!status.ok()) {
      EXPECT_THAT(std::string(status.message()), HasSubstr(path_)) << bytes;
      continue;
    }
    ++read;
    EXPECT_TRUE(f.whole >= -5 && std::isfinite(f.number) && f.open >= 0);
    EXPECT_TRUE(f.word == "a" || f.word == "b");
  }
  EXPECT_GT(read, runs / 50);
  // Nested without end.
  for (const char* piece : {"[", "{a=", "a.", "[one."}) {
    std::string deep = "x = ";
    for (int i = 0; i < 100'000; ++i) deep += piece;
    Fields f;
    EXPECT_FALSE(Read(deep, &f).ok());
  }
}

}  // namespace
}  // namespace dtensor::settings_test
