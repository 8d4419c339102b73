// Event: what every rank of a world hears of, in one order: a list in the store. Private to mesh/.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "dtensor/mesh/process/text.h"
#include "dtensor/mesh/store.h"
#include "dtensor/tensor/status.h"
#include "nlohmann/json.hpp"

namespace dtensor::process {

struct Event {
  std::string kind;  // left, failed, lost, abort, report
  int64_t rank = 0;
  std::string what;  // of an abort the group, of a report its number
  absl::Status status;
  nlohmann::json farewells = nlohmann::json::object();  // of a rank that leaves, by group

  static std::string Key(int64_t n) { return absl::StrCat("dtensor/event/", n); }
  std::string ToText() const {
    return Dump({{"kind", kind},
                 {"rank", rank},
                 {"what", what},
                 {"status", ToJson(status)},
                 {"farewells", farewells}});
  }
  // Null for what a program has set under such a key.
  static std::optional<Event> Of(const std::string& text) {
    try {
      const nlohmann::json from = Parse(text);
      return Event{from.at("kind").get<std::string>(), from.at("rank").get<int64_t>(),
                   from.at("what").get<std::string>(), StatusOf(from.at("status")),
                   from.at("farewells")};
    } catch (const nlohmann::json::exception&) {
      return std::nullopt;
    }
  }
  // Returns its number; numbers above `after` are tried.
  absl::StatusOr<int64_t> Append(Store& store, int64_t after) const {
    const std::string text = ToText();
    for (int64_t n = after + 1;; ++n) {
      DT_ASSIGN_OR_RETURN(const std::string before, store.CompareExchange(Key(n), "", text));
      if (before.empty()) return n;
    }
  }
};

}  // namespace dtensor::process
