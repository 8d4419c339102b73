// Test support: more cases of ownership_cases.h. Overloads of functions whose name has a line in
// ops/, forms in place, and what is made of ops.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <utility>

#include "dtensor/intercept.h"
#include "dtensor/mesh_scope.h"
#include "dtensor/ops/rules.h"
#include "dtensor/parallel/generate/sample.h"
#include "dtensor/parallel/io/tensor_folder.h"
#include "dtensor/parallel/local/local_map.h"
#include "dtensor/parallel/models/pretrained.h"
#include "dtensor/parallel/models/rope.h"
#include "dtensor/parallel/plan/loss_parallel.h"
#include "dtensor/parallel/train/check_copies.h"
#include "dtensor/parallel/train/trainer.h"
#include "dtensor/rehearsal.h"
#include "tests/common/temp_folder.h"
#include "tests/parallel/ownership_cases.h"

namespace dtensor {
namespace {

// Which of the functions of one name a call means is said by its signature: each is declared.
Cases OverloadCases() {
#define ISIN "isin(const DTensor&, const DTensor&, bool, bool)"
#define INDEX_FILL "index_fill(const DTensor&, int64_t, const DTensor&, const DTensor&)"
#define INDEX_FILL_NUMBER "index_fill(const DTensor&, int64_t, const DTensor&, Scalar)"
#define INDEX_FILL_ "index_fill_(const DTensor&, int64_t, const DTensor&, const DTensor&)"
#define INDEX_FILL_NUMBER_ "index_fill_(const DTensor&, int64_t, const DTensor&, Scalar)"
#define NARROW "narrow(const DTensor&, int64_t, const DTensor&, int64_t)"
#define QUANTILE \
  "quantile(const DTensor&, const DTensor&, std::optional<int64_t>, bool, const std::string&)"
#define REPEAT                                                                 \
  "repeat_interleave(const DTensor&, const DTensor&, std::optional<int64_t>, " \
  "std::optional<int64_t>)"
#define SCATTER(form, more) \
  "scatter" form "(const DTensor&, int64_t, const DTensor&, const DTensor&" more ")"
#define SCATTER_NUMBER(form, more) \
  "scatter" form "(const DTensor&, int64_t, const DTensor&, Scalar" more ")"
#define BAG                                                                                  \
  "embedding_bag(const DTensor&, const DTensor&, const DTensor&, const std::string&, bool, " \
  "const DTensor&, int64_t, bool)"
#define FLOOR "div_(const DTensor&, const DTensor&, absl::string_view)"
#define TOKEN_LOSS "token_loss(const DTensor&, const DTensor&, const TokenLossOptions&)"
#define BY_REDUCE ", const std::string&"
  return {
      UNARY(max),
      BINARY(max),
      CASE("max(const DTensor&, int64_t, bool)", max(f.x, 0)),
      UNARY(min),
      BINARY(min),
      CASE("min(const DTensor&, int64_t, bool)", min(f.x, 0)),
      UNARY(median),
      CASE("median(const DTensor&, int64_t, bool)", median(f.x, 0)),
      UNARY(nanmedian),
      CASE("nanmedian(const DTensor&, int64_t, bool)", nanmedian(f.x, 0)),
      CASE("isin(const DTensor&, Scalar, bool, bool)", isin(f.x, 1)),
      CASE(ISIN, isin(f.x, o.v)),
      CASE(ISIN, isin(o.x, f.v)),
      CASE(INDEX_FILL_NUMBER, index_fill(f.v, 0, o.i, 1)),
      CASE(INDEX_FILL_NUMBER, index_fill(o.v, 0, f.i, 1)),
      CASE(INDEX_FILL, index_fill(f.v, 0, o.i, o.s)),
      CASE(INDEX_FILL, index_fill(o.v, 0, f.i, o.s)),
      CASE(INDEX_FILL, index_fill(o.v, 0, o.i, f.s)),
      CASE(INDEX_FILL_NUMBER_, index_fill_(f.v, 0, o.i, 1)),
      CASE(INDEX_FILL_NUMBER_, index_fill_(o.v, 0, f.i, 1)),
      CASE(INDEX_FILL_, index_fill_(f.v, 0, o.i, o.s)),
      CASE(INDEX_FILL_, index_fill_(o.v, 0, f.i, o.s)),
      CASE(INDEX_FILL_, index_fill_(o.v, 0, o.i, f.s)),
      CASE("rsub(const DTensor&, const DTensor&, Scalar)", rsub(f.v, o.v)),
      CASE("rsub(const DTensor&, const DTensor&, Scalar)", rsub(o.v, f.v)),
      CASE("rsub(const DTensor&, Scalar, Scalar)", rsub(f.v, 1)),
      CASE("add(Scalar, const DTensor&, Scalar)", add(1, f.v)),
      CASE("bucketize(const DTensor&, const DTensor&, bool, bool)", bucketize(f.v, o.v)),
      CASE("bucketize(const DTensor&, const DTensor&, bool, bool)", bucketize(o.v, f.v)),
      CASE("bucketize(Scalar, const DTensor&, bool, bool)", bucketize(1, f.v)),
      CASE("searchsorted(const DTensor&, const DTensor&, bool, bool, const DTensor&)",
           searchsorted(f.v, o.v)),
      CASE("searchsorted(const DTensor&, const DTensor&, bool, bool, const DTensor&)",
           searchsorted(o.v, f.v)),
      CASE("searchsorted(const DTensor&, const DTensor&, bool, bool, const DTensor&)",
           searchsorted(o.v, o.v, false, false, f.i)),
      CASE("searchsorted(const DTensor&, Scalar, bool, bool, const DTensor&)",
           searchsorted(f.v, 1)),
      CASE("searchsorted(const DTensor&, Scalar, bool, bool, const DTensor&)",
           searchsorted(o.v, 1, false, false, f.i)),
      BINARY(true_divide),
      CASE("true_divide(const DTensor&, Scalar)", true_divide(f.v, 2)),
      CASE("narrow(const DTensor&, int64_t, int64_t, int64_t)", narrow(f.v, 0, 0, 1)),
      CASE(NARROW, narrow(f.v, 0, o.n, 1)),
      CASE(NARROW, narrow(o.v, 0, f.n, 1)),
      CASE("quantile(const DTensor&, double, std::optional<int64_t>, bool, const std::string&)",
           quantile(f.v, 0.5)),
      CASE(QUANTILE, quantile(f.v, o.s)),
      CASE(QUANTILE, quantile(o.v, f.s)),
      CASE("repeat_interleave(const DTensor&, int64_t, std::optional<int64_t>)",
           repeat_interleave(f.v, 2)),
      CASE(REPEAT, repeat_interleave(f.v, o.i)),
      CASE(REPEAT, repeat_interleave(o.v, f.i)),
      CASE("repeat_interleave(const DTensor&, std::optional<int64_t>)", repeat_interleave(f.i)),
      CASE(SCATTER_NUMBER("", ""), scatter(f.v, 0, o.i, 1)),
      CASE(SCATTER_NUMBER("", ""), scatter(o.v, 0, f.i, 1)),
      CASE(SCATTER_NUMBER("", BY_REDUCE), scatter(f.v, 0, o.i, 1, "add")),
      CASE(SCATTER_NUMBER("", BY_REDUCE), scatter(o.v, 0, f.i, 1, "add")),
      CASE(SCATTER("", ""), scatter(f.v, 0, o.i, o.v)),
      CASE(SCATTER("", ""), scatter(o.v, 0, f.i, o.v)),
      CASE(SCATTER("", ""), scatter(o.v, 0, o.i, f.v)),
      CASE(SCATTER("", BY_REDUCE), scatter(f.v, 0, o.i, o.v, "add")),
      CASE(SCATTER("", BY_REDUCE), scatter(o.v, 0, f.i, o.v, "add")),
      CASE(SCATTER("", BY_REDUCE), scatter(o.v, 0, o.i, f.v, "add")),
      CASE(SCATTER_NUMBER("_", ""), scatter_(f.v, 0, o.i, 1)),
      CASE(SCATTER_NUMBER("_", ""), scatter_(o.v, 0, f.i, 1)),
      CASE(SCATTER("_", ""), scatter_(f.v, 0, o.i, o.v)),
      CASE(SCATTER("_", ""), scatter_(o.v, 0, f.i, o.v)),
      CASE(SCATTER("_", ""), scatter_(o.v, 0, o.i, f.v)),
      CASE(SCATTER_NUMBER("_", BY_REDUCE), scatter_(f.v, 0, o.i, 1, "add")),
      CASE(SCATTER_NUMBER("_", BY_REDUCE), scatter_(o.v, 0, f.i, 1, "add")),
      CASE(SCATTER("_", BY_REDUCE), scatter_(f.v, 0, o.i, o.v, "add")),
      CASE(SCATTER("_", BY_REDUCE), scatter_(o.v, 0, f.i, o.v, "add")),
      CASE(SCATTER("_", BY_REDUCE), scatter_(o.v, 0, o.i, f.v, "add")),
      CASE("tensor_split(const DTensor&, int64_t, int64_t)", tensor_split(f.v, 2)),
      CASE("tensor_split(const DTensor&, DimList, int64_t)", tensor_split(f.v, DimList{1})),
      CASE("tensor_split(const DTensor&, std::initializer_list<int64_t>, int64_t)",
           tensor_split(f.v, {1})),
      CASE("tensordot(const DTensor&, const DTensor&, int64_t)", tensordot(f.x, o.x, 1)),
      CASE("tensordot(const DTensor&, const DTensor&, int64_t)", tensordot(o.x, f.x, 1)),
      CASE("tensordot(const DTensor&, const DTensor&, DimList, DimList)",
           tensordot(f.x, o.x, DimList{1}, DimList{0})),
      CASE("tensordot(const DTensor&, const DTensor&, DimList, DimList)",
           tensordot(o.x, f.x, DimList{1}, DimList{0})),
      CASE(BAG, embedding_bag(f.i, o.x, o.i, "sum", false, o.v)),
      CASE(BAG, embedding_bag(o.i, f.x, o.i, "sum", false, o.v)),
      CASE(BAG, embedding_bag(o.i, o.x, f.i, "sum", false, o.v)),
      CASE(BAG, embedding_bag(o.i, o.x, o.i, "sum", false, f.v)),
      CASE(FLOOR, div_(f.v, o.v, "floor")),
      CASE(FLOOR, div_(o.v, f.v, "floor")),
      CASE(TOKEN_LOSS, token_loss(f.x, o.i)),
      CASE(TOKEN_LOSS, token_loss(o.x, f.i)),
      CASE(TOKEN_LOSS, token_loss(o.x, o.i, {.weight = f.v})),
  };
}

// name_(self, ...) of every pointwise function: self, and each tensor behind it.
Cases InPlaceCases() {
#define WRITES(name, ...) CASE(#name "_(const DTensor&, const Args&... args)", name##_(__VA_ARGS__))
#define WRITES_TWO(name, a) WRITES(name, f.a, o.a), WRITES(name, o.a, f.a)
#define CASES_OF_Hidden(name)
#define CASES_OF_Backward(name)
#define CASES_OF_Real(name) WRITES(name, f.v),
#define CASES_OF_Same(name) WRITES(name, f.v),
#define CASES_OF_NotBool(name) WRITES(name, f.v),
#define CASES_OF_Two(name) WRITES_TWO(name, v),
#define CASES_OF_Compared(name) WRITES_TWO(name, v), WRITES(name, f.v, 2),
#define CASES_OF_TwoReal(name) WRITES_TWO(name, v),
#define CASES_OF_TwoInt(name) WRITES_TWO(name, i),
#define CASES_OF_Mixed(name) WRITES_TWO(name, v), WRITES(name, f.v, 2),
#define CASES_OF_MixedReal(name) WRITES_TWO(name, v), WRITES(name, f.v, 2),
#define CASES_OF_MixedInt(name) WRITES_TWO(name, i), WRITES(name, f.i, 2),
#define DT_POINTWISE(kind, user, name, ...) CASES_OF_##user(name)
  return {
#include "dtensor/ops/pointwise/elementwise.inc"
      WRITES_TWO(pow, v),
      WRITES(pow, f.v, 2),
      WRITES_TWO(float_power, v),
      WRITES(float_power, f.v, 2),
      WRITES_TWO(ldexp, v),
      WRITES(square, f.v),
      WRITES_TWO(true_divide, v),
      WRITES(true_divide, f.v, 2),
      WRITES(sgn, f.v),
      WRITES(deg2rad, f.v),
      WRITES(rad2deg, f.v),
      WRITES(bitwise_not, f.i),
      WRITES(round, f.v),
      WRITES_TWO(heaviside, v),
      WRITES_TWO(nextafter, v),
      WRITES(clamp, f.v, 0, 1),
      WRITES(clamp, f.v, o.v, o.v),
      WRITES(clamp, o.v, f.v, o.v),
      WRITES(clamp, o.v, o.v, f.v),
      WRITES_TWO(clamp_min, v),
      WRITES(clamp_min, f.v, 2),
      WRITES_TWO(clamp_max, v),
      WRITES(clamp_max, f.v, 2),
      WRITES(nan_to_num, f.v),
      WRITES(lerp, f.v, o.v, 0.5),
      WRITES(lerp, o.v, f.v, 0.5),
      WRITES(lerp, f.v, o.v, o.v),
      WRITES(lerp, o.v, f.v, o.v),
      WRITES(lerp, o.v, o.v, f.v),
      WRITES(addcmul, f.v, o.v, o.v),
      WRITES(addcmul, o.v, f.v, o.v),
      WRITES(addcmul, o.v, o.v, f.v),
      WRITES(addcdiv, f.v, o.v, o.v),
      WRITES(addcdiv, o.v, f.v, o.v),
      WRITES(addcdiv, o.v, o.v, f.v),
      WRITES(fill, f.v, 2),
      WRITES(fill, f.v, o.s),
      WRITES(fill, o.v, f.s),
      WRITES(logit, f.v),
      WRITES(gelu, f.v),
      WRITES(softplus, f.v),
      WRITES(leaky_relu, f.v),
      WRITES(elu, f.v),
      WRITES(selu, f.v),
      WRITES(celu, f.v),
      WRITES(hardtanh, f.v),
      WRITES(relu6, f.v),
      WRITES(softshrink, f.v),
      WRITES(hardshrink, f.v),
      WRITES(threshold, f.v, 0, 1),
      WRITES_TWO(prelu, v),
      WRITES(masked_fill, f.v, o.m, 1),
      WRITES(masked_fill, o.x.Detach(), f.m, 1),
      WRITES(masked_fill, o.x.Detach(), o.m, f.s),
      CASE("polygamma_(const DTensor&, int64_t)", polygamma_(f.v, 1)),
  };
}

// A region of this rank's own, on the mesh of all: what it refuses it refuses before it meets them.
template <class Fn>
void InRegion(const Tensors& o, const Fn& fn) {
  LocalMap(
      [&](const LocalRegion& region, const Values&) {
        fn(region);
        return Values{};
      },
      {o.d}, {});
}
#define IN_REGION(signature, call) \
  CASE("LocalRegion::" signature, InRegion(o, [&](const LocalRegion& region) { region.call; }))

Cases LocalCases() {
  return {
      CASE("LocalMap(const LocalFn&, const Values&, const LocalMapOptions&)",
           LocalMap([](const LocalRegion&, const Values& in) { return in; }, {f.d}, {})),
      IN_REGION("TypeOf(const DTensor&, absl::string_view)", TypeOf(f.v, "w")),
      IN_REGION("AllReduce(const DTensor&, absl::string_view, LocalType)", AllReduce(f.v, "w")),
      IN_REGION("AllGather(const DTensor&, absl::string_view, int, LocalType, int64_t)",
                AllGather(f.v, "w", 0)),
      IN_REGION("ReduceScatter(const DTensor&, absl::string_view, int)",
                ReduceScatter(f.v, "w", 0)),
      IN_REGION("AllToAll(const DTensor&, absl::string_view, int, int, int64_t)",
                AllToAll(f.x, "w", 0, 1)),
      IN_REGION("Convert(const DTensor&, absl::string_view, LocalType, int, int64_t)",
                Convert(f.v, "w", LocalType::kVarying)),
      IN_REGION("Reinterpret(const DTensor&, absl::string_view, LocalType)",
                Reinterpret(f.v, "w", LocalType::kVarying)),
  };
}

Cases PlacingCases() {
  return {
      CASE("DistributeTensor(const DTensor&, const DeviceMesh&)", DistributeTensor(f.x, Self())),
      CASE("DistributeTensor(const DTensor&, const DeviceMesh&)",
           DistributeTensor(f.x, ThisRank())),
      {"DistributeTensor(const DTensor&)",
       [](const Tensors& f, const Tensors&) {
         const MeshScope scope(ThisRank());
         DistributeTensor(f.x);
         return absl::OkStatus();
       }},
      {"DistributeTensor(const DTensor&, PlacementSpan)",
       [](const Tensors& f, const Tensors&) {
         const MeshScope scope(ThisRank());
         DistributeTensor(f.x, Placements{Shard(0)});
         return absl::OkStatus();
       }},
      CASE("DistributeTensor(const DTensor&, const DeviceMesh&, PlacementSpan, int64_t)",
           DistributeTensor(f.x, ThisRank(), Placements{Replicate()}, 0)),
      {"InterceptedCall::Proceed()",
       [](const Tensors& f, const Tensors& o) {
         const InterceptCalls scope("relu", [&](InterceptedCall& call) {
           call.inputs[0] = f.x;
           return call.Proceed();
         });
         relu(o.x);
         return absl::OkStatus();
       }},
      {"Rehearsal::Enter(const DTensor&)",
       [](const Tensors& f, const Tensors&) {
         const CostModel cost;
         return Rehearsal(cost).Enter(f.x).status();
       }},
      CASE("RequireOwn(absl::string_view, std::initializer_list<NamedInput>)",
           RequireOwn("f", {{"x", f.x}})),
      CASE("Unchanged(absl::string_view, const DTensor&)", Unchanged("f", f.x)),
      UNARY(Settled),
      CASE("CountClasses(absl::string_view, const DTensor&)", CountClasses("f", f.x)),
      {"CheckCopies(const StateDict&)",
       [](const Tensors& f, const Tensors&) { return CheckCopies({{"x", f.x}}); }},
      {"CheckCopies(const StateDict&)",
       [](const Tensors& f, const Tensors&) { return CheckCopies({{"x", f.d}}); }},
      {"WriteTensors(const StateDict&, const std::string&, const WriteOptions&)",
       [](const Tensors& f, const Tensors& o) {
         const testing::TempFolder folder;
         const absl::Status status = WriteTensors({{"v", o.v}, {"x", f.x}}, folder.path());
         EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
         return status;
       }},
  };
}

// A model of one layer, to which q is as a layer's keys.
std::unique_ptr<CausalLM> SmallModel() {
  ModelConfig config;
  config.model = LlamaConfig{.vocab = 8,
                             .hidden = 4,
                             .inner = 8,
                             .layers = 1,
                             .heads = 1,
                             .kv_heads = 1,
                             .head_size = 4,
                             .max_positions = 8};
  std::unique_ptr<CausalLM> model = MakeModel(config);
  Materialize(*model);
  return model;
}

void Attend(const DTensor& q, const DTensor& k, const DTensor& v, const DTensor& mask) {
  const std::unique_ptr<CausalLM> model = SmallModel();
  CausalAttention(*model, 0)(q, k, v, mask);
}
void Decode(const DTensor& ids, const KVCache::Layer& kept = {}, const DTensor& positions = {},
            const DTensor& mask = {}) {
  KVCache cache(4);
  if (kept.k.defined()) cache.layers = {kept};
  SmallModel()->Decode(ids, cache, positions, mask);
}

Cases ModelCases() {
#define ATTEND                                                                                   \
  "CausalAttention::operator()(const DTensor&, const DTensor&, const DTensor&, const DTensor&, " \
  "std::optional<double>, double)"
#define DECODE "CausalLM::Decode(const DTensor&, KVCache&, const DTensor&, const DTensor&, bool)"
#define NEXT "NextTokens(const DTensor&, const SamplingOptions&, const DTensor&)"
#define PENALISE "PenaliseRepetition(const DTensor&, const DTensor&, double)"
#define ROTATE "Rotate(const DTensor&, const Rotation&)"
#define ROTATION "MakeRotation(const DTensor&, const DTensor&, double, DType)"
  return {
      CASE(ATTEND, Attend(f.q, o.q, o.q, o.m)),
      CASE(ATTEND, Attend(o.q, f.q, o.q, o.m)),
      CASE(ATTEND, Attend(o.q, o.q, f.q, o.m)),
      CASE(ATTEND, Attend(o.q, o.q, o.q, f.m)),
      CASE(DECODE, Decode(f.ids)),
      CASE(DECODE, Decode(o.ids, {f.q, o.q})),
      CASE(DECODE, Decode(o.ids, {o.q, f.q})),
      CASE(DECODE, Decode(o.ids, {}, f.ids)),
      CASE(DECODE, Decode(o.ids, {}, o.ids, f.r)),
      CASE("SplitHeads(const DTensor&, int64_t)", SplitHeads(f.b, 2)),
      CASE("JoinHeads(const DTensor&)", JoinHeads(f.q)),
      CASE(ROTATE, Rotate(f.q, {o.x, o.x})),
      CASE(ROTATE, Rotate(o.q, {f.x, o.x})),
      CASE(ROTATE, Rotate(o.q, {o.x, f.x})),
      CASE(ROTATION, MakeRotation(f.i, o.v, 1, DType::kF32)),
      CASE(ROTATION, MakeRotation(o.i, f.v, 1, DType::kF32)),
      CASE("TopTokens(const DTensor&, int64_t)", TopTokens(f.x, 2)),
      CASE("FilterLogits(const DTensor&, const SamplingOptions&)", FilterLogits(f.x, {})),
      CASE(NEXT, NextTokens(f.x, {})),
      CASE(NEXT, NextTokens(o.x, {.repetition_penalty = 2}, f.ids)),
      CASE(PENALISE, PenaliseRepetition(f.x, o.ids, 2)),
      CASE(PENALISE, PenaliseRepetition(o.x, f.ids, 2)),
      CASE("NextTokenLoss(const DTensor&, const DTensor&)", NextTokenLoss(f.b, o.ids)),
      CASE("NextTokenLoss(const DTensor&, const DTensor&)", NextTokenLoss(o.b, f.ids)),
  };
}

// Calls that change nothing, or whose operand counts nothing: a function may return its input
// there, or not look at it.
Cases IdleCases() {
#define IDLE(...) CASE(#__VA_ARGS__, __VA_ARGS__)
  return {
      IDLE(roll(f.x, {0}, {0})),
      IDLE(flip(f.x, {})),
      IDLE(rot90(f.x, 0, {0, 1})),
      IDLE(repeat(f.x, {1, 1})),
      IDLE(tile(f.x, {})),
      IDLE(movedim(f.x, {0}, {0})),
      IDLE(swapaxes(f.x, 0, 0)),
      IDLE(t(f.v)),
      IDLE(T(f.v)),
      IDLE(ravel(f.v)),
      IDLE(view_as(f.x, o.x)),
      IDLE(reshape_as(f.x, o.x)),
      IDLE(expand_as(f.x, o.x)),
      IDLE(broadcast_to(f.x, {4, 4})),
      IDLE(broadcast_tensors({f.x})),
      IDLE(meshgrid({f.v})),
      IDLE(atleast_1d(f.v)),
      IDLE(atleast_2d(f.x)),
      IDLE(atleast_3d(f.b)),
      IDLE(chunk(f.x, 1)),
      IDLE(diff(f.x, 0)),
      IDLE(constant_pad_nd(f.x, {})),
      IDLE(pad(f.x, {})),
      IDLE(einsum("a", {f.v})),
      IDLE(einsum("ab->ab", {f.x})),
      IDLE(block_diag({f.x})),
      IDLE(vstack({f.x})),
      IDLE(hstack({f.x})),
      IDLE(dstack({f.b})),
      IDLE(column_stack({f.x})),
      IDLE(pixel_shuffle(f.q, 1)),
      IDLE(pixel_unshuffle(f.q, 1)),
      IDLE(cumsum(f.s, 0)),
      IDLE(cumprod(f.s, 0)),
      IDLE(sort(f.s)),
      IDLE(logsumexp(f.s)),
      IDLE(softmin(f.s, 0)),
      IDLE(argsort(f.s)),
      IDLE(fliplr(f.x)),
      IDLE(tril(f.x, 9)),
      IDLE(interpolate(f.q, {4, 4})),
      IDLE(avg_pool2d(f.q, {1})),
      IDLE(max_pool2d(f.q, {1})),
      IDLE(adaptive_avg_pool2d(f.q, {4, 4})),
      IDLE(take_along_dim(f.v, o.i)),
      IDLE(getitem(f.x, {})),
      IDLE(diag(f.v)),
      IDLE(slice_scatter(f.x, o.x)),
      IDLE(slice_scatter(o.x, f.x)),
      IDLE(dropout(f.x, 0.5, false)),
      IDLE(alpha_dropout(f.x, 0.5, false)),
      IDLE(feature_dropout(f.x, 0.5, false)),
      IDLE(dropout_(f.v, 0.5, false)),
      IDLE(round(f.i)),
      IDLE(ceil(f.i)),
      IDLE(floor(f.i)),
      IDLE(trunc(f.i)),
      IDLE(isfinite(f.i)),
      IDLE(isinf(f.i)),
      IDLE(signbit(f.m)),
      IDLE(repeat_interleave(f.v, 1)),
      IDLE(tensor_split(f.v, 1)),
      IDLE(narrow(f.v, 0, 0, 4)),
      IDLE(scale_({}, f.w)),
      IDLE(clip_grads_with_norm_({}, 1, f.w)),
      IDLE(clip_grads_with_norm_({o.v}, 1e9, f.w)),
      IDLE(addmm(f.x, o.x, o.x, 0)),
      IDLE(addmv(f.v, o.x, o.v, 0)),
      IDLE(addbmm(f.x, o.b, o.b, 0)),
      IDLE(baddbmm(f.b, o.b, o.b, 0)),
      IDLE(addr(f.x, o.v, o.v, 0)),
      IDLE(add(o.x, f.x, 0)),
      IDLE(sub(o.x, f.x, 0)),
      IDLE(index_add(o.v, 0, o.i, f.v, 0)),
      IDLE(addcmul(o.x, f.x, o.x, 0)),
      IDLE(NextTokens(o.x, {}, f.ids)),
      IDLE(binary_cross_entropy(o.v, o.v, f.v)),
      IDLE(SyncGradients({f.x})),
      IDLE(std(f.x)),
      IDLE(masked_fill(o.v, full({4}, 0, {DType::kBool}), f.s)),
  };
}

}  // namespace
}  // namespace dtensor
