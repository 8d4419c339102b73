#include "dtensor/ops/cases.h"

namespace dtensor {
namespace {

// The four forms of scatter and of scatter_, and the two of index_fill and of index_fill_.
#define DT_SCATTER(fn, x)                                                            \
  const DTensor self = x, index = a.T("index");                                      \
  const int64_t dim = a.Int("dim");                                                  \
  if (!a.Has("value")) {                                                             \
    return a.Has("reduce") ? fn(self, dim, index, a.T("src"), a.Text("reduce"))      \
                           : fn(self, dim, index, a.T("src"));                       \
  }                                                                                  \
  return a.Has("reduce") ? fn(self, dim, index, a.Number("value"), a.Text("reduce")) \
                         : fn(self, dim, index, a.Number("value"))
DTensor Scatter(CaseArgs& a) { DT_SCATTER(scatter, a.T("self")); }
DTensor ScatterInto(CaseArgs& a) { DT_SCATTER(scatter_, a.Written("self")); }
#undef DT_SCATTER

#define DT_INDEX_FILL(fn, x)                                               \
  const DTensor self = x, index = a.T("index");                            \
  return a.IsTensor("value") ? fn(self, a.Int("dim"), index, a.T("value")) \
                             : fn(self, a.Int("dim"), index, a.Number("value"))
DTensor IndexFill(CaseArgs& a) { DT_INDEX_FILL(index_fill, a.T("self")); }
DTensor IndexFillInto(CaseArgs& a) { DT_INDEX_FILL(index_fill_, a.Written("self")); }
#undef DT_INDEX_FILL

DTensor TakeAlongDim(CaseArgs& a) {
  std::optional<int64_t> dim;
  if (a.Has("dim")) dim = a.Int("dim");
  return take_along_dim(a.T("self"), a.T("indices"), dim);
}

bool IncludesSelf(CaseArgs& a) { return !a.Has("include_self") || a.Bool("include_self"); }

DTensor SliceScatter(CaseArgs& a) {
  std::optional<int64_t> start, end;
  if (a.Has("start")) start = a.Int("start");
  if (a.Has("end")) end = a.Int("end");
  return slice_scatter(a.T("self"), a.T("src"), a.Int("dim"), start, end, a.Int("step", 1));
}

Values RepeatInterleave(CaseArgs& a) {
  std::optional<int64_t> dim, size;
  if (a.Has("dim")) dim = a.Int("dim");
  if (a.Has("output_size")) size = a.Int("output_size");
  // Of repeats alone.
  if (!a.Has("self")) return {repeat_interleave(a.T("repeats"), size)};
  if (a.IsTensor("repeats")) {
    return {repeat_interleave(a.T("self"), a.T("repeats"), dim, size)};
  }
  return {repeat_interleave(a.T("self"), a.Int("repeats"), dim)};
}

DTensor EmbeddingBag(CaseArgs& a) {
  const DTensor weight = a.T("weight");
  int64_t padding = a.Int("padding_idx", -1);
  if (a.Has("padding_idx") && padding < 0) padding += weight.size(0);  // as PyTorch counts
  return embedding_bag(a.T("input"), weight, a.Optional("offsets"), a.TextOr("mode", "mean"),
                       a.Bool("scale_grad_by_freq"), a.Optional("per_sample_weights"), padding,
                       a.Bool("include_last_offset"));
}

}  // namespace

void AddGatherCases(CaseTable* table) {
  table->Add({
      DT_CASE(gather,
              "self[a,b] dim=0 index[3,b]:int64<a | self[a,b,c] dim=1 index[a,4,c]:int64<b | "
              "self[a,b] dim=-1 index[a,b]:int64<b | self[7,b] dim=0 index[5,2]:int64<7",
              gather(a.T("self"), a.Int("dim"), a.T("index"))),
      DT_CASE(take_along_dim,
              "self[a,b] indices[a,1]:int64<b dim=1 | self[a,b] indices[1,b]:int64<a dim=0",
              TakeAlongDim(a)),
      DT_CASE(take, "self[a,b] index[3]:int64<a | self[a] index[2,b]:int64<a",
              take(a.T("self"), a.T("index"))),
      DT_CASE(index_select,
              "self[a,b] dim=0 index[5]:int64<a | self[a,b,c] dim=1 index[4]:int64<b | "
              "self[a,b] dim=1 index[b]:int64<b",
              index_select(a.T("self"), a.Int("dim"), a.T("index"))),
      // Where what is written may be overwritten its gradient is not that of differences.
      DT_CASE(scatter,
              "self[a,b] dim=0 index[3,b]:int64<a src[3,b]~ | "
              "self[a,b,c] dim=1 index[a,1,c]:int64<b src[a,1,c] | "
              "self[a,b,c] dim=1 index[a,4,c]:int64<b src[a,4,c]~ | "

              "self[a,b] dim=1 index[a,3]:int64<b value=2.5",
              Scatter(a)),
      DT_CASE(scatter_,
              "self[a,b] dim=0 index[3,b]:int64<a src[3,b]~ | self[a,b] dim=1 index[a,1]:int64<b "
              "src[a,4] | self[a,b] dim=0 index[3,b]:int64<a src[3,b] reduce=add | "
              "self[a,b] dim=0 index[3,b]:int64<a value=1.5 reduce=multiply",
              ScatterInto(a)),
      DT_CASE(scatter_add,
              "self[a,b] dim=0 index[3,b]:int64<a src[3,b] | "
              "self[a,b,c] dim=1 index[a,4,c]:int64<b src[a,4,c]",
              scatter_add(a.T("self"), a.Int("dim"), a.T("index"), a.T("src"))),
      DT_CASE(scatter_add_,
              "self[a,b] dim=0 index[3,b]:int64<a src[3,b] | self[a,b] dim=1 index[a,2]:int64<b "
              "src[a,4]",
              scatter_add_(a.Written("self"), a.Int("dim"), a.T("index"), a.T("src"))),
      DT_CASE(scatter_reduce,
              "self[a,b] dim=0 index[3,b]:int64<a src[3,b] reduce=amax | "
              "self[a,b] dim=1 index[a,4]:int64<b src[a,4] reduce=prod | "
              "self[a,b] dim=0 index[3,b]:int64<a src[3,b] reduce=amin include_self=false | "
              "self[a,b] dim=1 index[a,4]:int64<b src[a,4] reduce=mean",
              scatter_reduce(a.T("self"), a.Int("dim"), a.T("index"), a.T("src"), a.Text("reduce"),
                             IncludesSelf(a))),
      DT_CASE(scatter_reduce_, "self[a,b] dim=0 index[3,b]:int64<a src[3,b] reduce=prod",
              scatter_reduce_(a.Written("self"), a.Int("dim"), a.T("index"), a.T("src"),
                              a.Text("reduce"), IncludesSelf(a))),
      DT_CASE(index_add,
              "self[a,b] dim=0 index[5]:int64<a source[5,b] alpha=2.0 | "
              "self[a,b] dim=1 index[3]:int64<b source[a,3]",
              index_add(a.T("self"), a.Int("dim"), a.T("index"), a.T("source"),
                        a.Has("alpha") ? a.Number("alpha") : Scalar(1))),
      DT_CASE(index_add_, "self[a,b] dim=0 index[5]:int64<a source[5,b]",
              index_add_(a.Written("self"), a.Int("dim"), a.T("index"), a.T("source"))),
      DT_CASE(index_copy,
              "self[a,b] dim=0 index[2]:int64<a source[2,b]~ | "
              "self[a,b] dim=1 index[1]:int64<b source[a,1]",
              index_copy(a.T("self"), a.Int("dim"), a.T("index"), a.T("source"))),
      DT_CASE(index_copy_, "self[a,b] dim=0 index[1]:int64<a source[1,b]",
              index_copy_(a.Written("self"), a.Int("dim"), a.T("index"), a.T("source"))),
      DT_CASE(index_fill,
              "self[a,b] dim=0 index[2]:int64<a value=1.5 | self[a,b] dim=1 index[1]:int64<b "
              "value[]",
              IndexFill(a)),
      DT_CASE(index_fill_,
              "self[a,b] dim=0 index[2]:int64<a value=1.5 | self[a,b] dim=1 index[1]:int64<b "
              "value[]",
              IndexFillInto(a)),
      DT_CASE(index_reduce,
              "self[a,b] dim=0 index[5]:int64<a source[5,b] reduce=amax | "
              "self[a,b] dim=1 index[3]:int64<b source[a,3] reduce=prod | "
              "self[a,b] dim=0 index[5]:int64<a source[5,b] reduce=mean include_self=false",
              index_reduce(a.T("self"), a.Int("dim"), a.T("index"), a.T("source"), a.Text("reduce"),
                           IncludesSelf(a))),
      DT_CASE(index_reduce_, "self[a,b] dim=0 index[5]:int64<a source[5,b] reduce=amin",
              index_reduce_(a.Written("self"), a.Int("dim"), a.T("index"), a.T("source"),
                            a.Text("reduce"), IncludesSelf(a))),
      DT_CASE(put,
              "self[a,b] index[3]:int64<a source[3]~ | "
              "self[a,b] index[3]:int64<a source[3] accumulate=true",
              put(a.T("self"), a.T("index"), a.T("source"), a.Bool("accumulate"))),
      DT_CASE(put_, "self[a,b] index[1]:int64<a source[1]",
              put_(a.Written("self"), a.T("index"), a.T("source"), a.Bool("accumulate"))),
      DT_CASE(slice_scatter,
              "self[6,b] src[2,b] dim=0 start=1 end=3 | self[a,7] src[a,3] dim=1 start=1 step=2",
              SliceScatter(a)),
      DT_CASE(select_scatter,
              "self[a,b] src[b] dim=0 index=2 | self[a,b,c] src[a,c] dim=1 index=-1",
              select_scatter(a.T("self"), a.T("src"), a.Int("dim"), a.Int("index"))),
      DT_CASE(diagonal_scatter, "self[4,6] src[4] | self[a,5,5] src[a,3] offset=-2 dim1=1 dim2=2",
              diagonal_scatter(a.T("self"), a.T("src"), a.Int("offset"), a.Int("dim1"),
                               a.Int("dim2", 1))),
      DT_CASE(getitem,
              "self[6,a,b] index[3]:int64<6 | self[5,5,b] index[2,3];[3]:int64<5 | "
              "self[a,b] index[a]:bool",
              getitem(a.T("self"), a.Indices("index"))),
      DT_CASE(index_put,
              "self[6,a,b] indices[3]:int64<6 values[b] | "
              "self[5,5,b] indices[2,3];[3]:int64<5 values[2,3,b] accumulate=true",
              index_put(a.T("self"), a.List("indices"), a.T("values"), a.Bool("accumulate"))),
      DT_CASE(
          index_put_,
          "self[6,a,b] indices[3]:int64<6 values[b] accumulate=true | "
          "self[5,5,b] indices[2,3];[3]:int64<5 values[2,3,b]~",
          index_put_(a.Written("self"), a.List("indices"), a.T("values"), a.Bool("accumulate"))),
      DT_CASE(nonzero, "self[a,b]:int64 | self[a,b,c]:bool",
              a.Bool("as_tuple") ? nonzero_tuple(a.T("self")) : Values{nonzero(a.T("self"))}),
      DT_CASE(nonzero_tuple, "self[a,b]:int64", nonzero_tuple(a.T("self"))),
      DT_CASE(argwhere, "self[a,b]:int64", argwhere(a.T("self"))),
      DT_CASE(masked_select, "self[a,b] mask[a,b]:bool | self[a,b] mask[b]:bool",
              masked_select(a.T("self"), a.T("mask"))),
      DT_CASE(masked_scatter,
              "self[a,b] mask[a,b]:bool source[a,b] | self[a,b] mask[b]:bool "
              "source[a,b]",
              masked_scatter(a.T("self"), a.T("mask"), a.T("source"))),
      DT_CASE(masked_scatter_, "self[a,b] mask[a,b]:bool source[a,b]",
              masked_scatter_(a.Written("self"), a.T("mask"), a.T("source"))),
      DT_CASE(repeat_interleave,
              "self[a,b] repeats=2 dim=0 | self[a,b] repeats=3 | self[a,b] repeats=2 dim=1 | "
              "self[a,b] repeats[a]:int64<3 dim=0",
              RepeatInterleave(a)),
      DT_CASE(one_hot, "self[a,b]:int64<5 num_classes=5 | self[a]:int64<4 num_classes=7",
              one_hot(a.T("self"), a.Int("num_classes", -1))),
      DT_CASE(embedding_bag,
              "input[a,3]:int64<6 weight[6,b] mode=sum | input[a,3]:int64<7 weight[7,b] | "
              "input[a,4]:int64<7 weight[7,b] mode=max | "
              "input[a,3]:int64<6 weight[6,b] mode=sum per_sample_weights[a,3] padding_idx=2",
              EmbeddingBag(a)),
  });
  const VerifyInput index = {{3, 4}, DType::kI64, {0, 4, 2, 2, 1, 1, 3, 2, 0, 4, 4, 1}};
  VerifyInput narrow = index;
  narrow.dtype = DType::kI32;
  const auto whole = [&](DType t) {
    return VerifySample{{Of(t, {5, 4}), index, Of(t, {3, 4})}, {IntAttr(0)}};
  };
  table->Judge({
      {"gather", {{{Of(DType::kU8, {5, 4}), index}, {IntAttr(0)}}}},
      {"scatter", {{{I({5, 4}), index, I({3, 4})}, {IntAttr(0)}}}},
      {"scatter_add", {whole(DType::kU8)}},
      {"scatter_prod", {whole(DType::kF64)}},
      {"scatter_amax", {whole(DType::kF64), whole(DType::kI32)}},
      {"scatter_amin", {whole(DType::kF64), whole(DType::kU8)}},
      {"check_index",
       {{{index}, {IntAttr(5), BoolAttr(true)}}, {{narrow}, {IntAttr(5), BoolAttr(true)}}}},
  });
}

}  // namespace dtensor
