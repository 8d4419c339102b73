#include "dtensor/ops/cases.h"

namespace dtensor {
namespace {

// A list that may be absent.
DimList Or(CaseArgs& a, const std::string& name, DimList otherwise) {
  return a.Has(name) ? a.Ints(name) : otherwise;
}

Padding PaddingOf(CaseArgs& a) {
  if (!a.Has("padding")) return 0;
  return a.IsText("padding") ? Padding(a.Text("padding")) : Padding(a.Ints("padding"));
}

template <class F>
DTensor ConvCase(CaseArgs& a, const F& conv) {
  return conv(a.T("input"), a.T("weight"), a.Optional("bias"), Or(a, "stride", {1}), PaddingOf(a),
              Or(a, "dilation", {1}), a.Int("groups", 1));
}

template <class F>
DTensor ConvTranspose(CaseArgs& a, const F& conv) {
  return conv(a.T("input"), a.T("weight"), a.Optional("bias"), Or(a, "stride", {1}),
              Or(a, "padding", {0}), Or(a, "output_padding", {0}), a.Int("groups", 1),
              Or(a, "dilation", {1}));
}

template <class F>
auto MaxPool(CaseArgs& a, const F& pool) {
  return pool(a.T("input"), a.Ints("kernel_size"), a.Ints("stride"), Or(a, "padding", {0}),
              Or(a, "dilation", {1}), a.Bool("ceil_mode"));
}

bool PadCounts(CaseArgs& a) { return !a.Has("count_include_pad") || a.Bool("count_include_pad"); }

template <class F>
DTensor AvgPool(CaseArgs& a, const F& pool) {
  std::optional<int64_t> divisor;
  if (a.Has("divisor_override")) divisor = a.Int("divisor_override");
  return pool(a.T("self"), a.Ints("kernel_size"), a.Ints("stride"), Or(a, "padding", {0}),
              a.Bool("ceil_mode"), PadCounts(a), divisor);
}

DTensor Interpolate(CaseArgs& a) {
  std::optional<bool> corners;
  if (a.Has("align_corners")) corners = a.Bool("align_corners");
  if (a.Bool("antialias")) a.LeaveOut("antialias");
  return interpolate(a.T("input"), a.Ints("size"), a.Floats("scale_factor"),
                     a.TextOr("mode", "nearest"), corners, a.Bool("recompute_scale_factor"));
}

std::vector<OpCase> ConvCases() {
  return {
      DT_CASE(conv1d,
              "input[n,c,6] weight[o,c,3] bias[o] padding=1 | "
              "input[n,4,7] weight[6,2,2] groups=2 stride=2 | "
              "input[n,4,7] weight[4,1,3] bias[4] groups=4 padding=same dilation=2 | "
              "input[c,6] weight[o,c,2]",
              ConvCase(a, conv1d)),
      DT_CASE(conv2d,
              "input[n,c,4,5] weight[o,c,3,2] bias[o] padding=1 stride=2 | "
              "input[2,6,5,4] weight[4,3,2,2] bias[4] groups=2 | "
              "input[c,3,4] weight[o,c,1,1] | input[n,6,3,4] weight[3,2,3,3] groups=3 padding=2 "
              "dilation=2",
              ConvCase(a, conv2d)),
      DT_CASE(conv3d,
              "input[2,c,3,2,3] weight[o,c,2,1,2] bias[o] | "
              "input[1,4,3,3,2] weight[2,2,2,3,1] groups=2 padding=1 stride=2",
              ConvCase(a, conv3d)),
      DT_CASE(conv_transpose1d,
              "input[n,c,4] weight[c,o,3] bias[o] stride=2 padding=1 output_padding=1 | "
              "input[n,4,3] weight[4,3,2] groups=2 dilation=2",
              ConvTranspose(a, conv_transpose1d)),
      DT_CASE(conv_transpose2d,
              "input[n,c,3,2] weight[c,o,2,3] bias[o] stride=2,1 | "
              "input[2,4,2,3] weight[4,3,2,2] bias[6] groups=2 padding=1 dilation=2",
              ConvTranspose(a, conv_transpose2d)),
      DT_CASE(conv_transpose3d, "input[2,c,2,1,2] weight[c,o,2,2,1] bias[o] stride=2",
              ConvTranspose(a, conv_transpose3d)),
  };
}

// A max pool under its name, with indices where the call asks for them, and under that of the
// function that always gives them.
#define DT_MAX_POOL_CASES(name, samples)                                         \
  OpCase{#name, samples,                                                         \
         [](CaseArgs& a) -> Values {                                             \
           if (a.Bool("return_indices")) return MaxPool(a, name##_with_indices); \
           return {MaxPool(a, name)};                                            \
         }},                                                                     \
      DT_CASE(name##_with_indices, samples, MaxPool(a, name##_with_indices))
#define DT_ADAPTIVE_MAX_POOL_CASES(name, samples)                                         \
  OpCase{#name, samples,                                                                  \
         [](CaseArgs& a) -> Values {                                                      \
           const DimList sizes = a.Ints("output_size");                                   \
           if (a.Bool("return_indices")) return name##_with_indices(a.T("input"), sizes); \
           return {name(a.T("input"), sizes)};                                            \
         }},                                                                              \
      DT_CASE(name##_with_indices, samples,                                               \
              name##_with_indices(a.T("input"), a.Ints("output_size")))

std::vector<OpCase> PoolCases() {
  return {
      DT_MAX_POOL_CASES(max_pool1d,
                        "input[a,b,7] kernel_size=3 stride=2 padding=1 ceil_mode=true | "
                        "input[a,6] kernel_size=2 dilation=2"),
      DT_MAX_POOL_CASES(max_pool2d,
                        "input[a,b,5,4] kernel_size=3,2 stride=2,1 padding=1 | "
                        "input[a,4,6] kernel_size=2"),
      DT_MAX_POOL_CASES(max_pool3d, "input[2,a,3,4,3] kernel_size=2 stride=1"),
      DT_ADAPTIVE_MAX_POOL_CASES(adaptive_max_pool1d, "input[a,b,7] output_size=3"),
      DT_ADAPTIVE_MAX_POOL_CASES(adaptive_max_pool2d,
                                 "input[a,b,5,4] output_size=3,2 | "
                                 "input[a,3,4] output_size=2,-1"),
      DT_ADAPTIVE_MAX_POOL_CASES(adaptive_max_pool3d, "input[2,a,3,2,4] output_size=2"),
      DT_CASE(avg_pool1d,
              "self[a,b,7] kernel_size=3 stride=2 padding=1 | "
              "self[a,b,6] kernel_size=3 stride=2 padding=1 ceil_mode=true count_include_pad=false",
              avg_pool1d(a.T("self"), a.Ints("kernel_size"), a.Ints("stride"),
                         Or(a, "padding", {0}), a.Bool("ceil_mode"), PadCounts(a))),
      DT_CASE(avg_pool2d,
              "self[a,b,5,4] kernel_size=3,2 stride=2,1 padding=1 ceil_mode=true | "
              "self[a,4,6] kernel_size=2 divisor_override=3",
              AvgPool(a, avg_pool2d)),
      DT_CASE(avg_pool3d, "self[2,a,3,4,3] kernel_size=2 stride=1", AvgPool(a, avg_pool3d)),
      DT_CASE(adaptive_avg_pool1d, "self[a,b,7] output_size=3 | self[a,5] output_size=6",
              adaptive_avg_pool1d(a.T("self"), a.Ints("output_size"))),
      DT_CASE(adaptive_avg_pool2d, "input[a,b,5,4] output_size=3,2 | input[a,3,4] output_size=-1,3",
              adaptive_avg_pool2d(a.T("input"), a.Ints("output_size"))),
      DT_CASE(adaptive_avg_pool3d, "input[2,a,3,2,4] output_size=2",
              adaptive_avg_pool3d(a.T("input"), a.Ints("output_size"))),
  };
}

std::vector<OpCase> ResampleCases() {
  return {
      DT_CASE(interpolate,
              "input[a,b,4] scale_factor=1.7 | input[a,b,3] size=5 mode=nearest-exact | "
              "input[a,b,5] size=3 mode=linear | "
              "input[2,a,3,4] size=5,6 mode=bilinear align_corners=true | "
              "input[2,a,3,4] scale_factor=1.5 mode=bilinear align_corners=false | "
              "input[2,a,5,4] size=3,7 mode=bicubic | "
              "input[2,a,3,4] size=5,6 mode=bicubic align_corners=true | "
              "input[2,a,5,4] size=3,3 mode=area | "
              "input[2,a,2,3,2] size=3,4,3 mode=trilinear",
              Interpolate(a)),
      DT_CASE(pixel_shuffle, "self[a,4b,2,3] upscale_factor=2 | self[9,a,2] upscale_factor=3",
              pixel_shuffle(a.T("self"), a.Int("upscale_factor"))),
      DT_CASE(pixel_unshuffle, "self[a,b,4,6] downscale_factor=2 | self[a,3,6] downscale_factor=3",
              pixel_unshuffle(a.T("self"), a.Int("downscale_factor"))),
      // Places away from those where the gradient jumps.
      DT_CASE(grid_sample,
              "input[n,c,3,4] grid[n,a,b,2]@-0.9..0.9 | "
              "input[n,c,3,4] grid[n,a,2,2]@-1.4..1.4 padding_mode=border align_corners=true | "
              "input[n,c,4,3] grid[n,2,a,2]@-1.4..1.4 padding_mode=reflection | "
              "input[2,c,2,3,2] grid[2,a,2,1,3]@-1.2..1.2 | "
              "input[n,c,4,3] grid[n,2,a,2]@-1.4..1.4 mode=nearest | "
              "input[2,c,4,3] grid[2,2,a,2]@-0.9..0.9 mode=bicubic | "
              "input[2,c,3,4] grid[2,a,1,2]@-1.4..1.4 mode=bicubic padding_mode=reflection "
              "align_corners=true",
              grid_sample(a.T("input"), a.T("grid"), a.TextOr("mode", "bilinear"),
                          a.TextOr("padding_mode", "zeros"), a.Bool("align_corners"))),
  };
}

}  // namespace

void AddConvCases(CaseTable* table) {
  table->Add(ConvCases());
  table->Add(PoolCases());
  table->Add(ResampleCases());
  // Groups with a bias, which others of its calls do not have.
  const auto grouped = [](int64_t batch, int64_t in, int64_t groups) -> VerifySample {
    return {{F({batch, in, 7}), F({in, 2, 3}), F({2 * groups})},
            {Attr(), IntAttr(groups)},
            {7, 7, 3, 1, 2, 2},
            0};
  };
  table->Judge({{"conv_input_bias", {grouped(3, 4, 4), grouped(2, 6, 2)}}});
}

}  // namespace dtensor
