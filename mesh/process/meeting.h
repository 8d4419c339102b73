// How the processes of a launch find each other where their library of messages does not: at a
// store that the launcher serves, or rank 0. Private to mesh/.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "dtensor/mesh/process/launcher.h"
#include "dtensor/mesh/process/messages.h"
#include "dtensor/mesh/store/tcp_server.h"
#include "dtensor/mesh/store/tcp_store.h"

namespace dtensor {

// Where, by the environment.
struct MeetingPlace {
  std::string host;        // as the environment says it; empty: where rank 0 says in `file`
  std::vector<int> ports;  // rank 0 serves at the first of them that is free; 0: at any
  bool served = false;     // by the launcher
  std::string token;       // store::kTokenBytes of them; empty: rank 0 draws it
  std::string file;        // in a folder that all see; empty: there is none
  // Machines start at different times. DTENSOR_TIMEOUT_S goes before it.
  absl::Duration limit = absl::Seconds(120);
};

// DTENSOR_STORE: "host:port" of a launcher that serves the store, or the path of a folder that all
// see ("/shared/job7", also as "file:///shared/job7"): there rank 0 writes where it serves, and a
// token, into a file that only its user reads, named after what makes tokens. Else MASTER_ADDR
// (DTENSOR_ADDRESS goes before it) and DTENSOR_PORT, or one of the eight ports after MASTER_PORT,
// which itself may be the launcher's. The token is made of DTENSOR_TOKEN, else of
// TORCHELASTIC_RUN_ID, else of MASTER_ADDR, which anybody knows; of MASTER_PORT, where no launcher
// serves the store; and of TORCHELASTIC_RESTART_COUNT.
//   Errors: InvalidArgument naming the variable that is missing or makes no sense.
absl::StatusOr<MeetingPlace> FindMeeting(const ProcessPlace& place, const Environment& environment);

// The token of one attempt of a launch.
std::string LaunchToken(absl::string_view secret, absl::string_view attempt);

// The IPv4 address of a name. Errors: Unavailable with the name and the system's words.
absl::StatusOr<std::string> ResolveHost(const std::string& host);
// This machine's address on the way to another one.
absl::StatusOr<std::string> AddressTowards(const std::string& address);

// One process at the meeting.
class Meeting {
 public:
  // Returns when all are here.
  //   Errors: those of FindMeeting; Unavailable if no port is free, if the folder cannot be written
  //   to, or if nobody with this launch's token answers until the limit; DeadlineExceeded naming
  //   the ranks that did not come; AlreadyExists for a rank that is here twice; FailedPrecondition
  //   for other world sizes.
  static absl::StatusOr<std::unique_ptr<Meeting>> Join(const ProcessPlace& place,
                                                       const Environment& environment);
  // What the library of messages is told; valid as long as this is.
  const DtMeeting& table() const { return table_; }
  const std::string& address() const { return address_; }  // this process's, for others
  int64_t requests() const { return requests_; }           // to the store, until End
  // After the library has met: returns when all have, on rank 0, which serves until then.
  absl::Status End();
  // Where it has not: `why`, or, by what the others say meanwhile, who says nothing.
  absl::Status Failed(const std::string& why);

 private:
  Meeting(const ProcessPlace& place, absl::Time deadline)
      : rank_(place.rank), size_(place.size), deadline_(deadline) {}
  absl::Status Serve(const MeetingPlace& where, const std::string& host);
  absl::Status Publish(const MeetingPlace& where);
  // `host`: of the store; where a file says it, from there.
  absl::Status Connect(const MeetingPlace& where, std::string* host);
  absl::Status Come();
  absl::StatusOr<std::string> Verdict();
  absl::Status AwaitAll();
  void Close();
  // What the library calls.
  static int SetText(void* meeting, const char* key, const void* data, int64_t bytes, char* why,
                     size_t why_size);
  static int GetText(void* meeting, const char* key, void* data, int64_t most, int64_t* bytes,
                     char* why, size_t why_size);

  const int64_t rank_, size_;
  const absl::Time deadline_;
  std::string address_;
  int64_t requests_ = 0;
  std::string published_;                   // the file of rank 0
  std::unique_ptr<TcpStoreServer> server_;  // of rank 0 where the launcher serves none
  std::unique_ptr<TcpStore> store_;
  DtMeeting table_ = {};
};

}  // namespace dtensor
