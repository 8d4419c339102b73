// What one op costs beyond its kernel: a loop of one kind of work on one rank of a world without
// peers, for counting instructions (bench/count_instructions) and for timing.
//
//   bench_dispatch --mode=add --n=10000 [--world=2]     prints "ns <per call>"
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "dtensor/mesh/launch.h"
#include "dtensor/move_plan.h"
#include "dtensor/ops/ops.h"
#include "dtensor/ops/rules.h"

namespace dtensor {
namespace {

struct Setup {
  DeviceMesh mesh;
  DTensor a, b;  // 10 x 10, sharded on the first mesh dim
};

DTensor TenByTen(const DeviceMesh& mesh, Placements p) {
  p.resize(mesh.ndim());
  return ones({10, 10}, {.mesh = mesh, .placements = std::move(p)});
}

// The kernel of `add` alone, on memory that is allocated anew each time as dispatch does.
void KernelOnly(const Setup& s, int64_t n) {
  const Kernel* kernel = FindHostKernel("add");
  const Tensor a = s.a.local(), b = s.b.local();
  const Attr attrs[] = {IntAttr(1)};
  for (int64_t i = 0; i < n; ++i) {
    const Tensor out = *Tensor::Empty(a.shape(), a.dtype());
    const TensorRef in[] = {a.ref(), b.ref()}, outs[] = {out.ref()};
    kernel->fn({in, outs, attrs, {}, nullptr, nullptr});
  }
}

using Mode = std::function<void(const Setup&, int64_t)>;

// One rank's view of a mesh of this world: the mesh, its place, its row along each dim and a plane,
// and the layout of a tensor (tests/mesh/view_memory_test.cc counts its bytes).
Mode MeshView() {
  return [count = int64_t{0}](const Setup& s, int64_t n) mutable {
    const int64_t world = s.mesh.size(), tp = world >= 1024 ? 16 : 2, pp = world >= 1024 ? 8 : 2;
    SpecInterner& specs = RankContext::Current().specs();
    for (const int64_t end = count + n; count < end; ++count) {
      const DeviceMesh mesh({pp, world / (pp * tp), tp}, {"pp", "dp", "tp"});
      Dims coordinate;
      mesh.Coordinate(RankContext::Current().rank(), &coordinate);
      const DeviceMesh rows[] = {mesh["pp"], mesh["dp"], mesh["tp"], mesh[{"dp", "tp"}]};
      const SpecRef spec = *specs.Intern(mesh, {Replicate(), Shard(0), Shard(1)},
                                         {(1 << 20) + count, 1 << 14}, DType::kBF16);
    }
  };
}

// A shape of its own for every call; prints how far the tables grew on the way.
void ManyShapes(const Setup& s, int64_t n) {
  int64_t entries = 0, specs = 0;
  for (int64_t i = 0; i < n; ++i) {
    const DTensor x = empty({1 + i % 1000, 1 + i / 1000}, {.mesh = s.mesh});
    const DTensor y = x + x;
    entries = std::max(entries, GetDispatchStats().entries);
    specs = std::max(specs, RankContext::Current().specs().size());
  }
  const DispatchStats stats = GetDispatchStats();
  std::printf("shapes %lld entries %lld specs %lld misses %lld evictions %lld\n",
              static_cast<long long>(n), static_cast<long long>(entries),
              static_cast<long long>(specs), static_cast<long long>(stats.misses),
              static_cast<long long>(stats.evictions));
}

// Tensors that all have shapes of their own, which is what a miss does besides planning; and an add
// of each where `add`.
Mode NewShapes(bool add) {
  return [add, i = int64_t{0}](const Setup& s, int64_t n) mutable {
    Placements p(s.mesh.ndim());
    p[0] = Shard(0);
    for (const int64_t end = i + n; i < end; ++i) {
      const DTensor x = empty({1 + i % 100, 1 + i / 100}, {.mesh = s.mesh, .placements = p});
      if (add) const DTensor y = x + x;
    }
  };
}

// A product of which an input has to be moved first.
// bench/count_instructions counts what runs inside of this function, so nothing is inlined into it.
[[gnu::noinline]] void MovedProduct(const DTensor& x, const DTensor& w) { matmul(x, w); }

void MovedProducts(const Setup& s, int64_t n) {
  matmul(s.a, s.b);  // plans
  for (int64_t i = 0; i < n; ++i) {
    for (const DTensor& t : {s.a, s.b}) t.local().buffer().BumpVersion();  // moved again each time
    MovedProduct(s.a, s.b);
  }
}

Mode Redistributions(const Placement& from, const Placement& to) {
  return [=](const Setup& s, int64_t n) {
    const DTensor x = TenByTen(s.mesh, {from});
    Placements target(s.mesh.ndim());
    target[0] = to;
    for (int64_t i = 0; i < n; ++i) const DTensor y = x.Redistribute(target);
  };
}

// One rank's plans of redistributions in which it has at most 1,000 pieces, in a world that may be
// large (--world=1000000), by turns of rank 0 and of others.
void Plans(const Setup& s, int64_t n) {
  const int64_t ranks = s.mesh.size(), tall = 2 * ranks + ranks / 2;
  SpecInterner& specs = RankContext::Current().specs();
  std::vector<int64_t> lengths(ranks, 7);
  lengths[ranks / 2] += 3 * tall - 7 * ranks;
  const auto spec = [&](const Placement& p, const Shape& shape) {
    return *specs.Intern(s.mesh, {p}, shape, DType::kF32);
  };
  const Placement flat = FlatShard(std::move(lengths)),
                  segmented = SegmentedShard(0, {{tall / 4}, {tall - tall / 4}});
  const std::pair<SpecRef, SpecRef> moves[7] = {
      {spec(Shard(0), {tall, 3}), spec(Shard(0, 3), {tall, 3})},
      {spec(Shard(0), {tall, 3}), spec(segmented, {tall, 3})},
      {spec(flat, {tall, 3}), spec(Shard(0), {tall, 3})},
      {spec(segmented, {tall, 3}), spec(flat, {tall, 3})},
      {spec(Partial(), {tall, 3}), spec(Shard(0), {tall, 3})},
      {spec(Partial(), {tall, 3}), spec(flat, {tall, 3})},
      {spec(Shard(0), {1000, 1000}), spec(Shard(1), {1000, 1000})},
  };
  for (int64_t i = 0; i < n; ++i) {
    const auto& [from, to] = moves[i % 7];
    const int64_t spread = (i * 7919 + ranks / 2) % ranks;
    const internal::MovePlan plan = internal::PlanMove(*from, *to, i / 7 % 2 == 0 ? 0 : spread);
  }
}

// Of 4,000 elements each: loops that are no longer vectorised take many times as many instructions.
Mode Elements(DTensor (*function)(const DTensor&)) {
  return [function](const Setup&, int64_t n) {
    const DTensor x = full({4000}, 1.25);
    for (int64_t i = 0; i < n; ++i) const DTensor y = function(x);
  };
}

std::map<std::string, Mode> Modes() {
  const auto repeat = [](const std::function<void(const Setup&)>& body) -> Mode {
    return [body](const Setup& s, int64_t n) {
      for (int64_t i = 0; i < n; ++i) body(s);
    };
  };
  return {
      {"kernel", KernelOnly},
      {"add", repeat([](const Setup& s) { const DTensor y = s.a + s.b; })},
      {"add_grad",
       [](const Setup& s, int64_t n) {
         DTensor w = s.a.Detach();
         w.RequiresGrad();
         for (int64_t i = 0; i < n; ++i) const DTensor y = w + s.b;
       }},
      {"miss", NewShapes(true)},
      {"new_shape", NewShapes(false)},
      {"many_shapes", ManyShapes},
      {"mesh_view", MeshView()},
      {"plan", Plans},
      {"mm",
       [](const Setup& s, int64_t n) {
         const DTensor whole = TenByTen(s.mesh, {});
         for (int64_t i = 0; i < n; ++i) const DTensor y = matmul(s.a, whole);
       }},
      {"moved_product", MovedProducts},
      {"redistribute", Redistributions(Shard(0), Replicate())},
      {"redistribute_rs", Redistributions(Replicate(), Shard(0))},
      {"redistribute_pr", Redistributions(Partial(), Replicate())},
      {"from_local",
       [](const Setup& s, int64_t n) {
         const DTensor local = OnSelf(s.a.local());
         FromLocalOptions options;
         options.shape = {10, 10};
         Placements p(s.mesh.ndim());
         p[0] = Shard(0);
         for (int64_t i = 0; i < n; ++i) const DTensor y = FromLocal(local, s.mesh, p, options);
       }},
      {"view", repeat([](const Setup& s) { const DTensor y = view(s.a, {10, 2, 5}); })},
      {"detach", repeat([](const Setup& s) { const DTensor y = s.a.Detach(); })},
      {"add_", repeat([](const Setup& s) { add_(s.a, s.b); })},
      {"elements_half",
       Elements([](const DTensor& x) { return to(to(x, DType::kF16), DType::kF32); })},
      {"elements_integer", Elements([](const DTensor& x) { return to(x, DType::kI64); })},
      {"elements_log", Elements([](const DTensor& x) { return log(x); })},
      {"elements_tanh", Elements([](const DTensor& x) { return tanh(x); })},
      {"elements_gelu", Elements([](const DTensor& x) { return gelu(x); })},
      {"elements_pow", Elements([](const DTensor& x) { return pow(x, x); })},
      {"elements_lgamma", Elements([](const DTensor& x) { return lgamma(x); })},
      {"elements_digamma", Elements([](const DTensor& x) { return digamma(x); })},
  };
}

int Main(int argc, char** argv) {
  std::string mode = "add";
  int64_t n = 10000, world = 2, dims = 1;
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    const size_t eq = arg.find('=');
    const std::string name = arg.substr(0, eq),
                      value = eq == std::string::npos ? "" : arg.substr(eq + 1);
    if (name == "--mode") {
      mode = value;
    } else if (name == "--n") {
      n = std::atoll(value.c_str());
    } else if (name == "--world") {
      world = std::atoll(value.c_str());
    } else if (name == "--dims") {
      dims = std::atoll(value.c_str());
    } else {
      std::fprintf(stderr, "unknown argument %s\n", argv[i]);
      return 2;
    }
  }
  const auto modes = Modes();
  if (modes.count(mode) == 0) {
    std::fprintf(stderr, "no mode \"%s\"; there are", mode.c_str());
    for (const auto& [name, fn] : modes) std::fprintf(stderr, " %s", name.c_str());
    std::fprintf(stderr, "\n");
    return 2;
  }
  if (dims > 1) world = int64_t{1} << dims;  // 2 x 2 x ...
  const absl::Status status = RunFake({.world = world, .rank = 0}, [&](RankContext&) {
    RegisterOps();
    Setup s;
    s.mesh = dims > 1 ? *DeviceMesh::Create(Dims(dims, 2)) : *DeviceMesh::Create({world}, {"tp"});
    s.a = TenByTen(s.mesh, {Shard(0)});
    s.b = TenByTen(s.mesh, {Shard(0)});
    const Mode& body = modes.at(mode);
    const bool once = mode == "many_shapes";  // counts over all of them
    if (!once) body(s, 100);
    // The median of short batches: a neighbour on the core spoils some, not most.
    const int64_t batches = once ? 1 : std::max<int64_t>(1, n / 500), each = n / batches;
    std::vector<double> ns;
    for (int64_t b = 0; b < batches; ++b) {
      const auto start = std::chrono::steady_clock::now();
      body(s, each);
      const std::chrono::duration<double, std::nano> took =
          std::chrono::steady_clock::now() - start;
      ns.push_back(took.count() / static_cast<double>(each));
    }
    std::sort(ns.begin(), ns.end());
    std::printf("ns %.1f\n", ns[ns.size() / 2]);
    return absl::OkStatus();
  });
  if (!status.ok()) std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
  return status.ok() ? 0 : 1;
}

}  // namespace
}  // namespace dtensor

int main(int argc, char** argv) { return dtensor::Main(argc, argv); }
