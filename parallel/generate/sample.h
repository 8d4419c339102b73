// Sampling: from logits to the next token. Logits may be sharded by class and by row as a plan
// leaves them: no function here gathers the vocabulary, and every rank gets the same tokens, which
// are those of one device. Functions throw Error.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "dtensor/distributed_tensor.h"

namespace dtensor {

struct SamplingOptions {
  double temperature = 0;          // 0: the most likely token; nothing below but the penalty counts
  int64_t top_k = 0;               // draws from this many most likely tokens; 0: from all
  double top_p = 1;                // then from the most likely ones that have this share together
  int64_t min_tokens_to_keep = 1;  // and of these at least so many, of what top_k leaves
  double repetition_penalty = 1;   // divides positive logits of tokens that are there already,
                                   // multiplies negative ones
};
// Errors: InvalidArgument naming the option that is out of its range.
absl::Status CheckSampling(const SamplingOptions& options);

// The k largest logits per row and the tokens that they belong to, largest first; of equal ones the
// lowest token first.
//   Shapes: logits [rows, vocab] -> [rows, k] and int64 [rows, k]; a larger k is the vocabulary's
//           size.
//   Sharding: rows stay as they are; the results are whole per row.
//   Comm:   where the vocabulary is sharded, also unevenly, all-gathers of k numbers per rank and
//           row; k per rank is capped by what a rank has.
Values TopTokens(const DTensor& logits, int64_t k);

// logits with those of `seen` tokens made less likely. seen: int64 [rows, n], a token may come
// several times. Comm: one all-reduce of [rows, n].
DTensor PenaliseRepetition(const DTensor& logits, const DTensor& seen, double penalty);

// logits / temperature, with -infinity for what top_k and then top_p leave out. top_k keeps the
// lowest of equal tokens. top_p keeps the fewest tokens with at least this share, at least
// min_tokens_to_keep of those that top_k leaves (all, where these are fewer), and those that are
// exactly as likely as the least of them. At temperatures below 1e-6 the largest of
// a row is 0: the quotients are more than floats hold.
//   Sharding: as logits.
//   Comm:   below 1e-6: an all-reduce of a number per row; top_k: TopTokens'; top_p: about forty of
//           them, which find the least likely token that is kept, and above one min_tokens_to_keep
//           TopTokens' of so many.
//   Source: TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper of transformers.
DTensor FilterLogits(const DTensor& logits, const SamplingOptions& options);

// The next token of each row: int64 [rows, 1], whole per row. Draws vocabulary-many numbers per row
// from the rank's default generator (none at temperature 0): the largest of logits plus Gumbel
// noise.
//   seen:   as PenaliseRepetition's; may be null where there is no penalty.
//   Errors: InvalidArgument for options out of range and logits of other shapes; OutOfRange for
//           logits that are NaN.
DTensor NextTokens(const DTensor& logits, const SamplingOptions& options, const DTensor& seen = {});

}  // namespace dtensor
