// Bpe: byte pair encoding, the model of a tokenizer: words to tokens by learnt merges.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "dtensor/parallel/io/json_fields.h"

namespace dtensor::text {

// Immutable.
class Bpe {
 public:
  // The object "model" of a tokenizer.json.
  //   Errors: InvalidArgument naming the field, for ids that are no whole numbers below 2^24 or are
  //   there twice, and merges of tokens that the vocabulary has not; Unimplemented for another type
  //   and for options that are not served.
  static absl::StatusOr<Bpe> Read(const JsonFields& model);

  // Appends the tokens of one word, whose characters stand for bytes: the pair with the lowest rank
  // is merged first, of equal ones the leftmost. Characters without a token become the unknown one,
  // or, where there is none, nothing, as in Hugging Face's library.
  //   Cost: n log n for n characters.
  void Encode(absl::string_view word, std::vector<int64_t>* ids) const;

  const absl::flat_hash_map<std::string, int32_t>& vocab() const { return vocab_; }

 private:
  struct Merge {
    int32_t rank, id;
  };
  static uint64_t Pair(int32_t a, int32_t b) {
    return static_cast<uint64_t>(a) << 32 | static_cast<uint32_t>(b);
  }
  absl::Status ReadVocab(const JsonFields& model);
  absl::Status ReadMerges(const JsonFields& model);
  std::vector<int32_t> Characters(absl::string_view word) const;

  absl::flat_hash_map<std::string, int32_t> vocab_;
  absl::flat_hash_map<uint64_t, Merge> merges_;
  int32_t unknown_ = -1;
  bool fuse_unknown_ = false, ignore_merges_ = false;
};

}  // namespace dtensor::text
