// A folder that goes when the test ends.
#pragma once

#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>

namespace dtensor::testing {

class TempFolder {
 public:
  TempFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "dtensor_test.XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("no folder can be made: " + name);
    path_ = name;
  }
  ~TempFolder() {
    std::error_code ignored;  // of files that another process takes away meanwhile
    std::filesystem::remove_all(path_, ignored);
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  std::string path() const { return path_.string(); }
  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }
  std::string Path(const std::string& name) const { return (path_ / name).string(); }
  // Writes a file of this name and returns its path.
  std::string Write(const std::string& name, const std::string& text) const {
    std::ofstream(path_ / name, std::ios::binary) << text;
    return Path(name);
  }
  std::string Read(const std::string& name) const {
    std::ifstream file(path_ / name, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

 private:
  std::filesystem::path path_;
};

// Enough text for a byte-level model to learn from.
inline std::string LearnableText(int lines = 400) {
  std::string text;
  for (int i = 0; i < lines; ++i) {
    text += "line " + std::to_string(i * i) + " of a text that can be learnt\n";
  }
  return text;
}

}  // namespace dtensor::testing
