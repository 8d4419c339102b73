// Random ops: the numbers of one device under any placement, no communication.
//
// All draw from the rank's default generator; call them on every rank alike. In place and without
// history: uniform_ and normal_ (dtensor/distribute.h), and these.
#pragma once

#include "dtensor/ops/family.h"

namespace dtensor {

void random_(const DTensor& t, int64_t from, int64_t to);  // whole numbers in [from, to)
void random_(const DTensor& t);  // from 0 up to what the dtype counts in steps of one
void bernoulli_(const DTensor& t, double p = 0.5);
void bernoulli_(const DTensor& t, const DTensor& p);  // p in t's placement
void exponential_(const DTensor& t, double lambda = 1);
void cauchy_(const DTensor& t, double median = 0, double sigma = 1);
void log_normal_(const DTensor& t, double mean = 1, double std = 2);
void geometric_(const DTensor& t, double p);
DTensor randint(int64_t low, int64_t high, IntSpan shape, TensorOptions options = {DType::kI64});
DTensor rand_like(const DTensor& x);
DTensor randn_like(const DTensor& x);
DTensor randint_like(const DTensor& x, int64_t low, int64_t high);
DTensor bernoulli(const DTensor& p);  // 1 with probability p[i]
// A permutation of 0 .. n - 1. The host computes it, whole on every rank: on a device it is copied
// there, and nobody waits.
DTensor randperm(int64_t n, const TensorOptions& options = {DType::kI64});
// Indices of categories drawn with the (unnormalised) probabilities in the last dim.
//   Shapes:   p [k] or [n, k] -> [samples] or [n, samples] int64, replicated
//   Comm:     gathers p.
//   Device:   the host computes: it waits for p and, without replacement, for its exponentials.
//   Errors:   InvalidArgument for more samples than categories without replacement, a negative or
//             not finite probability, or a row that sums to 0.
DTensor multinomial(const DTensor& p, int64_t samples, bool replacement = false);
// x with elements zeroed with probability p and the others scaled by 1 / (1 - p). The mask is that
// of one device; ranks that hold terms of a pending sum share it, so the sum may stay pending.
//   Types:    floating. p = 0 or training = false: x itself, of any dtype, nothing is drawn.
//   Comm:     a pending maximum, minimum or product is reduced first.
//   Errors:   InvalidArgument for p outside of [0, 1]; dropout_: for what is pending so.
//   Source:   torch.nn.functional.dropout on CUDA
DTensor dropout(const DTensor& x, double p = 0.5, bool training = true);
// The same, and the bool mask of what was kept.
Values dropout_with_mask(const DTensor& x, double p);
DTensor dropout_(const DTensor& x, double p = 0.5, bool training = true);
// Whole channels (dims 0 and 1) at a time.
DTensor feature_dropout(const DTensor& x, double p = 0.5, bool training = true);
// Keeps mean and variance of a self-normalising network (torch.nn.functional.alpha_dropout).
DTensor alpha_dropout(const DTensor& x, double p = 0.5, bool training = true);

}  // namespace dtensor
