// Merging the dumps of ranks into one report, and its texts.
#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "dtensor/mesh/flight.h"
#include "dtensor/tensor/text.h"

namespace dtensor {
namespace {

constexpr size_t kTagBytes = 160;  // of a tag in the summary

std::string Shortened(const std::string& text, size_t limit) {
  return text.size() <= limit ? text : text.substr(0, limit - 3) + "...";
}

std::string Named(const FlightCall& call) {
  return absl::StrCat(call.call, call.tag.empty() ? "" : " for ", Shortened(call.tag, kTagBytes));
}

std::string Number(const FlightCall& call) {
  return call.sequence == 0 ? std::string() : absl::StrCat("#", call.sequence, " ");
}

std::string Ms(double ms) { return absl::StrFormat("%.0f ms", ms); }

const FlightCall* CallAt(const FlightDump& dump, bool deferred, uint64_t sequence) {
  // Numbers ascend; messages (0) and calls of the other sort lie between.
  for (auto it = dump.calls.rbegin(); it != dump.calls.rend(); ++it) {
    if (it->deferred != deferred) continue;
    if (it->sequence == sequence) return &*it;
    if (it->sequence != 0 && it->sequence < sequence) return nullptr;
  }
  return nullptr;
}

// What every rank did at call `sequence` of one sort; empty if all did the same.
std::string DisagreementAt(bool deferred, uint64_t sequence, const std::vector<FlightDump>& dumps) {
  struct Variant {
    const FlightCall* call;
    std::vector<int64_t> ranks;
  };
  std::vector<Variant> variants;
  std::vector<int64_t> absent, left;
  for (const FlightDump& dump : dumps) {
    if (dump.silent) continue;
    const FlightCall* call = CallAt(dump, deferred, sequence);
    if (call == nullptr) {
      (dump.left ? left : absent).push_back(dump.rank);
      continue;
    }
    auto same = [&](const Variant& v) { return v.call->fingerprint == call->fingerprint; };
    auto it = std::find_if(variants.begin(), variants.end(), same);
    if (it == variants.end()) it = variants.insert(it, {call, {}});
    it->ranks.push_back(dump.rank);
  }
  if (variants.size() <= 1 && absent.empty() && left.empty()) return "";
  std::string text = absl::StrCat(deferred ? "deferred " : "", "call #", sequence, ": ");
  const char* separator = "";
  for (size_t i = 0; i < variants.size(); ++i) {
    if (i == kNamedInMessages) {
      absl::StrAppend(&text, "; and ", variants.size() - i, " more kinds of calls");
      break;
    }
    const Variant& v = variants[i];
    absl::StrAppend(&text, std::exchange(separator, "; "), RankNames(v.ranks), " issued ",
                    Named(*v.call));
  }
  if (!absent.empty()) {
    absl::StrAppend(&text, "; ", RankNames(absent), absent.size() == 1 ? " has" : " have",
                    " not come to it");
  }
  if (!left.empty()) absl::StrAppend(&text, "; ", RankNames(left), " left before it");
  return text;
}

std::string FirstDisagreement(bool deferred, const std::vector<FlightDump>& dumps) {
  uint64_t first = 1, last = 0;
  for (const FlightDump& dump : dumps) {
    uint64_t oldest = 0;
    for (const FlightCall& call : dump.calls) {
      if (call.sequence == 0 || call.deferred != deferred) continue;
      if (oldest == 0) oldest = call.sequence;
      last = std::max(last, call.sequence);
    }
    first = std::max(first, oldest);  // before that this rank does not remember
  }
  for (uint64_t s = first; s <= last; ++s) {
    std::string text = DisagreementAt(deferred, s, dumps);
    if (!text.empty()) return text;
  }
  return "";
}

// What one rank is doing on a group, without its name and the age: ranks alike share a line.
std::string Doing(const FlightDump& dump) {
  if (dump.silent) return "does not answer: its process is stopped, or gone";
  if (dump.left) return "left the group";
  if (dump.calls.empty()) return "has issued no call";
  const FlightCall& call = dump.calls.back();
  if (!call.pending()) {
    return absl::StrCat("in no call; last ", Number(call), call.call, " ", call.state,
                        call.error.empty() ? "" : " " + call.error);
  }
  return absl::StrCat(call.state, call.waits_for.empty() ? "" : " for " + RankNames(call.waits_for),
                      " in ", Number(call), Named(call));
}

std::vector<std::string> Lines(const FlightGroup& group) {
  std::vector<std::string> lines;
  const std::string where = absl::StrCat("[", group.label, "] ");
  if (!group.disagreement.empty()) {
    lines.push_back(absl::StrCat(where, "first disagreement: ", group.disagreement));
  }
  std::vector<std::pair<std::string, std::vector<const FlightDump*>>> alike;
  for (const FlightDump& dump : group.dumps) {
    const std::string doing = Doing(dump);
    auto it = std::find_if(alike.begin(), alike.end(),
                           [&](const auto& entry) { return entry.first == doing; });
    if (it == alike.end()) it = alike.insert(it, {doing, {}});
    it->second.push_back(&dump);
  }
  for (const auto& [doing, dumps] : alike) {
    std::vector<int64_t> ranks;
    double age = 0;
    for (const FlightDump* dump : dumps) {
      ranks.push_back(dump->rank);
      if (!dump->calls.empty()) age = std::max(age, dump->calls.back().age_ms);
    }
    const bool pending = !dumps[0]->calls.empty() && dumps[0]->calls.back().pending();
    lines.push_back(absl::StrCat(
        where, RankNames(ranks), ": ", doing,
        dumps[0]->calls.empty() || dumps[0]->left
            ? ""
            : absl::StrCat(", ", pending ? "since " : "begun ", Ms(age), pending ? "" : " ago")));
  }
  return lines;
}

bool Quiet(const FlightGroup& group) {
  return group.disagreement.empty() &&
         std::none_of(group.dumps.begin(), group.dumps.end(), [](const FlightDump& dump) {
           return !dump.calls.empty() && dump.calls.back().pending();
         });
}

nlohmann::json Json(const FlightCall& call) {
  nlohmann::json j = {
      {"group", call.group}, {"call", call.call}, {"state", call.state}, {"age_ms", call.age_ms}};
  if (call.sequence != 0) j["number"] = call.sequence;
  if (!call.tag.empty()) j["for"] = call.tag;
  if (!call.error.empty()) j["error"] = call.error;
  if (!call.waits_for.empty()) j["waits_for"] = call.waits_for;
  return j;
}

}  // namespace

FlightGroup MergeDumps(std::string label, std::vector<FlightDump> dumps) {
  FlightGroup group{std::move(label), std::move(dumps), ""};
  group.disagreement = FirstDisagreement(/*deferred=*/false, group.dumps);
  if (group.disagreement.empty()) {
    group.disagreement = FirstDisagreement(/*deferred=*/true, group.dumps);
  }
  return group;
}

std::vector<int64_t> FlightReport::Culprits() const {
  std::map<int64_t, std::set<int64_t>> waits;
  std::set<int64_t> wanted;
  for (const FlightGroup& group : groups) {
    for (const FlightDump& dump : group.dumps) {
      if (dump.calls.empty() || !dump.calls.back().pending()) continue;
      for (int64_t peer : dump.calls.back().waits_for) {
        waits[dump.rank].insert(peer);
        wanted.insert(peer);
      }
    }
  }
  std::vector<int64_t> culprits;
  for (int64_t rank : wanted) {
    if (waits.count(rank) == 0) culprits.push_back(rank);
  }
  if (!culprits.empty() || wanted.empty()) return culprits;
  // Everybody waits: follow one chain until it closes.
  std::vector<int64_t> chain = {*wanted.begin()};
  while (true) {
    const int64_t next = *waits[chain.back()].begin();
    auto closes = std::find(chain.begin(), chain.end(), next);
    if (closes != chain.end()) {
      culprits.assign(closes, chain.end());
      std::sort(culprits.begin(), culprits.end());
      return culprits;
    }
    chain.push_back(next);
  }
}

std::string FlightReport::Summary(size_t max_bytes) const {
  std::vector<std::string> lines;
  const std::vector<int64_t> culprits = Culprits();
  if (!culprits.empty()) {
    lines.push_back(absl::StrCat(RankNames(culprits), culprits.size() == 1 ? " holds" : " hold",
                                 " up the others"));
  }
  for (const FlightGroup& group : groups) {
    if (Quiet(group)) continue;
    for (std::string& line : Lines(group)) lines.push_back(std::move(line));
  }
  constexpr size_t kRoomForCount = 24;
  std::string text;
  for (size_t i = 0; i < lines.size(); ++i) {
    const size_t used = text.size() + kRoomForCount;
    const size_t room = max_bytes > used ? max_bytes - used : 0;
    if (room < 40) {
      return absl::StrCat(text, "\n  (", lines.size() - i, " more lines)");
    }
    absl::StrAppend(&text, i == 0 ? "" : "\n", "  ", Shortened(lines[i], room));
  }
  return text;
}

std::string FlightReport::ToText() const {
  std::string text = absl::StrCat(Summary(size_t{1} << 20), "\n");
  for (const FlightGroup& group : groups) {
    for (const FlightDump& dump : group.dumps) {
      absl::StrAppend(&text, "[", group.label, "] rank ", dump.rank, dump.left ? ", left" : "",
                      dump.silent ? ", does not answer" : "", ":\n");
      for (const FlightCall& call : dump.calls) {
        absl::StrAppend(&text, "  ", Number(call), call.call, call.tag.empty() ? "" : " for ",
                        call.tag, ": ", call.state, call.error.empty() ? "" : " ", call.error,
                        ", begun ", Ms(call.age_ms), " ago\n");
      }
    }
  }
  return text;
}

std::string FlightReport::ToJson() const {
  nlohmann::json all = {{"holding_up", Culprits()}, {"groups", nlohmann::json::array()}};
  for (const FlightGroup& group : groups) {
    nlohmann::json ranks = nlohmann::json::array();
    for (const FlightDump& dump : group.dumps) {
      nlohmann::json calls = nlohmann::json::array();
      for (const FlightCall& call : dump.calls) calls.push_back(Json(call));
      ranks.push_back({{"rank", dump.rank}, {"left", dump.left}, {"calls", std::move(calls)}});
      if (dump.silent) ranks.back()["silent"] = true;
    }
    all["groups"].push_back({{"label", group.label},
                             {"first_disagreement", group.disagreement},
                             {"ranks", std::move(ranks)}});
  }
  return all.dump(2, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace dtensor
