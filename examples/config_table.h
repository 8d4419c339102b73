// A program's settings: named "section.key", read from a TOML file and from the command line.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace dtensor {

// Where each setting goes; what stands there before is its default. The fields must outlive it.
class ConfigTable {
 public:
  // Whole numbers from `least` to `most`; numbers likewise, infinite only where `most` is; words,
  // one of `choices` if there are any; true or false.
  void Add(std::string key, int64_t* value, int64_t least, int64_t most);
  void Add(std::string key, double* value, double least, double most);
  void Add(std::string key, std::string* value, std::vector<std::string> choices = {});
  void Add(std::string key, bool* value);

  // Errors name the file or argument, the key, what was wrong and what would be right: NotFound for
  // a file that cannot be read; InvalidArgument for one that is no TOML (with the line), unknown
  // sections and keys (with the nearest), values of another type, out of range or no choice.
  absl::Status ReadToml(const std::string& path);
  absl::Status Set(absl::string_view key, absl::string_view text, const std::string& from);
  // [CONFIG.toml] [--section.key=value | --section.key value]...
  absl::Status ReadArguments(int argc, char** argv);

  // Settings whose key begins with `prefix` that were given, in a file or an argument; or in an
  // argument alone.
  std::vector<std::string> Given(absl::string_view prefix, bool in_argument = false) const;
  // All settings as TOML that reads back as the same values, but for those whose key begins with
  // one of `without`.
  std::string ToString(const std::vector<std::string>& without = {}) const;
  // The same by key.
  std::map<std::string, std::string> Values(const std::vector<std::string>& without = {}) const;

 private:
  struct Field {
    std::string key;
    std::variant<int64_t*, double*, std::string*, bool*> value;
    double least = 0, most = 0;
    std::vector<std::string> choices = {};
    bool given = false, in_argument = false;
    std::string Text() const;  // the value as TOML has it
  };
  absl::Status Find(absl::string_view key, const std::string& from, Field** field);
  static absl::Status Check(const Field& field, const std::string& from);
  friend struct TomlReader;

  std::vector<Field> fields_;
};

}  // namespace dtensor
