// Convolutions, pools and resampling: errors, oneDNN against the kernel of ours, halos.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <set>
#include <vector>

#include "dtensor/mesh/comm_trace.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/ops/ops.h"
#include "tests/ops/gradcheck.h"
#include "tests/ops/sharded.h"

namespace dtensor::testing::conv_test {
namespace {

using ::testing::HasSubstr;

DTensor Made(Shape shape, DType dtype = DType::kF64, uint64_t seed = 1) {
  return FromVector(Noise(Numel(shape), seed), shape, {dtype, DeviceMesh::Self(), {}});
}

std::string Refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& e) {
    return e.what();
  }
  return "nothing was refused";
}

TEST(ConvErrors, SayWhatWouldBeRight) {
  const DTensor x = Made({2, 4, 5, 5}), w = Made({6, 4, 3, 3});
  const auto expect = [](const std::string& want, const std::function<void()>& call) {
    EXPECT_THAT(Refusal(call), HasSubstr(want));
  };
  expect("needs an input of 4 dims", [&] { conv2d(Made({5, 5}), w); });
  expect("weight must have 4 dims (out, in / groups", [&] { conv2d(x, Made({6, 4, 3})); });
  expect("has 4 channels, weight [6, 3, 3, 3] with 1 groups takes 3",
         [&] { conv2d(x, Made({6, 3, 3, 3})); });
  expect("groups 2 must divide the 5 output channels",
         [&] { conv2d(x, Made({5, 2, 3, 3}), {}, {1}, 0, {1}, 2); });
  expect("bias must be [6], is [5]", [&] { conv2d(x, w, Made({5})); });
  expect("the kernel 3 with dilation 3 takes 7", [&] { conv2d(x, w, {}, {1}, 0, {3}); });
  expect("padding \"same\" needs stride 1, not 2", [&] { conv2d(x, w, {}, {2}, "same"); });
  expect("is \"full\"", [&] { conv2d(x, w, {}, {1}, "full"); });
  expect("stride [0] must be at least 1", [&] { conv2d(x, w, {}, {0}); });
  expect("stride [1, 1, 1] must have one number, or 2", [&] { conv2d(x, w, {}, {1, 1, 1}); });
  expect("dtypes differ", [&] { conv2d(x, Made({6, 4, 3, 3}, DType::kF32)); });
  expect("output_padding 2 must be less than stride 2 or dilation 1",
         [&] { conv_transpose2d(x, Made({4, 6, 3, 3}), {}, {2}, {0}, {2}); });
  expect("must be at most half of the window", [&] { max_pool2d(x, {2}, {2}, {2}); });
  expect("too small for a window of 6", [&] { avg_pool2d(x, {6}); });
  expect("divisor_override must not be 0", [&] { avg_pool2d(x, {2}, {}, {0}, false, true, 0); });
  expect("needs a floating tensor", [&] { avg_pool2d(Made({1, 1, 2, 2}, DType::kI32), {2}); });
  expect("mode must be one of nearest, ", [&] { interpolate(x, {7}, {}, "cubic"); });
  expect("mode linear takes x of 3 to 3 dims", [&] { interpolate(x, {7}, {}, "linear"); });
  expect("does not take align_corners", [&] { interpolate(x, {7}, {}, "nearest", true); });
  expect("one of the two", [&] { interpolate(x, {7}, {2.0}); });
  expect("padding_mode must be one of zeros, border, reflection",
         [&] { grid_sample(x, Made({2, 3, 3, 2}), "nearest", "wrap"); });
  expect("takes x [n, c, h, w] and grid", [&] { grid_sample(x, Made({2, 3, 3, 3})); });
  expect("must be a multiple of 9", [&] { pixel_shuffle(x, 3); });
}

// Single channels along one dim have a kernel of their own, up to eight taps: against the sum as it
// is written, and its gradients.
TEST(Conv, OfSingleChannelsIsTheSumOverTaps) {
  constexpr int64_t kImages = 2, kChannels = 3;
  int64_t compared = 0;
  for (const int64_t in : {1, 7, 16, 40, 75}) {
    for (const int64_t taps : {1, 2, 3, 4, 5, 7, 8, 9}) {
      for (const int64_t padding : {0, 2, 11}) {
        for (const int64_t dilation : {1, 3}) {
          const int64_t out = in + 2 * padding - dilation * (taps - 1);
          if (out < 1) continue;
          for (const DType dtype : {DType::kF64, DType::kF32}) {
            const DTensor x = Made({kImages, kChannels, in}, dtype, 1).RequiresGrad();
            const DTensor w = Made({kChannels, 1, taps}, dtype, 2).RequiresGrad();
            const DTensor b = Made({kChannels}, dtype, 3).RequiresGrad();
            const DTensor dy = Made({kImages, kChannels, out}, dtype, 4);
            const DTensor y = conv1d(x, w, b, {1}, padding, {dilation}, kChannels);
            ASSERT_EQ(y.shape(), Shape({kImages, kChannels, out}));
            y.Backward(dy);
            const auto px = x.ToVector<double>(), pw = w.ToVector<double>(),
                       pb = b.ToVector<double>(), pdy = dy.ToVector<double>();
            std::vector<double> want(pdy.size()), dx(px.size()), dw(pw.size());
            for (int64_t row = 0; row < kImages * kChannels; ++row) {
              const int64_t c = row % kChannels;
              for (int64_t o = 0; o < out; ++o) {
                double& sum = want[row * out + o] = pb[c];
                for (int64_t k = 0; k < taps; ++k) {
                  const int64_t at = o - padding + k * dilation;
                  if (at < 0 || at >= in) continue;
                  sum += pw[c * taps + k] * px[row * in + at];
                  dx[row * in + at] += pw[c * taps + k] * pdy[row * out + o];
                  dw[c * taps + k] += px[row * in + at] * pdy[row * out + o];
                }
              }
            }
            const double tolerance = dtype == DType::kF64 ? 1e-13 : 1e-5;
            const auto near = [&](const DTensor& got, const std::vector<double>& wanted) {
              EXPECT_THAT(got.ToVector<double>(),
                          ::testing::Pointwise(::testing::DoubleNear(tolerance), wanted))
                  << "in " << in << " taps " << taps << " padding " << padding << " dilation "
                  << dilation;
              ++compared;
            };
            near(y, want);
            near(x.grad(), dx);
            near(w.grad(), dw);
          }
        }
      }
    }
  }
  EXPECT_GT(compared, 1000);
}

// Rows of a pool are done tap by tap where windows are whole: against window by window.
TEST(MaxPool, IsTheLargestOfEveryWindow) {
  int64_t compared = 0;
  for (const int64_t in : {5, 9, 40, 300}) {
    for (const int64_t kernel : {1, 2, 3, 5}) {
      for (const int64_t stride : {1, 2, 3}) {
        for (const int64_t dilation : {1, 2}) {
          for (const DType dtype : {DType::kF64, DType::kF32, DType::kI64, DType::kU8}) {
            const int64_t padding = kernel / 2, reach = dilation * (kernel - 1) + 1;
            if (in + 2 * padding < reach) continue;
            std::vector<double> v = Noise(3 * in, 5);
            for (double& e : v) e = std::trunc(20 * e);  // many are equal
            if (!IsFloating(dtype)) {
              for (double& e : v) e = std::fabs(e);
            } else {
              v[4] = v[in + 3] = v[in + 4] = std::nan("");
            }
            const DTensor x = FromVector(v, {1, 3, in}, {.dtype = dtype});
            const Values got =
                max_pool1d_with_indices(x, {kernel}, {stride}, {padding}, {dilation});
            const auto values = got[0].ToVector<double>(), places = got[1].ToVector<double>();
            const int64_t out = got[0].size(2);
            ASSERT_EQ(out, (in + 2 * padding - reach) / stride + 1);
            for (int64_t row = 0; row < 3; ++row) {
              for (int64_t o = 0; o < out; ++o) {
                double best = 0;
                int64_t place = -1;
                for (int64_t k = 0; k < kernel; ++k) {
                  const int64_t at = o * stride - padding + k * dilation;
                  if (at < 0 || at >= in) continue;
                  const double e = v[row * in + at];
                  if (place >= 0 && !(e > best) && !std::isnan(e)) continue;
                  best = e;
                  place = at;
                }
                const double value = values[row * out + o];
                EXPECT_TRUE(value == best || (std::isnan(value) && std::isnan(best)));
                EXPECT_EQ(places[row * out + o], place)
                    << "in " << in << " kernel " << kernel << " stride " << stride << " dilation "
                    << dilation << " row " << row << " output " << o;
                ++compared;
              }
            }
          }
        }
      }
    }
  }
  EXPECT_GT(compared, 10000);
}

// Large enough for oneDNN, which has no float64.
struct Large {
  Shape x, w;
  DimList stride;
  Padding padding;
  DimList dilation;
  int64_t groups;
};

TEST(Conv, OneDnnGivesWhatColumnsGive) {
  const std::vector<Large> all = {{{2, 8, 14, 13}, {16, 8, 3, 3}, {1}, 1, {1}, 1},
                                  {{2, 8, 15, 13}, {16, 4, 4, 3}, {2, 3}, {2, 1}, {2, 1}, 2},
                                  {{3, 32, 17, 17}, {32, 1, 3, 3}, {1}, "same", {2}, 32},
                                  {{1, 16, 12, 12}, {8, 16, 2, 2}, {1}, "same", {1}, 1},
                                  {{2, 16, 90}, {24, 16, 5}, {3}, 2, {1}, 1},
                                  {{1, 4, 6, 8, 7}, {8, 4, 3, 2, 3}, {2, 1, 2}, 1, {1}, 1},
                                  {{2, 3, 30, 30}, {16, 3, 7, 7}, {2}, 3, {1}, 1},
                                  // Two images at once, then one that is left.
                                  {{5, 32, 39, 40}, {8, 32, 3, 3}, {1}, 1, {1}, 1}};
  for (const Large& l : all) {
    std::vector<std::vector<double>> results[2];
    for (const DType dtype : {DType::kF64, DType::kF32}) {
      const DTensor b = Made({l.w[0]}, dtype, 3);
      const OpFn conv = [&](const std::vector<DTensor>& in) {
        const auto call = l.x.size() == 3 ? conv1d : l.x.size() == 4 ? conv2d : conv3d;
        return call(in[0], in[1], in[2], l.stride, l.padding, l.dilation, l.groups);
      };
      std::vector<DTensor> in = {Made(l.x, dtype, 1), Made(l.w, dtype, 2), b};
      for (DTensor& t : in) t.RequiresGrad();
      auto& mine = results[dtype == DType::kF32];
      mine = Gradients(conv, in);
      mine.push_back(conv(in).ToVector<double>());
      // As a transposed one: its x has the channels of y.
      if (!l.padding.name.empty()) continue;
      const auto back = l.x.size() == 3   ? conv_transpose1d
                        : l.x.size() == 4 ? conv_transpose2d
                                          : conv_transpose3d;
      const DTensor y = conv(in).Detach(), c = Made({l.x[1]}, dtype, 4);
      mine.push_back(
          back(y, in[1].Detach(), c, l.stride, l.padding.sizes, {0}, l.groups, l.dilation)
              .ToVector<double>());
    }
    for (size_t i = 0; i < results[0].size(); ++i) {
      double largest = 1;
      for (const double v : results[0][i]) largest = std::max(largest, std::fabs(v));
      EXPECT_EQ(Differs(results[1][i], results[0][i], 1e-5 * largest), "")
          << ToString(l.x) << " " << ToString(l.w) << " result " << i;
    }
  }
}

TEST(MaxPool, TakesIntegers) {
  const DTensor x = FromVector(std::vector<int64_t>{3, -7, -8, -9, 5, 1}, {1, 1, 6});
  EXPECT_EQ(max_pool1d(x, {2}, {1}, {1}).ToVector<int64_t>(),
            (std::vector<int64_t>{3, 3, -7, -8, 5, 5, 1}));
}

// --- halos ---------------------------------------------------------------------------------------

struct Rows {
  int64_t in, kernel, stride, padding, dilation, ranks;
  int64_t Out() const { return (in + 2 * padding - dilation * (kernel - 1) - 1) / stride + 1; }
};

std::pair<int64_t, int64_t> BlockOf(int64_t n, int64_t ranks, int64_t r) {
  const int64_t chunk = (n + ranks - 1) / ranks;
  return {std::min(n, r * chunk), std::min(n, (r + 1) * chunk)};
}

// Rows that the windows of a rank read and another has: by listing them.
std::set<std::pair<int64_t, int64_t>> MovedRows(const Rows& c) {  // row, who reads it
  std::set<std::pair<int64_t, int64_t>> moved;
  for (int64_t r = 0; r < c.ranks; ++r) {
    const auto [first, last] = BlockOf(c.in, c.ranks, r);
    const auto [begin, end] = BlockOf(c.Out(), c.ranks, r);
    for (int64_t o = begin; o < end; ++o) {
      for (int64_t k = 0; k < c.kernel; ++k) {
        const int64_t row = o * c.stride - c.padding + k * c.dilation;
        if (row >= 0 && row < c.in && (row < first || row >= last)) moved.insert({row, r});
      }
    }
  }
  return moved;
}

int64_t ExchangedBytes(const CommTrace& trace, CommPhase phase) {
  int64_t bytes = 0;
  for (const CommEvent& e : trace.events()) {
    EXPECT_TRUE(e.phase != CommPhase::kForward || e.kind == CollectiveKind::kExchange);
    if (e.kind == CollectiveKind::kExchange && e.phase == phase) bytes += e.bytes;
  }
  return bytes;
}

// Bytes of the rows that are read, forward and back, and nothing else; the numbers of one rank.
void CheckHalo(const Rows& c) {
  const Operand x = Float({2, 3, c.in, 4}, 1), w = Float({5, 3, c.kernel, 3}, 2);
  const OpFn conv = [&](const std::vector<DTensor>& in) {
    return conv2d(in[0], in[1], {}, {c.stride, 1}, {c.padding, 1}, {c.dilation, 1});
  };
  const std::vector<double> value = conv({x.Make(), w.Make()}).ToVector<double>();
  const auto grads = Gradients(conv, {x.Make(), w.Make()});
  const auto moved = MovedRows(c);
  const int64_t row = 2 * 3 * 4 * 8;
  ASSERT_LT(static_cast<int64_t>(moved.size()), (c.ranks - 1) * c.in);
  ThrowIfError(RunSpmd(c.ranks, [&](RankContext& context) {
    const DeviceMesh mesh({c.ranks}, {"sp"});
    int64_t reads = 0, read = 0;
    const auto [first, last] = BlockOf(c.in, c.ranks, context.rank());
    for (const auto& [at, reader] : moved) {
      reads += reader == context.rank();
      read += at >= first && at < last;
    }
    const DTensor px = Place(x, mesh, {Shard(2)}, context.rank(), 5);
    const DTensor pw = Place(w, mesh, {Replicate()}, context.rank(), 6);
    const CommTrace trace;
    const DTensor y = conv({px, pw});
    EXPECT_EQ(y.placements()[0], Shard(2));
    y.Backward(FromVector(Cotangent(y.numel()), y.shape(), {y.dtype(), mesh, {}}));
    EXPECT_EQ(ExchangedBytes(trace, CommPhase::kForward), reads * row) << trace.ToString();
    EXPECT_EQ(ExchangedBytes(trace, CommPhase::kBackward), read * row) << trace.ToString();
    EXPECT_EQ(px.grad().placements()[0], Shard(2));
    EXPECT_EQ(Differs(y.ToVector<double>(), value, 1e-12), "");
    EXPECT_EQ(Differs(px.grad().ToVector<double>(), grads[0], 1e-12), "");
    EXPECT_EQ(Differs(pw.grad().ToVector<double>(), grads[1], 1e-12), "");
    return absl::OkStatus();
  }));
}

TEST(Halo, MovesTheRowsThatWindowsRead) {
  for (const Rows& c : {Rows{8, 3, 1, 1, 1, 2},     // one row from the neighbour
                        Rows{10, 3, 1, 1, 1, 3},    // uneven blocks
                        Rows{11, 3, 2, 1, 1, 3},    // stride: blocks of results are elsewhere
                        Rows{9, 3, 1, 2, 2, 2},     // dilation
                        Rows{12, 4, 2, 0, 1, 4},    // no padding
                        Rows{8, 7, 1, 3, 1, 4},     // rows of two neighbours on each side
                        Rows{9, 2, 2, 0, 1, 3},     // windows in other blocks than rows
                        Rows{5, 3, 1, 1, 1, 4}}) {  // a rank without rows
    SCOPED_TRACE(absl::StrCat("in ", c.in, " kernel ", c.kernel, " stride ", c.stride, " padding ",
                              c.padding, " dilation ", c.dilation, " ranks ", c.ranks));
    CheckHalo(c);
  }
}

// Where windows read everything there is no halo: dispatch finds what moves no more than a gather.
TEST(Halo, LargeWindowsAreLeftToDispatch) {
  const Operand x = Float({1, 2, 6, 3}, 1), w = Float({2, 2, 11, 3}, 2);
  const auto conv = [](const DTensor& a, const DTensor& b) {
    return conv2d(a, b, {}, {1}, {5, 0});
  };
  const std::vector<double> value = conv(x.Make(), w.Make()).ToVector<double>();
  ThrowIfError(RunSpmd(2, [&](RankContext& context) {
    const DeviceMesh mesh({2}, {"sp"});
    const DTensor px = Place(x, mesh, {Shard(2)}, context.rank(), 5).Detach();
    const DTensor pw = Place(w, mesh, {Replicate()}, context.rank(), 6).Detach();
    const CommTrace trace;
    const DTensor y = conv(px, pw);
    EXPECT_LE(trace.TotalBytes(), 3 * (2 * 3 * 8)) << trace.ToString();
    EXPECT_NE(y.placements()[0], Shard(2));
    EXPECT_EQ(Differs(y.ToVector<double>(), value, 1e-12), "");
    return absl::OkStatus();
  }));
}

TEST(Halo, ConvolutionsUnderAllPlacements) {
  const auto conv = [](const std::vector<DTensor>& in) {
    return conv2d(in[0], in[1], {}, {2, 1}, {1, 2}, {1, 2});
  };
  CheckSharded(conv, {Float({2, 2, 7, 6}, 1), Float({3, 2, 3, 3}, 2)});
}

TEST(Halo, MeanPoolsUnderAllPlacements) {
  const auto plain = [](const std::vector<DTensor>& in) {
    return avg_pool2d(in[0], {3}, {2}, {1});
  };
  const auto ceil = [](const std::vector<DTensor>& in) {
    return avg_pool2d(in[0], {3}, {2}, {1}, true, false);
  };
  const auto sums = [](const std::vector<DTensor>& in) {
    return avg_pool2d(in[0], {3}, {2}, {1}, true, true, 5);
  };
  for (const OpFn& pool : {OpFn(plain), OpFn(ceil), OpFn(sums)}) {
    CheckSharded(pool, {Float({2, 2, 8, 6}, 1)});
  }
  ThrowIfError(RunSpmd(2, [&](RankContext& context) {
    const DeviceMesh mesh({2}, {"sp"});
    const DTensor x = Place(Float({1, 1, 8, 2}, 1), mesh, {Shard(2)}, context.rank(), 5).Detach();
    const CommTrace trace;
    EXPECT_EQ(avg_pool2d(x, {2}).placements()[0], Shard(2));  // windows do not cross blocks
    EXPECT_EQ(trace.TotalCount(), 0) << trace.ToString();
    return absl::OkStatus();
  }));
}

TEST(Halo, MaxPoolsUnderAllPlacements) {
  const auto pool = [](const std::vector<DTensor>& in) {
    return max_pool2d(in[0], {3}, {2}, {1}, {1}, true);
  };
  CheckSharded(pool, {Float({2, 2, 9, 6}, 1)});
}

// Of a window with nothing above the padding the gradient goes to the first element that it has.
TEST(Halo, MaxPoolsOfWindowsThatHoldNothing) {
  const double none = -std::numeric_limits<double>::infinity();
  const Operand rows = {{1, 1, 12}, {none, 1, 2, 3, 4, none, none, 5, 6, 7, 8, none}, DType::kF64};
  const Operand nothing = {{1, 1, 9}, std::vector<double>(9, none), DType::kF64};
  for (const auto& [kernel, stride, padding, dilation] :
       {std::array<int64_t, 4>{2, 3, 1, 1}, {3, 2, 1, 2}, {3, 1, 2, 2}, {5, 1, 2, 1}}) {
    const auto pool = [=](const std::vector<DTensor>& in) {
      return max_pool1d(in[0], {kernel}, {stride}, {padding}, {dilation});
    };
    CheckSharded(pool, {rows});
    CheckSharded(pool, {nothing});
  }
  Operand plane = {{1, 1, 6, 5}, std::vector<double>(30, none), DType::kF64};
  plane.values[8] = plane.values[21] = 3;
  CheckSharded([](const std::vector<DTensor>& in) { return max_pool2d(in[0], {2}, {2}, {1}); },
               {plane});
}

// Ranks outside of the mesh come to the same specs and histories, so what follows finds all alike:
// the result goes on to other ranks, whose gradient comes back.
TEST(Halo, RanksOutsideOfTheMeshSeeTheSameSpecs) {
  const Operand x = Float({2, 3, 7, 4}, 1), w = Float({5, 3, 3, 3}, 2);
  const auto block = [](const DTensor& a, const DTensor& b) {
    return max_pool2d(conv2d(a, b, {}, {1}, {1}), {3}, {2}, {1});
  };
  const OpFn both = [&](const std::vector<DTensor>& in) { return block(in[0], in[1]); };
  const std::vector<double> value = both({x.Make(), w.Make()}).ToVector<double>();
  const auto grads = Gradients(both, {x.Make(), w.Make()});
  ThrowIfError(RunSpmd(4, [&](RankContext& rank) -> absl::Status {
    DT_ASSIGN_OR_RETURN(const DeviceMesh first, DeviceMesh::FromRanks({2}, {0, 1}, {"sp"}));
    DT_ASSIGN_OR_RETURN(const DeviceMesh second, DeviceMesh::FromRanks({2}, {3, 2}, {"sp"}));
    DTensor px = DistributeTensor(x.Make().Detach(), first, {Shard(2)}).RequiresGrad();
    DTensor pw = DistributeTensor(w.Make().Detach(), first, {Replicate()}).RequiresGrad();
    const DTensor y = block(px, pw);
    EXPECT_EQ(y.placements()[0], Shard(2));
    EXPECT_EQ(y.size(2), 4);
    EXPECT_TRUE(y.requires_grad());
    const DTensor sent = y.Redistribute(second, {Shard(0)});
    if (rank.rank() < 2) {
      sent.Backward(DTensor::Absent(sent.spec()));
      EXPECT_EQ(Differs(px.grad().ToVector<double>(), grads[0], 1e-12), "");
      EXPECT_EQ(Differs(pw.grad().ToVector<double>(), grads[1], 1e-12), "");
    } else {
      EXPECT_EQ(Differs(sent.ToVector<double>(), value, 1e-12), "");
      sent.Backward(FromVector(Cotangent(y.numel()), y.shape(), {y.dtype(), second, {}}));
    }
    return absl::OkStatus();
  }));
}

TEST(AdaptivePools, OfNoElementsGiveZeroGradients) {
  for (const int64_t ranks : {1, 2}) {
    ThrowIfError(RunSpmd(ranks, [&](RankContext&) {
      const DeviceMesh mesh({ranks}, {"dp"});
      DTensor x = ones({2, 1, 4, 4}, {.mesh = mesh, .placements = {Shard(0)}}).RequiresGrad();
      const DTensor y = adaptive_avg_pool2d(x, {0, 3});
      EXPECT_EQ(y.shape(), (Shape{2, 1, 0, 3}));
      sum(y).Backward();
      EXPECT_EQ(x.grad().ToVector<double>(), std::vector<double>(32, 0.0));
      return absl::OkStatus();
    }));
  }
}

// Rounded after each dim, the last one first. (Values of PyTorch.)
TEST(Interpolate, OfBytesGivesBytes) {
  const DTensor x =
      FromVector(std::vector<double>{0.0, 255.0, 100.0, 200.0}, {1, 1, 2, 2}, {DType::kU8});
  const auto at = [&](DimList size, const char* mode, bool corners) {
    const DTensor y = interpolate(x, size, {}, mode, corners);
    EXPECT_EQ(y.dtype(), DType::kU8);
    return y.ToVector<int64_t>();
  };
  EXPECT_EQ(at({3, 3}, "bilinear", false),
            (std::vector<int64_t>{0, 128, 255, 50, 139, 228, 100, 150, 200}));
  EXPECT_EQ(at({3, 3}, "bicubic", false),
            (std::vector<int64_t>{0, 126, 255, 46, 139, 232, 99, 152, 205}));
  EXPECT_EQ(at({4, 3}, "bicubic", true),
            (std::vector<int64_t>{0, 128, 255, 31, 135, 238, 69, 143, 217, 100, 150, 200}));
  EXPECT_THAT(Refusal([&] { interpolate(x, {3, 3}, {}, "area"); }),
              HasSubstr("needs a floating tensor, got uint8"));
}

}  // namespace
}  // namespace dtensor::testing::conv_test
