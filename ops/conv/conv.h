// Convolutions, pools and resampling: ops whose results read windows of the last dims ("spatial").
//
//   Shapes:   [n, c, s...] or, for one example, [c, s...]; results alike. A list of numbers has one
//             per spatial dim, or one for all.
//   Sharding: batch and channels. Spatial dims are read whole; where rows are sharded, convolutions
//             and pools fetch the rows that their windows need from the ranks that have them (a
//             halo), if those are fewer than all, and the result is sharded so, too. Not adaptive
//             pools, transposed convolutions, calls that want indices, and means of windows that
//             do not count alike (those that padding cuts, unless it counts).
//   Errors:   InvalidArgument for numbers of dims, sizes and arguments that do not fit. Same on
//             every rank.
#pragma once

#include <concepts>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "dtensor/ops/family.h"

namespace dtensor {

// Zeros around an input: numbers, or "valid" (none) or "same" (as many as make the result as large
// as the input, the odd one at the end; stride 1 only).
struct Padding {
  Padding(std::integral auto n) : sizes({static_cast<int64_t>(n)}) {}
  Padding(DimList n) : sizes(std::move(n)) {}
  Padding(std::initializer_list<int64_t> n) : sizes(n) {}
  Padding(const char* text) : name(text) {}
  Padding(std::string text) : name(std::move(text)) {}
  DimList sizes;
  std::string name;  // empty: `sizes` holds
};

// Sums of products of windows with a kernel, for every output channel.
//   Shapes:   x [n, c, s...], weight [o, c / groups, k...], bias [o] or null -> [n, o, t...] with
//             t = (s + padding - dilation (k - 1) - 1) / stride + 1, rounded down.
//   Types:    the same dtype; 16-bit floats accumulate in float32 and round once.
//   Sharding: "n (g c) [s], (g o) c [k], (g o) -> n (g o) [t]", linear: "x * w + b". Sharding the
//             input channels of a group gives Partial(sum). Gradients of weight and bias come as
//             Partial(sum) of a sharded batch.
//   Comm:     none of its own; with sharded rows the halo, in backward its gradient.
//   Errors:   InvalidArgument also for dtypes that differ, groups that do not divide the channels,
//             and a kernel that is larger than the padded input.
//   Source:   torch.nn.functional.conv1d, conv2d, conv3d
DTensor conv1d(const DTensor& x, const DTensor& weight, const DTensor& bias = {},
               DimList stride = {1}, const Padding& padding = 0, DimList dilation = {1},
               int64_t groups = 1);
DTensor conv2d(const DTensor& x, const DTensor& weight, const DTensor& bias = {},
               DimList stride = {1}, const Padding& padding = 0, DimList dilation = {1},
               int64_t groups = 1);
DTensor conv3d(const DTensor& x, const DTensor& weight, const DTensor& bias = {},
               DimList stride = {1}, const Padding& padding = 0, DimList dilation = {1},
               int64_t groups = 1);

// The gradient of a convolution by its input, as a layer.
//   Shapes:   x [n, c, s...], weight [c, o / groups, k...], bias [o] or null -> [n, o, t...] with
//             t = (s - 1) stride - 2 padding + dilation (k - 1) + output_padding + 1.
//   Types, Sharding, Comm: as conv2d, without a halo.
//   Errors:   as conv2d; InvalidArgument for an output_padding that is neither less than stride nor
//             than dilation.
//   Source:   torch.nn.functional.conv_transpose1d, conv_transpose2d, conv_transpose3d
DTensor conv_transpose1d(const DTensor& x, const DTensor& weight, const DTensor& bias = {},
                         DimList stride = {1}, DimList padding = {0}, DimList output_padding = {0},
                         int64_t groups = 1, DimList dilation = {1});
DTensor conv_transpose2d(const DTensor& x, const DTensor& weight, const DTensor& bias = {},
                         DimList stride = {1}, DimList padding = {0}, DimList output_padding = {0},
                         int64_t groups = 1, DimList dilation = {1});
DTensor conv_transpose3d(const DTensor& x, const DTensor& weight, const DTensor& bias = {},
                         DimList stride = {1}, DimList padding = {0}, DimList output_padding = {0},
                         int64_t groups = 1, DimList dilation = {1});

// The largest element of every window; NaN wins, of equal ones the first counts. What is outside of
// x is smaller than everything. stride {}: kernel_size.
//   Shapes:   t = (s + 2 padding - dilation (kernel_size - 1) - 1) / stride + 1, rounded down; up
//             with ceil_mode, but no window begins behind x.
//   Types:    any but bool.
//   Errors:   InvalidArgument also for a padding of more than half a window.
//   Source:   torch.nn.functional.max_pool1d, max_pool2d, max_pool3d
DTensor max_pool1d(const DTensor& x, DimList kernel_size, DimList stride = {},
                   DimList padding = {0}, DimList dilation = {1}, bool ceil_mode = false);
DTensor max_pool2d(const DTensor& x, DimList kernel_size, DimList stride = {},
                   DimList padding = {0}, DimList dilation = {1}, bool ceil_mode = false);
DTensor max_pool3d(const DTensor& x, DimList kernel_size, DimList stride = {},
                   DimList padding = {0}, DimList dilation = {1}, bool ceil_mode = false);
// The same, and where each was found: int64, counted through the spatial dims of x. Without a halo.
Values max_pool1d_with_indices(const DTensor& x, DimList kernel_size, DimList stride = {},
                               DimList padding = {0}, DimList dilation = {1},
                               bool ceil_mode = false);
Values max_pool2d_with_indices(const DTensor& x, DimList kernel_size, DimList stride = {},
                               DimList padding = {0}, DimList dilation = {1},
                               bool ceil_mode = false);
Values max_pool3d_with_indices(const DTensor& x, DimList kernel_size, DimList stride = {},
                               DimList padding = {0}, DimList dilation = {1},
                               bool ceil_mode = false);

// The mean of every window. It divides by the size of the window, as far as that is inside of x and
// its padding; by what is inside of x without count_include_pad; by divisor_override where that is
// given (not 0).
//   Shapes:   as max_pool2d.
//   Types:    floating; int64, whose means are cut to whole numbers (and whose sums must be below
//             2^53).
//   Sharding: batch and channels; linear.
//   Source:   torch.nn.functional.avg_pool1d, avg_pool2d, avg_pool3d
DTensor avg_pool1d(const DTensor& x, DimList kernel_size, DimList stride = {},
                   DimList padding = {0}, bool ceil_mode = false, bool count_include_pad = true);
DTensor avg_pool2d(const DTensor& x, DimList kernel_size, DimList stride = {},
                   DimList padding = {0}, bool ceil_mode = false, bool count_include_pad = true,
                   std::optional<int64_t> divisor_override = {});
DTensor avg_pool3d(const DTensor& x, DimList kernel_size, DimList stride = {},
                   DimList padding = {0}, bool ceil_mode = false, bool count_include_pad = true,
                   std::optional<int64_t> divisor_override = {});

// The same over windows that cut x into output_size parts, which overlap where that does not
// divide: part i begins at i s / t, rounded down, and ends at (i + 1) s / t, rounded up. An
// output_size of -1 (PyTorch's None) is that of x.
//   Source:   torch.nn.functional.adaptive_avg_pool1d, adaptive_max_pool1d, ...
DTensor adaptive_avg_pool1d(const DTensor& x, DimList output_size);
DTensor adaptive_avg_pool2d(const DTensor& x, DimList output_size);
DTensor adaptive_avg_pool3d(const DTensor& x, DimList output_size);
DTensor adaptive_max_pool1d(const DTensor& x, DimList output_size);
DTensor adaptive_max_pool2d(const DTensor& x, DimList output_size);
DTensor adaptive_max_pool3d(const DTensor& x, DimList output_size);
Values adaptive_max_pool1d_with_indices(const DTensor& x, DimList output_size);
Values adaptive_max_pool2d_with_indices(const DTensor& x, DimList output_size);
Values adaptive_max_pool3d_with_indices(const DTensor& x, DimList output_size);

// x at other spatial sizes.
//   Shapes:   x [n, c, s...] -> [n, c, t...]; t is `size`, or s scale_factor, rounded down: one of
//             the two.
//   Modes:    "nearest" (of one to three spatial dims), "nearest-exact", "area" (the adaptive
//             mean), "linear" (one), "bilinear" and "bicubic" (two), "trilinear" (three).
//             align_corners, of the last four only: the outer elements of x and of the result are
//             at the same places. Places are computed from the scale factors given, or, with
//             recompute_scale_factor and where there are none, from the sizes.
//   Types:    floating; uint8 in the two nearest modes, "bilinear" and "bicubic" (rounded after
//             each dim; PyTorch's weights have 16 bits, so a number may differ by one).
//   Sharding: batch and channels; linear.
//   Errors:   InvalidArgument also for a mode that does not fit the number of dims.
//   Source:   torch.nn.functional.interpolate, without antialias
DTensor interpolate(const DTensor& x, DimList size = {}, std::vector<double> scale_factor = {},
                    absl::string_view mode = "nearest", std::optional<bool> align_corners = {},
                    bool recompute_scale_factor = false);

// Channels to space: [..., c r r, h, w] -> [..., c, h r, w r], and back. Views and copies of
// ops/view; channels stay sharded where whole groups of r r of them are. Errors: InvalidArgument
// for sizes that r does not divide.
//   Source:   torch.nn.functional.pixel_shuffle, pixel_unshuffle
DTensor pixel_shuffle(const DTensor& x, int64_t upscale_factor);
DTensor pixel_unshuffle(const DTensor& x, int64_t downscale_factor);

// x at the places that the grid names: -1 and 1 are the ends of a dim of x, the centres of its
// outer elements with align_corners, else their outer edges.
//   Shapes:   x [n, c, h, w], grid [n, a, b, 2] with (x, y) -> [n, c, a, b]; of one dim more with
//             (x, y, z).
//   Modes:    "bilinear" (of two and of three dims), "nearest", "bicubic" (of two). padding_mode
//             says what is outside of x: "zeros", "border" (the nearest element), "reflection".
//   Types:    floating, both the same.
//   Sharding: batch, channels, dims of the grid; linear in x. With a sharded grid the gradient of x
//             comes as Partial(sum), with sharded channels that of the grid.
//   Source:   torch.nn.functional.grid_sample
DTensor grid_sample(const DTensor& x, const DTensor& grid, absl::string_view mode = "bilinear",
                    absl::string_view padding_mode = "zeros", bool align_corners = false);

}  // namespace dtensor
