// The largest element of a line and the sum of exponentials beside it, with one read of the line:
// of softmax and cross entropy.
#pragma once

#include "dtensor/tensor/cuda/kernels/stage.h"

namespace dtensor::cuda {

template <class T>
struct SumOfExps {
  T most, sum;  // sum: of exp(x - most)
};

// Of a line that lanes do not hold: each lane scales its sum where a larger element comes.
// Source: Milakov and Gimelshein 2018, Online normalizer calculation for softmax.
template <class T>
struct RunningSumOfExps {
  T most = -INFINITY, sum = 0;
  __device__ void Add(T v) {
    if (v > most) {
      sum = sum * ExpOf(most - v) + (v - v + 1);  // NaN of an infinity, as exp(v - v) gives
      most = v;
    } else if (v != -INFINITY) {
      sum += ExpOf(v - most);  // NaN of NaN
    }
  }
  __device__ SumOfExps<T> OfTeam(const Team& team) const {
    const T all = team.Max(most);
    // A lane of minus infinities, and one of nothing, has a sum of 0.
    return {all, team.Sum(most == all || sum == 0 ? sum : sum * ExpOf(most - all))};
  }
};

template <bool kHolds, class A>
__device__ SumOfExps<typename A::T> SumExps(const Team& team, int64_t n, const A& x) {
  using T = typename A::T;
  if constexpr (!kHolds) {
    RunningSumOfExps<T> running;
    ForLane<false>(team, n, [&](int k, int64_t i) { running.Add(x(k, i)); });
    return running.OfTeam(team);
  } else {
    T most = -INFINITY, sum = 0;
    ForLane<true>(team, n, [&](int k, int64_t i) { most = Maximum(most, x(k, i)); });
    most = team.Max(most);
    ForLane<true>(team, n, [&](int k, int64_t i) { sum += ExpOf(x(k, i) - most); });
    return {most, team.Sum(sum)};
  }
}

}  // namespace dtensor::cuda
