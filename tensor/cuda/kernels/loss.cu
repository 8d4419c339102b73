// What nll_loss and cross_entropy are made of, on contiguous [n, v]; v may be this rank's block of
// the classes.
#include "dtensor/tensor/cuda/kernels/sum_exps.h"

namespace dtensor::cuda {
namespace {

// Targets of rows, and where they are among this rank's classes.
struct Targets {
  Indices of;
  FactorRange classes;
  int64_t ignore;

  enum Where { kHere, kElsewhere, kIgnored };
  // Complains of what is no class; that is taken for another rank's.
  __device__ Where Locate(int64_t row, const ErrorSlot& slot, int64_t* column) const {
    const int64_t target = of[row];
    if (target == ignore) return kIgnored;
    if (target < 0 || target >= classes.global) {
      Complaint(slot) << "target " << target << " at position " << row << " is out of range for "
                      << classes.global << " classes";
      return kElsewhere;
    }
    *column = target - classes.start;
    return *column >= 0 && *column < classes.local ? kHere : kElsewhere;
  }
};

template <class X>
__global__ void __launch_bounds__(kThreads)
    NllPick(const X* x, Targets targets, X* out, int64_t rows, int64_t n, ErrorSlot slot) {
  for (int64_t r = GridStart(); r < rows; r += GridStep()) {
    int64_t column = 0;
    const bool here = targets.Locate(r, slot, &column) == Targets::kHere;
    Store(here ? -Widen(x[r * n + column]) : Computed<X>(0), out + r);
  }
}

// Threads of a block have neighbouring columns of one row. So many of them that what a warp reads
// of its row (target, loss's gradient, largest, log of the sum) is little beside its elements.
// Where rows begin amid sectors, threads begin that much in front.
struct Tiles {
  int64_t rows, n, per_row;
  bool amid;
  Tiles(int64_t rows, int64_t n, int64_t size) : rows(rows), n(n), amid(AmidSectors(n, size)) {
    const int64_t columns = n == 0 ? 0 : amid ? n + kSector / size - 1 : n;
    per_row = (columns + kTile - 1) / kTile;
  }
  static constexpr int kTile = 32 * kThreads;
  unsigned blocks() const { return static_cast<unsigned>(rows * per_row); }
  __device__ int64_t row() const { return blockIdx.x / per_row; }
  // visit(i) for elements of the row of `x`, this one's.
  template <class X, class Visit>
  __device__ void ForColumns(const X* x, const Visit& visit) const {
    const auto address = reinterpret_cast<uintptr_t>(x + row() * n);
    const int before = amid ? static_cast<int>(address % kSector / sizeof(X)) : 0;
    const int64_t first = blockIdx.x % per_row * kTile + threadIdx.x - before;
#pragma unroll 4
    for (int k = 0; k < kTile / kThreads; ++k) {
      const int64_t i = first + k * kThreads;
      if (i >= 0 && i < n) visit(i);
    }
  }
};

template <class X>
__global__ void __launch_bounds__(kThreads)
    NllPickBackward(const X* dy, Targets targets, X* dx, Tiles tiles, ErrorSlot slot) {
  const int64_t r = tiles.row();
  int64_t column = 0;
  const bool here = targets.Locate(r, slot, &column) == Targets::kHere;
  const Computed<X> at_target = here ? -Widen(dy[r]) : Computed<X>(0);
  tiles.ForColumns(dx, [&](int64_t j) {
    Store(here && j == column ? at_target : Computed<X>(0), dx + r * tiles.n + j);
  });
}

// log(sum(exp(x))) - x[target] of whole rows, their largest x and log(sum(exp(x - largest))).
template <class X, bool kHolds, bool kStaged>
__global__ void __launch_bounds__(kMostThreads, 1)
    CrossEntropyRows(const X* x, Targets targets, Computed<X>* losses, Computed<X>* top,
                     Computed<X>* log_sums, int64_t rows, TeamPlan plan, StagePlan stage,
                     ErrorSlot slot) {
  using T = Computed<X>;
  const Team team(plan);
  const int64_t n = targets.classes.local;
  const BlockLines at(team, n, 1, rows);
  const int64_t r = at.first + team.number;
  const bool mine = r < rows;
  const X* const row = x + at.base;
  SumOfExps<T> all;
  if constexpr (kHolds) {
    using Source = Lines<X, kStaged ? Stage::kRows : Stage::kNone>;
    const Source lines(team, at, stage, 0, x);
    if (kStaged) __syncthreads();
    all = SumExps<true>(team, at.mine, Line<Source, true>(team, lines, at.mine));
  } else {
    RunningSumOfExps<T> running;
    ForOnce<kStaged>(team, at, x, [&](T v) { running.Add(v); });
    all = running.OfTeam(team);
  }
  if (!mine || team.lane != 0) return;
  const T log_sum = LogOf(all.most == -INFINITY ? T(0) : all.sum);
  top[r] = all.most;
  log_sums[r] = log_sum;
  int64_t column = 0;
  const bool here = targets.Locate(r, slot, &column) == Targets::kHere;
  // The large terms cancel first.
  losses[r] = here ? (all.most - Widen(row[column])) + log_sum : T(0);
}

template <class X>
__global__ void __launch_bounds__(kThreads)
    CrossEntropyBackward(Floats dys, const X* x, Floats tops, Floats log_sums, Targets targets,
                         X* dx, Tiles tiles, ErrorSlot slot) {
  using T = Computed<X>;
  const int64_t r = tiles.row();
  int64_t column = 0;
  const Targets::Where where = targets.Locate(r, slot, &column);
  const T dy = where == Targets::kIgnored ? T(0) : dys.At<T>(r);
  const T top = tops.At<T>(r), log_sum = log_sums.At<T>(r);
  tiles.ForColumns(dx, [&](int64_t j) {
    const int64_t at = r * tiles.n + j;
    T v = where == Targets::kIgnored ? T(0) : ExpOf((Widen(x[at]) - top) - log_sum) * dy;
    if (where == Targets::kHere && j == column) v -= dy;
    Store(v, dx + at);
  });
}

// logp [n, v], t [n]; ignore_index -> [n]
void NllPickKernel(const KernelCall& c) {
  const int64_t rows = c.in[0].sizes[0], n = c.in[0].sizes[1];
  if (rows == 0) return;
  const Targets targets = {Indices(c.in[1]), PartOf(c, 0, n), c.attrs[0].i};
  VisitFloat(c.in[0].dtype, [&](auto e) {
    using X = decltype(e);
    NllPick<<<BlocksFor(rows), kThreads, 0, StreamOf(c)>>>(In<X>(c, 0), targets, Out<X>(c, 0), rows,
                                                           n, ErrorSlotOf(c));
    CheckLaunch();
  });
}

// dy [n], t [n]; num_classes, ignore_index -> [n, v]
void NllPickBackwardKernel(const KernelCall& c) {
  const Tiles tiles(c.out[0].sizes[0], c.out[0].sizes[1], SizeOf(c.out[0].dtype));
  if (tiles.blocks() == 0) return;
  const Targets targets = {Indices(c.in[1]), PartOf(c, 0, tiles.n), c.attrs[1].i};
  VisitFloat(c.in[0].dtype, [&](auto e) {
    using X = decltype(e);
    NllPickBackward<<<tiles.blocks(), kThreads, 0, StreamOf(c)>>>(
        In<X>(c, 0), targets, Out<X>(c, 0), tiles, ErrorSlotOf(c));
    CheckLaunch();
  });
}

// x [n, v], t [n]; ignore_index -> losses, top, log_sum [n], in the type that x is computed in
void CrossEntropyRowsKernel(const KernelCall& c) {
  const int64_t rows = c.in[0].sizes[0], n = c.in[0].sizes[1];
  if (rows == 0) return;
  const Targets targets = {Indices(c.in[1]), {0, n, n}, c.attrs[0].i};
  const TeamPlan plan(n, true);
  const auto blocks = static_cast<unsigned>((rows + plan.teams() - 1) / plan.teams());
  VisitFloat(c.in[0].dtype, [&](auto e) {
    using X = decltype(e);
    const bool staged = AmidSectors(n, sizeof(X));
    const auto run =
        plan.holds ? staged ? &CrossEntropyRows<X, true, true> : &CrossEntropyRows<X, true, false>
        : staged ? &CrossEntropyRows<X, false, true>
                   : &CrossEntropyRows<X, false, false>;
    const StagePlan stage =
        staged && plan.holds ? StagePlan(run, plan, n, 1, sizeof(X)) : StagePlan();
    const size_t bytes = staged && !plan.holds ? kStageTileBytes<X> : stage.bytes;
    run<<<blocks, static_cast<unsigned>(plan.threads), bytes, StreamOf(c)>>>(
        In<X>(c, 0), targets, Out<Computed<X>>(c, 0), Out<Computed<X>>(c, 1),
        Out<Computed<X>>(c, 2), rows, plan, stage, ErrorSlotOf(c));
    CheckLaunch();
  });
}

// dy [n], x [n, v], top [n], log_sum [n], t [n]; ignore_index -> [n, v]
void CrossEntropyBackwardKernel(const KernelCall& c) {
  const Tiles tiles(c.in[1].sizes[0], c.in[1].sizes[1], SizeOf(c.in[1].dtype));
  if (tiles.blocks() == 0) return;
  const Targets targets = {Indices(c.in[4]), PartOf(c, 0, tiles.n), c.attrs[0].i};
  VisitFloat(c.in[1].dtype, [&](auto e) {
    using X = decltype(e);
    CrossEntropyBackward<<<tiles.blocks(), kThreads, 0, StreamOf(c)>>>(
        Floats(c.in[0]), In<X>(c, 1), Floats(c.in[2]), Floats(c.in[3]), targets, Out<X>(c, 0),
        tiles, ErrorSlotOf(c));
    CheckLaunch();
  });
}

}  // namespace

void AddLossKernels(AddKernelFn add) {
  constexpr KernelLayout kContiguous = KernelLayout::kContiguous;
  add("nll_pick", NllPickKernel, kFloatDTypes, kContiguous);
  add("nll_pick_backward", NllPickBackwardKernel, kFloatDTypes, kContiguous);
  add("cross_entropy_rows", CrossEntropyRowsKernel, kFloatDTypes, kContiguous);
  add("cross_entropy_backward", CrossEntropyBackwardKernel, kFloatDTypes, kContiguous);
}

}  // namespace dtensor::cuda
