// embedding: rows of a table. With the table sharded by rows each rank looks up its own and the
// result is a pending sum; the gradient of such a table is made in the table's own placement.
#include "absl/strings/str_cat.h"
#include "dtensor/ops/index/pick.h"
#include "dtensor/ops/ops.h"
#include "dtensor/ops/rules.h"

namespace dtensor {
namespace {

absl::Status IntegerIds(const OpCall& call) {
  const DType ids = call.dtype(1);
  if (ids == DType::kI64 || ids == DType::kI32) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("ids must be int64 or int32, are ", TypeName(ids)));
}

absl::StatusOr<FactorText> BackwardFactors(const OpCall& call) {
  return FactorText{"... d, ... -> v d", {{"v", call.Int("num_rows")}}};
}

// Each row of dy divided by how often ids names its row of the table.
DTensor ByFrequency(const DTensor& dy, const DTensor& ids, int64_t rows) {
  const DTensor flat = flatten(ids);
  const DTensor times = AddUp(ones(flat.shape(), {dy.dtype(), ids.mesh(), {}}), 0, flat, rows);
  return div(dy, unsqueeze(reshape(Pick(times, 0, flat), ids.shape()), -1));
}

void EmbeddingVjp(VjpCall& c) {
  static const OpDef& op = GetOp("embedding_backward");
  const DTensor& ids = c.in(1);
  const DTensor dy =
      c.Bool("scale_grad_by_freq") ? ByFrequency(c.grad(), ids, c.in_spec(0).shape()[0]) : c.grad();
  DispatchOptions options;
  options.like = &c.in_spec(0);
  c.set(0, Call1(op, {&dy, &ids}, {IntAttr(c.in_spec(0).shape()[0]), IntAttr(c.Int("padding_idx"))},
                 options));
}

}  // namespace

void RegisterEmbeddingOps() {
  Op("embedding(w, ids; padding_idx, scale_grad_by_freq)")
      .Factors("v d, ... -> ... d")
      .Linear("w(ids)")
      .Monotone("w")
      .NeedsOffset("v")
      .Check(IntegerIds)
      .Vjp(EmbeddingVjp, "ids");
  Op("embedding_backward(dy, ids; num_rows, padding_idx)")
      .Factors(BackwardFactors)
      .Linear("dy(ids)")
      .NeedsOffset("v")
      .Check([](const OpCall& c) {
        const absl::Status ids = IntegerIds(c);
        return ids.ok() ? SameLeading(c, {1, 0}) : ids;
      });
}

DTensor embedding(const DTensor& ids, const DTensor& weight, int64_t padding_idx,
                  bool scale_grad_by_freq) {
  static const OpDef& op = GetOp("embedding");
  return AsOp("embedding", {{"ids", ids}, {"weight", weight}}, [&] {
    if (weight.ndim() != 2) {
      ThrowInvalid("embedding",
                   absl::StrCat("weight must be [rows, width], is ", ToString(weight.shape())));
    }
    if (padding_idx >= weight.size(0)) {
      ThrowInvalid("embedding", absl::StrCat("padding_idx ", padding_idx, " is outside of ",
                                             weight.size(0), " rows"));
    }
    return Call1(op, {&weight, &ids},
                 {IntAttr(padding_idx < 0 ? -1 : padding_idx), BoolAttr(scale_grad_by_freq)});
  });
}

}  // namespace dtensor
