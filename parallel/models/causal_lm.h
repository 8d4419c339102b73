// CausalLM: what decoder-only language models have in common, as one device would run them: token
// ids to logits, alone or after what a KV cache holds.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "dtensor/parallel/io/tensor_folder.h"
#include "dtensor/parallel/module/module.h"

namespace dtensor {

// Keys and values of the tokens that a model has seen. The first Decode makes the tensors, cut as
// the model's keys and values are: by heads under a plan that cuts heads, a rank without heads
// holds an empty part. Belongs to one rank; all ranks of the mesh keep one alike.
struct KVCache {
  struct Layer {
    DTensor k, v;  // [batch, kv_heads, capacity, head_size]
  };
  explicit KVCache(int64_t tokens) : capacity(tokens) {}
  std::vector<Layer> layers = {};
  int64_t capacity;    // tokens per row of the batch
  int64_t length = 0;  // those that are there
};

// A model from ids [batch, seq] to logits [batch, seq, vocab]:
//   model(ids), or model(Values{ids}.Add("positions", p).Add("mask", m))
// where rows are padded on the left: positions [batch, seq] int64, each token's own, and mask
// [batch, seq] bool, false for padding. A row's padding sees nothing and is seen by nothing.
class CausalLM : public Module {
 public:
  virtual int64_t vocab() const = 0;
  virtual int64_t layers() const = 0;
  virtual int64_t kv_heads() const = 0;
  virtual int64_t head_size() const = 0;
  virtual int64_t max_positions() const = 0;
  // The most tokens of a text: those of a model whose positions go on are not bounded.
  virtual int64_t max_tokens() const { return max_positions(); }

  // The same for tokens that come after the cache.length ones of the cache, which gets theirs.
  // Records no gradients.
  //   Shapes: ids [batch, seq]; positions [batch, seq] (default: length, length + 1, ...); mask
  //           [batch, length + seq], of all tokens so far (default: all count). last_only: logits
  //           [batch, 1, vocab] of the last token, and the head computes no others.
  //   Comm:   that of the model.
  //   Errors: InvalidArgument for more tokens than the cache has room for, another batch than that
  //           of its tokens, and those of the model; the cache's length is as it was then.
  DTensor Decode(const DTensor& ids, KVCache& cache, const DTensor& positions = {},
                 const DTensor& mask = {}, bool last_only = false);

  // Names in files (parallel/io): what files may leave out before every name ("transformer."), and
  // tensors that are no parameters (masks and tables of older files).
  virtual std::string file_prefix() const { return ""; }
  virtual bool IgnoresTensor(absl::string_view) const { return false; }
  // Texts that lay beside the weights (config.json, ...): SavePretrained writes them again.
  std::vector<std::pair<std::string, std::string>> companions = {};
  // The files that LoadPretrained read: SavePretrained writes such again.
  FolderForm form = {};

 protected:
  // How tokens see each other, the same in every layer of one call.
  struct Sight {
    DTensor positions;  // [seq] or [batch, seq] int64
    // bool, broadcasts to [batch, heads, seq, keys], null: none is needed. [batch, 1, 1, keys]
    // beside what first tokens cannot see; of later ones all that each of them sees.
    DTensor mask = {};
    int64_t past = 0;  // tokens before these
    int64_t keys = 0;  // and with these
  };
  // Errors: InvalidArgument for inputs of other shapes or dtypes than the class says.
  Sight Look(const Values& in);
  // That of the Decode that runs; null outside of it.
  KVCache* cache() const { return cache_; }
  // What the head is to see of x [batch, seq, hidden].
  DTensor Wanted(const DTensor& x) const;
  friend class CausalAttention;

 private:
  DTensor Positions(int64_t begin, int64_t end, const DeviceMesh& mesh);

  KVCache* cache_ = nullptr;
  bool last_only_ = false;
};

// The part of a decoder's attention behind the projections. One per layer; it reads and fills the
// cache of its model.
class CausalAttention {
 public:
  CausalAttention(const CausalLM& model, int64_t layer) : model_(model), layer_(layer) {}
  // softmax(q k^T * scale + mask) v over this call's keys and those of the cache. q [b, h, s, d],
  // k and v [b, g, s, d], g divides h; mask as CausalLM::Look gives it: first tokens see none that
  // come later.
  DTensor operator()(const DTensor& q, const DTensor& k, const DTensor& v, const DTensor& mask,
                     std::optional<double> scale = {}, double dropout = 0) const;

 private:
  const CausalLM& model_;
  int64_t layer_;
};

// [batch, seq, heads * size] -> [batch, heads, seq, size], and back.
DTensor SplitHeads(const DTensor& x, int64_t size);
DTensor JoinHeads(const DTensor& x);

}  // namespace dtensor
