#include "dtensor/ops/conv/spatial.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace dtensor {

DimList PerDim(absl::string_view op, absl::string_view what, const DimList& list, int dims,
               int64_t least) {
  if (list.size() != 1 && list.size() != static_cast<size_t>(dims)) {
    ThrowInvalid(op, absl::StrCat(what, " ", ToString(list), " must have ",
                                  dims == 1 ? "" : "one number, or ", dims,
                                  dims == 1 ? " number" : ", one per spatial dim"));
  }
  for (const int64_t n : list) {
    if (n >= least && n <= kMostWindowNumber) continue;
    ThrowInvalid(op, absl::StrCat(what, " ", ToString(list), " must be at least ", least,
                                  n > least ? " and at most 2^31" : ""));
  }
  return list.size() == 1 ? DimList(dims, list[0]) : list;
}

void RequireSpatial(absl::string_view op, const DTensor& x, int dims) {
  if (x.ndim() == dims + 1 || x.ndim() == dims + 2) return;
  ThrowInvalid(op, absl::StrCat("needs an input of ", dims + 2, " dims (batch, channels, ", dims,
                                " spatial), or of ", dims + 1, " without a batch, got ",
                                ToString(x.shape())));
}

DimList Packed(const WindowDims& windows) {
  DimList all;
  for (const WindowDim& d : windows) {
    all.insert(all.end(), {d.in, d.out, d.kernel, d.stride, d.dilation, d.before});
  }
  return all;
}

absl::StatusOr<Windows> CheckedWindows(const OpCall& call) {
  const IntSpan window = call.Ints("window");
  const bool fits = !window.empty() && window.size() % kWindowNumbers == 0 &&
                    window.size() <= kWindowNumbers * kMaxWindowDims;
  if (!fits) {
    return absl::InvalidArgumentError(absl::StrCat("attribute window has ", window.size(),
                                                   " numbers, must have ", kWindowNumbers,
                                                   " for each of 1 to ", kMaxWindowDims, " dims"));
  }
  for (size_t i = 0; i < window.size(); ++i) {
    const size_t field = i % kWindowNumbers;
    const int64_t least = field == 3 || field == 4 ? 1 : 0;  // stride and dilation
    DT_RETURN_IF_ERROR(
        RequireDim(absl::StrCat("window[", i, "]"), window[i] - least, kMostWindowNumber));
  }
  return WindowsOf(IntsAttr(window));
}

std::string WholeDims(absl::string_view name, int dims) {
  std::string text;
  for (int d = 0; d < dims; ++d) absl::StrAppend(&text, " [", name, d, "]");
  return text;
}

std::vector<std::pair<std::string, int64_t>> WindowSizes(const Windows& windows) {
  std::vector<std::pair<std::string, int64_t>> sizes;
  for (int d = 0; d < windows.dims; ++d) {
    const WindowDim& w = windows.d[kMaxWindowDims - windows.dims + d];
    sizes.insert(sizes.end(), {{absl::StrCat("i", d), w.in}, {absl::StrCat("t", d), w.out}});
  }
  return sizes;
}

absl::StatusOr<FactorText> WindowFactors(const OpCall& call) {
  DT_ASSIGN_OR_RETURN(const Windows w, CheckedWindows(call));
  const std::string in = absl::StrCat("...", WholeDims("i", w.dims));
  std::string out = absl::StrCat("...", WholeDims("t", w.dims));
  std::vector<std::pair<std::string, int64_t>> sizes = WindowSizes(w);
  if (call.op().num_outputs() == 2) {  // names of their own: no dim can be cut in both
    absl::StrAppend(&out, ", ...", WholeDims("u", w.dims));
    for (int d = 0; d < w.dims; ++d) {
      sizes.emplace_back(absl::StrCat("u", d), w.d[kMaxWindowDims - w.dims + d].out);
    }
  }
  return FactorText{absl::StrCat(in, " -> ", out), std::move(sizes)};
}

absl::StatusOr<FactorText> WindowBackwardFactors(const OpCall& call) {
  DT_ASSIGN_OR_RETURN(const Windows w, CheckedWindows(call));
  const std::string in = absl::StrCat("...", WholeDims("i", w.dims));
  std::string out = absl::StrCat("...", WholeDims("t", w.dims));
  if (call.num_inputs() == 2) out = absl::StrCat(out, ", ", out);
  return FactorText{absl::StrCat(out, " -> ", in), WindowSizes(w)};
}

}  // namespace dtensor
