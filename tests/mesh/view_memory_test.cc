// What one rank's view of a mesh takes: a few hundred bytes, whatever the number of ranks. This
// program counts every allocation.
#include <gtest/gtest.h>
#include <malloc.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <new>

#include "dtensor/mesh/launch.h"
#include "dtensor/mesh/parallel_groups.h"
#include "dtensor/tensor/status.h"
#include "tests/common/thin.h"

namespace {
thread_local int64_t live_bytes = 0, most_bytes = 0;

void Give(void* p) {
  if (p != nullptr) live_bytes -= static_cast<int64_t>(malloc_usable_size(p));
  std::free(p);
}
}  // namespace

// NOLINTBEGIN: the whole program's.
void* operator new(size_t bytes) {
  void* p = std::malloc(bytes == 0 ? 1 : bytes);
  if (p == nullptr) throw std::bad_alloc();
  live_bytes += static_cast<int64_t>(malloc_usable_size(p));
  if (live_bytes > most_bytes) most_bytes = live_bytes;
  return p;
}
void operator delete(void* p) noexcept { Give(p); }
void operator delete(void* p, size_t) noexcept { Give(p); }
// NOLINTEND

namespace dtensor {
namespace {

struct View {
  int64_t held = 0, most = 0;  // bytes, afterwards and on the way
  friend bool operator==(const View&, const View&) = default;
};

// The mesh, this rank's place in it, its row along each dim and a plane, and a tensor's layout.
View ViewOf(IntSpan shape, int64_t rank) {
  View view;
  const FakeOptions world = {.world = *CheckedNumel(shape), .rank = rank};
  const absl::Status status = RunFake(world, [&](RankContext& context) -> absl::Status {
    // The intern table exists in any program.
    DT_RETURN_IF_ERROR(context.specs().Intern(DeviceMesh::Self(), {}, {1}, DType::kF32).status());
    const int64_t before = live_bytes;
    most_bytes = live_bytes;
    DT_ASSIGN_OR_RETURN(const DeviceMesh mesh, DeviceMesh::Create(shape, {"pp", "dp", "tp"}));
    Dims coordinate;
    EXPECT_TRUE(mesh.Coordinate(rank, &coordinate));
    EXPECT_EQ(mesh.RankAt(coordinate), rank);
    const DeviceMesh pp = mesh["pp"], dp = mesh["dp"], tp = mesh["tp"], plane = mesh[{"dp", "tp"}];
    EXPECT_EQ(plane.size(), dp.size() * tp.size());
    DT_ASSIGN_OR_RETURN(const SpecRef spec,
                        context.specs().Intern(mesh, {Replicate(), Shard(0), Shard(1)},
                                               {1 << 20, 1 << 14}, DType::kBF16));
    EXPECT_EQ(spec->local_shape()[0], (1 << 20) / dp.size());
    view.most = most_bytes - before;
    view.held = live_bytes - before;
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  return view;
}

// A rank of 16,384 asks for every group that it is in: 4 KiB and 50 microseconds.
TEST(ViewMemory, AllGroupsOfALargeWorld) {
  const FakeOptions world = {.world = 16384, .rank = 5001};
  const absl::Status status = RunFake(world, [&](RankContext& context) -> absl::Status {
    int64_t members = 0;
    const auto ask = [&]() -> absl::Status {
      DT_ASSIGN_OR_RETURN(
          const ParallelGroups groups,
          ParallelGroups::Create({.tp = 8, .pp = 8, .cp = 2, .ep = 16, .pipeline_split_rank = 3},
                                 context.world_size()));
      for (const char* name : {"tp", "cp", "dp", "pp", "dp_cp", "mp", "world", "ep", "expert_dp",
                               "tp_ep_pp", "embedding"}) {
        DT_ASSIGN_OR_RETURN(const DeviceMesh group, groups.Group(name, context.rank()));
        members += group.size();
      }
      return absl::OkStatus();
    };
    DT_RETURN_IF_ERROR(ask());
    EXPECT_EQ(members, 8 + 2 + 128 + 8 + 256 + 64 + 16384 + 16 + 16 + 1024 + 3);
    const int64_t before = live_bytes;
    most_bytes = live_bytes;
    auto least = std::chrono::nanoseconds::max();
    for (int i = 0; i < 200; ++i) {
      const auto start = std::chrono::steady_clock::now();
      DT_RETURN_IF_ERROR(ask());
      least = std::min<std::chrono::nanoseconds>(least, std::chrono::steady_clock::now() - start);
    }
    EXPECT_GT(most_bytes, before);
    EXPECT_LE(most_bytes - before, 4096);
    EXPECT_LE(least, std::chrono::microseconds(testing::kSanitized ? 5000 : 50));
    printf("%ld bytes, %ld ns\n", static_cast<long>(most_bytes - before),
           static_cast<long>(least.count()));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(ViewMemory, IsSmallAndTheSameForAnyWorld) {
  const View big = ViewOf({8, 128, 16}, 5000);
  EXPECT_GT(big.held, 0);
  EXPECT_GE(big.most, big.held);
  EXPECT_LE(big.most, 4096);
  for (const int64_t rank : {int64_t{0}, int64_t{16383}})
    EXPECT_EQ(ViewOf({8, 128, 16}, rank), big);
  EXPECT_EQ(ViewOf({2, 2, 2}, 5), big);
  EXPECT_EQ(ViewOf({64, 1024, 64}, 1 << 20), big);
  std::printf("one rank's view: %lld bytes, at most %lld on the way\n",
              static_cast<long long>(big.held), static_cast<long long>(big.most));
}

}  // namespace
}  // namespace dtensor
