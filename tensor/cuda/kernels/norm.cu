// layer_norm and rms_norm over the last dim of contiguous arrays, forward and backward. A row that
// fits into a team's registers is read once; variance in two passes over them.
#include "dtensor/tensor/cuda/kernels/fold.h"
#include "dtensor/tensor/cuda/kernels/team.h"

namespace dtensor::cuda {
namespace {

// Statistics have the type of x, or the one in which it is computed.
struct FloatsOut {
  void* data;
  DType dtype;
  explicit FloatsOut(const TensorRef& t) : data(t.data), dtype(t.dtype) {}
  template <class T>
  __device__ void Set(int64_t i, T v) const {
    switch (dtype) {
      case DType::kF64:
        static_cast<double*>(data)[i] = v;
        break;
      case DType::kF32:
        static_cast<float*>(data)[i] = static_cast<float>(v);
        break;
      case DType::kBF16:
        static_cast<BFloat16*>(data)[i] = ToBFloat16(static_cast<float>(v));
        break;
      default:
        static_cast<Half*>(data)[i] = ToHalf(static_cast<float>(v));
    }
  }
};

struct RowShape {
  int64_t n, count;  // elements of a row, rows
  explicit RowShape(const TensorRef& x)
      : n(x.sizes[x.ndim - 1]), count(ProductOf(x, 0, x.ndim - 1)) {}
};

template <class X, bool kHolds>
__global__ void __launch_bounds__(kMostThreads, 1)
    LayerNorm(const X* x, Floats g, Floats b, X* y, FloatsOut means, FloatsOut rstds, RowShape rows,
              double eps, TeamPlan plan) {
  using T = Computed<X>;
  const Team team(plan);
  const int64_t r = blockIdx.x * static_cast<int64_t>(blockDim.x / plan.lanes) + team.number;
  const bool mine = r < rows.count;
  const int64_t n = mine ? rows.n : 0, base = mine ? r * rows.n : 0;
  const Line<X, kHolds> line(team, x + base, n, 1);
  const T size = static_cast<T>(rows.n);
  T sum = 0, square = 0;
  ForLane<kHolds>(team, n, [&](int k, int64_t i) { sum += line(k, i); });
  const T mean = team.Sum(sum) / size;
  ForLane<kHolds>(team, n, [&](int k, int64_t i) {
    const T d = line(k, i) - mean;
    square += d * d;
  });
  const T rstd = T(1) / Root(team.Sum(square) / size + static_cast<T>(eps));
  ForLane<kHolds>(team, n, [&](int k, int64_t i) {
    Store(MulAdd((line(k, i) - mean) * rstd, g.At<T>(i), b.At<T>(i)), y + base + i);
  });
  if (!mine || team.lane != 0) return;
  means.Set(r, mean);
  rstds.Set(r, rstd);
}

template <class X, bool kHolds>
__global__ void __launch_bounds__(kMostThreads, 1)
    RmsNorm(const X* x, Floats g, X* y, FloatsOut rstds, RowShape rows, double eps, TeamPlan plan) {
  using T = Computed<X>;
  const Team team(plan);
  const int64_t r = blockIdx.x * static_cast<int64_t>(blockDim.x / plan.lanes) + team.number;
  const bool mine = r < rows.count;
  const int64_t n = mine ? rows.n : 0, base = mine ? r * rows.n : 0;
  const Line<X, kHolds> line(team, x + base, n, 1);
  T square = 0;
  ForLane<kHolds>(team, n, [&](int k, int64_t i) { square += line(k, i) * line(k, i); });
  const T rstd = T(1) / Root(team.Sum(square) / static_cast<T>(rows.n) + static_cast<T>(eps));
  ForLane<kHolds>(team, n,
                  [&](int k, int64_t i) { Store(line(k, i) * rstd * g.At<T>(i), y + base + i); });
  if (mine && team.lane == 0) rstds.Set(r, rstd);
}

// The gradient of rows first, first + teams, ... by a team, and its part of the gradients of g and
// b: rows `first` of dg and db [teams, n]. mean and db only with kCentered.
template <class X, bool kCentered, bool kHolds>
__global__ void __launch_bounds__(kMostThreads, 1)
    NormBackward(const X* dy, const X* x, Floats means, Floats rstds, Floats g, X* dx,
                 Computed<X>* dg, Computed<X>* db, RowShape rows, TeamPlan plan) {
  using T = Computed<X>;
  const Team team(plan);
  const int64_t per_block = blockDim.x / plan.lanes, teams = gridDim.x * per_block;
  const int64_t first = blockIdx.x * per_block + team.number;
  T dg_held[kHolds ? kHeld : 1] = {}, db_held[kHolds ? kHeld : 1] = {};
  // Of a row: dy * g, and x normalized. So g is read once for it too.
  T scaled_held[kHolds ? kHeld : 1], h_held[kHolds ? kHeld : 1];
  dg += first * rows.n;
  if (kCentered) db += first * rows.n;
  if constexpr (!kHolds) {
    ForLane<false>(team, rows.n, [&](int, int64_t i) {
      dg[i] = 0;
      if (kCentered) db[i] = 0;
    });
  }
  const T size = static_cast<T>(rows.n);
  for (int64_t block_row = blockIdx.x * per_block; block_row < rows.count; block_row += teams) {
    const int64_t r = block_row + team.number;
    const bool mine = r < rows.count;
    const int64_t n = mine ? rows.n : 0, base = mine ? r * rows.n : 0;
    const T mean = mine && kCentered ? means.At<T>(r) : T(0), rstd = mine ? rstds.At<T>(r) : T(0);
    const Line<X, kHolds> grad(team, dy + base, n, 1), line(team, x + base, n, 1);
    T a = 0, b = 0;
    const auto add = [&](T d, T h, T* to_g, T* to_b) {
      *to_g += d * h;
      if (kCentered) *to_b += d;
    };
    ForLane<kHolds>(team, n, [&](int k, int64_t i) {
      const T scaled = grad(k, i) * g.At<T>(i), h = (line(k, i) - mean) * rstd;
      if (kCentered) a += scaled;
      b += scaled * h;
      if constexpr (kHolds) {
        scaled_held[k] = scaled;
        h_held[k] = h;
        add(grad(k, i), h, &dg_held[k], &db_held[k]);
      }
    });
    if (kCentered) a = team.Sum(a) / size;
    b = team.Sum(b) / size;
    ForLane<kHolds>(team, n, [&](int k, int64_t i) {
      if constexpr (kHolds) {
        Store(rstd * (scaled_held[k] - a - h_held[k] * b), dx + base + i);
      } else {
        const T h = (line(k, i) - mean) * rstd;
        Store(rstd * (grad(k, i) * g.At<T>(i) - a - h * b), dx + base + i);
        add(grad(k, i), h, dg + i, kCentered ? db + i : nullptr);
      }
    });
  }
  if constexpr (kHolds) {
    ForLane<true>(team, rows.n, [&](int k, int64_t i) {
      dg[i] = dg_held[k];
      if (kCentered) db[i] = db_held[k];
    });
  }
}

template <class T>
struct ColumnSum {
  using Acc = T;
  const T* parts;
  FloatsOut out;
  __device__ Acc Start() const { return T(0); }
  __device__ Acc Term(int64_t at, int64_t, int64_t) const { return parts[at]; }
  __device__ Acc Join(Acc a, Acc b) const { return a + b; }
  __device__ void Finish(int64_t o, Acc acc) const { out.Set(o, acc); }
};

unsigned BlocksOf(const RowShape& rows, const TeamPlan& plan) {
  return static_cast<unsigned>((rows.count + plan.teams() - 1) / plan.teams());
}

// x, g, b; eps -> y, mean, rstd
void LayerNormKernel(const KernelCall& c) {
  const RowShape rows(c.in[0]);
  if (rows.count == 0) return;
  const TeamPlan plan(rows.n, true);
  VisitFloat(c.in[0].dtype, [&](auto e) {
    using X = decltype(e);
    const auto run = plan.holds ? &LayerNorm<X, true> : &LayerNorm<X, false>;
    run<<<BlocksOf(rows, plan), static_cast<unsigned>(plan.threads), 0, StreamOf(c)>>>(
        In<X>(c, 0), Floats(c.in[1]), Floats(c.in[2]), Out<X>(c, 0), FloatsOut(c.out[1]),
        FloatsOut(c.out[2]), rows, c.attrs[0].d, plan);
    CheckLaunch();
  });
}

// x, g; eps -> y, rstd
void RmsNormKernel(const KernelCall& c) {
  const RowShape rows(c.in[0]);
  if (rows.count == 0) return;
  const TeamPlan plan(rows.n, true);
  VisitFloat(c.in[0].dtype, [&](auto e) {
    using X = decltype(e);
    const auto run = plan.holds ? &RmsNorm<X, true> : &RmsNorm<X, false>;
    run<<<BlocksOf(rows, plan), static_cast<unsigned>(plan.threads), 0, StreamOf(c)>>>(
        In<X>(c, 0), Floats(c.in[1]), Out<X>(c, 0), FloatsOut(c.out[1]), rows, c.attrs[0].d, plan);
    CheckLaunch();
  });
}

// dy, x, [mean,] rstd, g -> dx, dg[, db]
template <bool kCentered>
void NormBackwardKernel(const KernelCall& c) {
  const RowShape rows(c.in[0]);
  const TensorRef &rstd = c.in[kCentered ? 3 : 2], &g = c.in[kCentered ? 4 : 3];
  const TeamPlan plan(rows.n, true);
  // Enough teams for a device, and few against the rows, since each writes a row of sums.
  constexpr int64_t kEnough = 512, kRowsOfTeam = 16;
  const int64_t wanted = (rows.count + kRowsOfTeam - 1) / kRowsOfTeam;
  const int64_t most = wanted < kEnough ? wanted : kEnough;
  const int64_t blocks = most <= plan.teams() ? 1 : (most + plan.teams() - 1) / plan.teams();
  const int64_t teams = blocks * plan.teams();
  if (rows.n == 0) return;
  VisitFloat(c.in[0].dtype, [&](auto e) {
    using X = decltype(e);
    auto* parts = Scratch<Computed<X>>(c, (kCentered ? 2 : 1) * teams * rows.n);
    if (parts == nullptr) return;
    auto* more = kCentered ? parts + teams * rows.n : nullptr;
    constexpr bool kMayHold = sizeof(Computed<X>) == 4;  // float64 would not fit into registers
    const auto run = plan.holds && kMayHold ? &NormBackward<X, kCentered, kMayHold>
                                            : &NormBackward<X, kCentered, false>;
    run<<<static_cast<unsigned>(blocks), static_cast<unsigned>(plan.threads), 0, StreamOf(c)>>>(
        In<X>(c, 0), In<X>(c, 1), Floats(c.in[2]), Floats(rstd), Floats(g), Out<X>(c, 0), parts,
        more, rows, plan);
    CheckLaunch();
    RunFold(c, ColumnSum<Computed<X>>{parts, FloatsOut(c.out[1])}, FoldPlan(teams, rows.n));
    if (!kCentered) return;
    RunFold(c, ColumnSum<Computed<X>>{more, FloatsOut(c.out[2])}, FoldPlan(teams, rows.n));
  });
}

}  // namespace

void AddNormKernels(AddKernelFn add) {
  constexpr KernelLayout kContiguous = KernelLayout::kContiguous;
  add("layer_norm", LayerNormKernel, kFloatDTypes, kContiguous);
  add("layer_norm_backward", NormBackwardKernel<true>, kFloatDTypes, kContiguous);
  add("rms_norm", RmsNormKernel, kFloatDTypes, kContiguous);
  add("rms_norm_backward", NormBackwardKernel<false>, kFloatDTypes, kContiguous);
}

}  // namespace dtensor::cuda
