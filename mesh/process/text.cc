#include "dtensor/mesh/process/text.h"

#include <utility>

#include "absl/strings/escaping.h"
#include "dtensor/tensor/status.h"

namespace dtensor::process {
namespace {

using nlohmann::json;

std::string Packed(absl::string_view bytes) { return absl::Base64Escape(bytes); }

std::string Unpacked(const std::string& text) {
  std::string bytes;
  return absl::Base64Unescape(text, &bytes) ? bytes : text;
}

json Counts(const absl::flat_hash_map<int, uint64_t>& counts) {
  json list = json::array();
  for (const auto& [peer, count] : counts) list.push_back({peer, count});
  return list;
}

absl::flat_hash_map<int, uint64_t> CountsOf(const json& list) {
  absl::flat_hash_map<int, uint64_t> counts;
  for (const json& pair : list) counts[pair.at(0).get<int>()] = pair.at(1).get<uint64_t>();
  return counts;
}

}  // namespace

// The store takes no message of any size, and nobody reads so long a one.
static std::string Shortened(absl::string_view message) {
  constexpr size_t kMost = 1 << 20;
  if (message.size() <= kMost) return std::string(message);
  return absl::StrCat(message.substr(0, kMost), "... (", message.size() - kMost, " bytes more)");
}

json ToJson(const absl::Status& status) {
  json payloads = json::object();
  status.ForEachPayload([&](absl::string_view url, const absl::Cord& payload) {
    payloads[std::string(url)] = Packed(std::string(payload));
  });
  return {{"code", static_cast<int>(status.code())},
          {"message", Packed(Shortened(status.message()))},
          {"payloads", payloads}};
}

absl::Status StatusOf(const json& from) {
  absl::Status status(static_cast<absl::StatusCode>(from.at("code").get<int>()),
                      Unpacked(from.at("message").get<std::string>()));
  for (const auto& [url, payload] : from.at("payloads").items()) {
    status.SetPayload(url, absl::Cord(Unpacked(payload.get<std::string>())));
  }
  return status;
}

json ToJson(const FarewellOfGroup& farewell) {
  return {{"arrived", {farewell.arrived[0], farewell.arrived[1]}},
          {"sent", Counts(farewell.sent)},
          {"received", Counts(farewell.received)}};
}

FarewellOfGroup FarewellOf(const json& from) {
  const json& arrived = from.at("arrived");
  return {{arrived.at(0).get<uint64_t>(), arrived.at(1).get<uint64_t>()},
          CountsOf(from.at("sent")),
          CountsOf(from.at("received"))};
}

json ToJson(const FlightDump& dump) {
  json calls = json::array();
  for (const FlightCall& c : dump.calls) {
    calls.push_back({{"sequence", c.sequence},
                     {"deferred", c.deferred},
                     {"fingerprint", c.fingerprint},
                     {"group", c.group},
                     {"call", c.call},
                     {"tag", c.tag},
                     {"state", c.state},
                     {"error", c.error},
                     {"waits_for", c.waits_for},
                     {"age_ms", c.age_ms}});
  }
  return {{"rank", dump.rank}, {"left", dump.left}, {"calls", calls}};
}

FlightDump DumpOf(const json& from) {
  FlightDump dump{from.at("rank").get<int64_t>(), from.at("left").get<bool>(), {}};
  for (const json& c : from.at("calls")) {
    FlightCall call;
    call.sequence = c.at("sequence").get<uint64_t>();
    call.deferred = c.at("deferred").get<bool>();
    call.fingerprint = c.at("fingerprint").get<uint64_t>();
    call.group = c.at("group").get<std::string>();
    call.call = c.at("call").get<std::string>();
    call.tag = c.at("tag").get<std::string>();
    call.state = c.at("state").get<std::string>();
    call.error = c.at("error").get<std::string>();
    call.waits_for = c.at("waits_for").get<std::vector<int64_t>>();
    call.age_ms = c.at("age_ms").get<double>();
    dump.calls.push_back(std::move(call));
  }
  return dump;
}

json ToJson(const std::vector<Piece>& pieces) {
  json list = json::array();
  for (const Piece& p : pieces) {
    const std::vector<int64_t> shape(p.view.shape().begin(), p.view.shape().end());
    list.push_back({p.peer, static_cast<int>(p.view.dtype()), shape});
  }
  return list;
}

std::vector<Piece> PiecesOf(const json& from) {
  std::vector<Piece> pieces;
  for (const json& p : from) {
    const auto shape = p.at(2).get<std::vector<int64_t>>();
    pieces.push_back({p.at(0).get<int>(),
                      ValueOrThrow(Tensor::Empty(shape, static_cast<DType>(p.at(1).get<int>()),
                                                 DeviceType::kMeta))});
  }
  return pieces;
}

std::string Dump(const json& from) {
  return from.dump(-1, ' ', false, json::error_handler_t::replace);
}

json Parse(const std::string& text) {
  json parsed = json::parse(text, nullptr, /*allow_exceptions=*/false);
  return parsed.is_discarded() ? json() : parsed;
}

}  // namespace dtensor::process
