// softmax, log_softmax and their gradients along one dim of contiguous arrays, and sum_exp. Lines
// that fit into a team's registers or a block's shared memory are read once, of longer ones what
// does not fit twice.
#include "dtensor/tensor/cuda/kernels/sum_exps.h"

namespace dtensor::cuda {
namespace {

// The part of a line that a thread has of each input; its work is in Run.
struct Softmax {
  template <bool kHolds, class A, class B, class Write>
  __device__ static void Run(const Team& team, int64_t n, const A& x, const B&,
                             const Write& write) {
    const auto all = SumExps<kHolds>(team, n, x);
    const auto scale = 1 / all.sum;
    ForLane<kHolds>(team, n,
                    [&](int k, int64_t i) { write(i, ExpOf(x(k, i) - all.most) * scale); });
  }
};
struct LogSoftmax {
  template <bool kHolds, class A, class B, class Write>
  __device__ static void Run(const Team& team, int64_t n, const A& x, const B&,
                             const Write& write) {
    const auto all = SumExps<kHolds>(team, n, x);
    const auto log_sum = LogOf(all.sum);
    // In this order, so that large numbers cancel first.
    ForLane<kHolds>(team, n, [&](int k, int64_t i) { write(i, (x(k, i) - all.most) - log_sum); });
  }
};
struct SoftmaxBackward {
  template <bool kHolds, class A, class B, class Write>
  __device__ static void Run(const Team& team, int64_t n, const A& dy, const B& y,
                             const Write& write) {
    typename A::T dot = 0;
    ForLane<kHolds>(team, n, [&](int k, int64_t i) { dot += dy(k, i) * y(k, i); });
    dot = team.Sum(dot);
    ForLane<kHolds>(team, n, [&](int k, int64_t i) { write(i, (dy(k, i) - dot) * y(k, i)); });
  }
};
struct LogSoftmaxBackward {
  template <bool kHolds, class A, class B, class Write>
  __device__ static void Run(const Team& team, int64_t n, const A& dy, const B& y,
                             const Write& write) {
    typename A::T sum = 0;
    ForLane<kHolds>(team, n, [&](int k, int64_t i) { sum += dy(k, i); });
    sum = team.Sum(sum);
    ForLane<kHolds>(team, n, [&](int k, int64_t i) { write(i, dy(k, i) - ExpOf(y(k, i)) * sum); });
  }
};

// The lines of [outer, n, inner].
template <class Op, class X, bool kTwo, bool kHolds, Stage kStage>
__global__ void __launch_bounds__(kMostThreads, 1)
    OverLines(const X* a, const X* b, X* out, int64_t n, int64_t inner, int64_t lines,
              TeamPlan plan, StagePlan stage) {
  using Source = Lines<X, kStage>;
  const Team team(plan);
  const BlockLines at(team, n, inner, lines);
  const Source x(team, at, stage, 0, a);
  const Source y = kTwo ? Source(team, at, stage, 1, b) : x;
  if (kStage != Stage::kNone) __syncthreads();
  const int64_t count = at.mine;
  const Line<Source, kHolds> first(team, x, count);
  const Line<Source, kHolds && kTwo> second(team, y, kTwo ? count : 0);
  Op::template Run<kHolds>(team, count, first, second,
                           [&](int64_t i, Computed<X> v) { x.Put(i, v, at, out); });
  x.Send(team, at, out);
}

template <class Op, bool kTwo>
void LinesKernel(const KernelCall& c) {
  const TensorRef& x = c.in[0];
  const int dim = x.ndim == 0 ? 0 : static_cast<int>(c.attrs[0].i);
  const int64_t n = x.ndim == 0 ? 1 : x.sizes[dim];
  const int64_t inner = ProductOf(x, dim + 1, x.ndim), lines = ProductOf(x, 0, dim) * inner;
  if (n == 0 || lines == 0) return;
  const TeamPlan plan(n, inner == 1);
  const auto blocks = static_cast<unsigned>((lines + plan.teams() - 1) / plan.teams());
  VisitFloat(x.dtype, [&](auto e) {
    using X = decltype(e);
    const bool staged = !plan.holds || (plan.rows && AmidSectors(n, sizeof(X)));
    const auto run = !plan.holds ? &OverLines<Op, X, kTwo, false, Stage::kPart>
                     : staged    ? &OverLines<Op, X, kTwo, true, Stage::kRows>
                                 : &OverLines<Op, X, kTwo, true, Stage::kNone>;
    const StagePlan stage = staged ? StagePlan(run, plan, n, kTwo ? 2 : 1, sizeof(X)) : StagePlan();
    run<<<blocks, static_cast<unsigned>(plan.threads), stage.bytes, StreamOf(c)>>>(
        In<X>(c, 0), In<X>(c, kTwo ? 1 : 0), Out<X>(c, 0), n, inner, lines, plan, stage);
    CheckLaunch();
  });
}

// sum over j of exp(x[i, j] - m[i])
template <class X, class To, bool kStaged>
__global__ void __launch_bounds__(kMostThreads, 1)
    SumExp(const X* x, Floats m, To* out, int64_t n, int64_t lines, TeamPlan plan) {
  using T = Computed<X>;
  const Team team(plan);
  const BlockLines at(team, n, 1, lines);
  const int64_t l = at.first + team.number;
  const T most = l < lines ? m.At<T>(l) : T(0);
  T sum = 0;
  ForOnce<kStaged>(team, at, x, [&](T v) { sum += ExpOf(v - most); });
  sum = team.Sum(sum);
  if (l < lines && team.lane == 0) out[l] = most == -INFINITY ? T(0) : sum;
}

// x [n, v], m [n] -> [n], in the type that x is computed in
void SumExpKernel(const KernelCall& c) {
  const TensorRef& x = c.in[0];
  const int64_t lines = x.sizes[0], n = x.sizes[1];
  if (lines == 0) return;
  const TeamPlan plan(n, true);
  const auto blocks = static_cast<unsigned>((lines + plan.teams() - 1) / plan.teams());
  VisitFloat(x.dtype, [&](auto e) {
    using X = decltype(e);
    const bool staged = AmidSectors(n, sizeof(X));
    const auto run = staged ? &SumExp<X, Computed<X>, true> : &SumExp<X, Computed<X>, false>;
    run<<<blocks, static_cast<unsigned>(plan.threads), staged ? kStageTileBytes<X> : 0,
          StreamOf(c)>>>(In<X>(c, 0), Floats(c.in[1]), Out<Computed<X>>(c, 0), n, lines, plan);
    CheckLaunch();
  });
}

}  // namespace

void AddSoftmaxKernels(AddKernelFn add) {
  constexpr KernelLayout kContiguous = KernelLayout::kContiguous;
  add("softmax", LinesKernel<Softmax, false>, kFloatDTypes, kContiguous);
  add("log_softmax", LinesKernel<LogSoftmax, false>, kFloatDTypes, kContiguous);
  add("softmax_backward", LinesKernel<SoftmaxBackward, true>, kFloatDTypes, kContiguous);
  add("log_softmax_backward", LinesKernel<LogSoftmaxBackward, true>, kFloatDTypes, kContiguous);
  add("sum_exp", SumExpKernel, kFloatDTypes, kContiguous);
}

}  // namespace dtensor::cuda
