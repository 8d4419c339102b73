#include "dtensor/tensor/rank_state.h"

namespace dtensor {

constinit thread_local RankState* RankState::current_ = nullptr;

RankState& RankState::OfThread() {
  struct Own {
    RankState state;
    ~Own() { current_ = nullptr; }
  };
  thread_local Own own;
  current_ = &own.state;
  return own.state;
}

}  // namespace dtensor
