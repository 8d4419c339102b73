// Files of tokens, read in pieces: no more than what was asked for is in memory.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace dtensor {

// Either a file that WriteTokens made, or any other, whose bytes are tokens then (0 to 255), or
// tokens that are in memory.
//
// A token file is a head of 32 bytes, little-endian, and the tokens:
//   "DTTOKENS", uint32 version (1), uint32 bytes per token (2 or 4), uint64 number of tokens,
//   uint64 largest token
class TokenFile {
 public:
  // Errors: NotFound for what is no regular file that can be read; InvalidArgument for a head that
  // is not as above, for a file that is shorter or longer than its head says, and for one named
  // ".bin" without such a head: its tokens are not its bytes. All name the path.
  static absl::StatusOr<TokenFile> Open(const std::string& path);
  // The bytes of any file, whatever it is named or begins with. Errors: NotFound as above.
  static absl::StatusOr<TokenFile> OpenBytes(const std::string& path);
  // Tokens that were made here, as a file would have them; `name` is what errors call it.
  //   Errors: InvalidArgument for a token that is negative or does not fit into 32 bits.
  static absl::StatusOr<TokenFile> Of(std::string name, absl::Span<const int64_t> tokens);

  const std::string& path() const;
  int64_t size() const { return count_; }
  // What a model's vocabulary must go beyond: as the head says, of bytes 255.
  int64_t largest() const { return largest_; }
  // Whether tokens are bytes: there was no head.
  bool is_bytes() const { return width_ == 1; }
  // Tokens [start, start + out.size()). Errors: OutOfRange beyond the end; Unavailable, rank-local,
  // for what cannot be read; InvalidArgument, rank-local, for a token above largest().
  absl::Status Read(int64_t start, absl::Span<int64_t> out) const;

 private:
  struct Handle;
  static absl::StatusOr<TokenFile> OpenRegular(const std::string& path);
  std::shared_ptr<const Handle> file_;
  int64_t count_ = 0, largest_ = 255, head_ = 0;
  int width_ = 1;
};

// Errors: InvalidArgument for a token that does not fit into `bytes_per_token` (2 or 4), naming it;
// those of WriteFile (tensor/file.h).
absl::Status WriteTokens(const std::string& path, absl::Span<const int64_t> tokens,
                         int bytes_per_token = 2);

}  // namespace dtensor
