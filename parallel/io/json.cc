#include "dtensor/parallel/io/json.h"

#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"

namespace dtensor {
namespace {

using nlohmann::json;

constexpr int64_t kMostValues = int64_t{1} << 24;

// Looks at the events of a parse and builds nothing. A function that returns false ends it.
class Checker {
 public:
  explicit Checker(int most_depth) : most_depth_(most_depth) {}
  const std::string& problem() const { return problem_; }

  bool null() { return Count(); }
  bool boolean(bool) { return Count(); }
  bool number_integer(json::number_integer_t) { return Count(); }
  bool number_unsigned(json::number_unsigned_t) { return Count(); }
  bool number_float(json::number_float_t, const json::string_t&) { return Count(); }
  bool string(json::string_t&) { return Count(); }
  bool binary(json::binary_t&) { return Count(); }
  bool start_object(size_t) { return Open(); }
  bool start_array(size_t) { return Open(); }
  bool end_object() { return Close(); }
  bool end_array() { return Close(); }
  bool key(json::string_t& name) {
    if (keys_.back().insert(name).second) {
      path_.back() = name;
      return true;
    }
    problem_ = absl::StrCat("the key ", Quoted(name), Where(), " is there twice");
    return false;
  }
  bool parse_error(size_t, const std::string&, const json::exception& e) {
    const std::string what = e.what();  // "[json.exception.parse_error.101] parse error at ..."
    const size_t end = what.find("] ");
    const std::string cause = what.substr(end == std::string::npos ? 0 : end + 2, 300);
    problem_ = "not JSON: " + absl::StrReplaceAll(absl::CHexEscape(cause), {{"\\'", "'"}});
    return false;
  }

 private:
  bool Count() {
    if (++values_ <= kMostValues) return true;
    problem_ = absl::StrCat("more than ", kMostValues, " values of JSON");
    return false;
  }
  bool Open() {
    if (!Count()) return false;
    keys_.emplace_back();
    path_.emplace_back();
    if (static_cast<int>(keys_.size()) <= most_depth_) return true;
    problem_ = absl::StrCat("more than ", most_depth_, " levels of JSON");
    return false;
  }
  bool Close() {
    keys_.pop_back();
    path_.pop_back();
    return true;
  }
  static std::string Quoted(const std::string& name) {
    return absl::StrCat("\"", absl::CHexEscape(name.substr(0, 200)), "\"");
  }
  // Of which object of the whole.
  std::string Where() const {
    const std::string& outer = path_.size() < 2 ? path_.back() : path_[path_.size() - 2];
    return path_.size() < 2 || outer.empty() ? "" : " of " + Quoted(outer);
  }
  const int most_depth_;
  int64_t values_ = 0;
  std::vector<absl::flat_hash_set<std::string>> keys_;
  std::vector<std::string> path_;  // the key that is read, per level
  std::string problem_;
};

}  // namespace

absl::StatusOr<json> ParseJsonObject(absl::string_view text, const std::string& where,
                                     int most_depth) {
  const auto bad = [&](absl::string_view what) {
    return absl::InvalidArgumentError(absl::StrCat(where, ": ", what));
  };
  if (text.empty()) return bad("is empty, and not a JSON object");
  if (text[0] != '{') return bad("does not begin with '{' as a JSON object does");
  // The parser takes one for the end.
  if (text.find('\0') != absl::string_view::npos) return bad("not JSON: a NUL byte");
  Checker checker(most_depth);
  if (!json::sax_parse(text.begin(), text.end(), &checker)) return bad(checker.problem());
  return json::parse(text.begin(), text.end());
}

std::string DescribeJson(const json& value) {
  const std::string type = value.type_name();
  if (value.is_null()) return "null";
  if (value.is_structured()) return absl::StrCat("an ", type);
  return absl::StrCat("the ", type, " ",
                      value.dump(-1, ' ', true, json::error_handler_t::replace).substr(0, 80));
}

}  // namespace dtensor
