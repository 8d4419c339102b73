#include <memory>
#include <utility>
#include <vector>

#include "dtensor/mesh/backends.h"
#include "dtensor/mesh/flight.h"

namespace dtensor {
namespace {

// A communicator without peers: a call ends at once; what this rank would have got from others
// stays zero (what it holds itself is copied), so a program runs on and its calls can be counted.
class FakeBackend : public CommBackend {
 public:
  explicit FakeBackend(int index) : me_(index) {}

  const CommCaps& caps() const override { return kCaps; }
  Work Start(const CollectiveCall& call, Record record) override {
    record();
    switch (call.kind) {
      case CollectiveKind::kAllReduce:
      case CollectiveKind::kBroadcast:
        CopyOwn(call.in, call.out);
        break;
      case CollectiveKind::kAllGather:
        Fill(call.out, 0);
        CopyOwn(call.in, OwnRows(call.out, call.counts));
        break;
      case CollectiveKind::kReduceScatter:
        CopyOwn(OwnRows(call.in, call.counts), call.out);
        break;
      case CollectiveKind::kExchange:
        Exchange(call);
        break;
      case CollectiveKind::kRecv:
        Fill(call.out, 0);
        break;
      default:
        break;
    }
    return Work();
  }
  absl::Status Health() override { return status_; }
  void Abort(absl::Status why) override { status_ = std::move(why); }
  FlightRecorder& flight() override { return flight_; }

 private:
  static constexpr CommCaps kCaps = {
      .strided = true, .many_pieces = true, .overlap = true, .rank_order = true, .same_bits = true};
  static void CopyOwn(const Tensor& from, const Tensor& to) {
    if (from.numel() > 0 && from.data() != to.data()) Copy(from, to);
  }
  // This rank's rows of a tensor that all share.
  Tensor OwnRows(const Tensor& whole, const std::vector<int64_t>& counts) const {
    int64_t start = 0;
    for (int r = 0; r < me_; ++r) start += counts[r];
    return whole.Slice(0, start, counts[me_]);
  }
  void Exchange(const CollectiveCall& call) const {
    size_t next = 0;
    for (const Piece& in : call.recvs) {
      Fill(in.view, 0);
      if (in.peer != me_) continue;
      while (next < call.sends.size() && call.sends[next].peer != me_) ++next;
      if (next < call.sends.size() && call.sends[next].view.shape() == in.view.shape()) {
        CopyOwn(call.sends[next++].view, in.view);
      }
    }
  }

  int me_;
  absl::Status status_;
  FlightRecorder flight_;
};

}  // namespace

BackendEntry FakeBackendEntry() {
  return {"fake", "nobody: there is no data, or there are no peers",
          [](const World& world, const GroupRequest& group) {
            return world.launcher() == Launcher::kFake || group.device == DeviceType::kMeta;
          },
          [](World&, const GroupRequest& group) -> std::unique_ptr<CommBackend> {
            return std::make_unique<FakeBackend>(group.index);
          }};
}

}  // namespace dtensor
