// Ops on DTensor: what user programs and models are written with. Same meaning as PyTorch's
// functions of the same name unless said otherwise; shapes are global. Every function throws Error
// on bad input, the same on every rank. `dim`s may be negative.
#pragma once

#include "dtensor/ops/conv/conv.h"
#include "dtensor/ops/family.h"
#include "dtensor/ops/index/index.h"
#include "dtensor/ops/matmul/matmul.h"
#include "dtensor/ops/nn/nn.h"
#include "dtensor/ops/optim/optim.h"
#include "dtensor/ops/pointwise/pointwise.h"
#include "dtensor/ops/random/random.h"
#include "dtensor/ops/reduce/reduce.h"
#include "dtensor/ops/scan/scan.h"
#include "dtensor/ops/sort/sort.h"
#include "dtensor/ops/view/view.h"
