// Files are read within bounds and replaced whole or not at all.
#include "dtensor/tensor/file.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>

#include "dtensor/tensor/status.h"
#include "tests/common/temp_folder.h"

namespace dtensor::file_test {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

class FileTest : public ::testing::Test {
 protected:
  std::string Path(const std::string& name) const { return folder_.Path(name); }
  int64_t Entries() const {
    return std::distance(fs::directory_iterator(folder_.path()), fs::directory_iterator());
  }
  const testing::TempFolder folder_;
};

TEST_F(FileTest, ReplacesAndKeepsModeAndLink) {
  ASSERT_TRUE(WriteFile(Path("a"), "first").ok());
  EXPECT_EQ(*ReadFile(Path("a")), "first");
  ASSERT_EQ(chmod(Path("a").c_str(), 0640), 0);
  fs::create_symlink("a", Path("link"));
  ASSERT_TRUE(WriteFile(Path("link"), std::string("se\0cond", 7)).ok());
  EXPECT_EQ(*ReadFile(Path("a")), std::string("se\0cond", 7));
  EXPECT_TRUE(fs::is_symlink(Path("link")));
  struct stat info;
  ASSERT_EQ(stat(Path("a").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0640u);
  const mode_t old = umask(027);
  ASSERT_TRUE(WriteFile(Path("fresh"), "").ok());
  umask(old);
  ASSERT_EQ(stat(Path("fresh").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0640u);  // as open() makes them, not as mkstemp does
  EXPECT_EQ(Entries(), 3);
}

TEST_F(FileTest, ALinkToWhatDoesNotExistStaysOne) {
  fs::create_symlink("there", Path("link"));
  ASSERT_TRUE(WriteFile(Path("link"), "text").ok());
  EXPECT_TRUE(fs::is_symlink(Path("link")));
  EXPECT_EQ(*ReadFile(Path("there")), "text");
  fs::create_symlink("none/there", Path("nowhere"));
  EXPECT_FALSE(CheckWritable(Path("nowhere")).ok());
  fs::create_symlink("circle", Path("circle"));
  EXPECT_FALSE(ReadFile(Path("circle")).ok());
}

TEST_F(FileTest, TheLongestNameIsNotTooLong) {
  const std::string name = Path(std::string(255, 'n'));
  ASSERT_TRUE(WriteFile(name, "text").ok());
  EXPECT_EQ(*ReadFile(name), "text");
  EXPECT_EQ(Entries(), 1);
}

// A program's output goes on in the file that it is redirected to.
TEST_F(FileTest, WhatIsOpenIsWrittenToAndNotReplaced) {
  const int file = open(Path("out").c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
  ASSERT_GE(file, 0);
  const std::string name = "/dev/fd/" + std::to_string(file);
  ASSERT_EQ(write(file, "before ", 7), 7);
  EXPECT_TRUE(CheckWritable(name).ok());
  EXPECT_TRUE(WriteFile(name, "text ").ok());
  ASSERT_EQ(write(file, "after", 5), 5);
  close(file);
  EXPECT_EQ(*ReadFile(Path("out")), "before text after");
  EXPECT_FALSE(CheckWritable(name).ok());
  EXPECT_FALSE(WriteFile(name, "text").ok());
}

// A write that fails in the middle: the old file is whole, and nothing is left beside it.
TEST_F(FileTest, AFullDiskLeavesTheOldFile) {
  ASSERT_TRUE(WriteFile(Path("a"), "old").ok());
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small = {1000, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const absl::Status status = WriteFile(Path("a"), std::string(5000, 'x'));
  const absl::Status fresh = WriteFile(Path("b"), std::string(5000, 'x'));
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr(Path("a")), HasSubstr("cannot be written: File too large")));
  EXPECT_FALSE(fresh.ok());
  EXPECT_EQ(*ReadFile(Path("a")), "old");
  EXPECT_EQ(Entries(), 1);
}

TEST_F(FileTest, WritesToDevicesDirectly) {
  EXPECT_TRUE(WriteFile("/dev/null", "text").ok());
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
  EXPECT_THAT(std::string(WriteFile("/dev/full", "text").message()), HasSubstr("No space left"));
}

TEST_F(FileTest, CheckWritableChangesNothing) {
  ASSERT_TRUE(WriteFile(Path("a"), "old").ok());
  const auto written = fs::last_write_time(Path("a"));
  EXPECT_TRUE(CheckWritable(Path("a")).ok());
  EXPECT_TRUE(CheckWritable(Path("b")).ok());
  EXPECT_EQ(fs::last_write_time(Path("a")), written);
  EXPECT_EQ(*ReadFile(Path("a")), "old");
  EXPECT_EQ(Entries(), 1);
  for (const std::string& bad :
       {Path("none/b"), folder_.path(), Path("folder/"), Path("a/b"), std::string("")}) {
    EXPECT_EQ(CheckWritable(bad).code(), absl::StatusCode::kUnavailable) << bad;
    EXPECT_EQ(WriteFile(bad, "x").code(), absl::StatusCode::kUnavailable) << bad;
  }
}

TEST_F(FileTest, ReadsOnlyWhatEnds) {
  ASSERT_EQ(mkfifo(Path("pipe").c_str(), 0600), 0);
  for (const std::string& bad :
       {Path("none"), folder_.path(), Path("pipe"), std::string("/dev/zero")}) {
    const absl::Status status = ReadFile(bad).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kNotFound) << bad;
    EXPECT_THAT(std::string(status.message()), HasSubstr(bad + " cannot be read: ")) << bad;
  }
  ASSERT_TRUE(WriteFile(Path("a"), std::string(200000, 'x')).ok());
  EXPECT_EQ(ReadFile(Path("a"), 200000)->size(), 200000u);
  EXPECT_THAT(std::string(ReadFile(Path("a"), 199999).status().message()),
              HasSubstr("has more than 199999 bytes"));
}

TEST_F(FileTest, SameFileByAnyName) {
  ASSERT_TRUE(WriteFile(Path("a"), "").ok());
  fs::create_symlink("a", Path("link"));
  EXPECT_TRUE(SameFile(Path("a"), Path("./link")));
  EXPECT_TRUE(SameFile(Path("new"), Path("x/../new")));
  EXPECT_TRUE(SameFile(Path("new"), Path("new/")));
  EXPECT_FALSE(SameFile(Path("a"), Path("b")));
  EXPECT_TRUE(SameFile("dtensor_new_file", "./dtensor_new_file"));  // neither is there
}

}  // namespace
}  // namespace dtensor::file_test
