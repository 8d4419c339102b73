#include "examples/config_table.h"

#include <cmath>
#include <exception>

// It takes seconds to compile, so it is included here alone.
#define TOML_EXCEPTIONS 0
#include <toml++/toml.h>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
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

std::string Quoted(absl::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out + "\"";
}

struct KindName {
  std::string operator()(int64_t*) const { return "a whole number"; }
  std::string operator()(double*) const { return "a number"; }
  std::string operator()(std::string*) const { return "a text"; }
  std::string operator()(bool*) const { return "true or false"; }
};

// A number as TOML has it: one with a fraction keeps looking like one.
std::string Number(double value) {
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  const std::string text = absl::StrCat(value);
  return text.find_first_of(".e") == std::string::npos ? text + ".0" : text;
}

}  // namespace

struct TomlReader {
  const ConfigTable& table;
  const std::string& path;

  absl::Status Read(const toml::table& node, const std::string& prefix) const {
    for (const auto& [name, value] : node) {
      const std::string key = prefix.empty() ? std::string(name.str())
                                             : absl::StrCat(prefix, ".", std::string(name.str()));
      const absl::Status status =
          value.is_table() ? Read(*value.as_table(), key) : Take(key, value);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  absl::Status Take(const std::string& key, const toml::node& value) const {
    const std::string from = absl::StrCat(path, ":", value.source().begin.line);
    const ConfigTable::Field* field = nullptr;
    DT_RETURN_IF_ERROR(table.Find(key, from, &field));
    const auto wrong = [&] {
      return Bad(from, absl::StrCat(key, " must be ", std::visit(KindName(), field->value)));
    };
    if (auto* const* whole = std::get_if<int64_t*>(&field->value)) {
      if (!value.is_integer()) return wrong();
      **whole = value.as_integer()->get();
    } else if (auto* const* number = std::get_if<double*>(&field->value)) {
      if (!value.is_number()) return wrong();
      **number = *value.value<double>();
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

absl::Status ConfigTable::Find(absl::string_view key, const std::string& from,
                               const Field** field) const {
  std::vector<std::string> known;
  for (const Field& f : fields_) {
    if (f.key == key) {
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
    return Bad(from, absl::StrCat(field.key, " must be from ", field.least, " to ", field.most,
                                  ", got ", shown));
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
  const Field* field = nullptr;
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
      const Field* field = nullptr;
      DT_RETURN_IF_ERROR(Find(argument, from, &field));
      return Bad(from, "needs a value");
    }
    const absl::string_view key = argument.substr(0, equals);
    const absl::string_view text =
        equals == absl::string_view::npos ? argv[++i] : argument.substr(equals + 1);
    DT_RETURN_IF_ERROR(Set(key, text, from));
  }
  return absl::OkStatus();
}

std::string ConfigTable::ToString() const {
  std::string text, section;
  for (const Field& f : fields_) {
    const size_t dot = f.key.rfind('.');
    if (f.key.substr(0, dot) != section) {
      absl::StrAppend(&text, section.empty() ? "" : "\n", "[", f.key.substr(0, dot), "]\n");
      section = f.key.substr(0, dot);
    }
    absl::StrAppend(&text, f.key.substr(dot + 1), " = ");
    if (auto* const* whole = std::get_if<int64_t*>(&f.value)) absl::StrAppend(&text, **whole);
    if (auto* const* number = std::get_if<double*>(&f.value)) text += Number(**number);
    if (auto* const* word = std::get_if<std::string*>(&f.value)) text += Quoted(**word);
    if (auto* const* flag = std::get_if<bool*>(&f.value)) text += **flag ? "true" : "false";
    text += "\n";
  }
  return text;
}

}  // namespace dtensor
