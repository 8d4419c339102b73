// What a plan costs in large worlds: memory for the pieces that its rank sends and receives, and
// for nothing else; and that both ends of a piece plan it alike. The time is printed; what bounds
// it are the instructions that bench/count_instructions counts (bench_dispatch --mode=plan).
#include <gtest/gtest.h>
#include <malloc.h>

#include <atomic>
#include <cstdlib>
#include <ctime>
#include <new>

#include "dtensor/move_plan.h"
#include "dtensor/tensor/status.h"
#include "tests/common/thin.h"

namespace {

thread_local int64_t held = 0, most_held = 0;

void* Taken(void* memory) {
  if (memory == nullptr) return nullptr;
  held += static_cast<int64_t>(malloc_usable_size(memory));
  most_held = std::max(most_held, held);
  return memory;
}

}  // namespace

void* operator new(size_t size) {
  void* memory = Taken(std::malloc(size));
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
// What std::stable_sort asks for.
void* operator new(size_t size, const std::nothrow_t&) noexcept { return Taken(std::malloc(size)); }
void operator delete(void* memory) noexcept {
  if (memory != nullptr) held -= static_cast<int64_t>(malloc_usable_size(memory));
  std::free(memory);
}
void operator delete(void* memory, size_t) noexcept { operator delete(memory); }

namespace dtensor {
namespace {

using internal::MovePlan;

constexpr int64_t kPieces = 1000;  // above, a plan may cost more
constexpr int64_t kMostBytes = 1 << 20;

double CpuMs() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e3 + static_cast<double>(now.tv_nsec) * 1e-6;
}

struct Side {
  DeviceMesh mesh;
  Placements placements;
};

std::string Name(const Side& from, const Side& to) {
  const auto text = [](const Placements& placements) {
    const std::string name = ToString(placements);
    return name.size() < 60 ? name : name.substr(0, 60) + "...";
  };
  return from.mesh.ToString() + " " + text(from.placements) + " to " + to.mesh.ToString() + " " +
         text(to.placements);
}

int64_t Elements(const std::vector<MovePlan::PeerBox>& boxes, int64_t peer) {
  int64_t elements = 0;
  for (const MovePlan::PeerBox& b : boxes) elements += b.peer == peer ? b.box.numel() : 0;
  return elements;
}

struct Cost {
  double ms = 0;
  int64_t bytes = 0, plans = 0, too_many_pieces = 0;
};

MovePlan Plan(const Side& from, const Side& to, const Shape& shape, int64_t rank, Cost* cost) {
  SpecInterner specs(rank);
  const SpecRef a = ValueOrThrow(specs.Intern(from.mesh, from.placements, shape, DType::kF32)),
                b = ValueOrThrow(specs.Intern(to.mesh, to.placements, shape, DType::kF32));
  const int64_t before = held;
  most_held = held;
  const double start = CpuMs();
  MovePlan plan = internal::PlanMove(*a, *b, rank);
  const double ms = CpuMs() - start;
  const int64_t bytes = most_held - before;
  const size_t pieces = plan.sends.size() + plan.recvs.size() + plan.own.size();
  if (pieces > kPieces) {
    ++cost->too_many_pieces;
    return plan;
  }
  ++cost->plans;
  cost->ms = std::max(cost->ms, ms);
  cost->bytes = std::max(cost->bytes, bytes);
  EXPECT_LE(bytes, kMostBytes) << "rank " << rank << " of " << Name(from, to);
  return plan;
}

// Some ranks and peers of theirs, until one has too many pieces: such plans take long.
void Check(const Side& from, const Side& to, const Shape& shape, Cost* cost) {
  SCOPED_TRACE(Name(from, to));
  const int64_t last = std::max(from.mesh.MaxRank(), to.mesh.MaxRank());
  const int64_t too_many = cost->too_many_pieces;
  using Boxes = std::vector<MovePlan::PeerBox> MovePlan::*;
  for (const int64_t rank : {last / 2 + 7, last / 3, int64_t{0}, last}) {
    if (!from.mesh.Contains(rank) && !to.mesh.Contains(rank)) continue;
    const MovePlan plan = Plan(from, to, shape, rank, cost);
    for (const auto& [mine, theirs] :
         {std::pair<Boxes, Boxes>(&MovePlan::sends, &MovePlan::recvs),
          std::pair<Boxes, Boxes>(&MovePlan::recvs, &MovePlan::sends)}) {
      const std::vector<MovePlan::PeerBox>& boxes = plan.*mine;
      for (size_t i = 0; i < boxes.size(); i += 1 + boxes.size() / 2) {
        if (cost->too_many_pieces > too_many) return;
        const int64_t peer = boxes[i].peer;
        EXPECT_EQ(Elements(boxes, peer), Elements(Plan(from, to, shape, peer, cost).*theirs, rank));
      }
    }
  }
}

void Report(const char* what, const Cost& cost) {
  EXPECT_GT(cost.plans, 0);
  std::printf("%s: %lld plans of at most %lld pieces: at most %.2f ms, %lld KiB (%lld had more)\n",
              what, static_cast<long long>(cost.plans), static_cast<long long>(kPieces), cost.ms,
              static_cast<long long>(cost.bytes >> 10),
              static_cast<long long>(cost.too_many_pieces));
}

std::vector<int64_t> Lengths(int64_t numel, int64_t n) {
  std::vector<int64_t> lengths(n, numel / n);
  lengths[n / 2] += numel % n;
  return lengths;
}

TEST(PlanScale, OneMeshDimOfAMillion) {
  const int64_t ranks = 1000000 / testing::Thin(10);
  const DeviceMesh mesh({ranks}, {"dp"});
  Cost cost;
  const auto flat = [&](const Shape& shape) { return FlatShard(Lengths(Numel(shape), ranks)); };
  const auto segmented = [](const Shape& shape) {
    return SegmentedShard(0, {shape[0] / 4, shape[0] - shape[0] / 4});
  };
  const auto check = [&](const Shape& shape, const std::vector<Placement>& kinds) {
    for (const Placement& from : kinds) {
      for (const Placement& to : kinds) {
        // Everybody receives from everybody: a million pieces.
        const bool gathers = to.is_replicate() || to.is_partial();
        if (from == to || (gathers && !from.is_partial() && !from.is_replicate())) continue;
        Check({mesh, {from}}, {mesh, {to}}, shape, &cost);
      }
    }
  };
  const Shape tall = {2 * ranks, 3}, square = {1000, 1000};
  check(tall, {Replicate(), Shard(0), Shard(0, 3), Partial(), segmented(tall), flat(tall)});
  check(square, {Replicate(), Shard(0), Shard(1), Partial(), segmented(square)});
  check(square, {Shard(1), flat(square)});
  Report("one mesh dim", cost);
}

TEST(PlanScale, MeshesOfTwoAndThreeDims) {
  Cost cost;
  const auto check = [&](const DeviceMesh& mesh, const Shape& shape, int stride) {
    std::vector<Placements> all = {{}};
    for (int m = 0; m < mesh.ndim(); ++m) {
      std::vector<Placements> next;
      for (const Placements& p : all) {
        for (const Placement& k : {Replicate(), Shard(0), Shard(1), Partial()}) {
          next.push_back(p);
          next.back().push_back(k);
        }
      }
      all = std::move(next);
    }
    const auto cuts = [](const Placements& p) {
      return std::any_of(p.begin(), p.end(), [](const Placement& x) { return x.cuts(); });
    };
    for (size_t i = 0; i < all.size() * all.size(); i += stride * testing::Thin(11)) {
      const Placements &from = all[i / all.size()], &to = all[i % all.size()];
      if (cuts(from) && !cuts(to)) continue;  // everybody receives from everybody
      Check({mesh, from}, {mesh, to}, shape, &cost);
    }
  };
  check(DeviceMesh({1000, 1000}, {"dp", "tp"}), {4000, 6000}, 3);
  check(DeviceMesh({1000, 1000}, {"dp", "tp"}), {1000, 999}, 17);
  check(DeviceMesh({100, 100, 100}, {"pp", "dp", "tp"}), {20000, 10000}, 97);
  Report("two and three mesh dims", cost);
}

TEST(PlanScale, BetweenMeshes) {
  const int64_t half = 500000 / testing::Thin(10);
  const DeviceMesh world({2, half}, {"pp", "tp"});
  const DeviceMesh first = *world.SubMeshByDims(std::vector<int>{1}, 0),
                   second = *world.SubMeshByDims(std::vector<int>{1}, half);
  const DeviceMesh grid = *second.Reshape({half / 500, 500}, {"dp", "tp"});
  Cost cost;
  const Shape shape = {1000000, 4};
  for (const Placement& from : {Replicate(), Shard(0), Partial()}) {
    for (const Placement& to : {Replicate(), Shard(0), Shard(0, 3)}) {
      if (from.is_shard() && to.is_replicate()) continue;
      Check({first, {from}}, {second, {to}}, shape, &cost);
      Check({first, {from}}, {grid, {to, Replicate()}}, shape, &cost);
      Check({first, {from}}, {grid, {Replicate(), to}}, shape, &cost);
    }
  }
  Report("between meshes", cost);
}

}  // namespace
}  // namespace dtensor
