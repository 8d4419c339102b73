#include "dtensor/ops/cases.h"

namespace dtensor {
namespace {

Values Split(CaseArgs& a) {
  const char* const sizes = "split_size_or_sections";
  if (a.IsList(sizes)) return split(a.T("tensor"), a.Ints(sizes), a.Int("dim"));
  return split(a.T("tensor"), a.Int(sizes), a.Int("dim"));
}

DTensor Squeeze(CaseArgs& a) {
  return a.Has("dim") ? squeeze(a.T("self"), a.Ints("dim")) : squeeze(a.T("self"));
}

Values TensorSplit(CaseArgs& a) {
  const DTensor x = a.T("self");
  const int64_t dim = a.Int("dim");
  if (a.Has("sections")) return tensor_split(x, a.Int("sections"), dim);
  if (a.Has("indices")) return tensor_split(x, a.Ints("indices"), dim);
  // A tensor of either.
  const DTensor at = a.T("tensor_indices_or_sections");
  const std::vector<int64_t> values = at.ToVector<int64_t>();
  return at.ndim() == 0 ? tensor_split(x, values[0], dim) : tensor_split(x, values, dim);
}

// The number, a range with a step, and a new dim before the rest.
DTensor Indexed(CaseArgs& a) {
  return index(a.T("self"),
               {a.Int("at"), Slice(a.Int("from"), {}, a.Int("step", 1)), kNewDim, kEllipsis});
}

}  // namespace

void AddViewCases(CaseTable* table) {
  table->Add({
      DT_CASE(view, "self[a,2b] size=a,2,b | self[a,b,c] size=-1,c",
              view(a.T("self"), a.Ints("size"))),
      DT_CASE(reshape,
              "self[4,6] shape=2,2,6 | self[4,6] shape=4,3,2 | self[3,5,2] shape=15,2 | "
              "self[3,4] shape=6,2 | self[2,6] shape=2,2,3 | self[2,12] shape=2,6,2 | "
              "self[a,2b] shape=2a,b | self[2a,b] shape=2,a,b | self[...] shape=-1",
              reshape(a.T("self"), a.Ints("shape"))),
      DT_CASE(flatten, "self[...] | self[a,b,c] start_dim=1 end_dim=2 | self[a,b,c] end_dim=1",
              flatten(a.T("self"), a.Int("start_dim"), a.Int("end_dim", -1))),
      DT_CASE(ravel, "self[...]", ravel(a.T("self"))),
      DT_CASE(unflatten, "self[2a,b] dim=0 sizes=2,a | self[a,3b] dim=1 sizes=-1,b",
              unflatten(a.T("self"), a.Int("dim"), a.Ints("sizes"))),
      DT_CASE(squeeze, "self[a,1,b] | self[1,a,b] dim=0 | self[1,a,1] dim=0,2 | self[...]",
              Squeeze(a)),
      DT_CASE(unsqueeze, "self[...] dim=1 | self[a,b] dim=2", unsqueeze(a.T("self"), a.Int("dim"))),
      DT_CASE(transpose, "self[a,b] dim0=0 dim1=1 | self[...] dim0=0 dim1=-1",
              transpose(a.T("self"), a.Int("dim0"), a.Int("dim1"))),
      DT_CASE(swapaxes, "self[...] axis0=0 axis1=1",
              swapaxes(a.T("self"), a.Int("axis0"), a.Int("axis1"))),
      DT_CASE(permute, "self[a,b,c] dims=2,0,1 | self[a,b,c] dims=0,2,1",
              permute(a.T("self"), a.Ints("dims"))),
      DT_CASE(expand, "self[a,1] size=a,3 | self[a,b] size=2,-1,b",
              expand(a.T("self"), a.Ints("size"))),
      DT_CASE(select, "self[6,a] dim=0 index=2 | self[...] dim=1 index=0",
              select(a.T("self"), a.Int("dim"), a.Int("index"))),
      DT_CASE(slice,
              "self[6,4] dim=0 start=1 end=5 | self[5,7] dim=1 end=6 step=2 | self[...] dim=1 | "
              "self[...] dim=0 start=1 end=4",
              slice(a.T("self"), a.Int("dim"), a.Int("start"), a.Int("end", INT64_MAX),
                    a.Int("step", 1))),
      DT_CASE(split,
              "tensor[a,b] split_size_or_sections=2 dim=1 | "
              "tensor[...] split_size_or_sections=2 | "
              "tensor[2a,b] split_size_or_sections=a,a",
              Split(a)),
      DT_CASE(split_with_sizes, "self[2a,b] split_sizes=a,a | self[a,b,3] split_sizes=1,2 dim=2",
              split_with_sizes(a.T("self"), a.Ints("split_sizes"), a.Int("dim"))),
      DT_CASE(alias, "self[...] | self[a,b]", alias(a.T("self"))),
      DT_CASE(t, "self[a,b] | self[a]", t(a.T("self"))),
      DT_CASE(T, "self[a,b] | self[a,b,c]", T(a.T("self"))),
      DT_CASE(mT, "self[a,b] | self[a,b,c]", mT(a.T("self"))),
      DT_CASE(movedim,
              "self[a,b,c] source=0 destination=2 | self[a,b,c] source=0,1 "
              "destination=-1,0",
              movedim(a.T("self"), a.Ints("source"), a.Ints("destination"))),
      DT_CASE(broadcast_to, "self[a,1] size=a,3 | self[a,b] size=2,a,b",
              broadcast_to(a.T("self"), a.Ints("size"))),
      DT_CASE(expand_as, "self[a,1] other[a,b]~", expand_as(a.T("self"), a.T("other"))),
      DT_CASE(view_as, "self[a,2b] other[a,2,b]~", view_as(a.T("self"), a.T("other"))),
      DT_CASE(reshape_as, "self[a,2b] other[a,2,b]~", reshape_as(a.T("self"), a.T("other"))),
      DT_CASE(narrow, "self[6,a] dim=0 start=2 length=3 | self[a,5] dim=-1 start=-3 length=2",
              a.IsTensor("start")
                  ? narrow(a.T("self"), a.Int("dim"), a.T("start"), a.Int("length"))
                  : narrow(a.T("self"), a.Int("dim"), a.Int("start"), a.Int("length"))),
      DT_CASE(atleast_1d, "self[] | self[a]", atleast_1d(a.T("self"))),
      DT_CASE(atleast_2d, "self[a] | self[a,b]", atleast_2d(a.T("self"))),
      DT_CASE(atleast_3d, "self[a] | self[a,b]", atleast_3d(a.T("self"))),
      DT_CASE(broadcast_tensors, "tensors[a,1];[b] | tensors[a,b];[1,b];[]",
              broadcast_tensors(a.List("tensors"))),
      DT_CASE(meshgrid, "tensors[a];[b] indexing=xy | tensors[a];[b];[]",
              meshgrid(a.List("tensors"), a.TextOr("indexing", "ij"))),
      DT_CASE(chunk, "self[a,b] chunks=3 dim=1 | self[...] chunks=2",
              chunk(a.T("self"), a.Int("chunks"), a.Int("dim"))),
      DT_CASE(tensor_split, "self[a,b] sections=3 dim=1 | self[a,b] indices=1,3", TensorSplit(a)),
      DT_CASE(unbind, "self[a,3] dim=1 | self[3,a]", unbind(a.T("self"), a.Int("dim"))),
      DT_CASE(repeat, "self[a,b] repeats=2,3 | self[a] repeats=2,1 | self[a,b] repeats=1,1",
              repeat(a.T("self"), a.Ints("repeats"))),
      DT_CASE(tile, "self[a,b] dims=2 | self[a] dims=2,3", tile(a.T("self"), a.Ints("dims"))),
      DT_CASE(diagonal, "self[a,b] | self[a,b,c] offset=1 dim1=0 dim2=2 | self[5,4] offset=-1",
              diagonal(a.T("self"), a.Int("offset"), a.Int("dim1"), a.Int("dim2", 1))),
      DT_CASE(unfold, "self[a,7] dimension=1 size=3 step=2 | self[6,b] dimension=0 size=2 step=1",
              unfold(a.T("self"), a.Int("dimension"), a.Int("size"), a.Int("step"))),
      DT_CASE(as_strided,
              "self[4,6] size=3,2 stride=1,6 storage_offset=2 | self[5,4] size=4,3 stride=4,2",
              as_strided(a.T("self"), a.Ints("size"), a.Ints("stride"), a.Int("storage_offset"))),
      DT_CASE(index, "self[6,5,a] at=1 from=1 | self[...] at=-1 from=0 step=2", Indexed(a)),
  });
  table->Judge({
      // Backward puts gradients of slices together without it, where it may.
      {"slice_backward",
       {{{F({4, 4})}, {IntAttr(0), IntAttr(1), IntAttr(1), IntAttr(6)}},
        {{F({5, 3})}, {IntAttr(1), IntAttr(0), IntAttr(2), IntAttr(7)}},
        {{F({5, 7})}, {IntAttr(1), IntAttr(0), IntAttr(1), IntAttr(7)}}}},
  });
}

}  // namespace dtensor
