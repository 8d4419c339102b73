#include "dtensor/mesh/host_exchange.h"

#include <memory>
#include <string_view>

#include "dtensor/mesh/call_tag.h"
#include "dtensor/mesh/flight.h"
#include "dtensor/mesh/hash.h"

namespace dtensor {

absl::Status RunHostExchange(CommBackend& backend, const std::string& label,
                             absl::string_view what_for,
                             absl::FunctionRef<void(const CollectiveCall&)> begin) {
  const Tensor none;
  CollectiveCall call{.kind = CollectiveKind::kHostExchange, .in = none, .out = none};
  backend.Number(&call);
  const auto op = std::make_shared<const std::string>(what_for);
  const CallTag tag = {.op = &op, .hash = HashRange(static_cast<uint64_t>(call.kind), what_for)};
  call.tag = &tag;
  call.fingerprint = HashMix(HashRange(tag.hash, label), call.before);
  begin(call);
  FlightRecorder& flight = backend.flight();
  const size_t place = flight.Begin(call, flight.AddLabel(label));
  const absl::Status status = backend.Start(call, [&] { return place; }).Wait();
  flight.End(place, status.code());
  return status;
}

}  // namespace dtensor
