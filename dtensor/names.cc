#include "dtensor/names.h"

#include <algorithm>
#include <utility>

namespace dtensor {

int EditDistance(absl::string_view a, absl::string_view b) {
  std::vector<int> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = static_cast<int>(j);
  for (size_t i = 1; i <= a.size(); ++i) {
    int diagonal = row[0];
    row[0] = static_cast<int>(i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const int replace = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, replace});
    }
  }
  return row[b.size()];
}

std::vector<std::string> NearestNames(absl::string_view name, const std::vector<std::string>& known,
                                      int count) {
  std::vector<std::pair<int, const std::string*>> sorted;
  for (const std::string& k : known) sorted.emplace_back(EditDistance(name, k), &k);
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  if (static_cast<int>(sorted.size()) > count) sorted.resize(count);
  std::vector<std::string> nearest;
  for (const auto& [distance, k] : sorted) nearest.push_back(*k);
  return nearest;
}

}  // namespace dtensor
