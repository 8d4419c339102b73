// ProcessWorld: ranks that are processes. Private to mesh/.
//
// What happens to ranks (one left, one failed, one is gone, a group was aborted) is a list in the
// store, in one order for all. A thread of every process, the watcher, reads it as it grows and
// tells the groups: so an error reaches whoever waits, with the same first cause everywhere.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/time.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/mesh/process/endpoint.h"
#include "dtensor/mesh/process/group.h"
#include "dtensor/mesh/process/rendezvous.h"
#include "dtensor/mesh/store/tcp_server.h"
#include "dtensor/mesh/store/tcp_store.h"
#include "dtensor/mesh/world.h"

namespace dtensor {

namespace process {
struct Event;
}  // namespace process

struct ProcessWorldOptions {
  absl::Duration timeout = absl::Seconds(60);  // of every wait for peers
  WrapBackend wrap = nullptr;
  CostModel cost = {};  // rank 0's counts
};

class ProcessWorld : public World {
 public:
  // A world of the first `size` processes of the launch. All processes call it, those beyond `size`
  // too; they look on. Rank 0 serves the store.
  //   Errors: InvalidArgument for a size that the launch has not; those of MeetForWorld, and
  //   DeadlineExceeded naming who did not reach the store: alike on all ranks.
  static absl::StatusOr<std::shared_ptr<ProcessWorld>> Meet(Endpoint& endpoint, int64_t size,
                                                            ProcessWorldOptions options);
  ~ProcessWorld() override;

  int64_t size() const override { return size_; }
  Launcher launcher() const override { return Launcher::kProcesses; }
  bool spmd() const override { return true; }
  const CostModel& cost_model() const override { return cost_; }
  absl::Duration timeout() const override { return options_.timeout; }
  Store& StoreOf(int64_t) override { return *store_; }
  absl::StatusOr<std::unique_ptr<CommBackend>> MakeComm(const GroupRequest& group) override;
  absl::Status SetOptions(const GroupRequest& group, const GroupOptions& options) override;
  absl::StatusOr<std::vector<std::string>> Exchange(const GroupRequest& group,
                                                    absl::string_view what_for,
                                                    std::string mine) override;
  void Fail(int64_t rank, const absl::Status& why) override;
  void Leave(int64_t rank, const absl::Status& how) override;
  absl::Status FirstCause() override;
  FlightReport Report() override;
  FlightReport LastReport() override;

  // Until every rank has left or failed: after Leave. When one has failed the others have a few
  // seconds; whoever takes longer stays behind.
  void AwaitAll();

  // By rank, how many messages the store has had of it; of rank 0, which serves it.
  std::map<int64_t, int64_t> StoreMessages() const { return server_->Heard(); }

  Endpoint& endpoint() { return endpoint_; }
  int64_t rank() const { return endpoint_.rank(); }
  absl::StatusOr<std::shared_ptr<ProcessGroup>> GroupOf(const std::vector<int64_t>& ranks);
  void AbortGroup(ProcessGroup& group, const absl::Status& why);
  // Takes a report and returns its summary as the end of a message ("\nflight report:\n...").
  std::string ReportText();
  // The same for what ends groups: the first stays for good.
  std::string LastingReport();

 private:
  using Event = process::Event;
  ProcessWorld(Endpoint& endpoint, int64_t size, ProcessWorldOptions options);
  absl::StatusOr<Invitation> ServeStore(const Machines& machines);
  absl::Status MeetInStore(const Invitation& invitation);
  // With DTENSOR_LOG=comm.
  absl::Status LogStart() const;

  void Watch();
  void Handle(const Event& event);
  void HandleLeft(const Event& event);
  void HandleFailed(int64_t rank, const absl::Status& why);
  void AnswerReport(const std::string& id);
  // Of rank 0: tells all of ranks of which nothing was heard for too long.
  void LookForSilent();
  // What this process is at, as JSON, where DTENSOR_HEALTH_FILE says (docs/guide/launch.md). Of the
  // watcher, and where there is none any more.
  void WriteHealth(bool ended = false);
  std::string HealthPath() const;  // empty: nobody asks
  // The store is gone, and rank 0 with it.
  void LoseStore(const absl::Status& why);
  // Puts the event into the list, and returns when this process has heard of it; where it cannot,
  // this rank alone takes it in.
  void Post(const Event& event);
  bool AllAccounted(bool but_silent = false) const;  // under mutex_
  void TellWhoIsAwaited() const;                     // under mutex_

  Endpoint& endpoint_;
  const int64_t size_;
  const ProcessWorldOptions options_;
  CostModel cost_;
  // A watcher lets the store hear of it at every beat; without a word for so long a rank is lost.
  const absl::Duration beat_, silence_;
  struct Silence {
    int64_t messages = 0, beats = 0;
  };
  std::map<int64_t, Silence> silences_;  // by rank, of rank 0's watcher
  std::string health_path_;
  int64_t first_channel_ = 0;
  std::unique_ptr<TcpStoreServer> server_;  // of rank 0
  std::unique_ptr<TcpStore> store_;
  std::thread watcher_;

  std::mutex mutex_;
  std::condition_variable heard_;
  // What follows is guarded by mutex_.
  int64_t seen_ = 0;  // events
  bool lost_store_ = false;
  absl::Status cause_, notice_;  // as RunSpmd returns it, as peers see it
  std::vector<bool> failed_, left_;
  std::vector<bool> silent_;  // where a report was asked for last
  std::map<int64_t, std::map<std::string, FarewellOfGroup>> farewells_;  // by rank, by group
  std::map<std::string, std::shared_ptr<ProcessGroup>> groups_;
  std::map<std::string, absl::Status> aborted_;  // by group, also of those not made here yet
  bool report_lasts_ = false;
  std::string report_text_;
  FlightReport report_;
};

// RunSpmd where ranks are processes: runs `body` once, here, as this process's rank.
absl::Status RunOnProcesses(Endpoint& endpoint, int64_t ranks,
                            absl::FunctionRef<absl::Status(RankContext&)> body,
                            const SpmdOptions& options);

}  // namespace dtensor
