#include "dtensor/parallel/models/causal_lm.h"

#include <algorithm>
#include <bit>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "dtensor/ops/nn/attention.h"
#include "dtensor/ops/ops.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

[[noreturn]] void Refuse(const Module& model, absl::string_view what) {
  Throw(absl::InvalidArgumentError(absl::StrCat("[", model.type_name(), "] ", what)));
}

// Zeros for the keys (or values) of `capacity` tokens, placed as those of some tokens are.
DTensor RoomFor(const DTensor& some, int64_t capacity) {
  Shape shape = some.shape();
  shape[2] = capacity;
  Placements placements = WithoutPending(some.placements());
  for (Placement& p : placements) {
    if (p.is_sized() || (p.cuts_dim() && p.dim() == 2)) p = Replicate();
  }
  return zeros(shape, {.dtype = some.dtype(), .mesh = some.mesh(), .placements = placements});
}

// Puts `some` behind the `past` tokens of `all`, and gives these and those.
DTensor Append(const DTensor& all, const DTensor& some, int64_t past) {
  const int64_t end = past + some.size(2);
  copy_(slice(all, 2, past, end), some);
  return slice(all, 2, 0, end);
}

}  // namespace

DTensor CausalLM::Decode(const DTensor& ids, KVCache& cache, const DTensor& positions,
                         const DTensor& mask, bool last_only) {
  const NoGrad no_grad;
  cache_ = &cache;
  last_only_ = last_only;
  const absl::Cleanup done = [this] {
    cache_ = nullptr;
    last_only_ = false;
  };
  Values in = {ids};
  if (positions.defined()) in.Add("positions", positions);
  if (mask.defined()) in.Add("mask", mask);
  DTensor logits = (*this)(in)[0];
  cache.length += ids.size(1);
  return logits;
}

DTensor CausalLM::Wanted(const DTensor& x) const {
  return last_only_ && x.size(1) > 1 ? slice(x, 1, x.size(1) - 1, x.size(1)) : x;
}

// Cut from a table that stays, so that a step brings nothing to a device. Its size doubles as
// sequences grow: of all positions that a config allows it may be more than there is memory.
DTensor CausalLM::Positions(int64_t begin, int64_t end, const DeviceMesh& mesh) {
  const TensorOptions whole = {.dtype = DType::kI64, .mesh = mesh};
  if (end > max_positions()) return arange(begin, end, 1, whole);
  constexpr uint64_t kLeast = 1024;
  const uint64_t grown = std::bit_ceil(std::max(static_cast<uint64_t>(end), kLeast));
  const int64_t size = std::min(static_cast<int64_t>(grown), max_positions());
  return slice(Cached(absl::StrCat("positions ", size, " ", mesh.ToString()),
                      [&] { return arange(0, size, 1, whole); }),
               0, begin, end);
}

CausalLM::Sight CausalLM::Look(const Values& in) {
  const DTensor& ids = in[0];
  if (ids.ndim() != 2 || ids.dtype() != DType::kI64) {
    Refuse(*this, absl::StrCat("ids must be int64 [batch, seq], got ", ids.spec().ToString()));
  }
  Sight sight{.positions = in.Named("positions", 1),
              .past = cache_ == nullptr ? 0 : cache_->length};
  const int64_t batch = ids.size(0), seq = ids.size(1);
  sight.keys = sight.past + seq;
  if (cache_ != nullptr) {
    if (sight.keys > cache_->capacity) {
      Refuse(*this, absl::StrCat("the cache holds ", sight.past, " of ", cache_->capacity,
                                 " tokens and has no room for ", seq, " more"));
    }
    // Without tensors where the first call could not make them.
    const DTensor first = cache_->layers.empty() ? DTensor() : cache_->layers[0].k;
    if (first.defined() && first.size(0) != batch) {
      Refuse(*this,
             absl::StrCat("the cache is of ", first.size(0), " rows, the ids are of ", batch));
    }
  }
  DTensor mask = in.Named("mask", 2);
  if (!sight.positions.defined()) {
    sight.positions = Positions(sight.past, sight.keys, ids.mesh());
  } else if (sight.positions.shape() != ids.shape() || sight.positions.dtype() != DType::kI64) {
    Refuse(*this, absl::StrCat("positions must be int64 ", ToString(ids.shape()), ", got ",
                               sight.positions.spec().ToString()));
  }
  if (mask.defined() &&
      (mask.shape() != Shape{batch, sight.keys} || mask.dtype() != DType::kBool)) {
    Refuse(*this, absl::StrCat("mask must be bool ", ToString(Shape{batch, sight.keys}), ", got ",
                               mask.spec().ToString()));
  }
  // One token sees all, and first tokens are what causal attention means.
  if (seq > 1 && sight.past > 0) {
    sight.mask = ge(unsqueeze(Positions(sight.past, sight.keys, ids.mesh()), 1),
                    Positions(0, sight.keys, ids.mesh()));
  }
  if (mask.defined()) {
    mask = unsqueeze(unsqueeze(mask, 1), 1);
    sight.mask = sight.mask.defined() ? logical_and(mask, sight.mask) : mask;
  }
  return sight;
}

DTensor CausalAttention::operator()(const DTensor& q, const DTensor& k, const DTensor& v,
                                    const DTensor& mask, std::optional<double> scale,
                                    double dropout) const {
  DTensor keys = k, values = v;
  if (KVCache* cache = model_.cache()) {
    if (cache->layers.empty()) cache->layers.resize(model_.layers());
    KVCache::Layer& mine = cache->layers[layer_];
    if (!mine.k.defined()) mine = {RoomFor(k, cache->capacity), RoomFor(v, cache->capacity)};
    keys = Append(mine.k, k, cache->length);
    values = Append(mine.v, v, cache->length);
  }
  // Of later tokens the mask says it all (Look).
  if (q.size(2) > 1 && q.size(2) == keys.size(2)) {
    return causal_attention(q, keys, values, mask, scale, /*enable_gqa=*/true, dropout);
  }
  return scaled_dot_product_attention(q, keys, values, mask, /*is_causal=*/false, scale,
                                      /*enable_gqa=*/true, dropout);
}

DTensor SplitHeads(const DTensor& x, int64_t size) {
  return transpose(unflatten(x, -1, {-1, size}), 1, 2);
}
DTensor JoinHeads(const DTensor& x) { return flatten(transpose(x, 1, 2), 2, 3); }

}  // namespace dtensor
