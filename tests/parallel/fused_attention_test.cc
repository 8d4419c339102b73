// A transformer whose q, k and v are one Linear, under a plan: no collective more than with three.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "dtensor/ops/ops.h"
#include "dtensor/parallel/models/gpt.h"
#include "dtensor/parallel/models/gpt_plan.h"
#include "dtensor/rng/generator.h"
#include "tests/parallel/support.h"

namespace dtensor::fused_attention_test {
namespace {

constexpr GPTConfig kConfig = {.vocab = 16, .seq = 6, .layers = 2, .hidden = 20, .heads = 5};

// GPT-2's attention: c_attn [3 * size, size], c_proj [size, size].
class FusedAttention : public Module {
 public:
  FusedAttention(int64_t size, int64_t heads)
      : size_(size),
        head_size_(size / heads),
        c_attn_(AddChild<Linear>("c_attn", size, 3 * size)),
        c_proj_(AddChild<Linear>("c_proj", size, size)) {}
  std::string type_name() const override { return "FusedAttention"; }

 protected:
  Values Forward(const Values& in) override {
    const Values qkv = split(DTensor(c_attn_(in[0])), size_, -1);
    const auto heads = [&](const DTensor& x) {
      return transpose(unflatten(x, -1, {-1, head_size_}), 1, 2);
    };
    const DTensor o = scaled_dot_product_attention(heads(qkv[0]), heads(qkv[1]), heads(qkv[2]), {},
                                                   /*is_causal=*/true);
    return {c_proj_(flatten(transpose(o, 1, 2), 2, 3))};
  }

 private:
  int64_t size_, head_size_;
  Linear &c_attn_, &c_proj_;
};

// Pre-norm blocks of either kind of attention.
template <class Attention>
class Model : public Module {
 public:
  explicit Model(const GPTConfig& c)
      : tokens_(AddChild<Embedding>("tokens", c.vocab, c.hidden)),
        blocks_(AddChild<Sequential>("blocks")),
        head_(AddChild<Linear>("head", c.hidden, c.vocab, /*bias=*/false)) {
    for (int64_t i = 0; i < c.layers; ++i) blocks_.template Append<Block>(c);
  }
  std::string type_name() const override { return "Model"; }

 protected:
  Values Forward(const Values& in) override { return {head_(blocks_(tokens_(in[0])))}; }

 private:
  class Block : public Module {
   public:
    explicit Block(const GPTConfig& c)
        : norm1_(AddChild<LayerNorm>("norm1", c.hidden)),
          attn_(AddChild<Attention>("attn", c.hidden, c.heads)),
          norm2_(AddChild<LayerNorm>("norm2", c.hidden)),
          mlp_(AddChild<MLP>("mlp", c.hidden, 4 * c.hidden)) {}
    std::string type_name() const override { return "Block"; }

   protected:
    Values Forward(const Values& in) override {
      const DTensor x = in[0] + DTensor(attn_(norm1_(in[0])));
      return {x + DTensor(mlp_(norm2_(x)))};
    }

   private:
    LayerNorm& norm1_;
    Attention& attn_;
    LayerNorm& norm2_;
    MLP& mlp_;
  };
  Embedding& tokens_;
  Sequential& blocks_;
  Linear& head_;
};

struct Traffic {
  int64_t count = 0, bytes = 0;
};

// Of the first rank, of one step; over dp, where there are several, the batch is cut.
template <class Attention>
Traffic TrafficOf(int64_t dp, int64_t tp, const Plan& attention) {
  Traffic traffic;
  const absl::Status status = RunSpmd(dp * tp, [&](RankContext& context) -> absl::Status {
    const DeviceMesh mesh = testing::DpTp(dp, tp);
    Model<Attention> model(kConfig);
    Plan plan = {{"tokens", RowwiseParallel()},
                 {"blocks.*.mlp.up", ColwiseParallel()},
                 {"blocks.*.mlp.down", RowwiseParallel()},
                 {"head", ColwiseParallel()}};
    plan.insert(plan.end(), attention.begin(), attention.end());
    DT_RETURN_IF_ERROR(ParallelizeModule(model, mesh, plan));
    ManualSeed(1);
    Materialize(model);
    const DTensor ids = FromVector(testing::Integers(2 * kConfig.seq, 3), {2, kConfig.seq},
                                   {.mesh = mesh, .placements = {Shard(0), Replicate()}});
    const CommTrace trace;
    const DTensor logits = model(to(abs(ids), DType::kI64));
    sum(logits * logits).Backward();
    if (context.rank() == 0) traffic = {trace.TotalCount(), trace.TotalBytes()};
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  return traffic;
}

TEST(FusedAttentionPlan, CostsNoCollectiveMoreThanThreeProjections) {
  const int64_t size = kConfig.hidden, unit = size / kConfig.heads;
  // 5 heads: uneven, and at 4 ranks one has none.
  for (const auto& [dp, tp] : {std::pair{1, 2}, {1, 3}, {1, 4}, {2, 2}, {2, 4}}) {
    SCOPED_TRACE(absl::StrCat(dp, " x ", tp));
    const Traffic three =
        TrafficOf<CausalSelfAttention>(dp, tp,
                                       {{"blocks.*.attn.w[qkv]", ColwiseParallel({.unit = unit})},
                                        {"blocks.*.attn.wo", RowwiseParallel({.unit = unit})}});
    const Traffic fused = TrafficOf<FusedAttention>(
        dp, tp,
        {{"blocks.*.attn.c_attn",
          ColwiseParallel({.segments = {{size, unit}, {size, unit}, {size, unit}}})},
         {"blocks.*.attn.c_proj", RowwiseParallel({.unit = unit})}});
    EXPECT_GT(three.count, 0);
    EXPECT_LE(fused.count, three.count);
    EXPECT_LE(fused.bytes, three.bytes);
  }
}

}  // namespace
}  // namespace dtensor::fused_attention_test
