// Test support: regular expressions (of std::regex, which takes g++ two seconds in every file that
// uses it).
#pragma once

#include <string>
#include <vector>

namespace dtensor::testing {

// Whether the whole text is of the pattern.
bool IsOf(const std::string& text, const std::string& pattern);

// The groups of the first match, [0] the whole of it; {}: there is none.
std::vector<std::string> FirstMatch(const std::string& text, const std::string& pattern);

// Group 1 of every match.
std::vector<std::string> AllMatches(const std::string& text, const std::string& pattern);

// Every match replaced by `with`, where $1 is group 1.
std::string Replaced(const std::string& text, const std::string& pattern, const std::string& with);

}  // namespace dtensor::testing
