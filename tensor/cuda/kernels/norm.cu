// layer_norm and rms_norm over the last dim of contiguous arrays, forward and backward. A row that
// fits into a team's registers or a block's shared memory is read once, of longer ones what does
// not fit again in each pass; variance in two passes.
#include "dtensor/tensor/cuda/kernels/fold.h"
#include "dtensor/tensor/cuda/kernels/stage.h"

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

// Rows lie in registers (kHolds), or in shared memory where they are long or begin amid sectors.
template <bool kHolds>
inline constexpr Stage StageOf = kHolds ? Stage::kNone : Stage::kPart;

template <class X, bool kHolds>
__global__ void __launch_bounds__(kMostThreads, 1)
    LayerNorm(const X* x, Floats g, Floats b, X* y, FloatsOut means, FloatsOut rstds, RowShape rows,
              double eps, TeamPlan plan, StagePlan stage) {
  using T = Computed<X>;
  using Source = Lines<X, StageOf<kHolds>>;
  const Team team(plan);
  const BlockLines at(team, rows.n, 1, rows.count);
  const int64_t n = at.mine;
  const Source source(team, at, stage, 0, x);
  if (!kHolds) __syncthreads();
  const Line<Source, kHolds> line(team, source, n);
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
    source.Put(i, MulAdd((line(k, i) - mean) * rstd, g.At<T>(i), b.At<T>(i)), at, y);
  });
  source.Send(team, at, y);
  const int64_t r = at.first + team.number;
  if (r >= rows.count || team.lane != 0) return;
  means.Set(r, mean);
  rstds.Set(r, rstd);
}

template <class X, bool kHolds>
__global__ void __launch_bounds__(kMostThreads, 1)
    RmsNorm(const X* x, Floats g, X* y, FloatsOut rstds, RowShape rows, double eps, TeamPlan plan,
            StagePlan stage) {
  using T = Computed<X>;
  using Source = Lines<X, StageOf<kHolds>>;
  const Team team(plan);
  const BlockLines at(team, rows.n, 1, rows.count);
  const int64_t n = at.mine;
  const Source source(team, at, stage, 0, x);
  if (!kHolds) __syncthreads();
  const Line<Source, kHolds> line(team, source, n);
  T square = 0;
  ForLane<kHolds>(team, n, [&](int k, int64_t i) { square += line(k, i) * line(k, i); });
  const T rstd = T(1) / Root(team.Sum(square) / static_cast<T>(rows.n) + static_cast<T>(eps));
  ForLane<kHolds>(team, n,
                  [&](int k, int64_t i) { source.Put(i, line(k, i) * rstd * g.At<T>(i), at, y); });
  source.Send(team, at, y);
  const int64_t r = at.first + team.number;
  if (r < rows.count && team.lane == 0) rstds.Set(r, rstd);
}

// Shared memory of NormBackward: rows of dy and x as far as they fit, of sums, and the weight.
struct BackwardStage {
  StagePlan lines;
  bool fits = true;    // whether whole rows of sums do
  int64_t weight = 0;  // elements of it that are held
  int64_t at = 0;      // where sums begin, then the weight
  size_t bytes = 0;

  BackwardStage() = default;
  template <class... Args>
  BackwardStage(void (*kernel)(Args...), const TeamPlan& plan, int64_t n, int64_t size,
                int64_t sum_size, int rows_of_sums) {
    const int64_t teams = plan.teams(), around = 4 * kPackBytes;
    const int64_t of_sums = teams * rows_of_sums * sum_size, of_lines = teams * 2 * size;
    int64_t left = SharedRoom(kernel, n * (of_sums + sum_size + of_lines) + around) - around;
    fits = left >= n * of_sums;
    if (!fits) return;
    left -= n * of_sums;
    const auto take = [&](int64_t each) {
      const int64_t most = left / each, taken = most < n ? most : n;
      left -= taken * each;
      return taken;
    };
    weight = take(sum_size);
    lines.held = take(of_lines);
    if (teams > 1 && lines.held < n) lines.held = 0;  // of several rows all or nothing
    lines.slot = StagePlan::SlotOf(lines.held * teams * size);
    at = 2 * lines.slot;
    bytes = static_cast<size_t>(at + n * of_sums + weight * sum_size);
  }
};

// The gradient of rows first, first + teams, ... by a team, and its part of the gradients of g and
// b: rows `first` of dg and db [teams, n]. mean and db only with kCentered. What a row needs twice
// lies in registers (kHolds) or in shared memory.
template <class X, bool kCentered, bool kHolds>
__global__ void __launch_bounds__(kMostThreads, 1)
    NormBackward(const X* dy, const X* x, Floats means, Floats rstds, Floats g, X* dx,
                 Computed<X>* dg, Computed<X>* db, RowShape rows, TeamPlan plan,
                 BackwardStage stage) {
  using T = Computed<X>;
  using Source = Lines<X, StageOf<kHolds>>;
  const Team team(plan);
  const int64_t per_block = team.teams(), teams = gridDim.x * per_block;
  const int64_t first = blockIdx.x * per_block + team.number;
  dg += first * rows.n;
  if (kCentered) db += first * rows.n;
  T dg_held[kHolds ? kHeld : 1] = {}, db_held[kHolds ? kHeld : 1] = {};
  // Of a row: dy * g, and x normalized. So g is read once for it too.
  T scaled_held[kHolds ? kHeld : 1], h_held[kHolds ? kHeld : 1];
  T *dg_sums = nullptr, *db_sums = nullptr, *weight = nullptr;
  if constexpr (!kHolds) {
    T* const sums = reinterpret_cast<T*>(DynamicShared() + stage.at);
    dg_sums = sums + team.number * rows.n;
    if (kCentered) db_sums = dg_sums + per_block * rows.n;
    weight = sums + (kCentered ? 2 : 1) * per_block * rows.n;
    for (int64_t i = threadIdx.x; i < stage.weight; i += blockDim.x) weight[i] = g.At<T>(i);
    ForLane<false>(team, rows.n, [&](int, int64_t i) {
      dg_sums[i] = 0;
      if (kCentered) db_sums[i] = 0;
    });
  }
  const auto weight_at = [&](int64_t i) {
    if (!kHolds && i < stage.weight) return weight[i];
    return g.At<T>(i);
  };
  const T size = static_cast<T>(rows.n);
  for (int64_t block_row = blockIdx.x * per_block; block_row < rows.count; block_row += teams) {
    const BlockLines at(team, rows.n, 1, rows.count, block_row);
    const int64_t r = block_row + team.number, n = at.mine;
    const T mean = n > 0 && kCentered ? means.At<T>(r) : T(0), rstd = n > 0 ? rstds.At<T>(r) : T(0);
    const Source dy_source(team, at, stage.lines, 0, dy), x_source(team, at, stage.lines, 1, x);
    if (!kHolds) __syncthreads();
    const Line<Source, kHolds> grad(team, dy_source, n), line(team, x_source, n);
    T a = 0, b = 0;
    const auto add = [&](T d, T h, T* to_g, T* to_b) {
      *to_g += d * h;
      if (kCentered) *to_b += d;
    };
    ForLane<kHolds>(team, n, [&](int k, int64_t i) {
      const T scaled = grad(k, i) * weight_at(i), h = (line(k, i) - mean) * rstd;
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
        dy_source.Put(i, rstd * (scaled_held[k] - a - h_held[k] * b), at, dx);
      } else {
        const T d = grad(k, i), h = (line(k, i) - mean) * rstd;
        add(d, h, &dg_sums[i], kCentered ? &db_sums[i] : nullptr);
        dy_source.Put(i, rstd * (d * weight_at(i) - a - h * b), at, dx);
      }
    });
    dy_source.Send(team, at, dx);
  }
  ForLane<kHolds>(team, rows.n, [&](int k, int64_t i) {
    dg[i] = kHolds ? dg_held[k] : dg_sums[i];
    if (kCentered) db[i] = kHolds ? db_held[k] : db_sums[i];
  });
}

// The same where shared memory has no room for rows of sums, in the same order: first each row's
// two means, a and b [rows], of what its gradient is made of.
template <class X, bool kCentered>
__global__ void __launch_bounds__(kMostThreads, 1)
    NormRowMeans(const X* dy, const X* x, Floats means, Floats rstds, Floats g, Computed<X>* a_of,
                 Computed<X>* b_of, RowShape rows, TeamPlan plan) {
  using T = Computed<X>;
  const Team team(plan);
  const BlockLines at(team, rows.n, 1, rows.count);
  const int64_t r = at.first + team.number, n = at.mine;
  const T mean = n > 0 && kCentered ? means.At<T>(r) : T(0), rstd = n > 0 ? rstds.At<T>(r) : T(0);
  T a = 0, b = 0;
  ForLane<false>(team, n, [&](int, int64_t i) {
    const T scaled = Widen(dy[at.base + i]) * g.At<T>(i);
    if (kCentered) a += scaled;
    b += scaled * ((Widen(x[at.base + i]) - mean) * rstd);
  });
  const T size = static_cast<T>(rows.n);
  if (kCentered) a = team.Sum(a) / size;
  b = team.Sum(b) / size;
  if (n == 0 || team.lane != 0) return;
  a_of[r] = a;
  b_of[r] = b;
}
// Then columns of rows first, first + teams, ..., as of team `first` = blockIdx.y.
constexpr int kColumns = 4;  // of a thread: what it reads of each row is little beside them
template <class X, bool kCentered>
__global__ void __launch_bounds__(kThreads, 1)
    NormColumns(const X* dy, const X* x, Floats means, Floats rstds, Floats g,
                const Computed<X>* a_of, const Computed<X>* b_of, X* dx, Computed<X>* dg,
                Computed<X>* db, RowShape rows) {
  using T = Computed<X>;
  const int64_t first = blockIdx.x * int64_t{kColumns * kThreads} + threadIdx.x;
  const auto columns = [&](const auto& visit) {
#pragma unroll
    for (int k = 0; k < kColumns; ++k) {
      if (first + k * kThreads < rows.n) visit(k, first + k * kThreads);
    }
  };
  T weight[kColumns], dg_sums[kColumns] = {}, db_sums[kColumns] = {};
  columns([&](int k, int64_t i) { weight[k] = g.At<T>(i); });
  for (int64_t r = blockIdx.y; r < rows.count; r += gridDim.y) {
    const T mean = kCentered ? means.At<T>(r) : T(0), rstd = rstds.At<T>(r);
    const T a = kCentered ? a_of[r] : T(0), b = b_of[r];
    columns([&](int k, int64_t i) {
      const int64_t at = r * rows.n + i;
      const T d = Widen(dy[at]), h = (Widen(x[at]) - mean) * rstd;
      dg_sums[k] += d * h;
      if (kCentered) db_sums[k] += d;
      Store(rstd * (d * weight[k] - a - h * b), dx + at);
    });
  }
  columns([&](int k, int64_t i) {
    dg[blockIdx.y * rows.n + i] = dg_sums[k];
    if (kCentered) db[blockIdx.y * rows.n + i] = db_sums[k];
  });
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
    const bool holds = plan.holds && !AmidSectors(rows.n, sizeof(X));
    const auto run = holds ? &LayerNorm<X, true> : &LayerNorm<X, false>;
    const StagePlan stage = holds ? StagePlan() : StagePlan(run, plan, rows.n, 1, sizeof(X));
    run<<<BlocksOf(rows, plan), static_cast<unsigned>(plan.threads), stage.bytes, StreamOf(c)>>>(
        In<X>(c, 0), Floats(c.in[1]), Floats(c.in[2]), Out<X>(c, 0), FloatsOut(c.out[1]),
        FloatsOut(c.out[2]), rows, c.attrs[0].d, plan, stage);
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
    const bool holds = plan.holds && !AmidSectors(rows.n, sizeof(X));
    const auto run = holds ? &RmsNorm<X, true> : &RmsNorm<X, false>;
    const StagePlan stage = holds ? StagePlan() : StagePlan(run, plan, rows.n, 1, sizeof(X));
    run<<<BlocksOf(rows, plan), static_cast<unsigned>(plan.threads), stage.bytes, StreamOf(c)>>>(
        In<X>(c, 0), Floats(c.in[1]), Out<X>(c, 0), FloatsOut(c.out[1]), rows, c.attrs[0].d, plan,
        stage);
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
    // Float64 would not fit into registers.
    constexpr bool kMayHold = sizeof(Computed<X>) == 4;
    const bool holds = plan.holds && kMayHold && !AmidSectors(rows.n, sizeof(X));
    const auto run =
        holds ? &NormBackward<X, kCentered, kMayHold> : &NormBackward<X, kCentered, false>;
    const BackwardStage stage =
        holds ? BackwardStage()
              : BackwardStage(run, plan, rows.n, sizeof(X), sizeof(Computed<X>), kCentered ? 2 : 1);
    if (stage.fits) {
      run<<<static_cast<unsigned>(blocks), static_cast<unsigned>(plan.threads), stage.bytes,
            StreamOf(c)>>>(In<X>(c, 0), In<X>(c, 1), Floats(c.in[2]), Floats(rstd), Floats(g),
                           Out<X>(c, 0), parts, more, rows, plan, stage);
    } else {
      auto* of_rows = Scratch<Computed<X>>(c, 2 * rows.count + 1);
      if (of_rows == nullptr) return;
      if (rows.count > 0) {
        NormRowMeans<X, kCentered>
            <<<BlocksOf(rows, plan), static_cast<unsigned>(plan.threads), 0, StreamOf(c)>>>(
                In<X>(c, 0), In<X>(c, 1), Floats(c.in[2]), Floats(rstd), Floats(g), of_rows,
                of_rows + rows.count, rows, plan);
        CheckLaunch();
      }
      const int64_t tiles = (rows.n + kColumns * kThreads - 1) / (kColumns * kThreads);
      const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(teams));
      NormColumns<X, kCentered><<<grid, kThreads, 0, StreamOf(c)>>>(
          In<X>(c, 0), In<X>(c, 1), Floats(c.in[2]), Floats(rstd), Floats(g), of_rows,
          of_rows + rows.count, Out<X>(c, 0), parts, more, rows);
    }
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
