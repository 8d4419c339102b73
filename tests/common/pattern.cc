#include "tests/common/pattern.h"

#include <map>
#include <regex>

namespace dtensor::testing {
namespace {

const std::regex& Compiled(const std::string& pattern) {
  static thread_local std::map<std::string, std::regex> kept;
  const auto at = kept.find(pattern);
  return at != kept.end() ? at->second : kept.emplace(pattern, pattern).first->second;
}

}  // namespace

bool IsOf(const std::string& text, const std::string& pattern) {
  return std::regex_match(text, Compiled(pattern));
}

std::vector<std::string> FirstMatch(const std::string& text, const std::string& pattern) {
  std::smatch found;
  std::regex_search(text, found, Compiled(pattern));
  return {found.begin(), found.end()};
}

std::vector<std::string> AllMatches(const std::string& text, const std::string& pattern) {
  std::vector<std::string> all;
  std::sregex_iterator at(text.begin(), text.end(), Compiled(pattern));
  for (; at != std::sregex_iterator(); ++at) all.push_back((*at)[1]);
  return all;
}

std::string Replaced(const std::string& text, const std::string& pattern, const std::string& with) {
  return std::regex_replace(text, Compiled(pattern), with);
}

}  // namespace dtensor::testing
