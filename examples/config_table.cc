#include "examples/config_table.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <exception>
#include <iterator>

// It takes seconds to compile, so it is included here alone.
#define TOML_EXCEPTIONS 0
// Version 3.3 asserts of the first character of a key, or with NDEBUG has the compiler assume, what
// a malformed file need not hold, and refuses the file right after: so it does neither.
#pragma push_macro("NDEBUG")
#undef NDEBUG
#define TOML_ASSERT(expr) static_assert(true)
#include <toml++/toml.h>
#pragma pop_macro("NDEBUG")

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "dtensor/names.h"
#include "dtensor/tensor/file.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

absl::Status Bad(const std::string& from, const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat(from, ": ", what));
}

// A basic string of TOML.
std::string Quoted(absl::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    const auto code = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += {'\\', c};
    } else if (code < 0x20 || code == 0x7F) {
      absl::StrAppend(&out, "\\u", absl::Hex(code, absl::kZeroPad4));
    } else {
      out += c;
    }
  }
  return out + "\"";
}

struct KindName {
  std::string operator()(int64_t*) const { return "a whole number"; }
  std::string operator()(double*) const { return "a number"; }
  std::string operator()(std::string*) const { return "a text"; }
  std::string operator()(bool*) const { return "true or false"; }
};

// The fewest digits that read back as the same number; one with a fraction keeps looking like one.
std::string Number(double value) {
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  char digits[64];
  const std::string text(digits, std::to_chars(digits, std::end(digits), value).ptr);
  return text.find_first_of(".e") == std::string::npos ? text + ".0" : text;
}

bool BeginsWithOneOf(absl::string_view key, const std::vector<std::string>& prefixes) {
  return absl::c_any_of(prefixes, [&](const std::string& p) { return absl::StartsWith(key, p); });
}

}  // namespace

struct TomlReader {
  ConfigTable& table;
  const std::string& path;

  absl::Status Read(const toml::table& node, const std::string& prefix) const {
    for (const auto& [name, value] : node) {
      const std::string key = prefix.empty() ? std::string(name.str())
                                             : absl::StrCat(prefix, ".", std::string(name.str()));
      if (!value.is_table()) {
        DT_RETURN_IF_ERROR(Take(key, value));
        continue;
      }
      DT_RETURN_IF_ERROR(Section(key, value));
      DT_RETURN_IF_ERROR(Read(*value.as_table(), key));
    }
    return absl::OkStatus();
  }

  std::string Place(const toml::node& value) const {
    return absl::StrCat(path, ":", value.source().begin.line);
  }

  // That there is such a section, also where it has no keys.
  absl::Status Section(const std::string& section, const toml::node& value) const {
    std::vector<std::string> known;
    for (const ConfigTable::Field& f : table.fields_) {
      if (absl::StartsWith(f.key, section + ".")) return absl::OkStatus();
      known.push_back(f.key.substr(0, f.key.rfind('.')));
    }
    known.erase(std::unique(known.begin(), known.end()), known.end());
    return Bad(Place(value), absl::StrCat("unknown section [", section, "]; nearest: ",
                                          absl::StrJoin(NearestNames(section, known), ", ")));
  }

  absl::Status Take(const std::string& key, const toml::node& value) const {
    const std::string from = Place(value);
    ConfigTable::Field* field = nullptr;
    DT_RETURN_IF_ERROR(table.Find(key, from, &field));
    const auto wrong = [&] {
      return Bad(from, absl::StrCat(key, " must be ", std::visit(KindName(), field->value)));
    };
    if (auto* const* whole = std::get_if<int64_t*>(&field->value)) {
      if (!value.is_integer()) return wrong();
      **whole = value.as_integer()->get();
    } else if (auto* const* number = std::get_if<double*>(&field->value)) {
      if (!value.is_number()) return wrong();
      **number = value.is_integer() ? static_cast<double>(value.as_integer()->get())
                                    : value.as_floating_point()->get();
    } else if (auto* const* text = std::get_if<std::string*>(&field->value)) {
      if (!value.is_string()) return wrong();
      **text = value.as_string()->get();
    } else {
      if (!value.is_boolean()) return wrong();
      *std::get<bool*>(field->value) = value.as_boolean()->get();
    }
    return ConfigTable::Check(*field, from);
  }
};

void ConfigTable::Add(std::string key, int64_t* value, int64_t least, int64_t most) {
  fields_.push_back({std::move(key), value, static_cast<double>(least), static_cast<double>(most)});
}
void ConfigTable::Add(std::string key, double* value, double least, double most) {
  fields_.push_back({std::move(key), value, least, most});
}
void ConfigTable::Add(std::string key, std::string* value, std::vector<std::string> choices) {
  fields_.push_back({std::move(key), value, 0, 0, std::move(choices)});
}
void ConfigTable::Add(std::string key, bool* value) { fields_.push_back({std::move(key), value}); }

absl::Status ConfigTable::Find(absl::string_view key, const std::string& from, Field** field) {
  std::vector<std::string> known;
  for (Field& f : fields_) {
    if (f.key == key) {
      f.given = true;
      *field = &f;
      return absl::OkStatus();
    }
    known.push_back(f.key);
  }
  return Bad(from, absl::StrCat("unknown setting ", key, "; nearest: ",
                                absl::StrJoin(NearestNames(std::string(key), known), ", ")));
}

absl::Status ConfigTable::Check(const Field& field, const std::string& from) {
  const auto range = [&](double value, const std::string& shown) {
    if (value >= field.least && value <= field.most) return absl::OkStatus();
    const bool whole = std::holds_alternative<int64_t*>(field.value);
    const auto bound = [&](double b) {  // with all its digits where it is whole
      return whole ? absl::StrFormat("%.0f", b) : absl::StrCat(b);
    };
    std::string most = absl::StrCat(" to ", bound(field.most));
    if (std::isinf(field.most)) most = " or above, or inf";
    if (whole && field.most >= 0x1p63) most = " or above";  // what int64 holds
    return Bad(
        from, absl::StrCat(field.key, " must be from ", bound(field.least), most, ", got ", shown));
  };
  if (auto* const* whole = std::get_if<int64_t*>(&field.value)) {
    return range(static_cast<double>(**whole), absl::StrCat(**whole));
  }
  if (auto* const* number = std::get_if<double*>(&field.value)) {
    return range(**number, absl::StrCat(**number));
  }
  auto* const* text = std::get_if<std::string*>(&field.value);
  if (text == nullptr || field.choices.empty()) return absl::OkStatus();
  for (const std::string& choice : field.choices) {
    if (**text == choice) return absl::OkStatus();
  }
  return Bad(from, absl::StrCat(field.key, " must be one of ", absl::StrJoin(field.choices, ", "),
                                ", got ", Quoted(**text)));
}

absl::Status ConfigTable::ReadToml(const std::string& path) {
  DT_ASSIGN_OR_RETURN(const std::string text, ReadFile(path, 1 << 20));
  const toml::parse_result parsed = toml::parse(text);
  if (!parsed) {
    return Bad(absl::StrCat(path, ":", parsed.error().source().begin.line),
               std::string(parsed.error().description()));
  }
  return TomlReader{*this, path}.Read(parsed.table(), "");
}

absl::Status ConfigTable::Set(absl::string_view key, absl::string_view text,
                              const std::string& from) {
  Field* field = nullptr;
  DT_RETURN_IF_ERROR(Find(key, from, &field));
  bool fits = true;
  if (auto* const* whole = std::get_if<int64_t*>(&field->value)) {
    fits = absl::SimpleAtoi(text, *whole);
  } else if (auto* const* number = std::get_if<double*>(&field->value)) {
    fits = absl::SimpleAtod(text, *number);
  } else if (auto* const* word = std::get_if<std::string*>(&field->value)) {
    **word = std::string(text);
  } else {
    fits = absl::SimpleAtob(text, std::get<bool*>(field->value));
  }
  if (fits) return Check(*field, from);
  return Bad(from, absl::StrCat(key, " must be ", std::visit(KindName(), field->value), ", got ",
                                Quoted(text)));
}

absl::Status ConfigTable::ReadArguments(int argc, char** argv) {
  bool has_file = false;
  for (int i = 1; i < argc; ++i) {  // the file first: arguments go before it
    if (absl::StartsWith(argv[i], "--")) {
      i += absl::StrContains(argv[i], "=") ? 0 : 1;
      continue;
    }
    if (has_file) return Bad(argv[i], "a second file of settings; there can be one");
    has_file = true;
    DT_RETURN_IF_ERROR(ReadToml(argv[i]));
  }
  for (int i = 1; i < argc; ++i) {
    absl::string_view argument = argv[i];
    if (!absl::ConsumePrefix(&argument, "--")) continue;
    const size_t equals = argument.find('=');
    const std::string from = argv[i];
    if (equals == absl::string_view::npos && i + 1 >= argc) {
      Field* field = nullptr;
      DT_RETURN_IF_ERROR(Find(argument, from, &field));
      return Bad(from, "needs a value");
    }
    const absl::string_view key = argument.substr(0, equals);
    const absl::string_view text =
        equals == absl::string_view::npos ? argv[++i] : argument.substr(equals + 1);
    DT_RETURN_IF_ERROR(Set(key, text, from));
    Field* field = nullptr;
    DT_RETURN_IF_ERROR(Find(key, from, &field));
    field->in_argument = true;
  }
  return absl::OkStatus();
}

std::vector<std::string> ConfigTable::Given(absl::string_view prefix, bool in_argument) const {
  std::vector<std::string> given;
  for (const Field& f : fields_) {
    if ((in_argument ? f.in_argument : f.given) && absl::StartsWith(f.key, prefix)) {
      given.push_back(f.key);
    }
  }
  return given;
}

std::string ConfigTable::Field::Text() const {
  if (auto* const* whole = std::get_if<int64_t*>(&value)) return absl::StrCat(**whole);
  if (auto* const* number = std::get_if<double*>(&value)) return Number(**number);
  if (auto* const* word = std::get_if<std::string*>(&value)) return Quoted(**word);
  return *std::get<bool*>(value) ? "true" : "false";
}

std::string ConfigTable::ToString(const std::vector<std::string>& without) const {
  std::string text, section;
  for (const Field& f : fields_) {
    if (BeginsWithOneOf(f.key, without)) continue;
    const size_t dot = f.key.rfind('.');
    if (f.key.substr(0, dot) != section) {
      absl::StrAppend(&text, section.empty() ? "" : "\n", "[", f.key.substr(0, dot), "]\n");
      section = f.key.substr(0, dot);
    }
    absl::StrAppend(&text, f.key.substr(dot + 1), " = ", f.Text(), "\n");
  }
  return text;
}

std::map<std::string, std::string> ConfigTable::Values(
    const std::vector<std::string>& without) const {
  std::map<std::string, std::string> values;
  for (const Field& f : fields_) {
    if (!BeginsWithOneOf(f.key, without)) values[f.key] = f.Text();
  }
  return values;
}

}  // namespace dtensor
