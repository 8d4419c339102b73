// FileStore: a Store in a folder that all ranks see: where they cannot reach each other otherwise
// before they have met. Private to mesh/.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "dtensor/mesh/store.h"

namespace dtensor {

// A key is a file. Changes are made under a lock of the folder (fcntl, which network file systems
// have too) and appear whole; who waits looks every few milliseconds.
class FileStore : public Store {
 public:
  // Makes the folder if it is not there. Errors: Unavailable with its name and the system's reason.
  static absl::StatusOr<std::unique_ptr<FileStore>> Open(std::string folder, std::string who);

  absl::Status Set(Key key, absl::string_view value) override;
  absl::StatusOr<std::string> Get(Key key, absl::Time deadline) override;
  absl::Status Wait(absl::Span<const std::string> keys, absl::Time deadline) override;
  absl::StatusOr<int64_t> Add(Key key, int64_t n) override;
  absl::StatusOr<std::string> CompareExchange(Key key, absl::string_view expected,
                                              absl::string_view desired) override;

 private:
  FileStore(std::string folder, std::string who)
      : folder_(std::move(folder)), who_(std::move(who)) {}
  std::string PathOf(Key key) const;
  // Under the lock of the folder.
  absl::Status Locked(absl::FunctionRef<absl::Status()> change) const;
  // The value; NotFound where there is none.
  absl::StatusOr<std::string> Read(Key key) const;
  absl::Status Write(Key key, absl::string_view value) const;

  const std::string folder_, who_;
};

}  // namespace dtensor
