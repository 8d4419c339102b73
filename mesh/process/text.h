// What processes write for each other, as text. Private to mesh/.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "dtensor/mesh/comm_call.h"
#include "dtensor/mesh/flight.h"
#include "dtensor/mesh/process/group.h"
#include "nlohmann/json.hpp"

namespace dtensor::process {

// All of a status, payloads too.
nlohmann::json ToJson(const absl::Status& status);
absl::Status StatusOf(const nlohmann::json& json);

nlohmann::json ToJson(const FarewellOfGroup& farewell);
FarewellOfGroup FarewellOf(const nlohmann::json& json);

nlohmann::json ToJson(const FlightDump& dump);
FlightDump DumpOf(const nlohmann::json& json);

// Peers, dtypes and shapes; read back as tensors without data.
nlohmann::json ToJson(const std::vector<Piece>& pieces);
std::vector<Piece> PiecesOf(const nlohmann::json& json);

// Messages may hold any bytes.
std::string Dump(const nlohmann::json& json);
// Null for what is no JSON.
nlohmann::json Parse(const std::string& text);

}  // namespace dtensor::process
