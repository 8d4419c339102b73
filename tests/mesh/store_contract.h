// What every Store keeps: tests over factories. A program that has one instantiates StoreContract:
//
//   INSTANTIATE_TEST_SUITE_P(Memory, StoreContract, testing::Values(&MakeMemoryStores));
#pragma once

#include <memory>
#include <vector>

#include "dtensor/mesh/store.h"
#include "gtest/gtest.h"

namespace dtensor {

// Handles of `ranks` ranks on one new store; that of rank r calls itself "rank r".
using MakeStores = std::vector<std::unique_ptr<Store>> (*)(int ranks);

class StoreContract : public ::testing::TestWithParam<MakeStores> {};

}  // namespace dtensor
