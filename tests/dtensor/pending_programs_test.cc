// Random programs of pending redistributions whose sources change in place, through their arrays
// and through views, before, between and after the reads of each rank: every read gives, bit for
// bit, what the blocking program gives. DT_PENDING_PROGRAMS and DT_PENDING_SEED run others.
#include <gtest/gtest.h>

#include <cstdlib>
#include <thread>

#include "dtensor/distribute.h"
#include "dtensor/mesh/limited.h"
#include "test_ops.h"
#include "tests/common/layouts.h"

namespace dtensor::pending_programs_test {
namespace {

using testing::Apply;
using testing::Layout;
using testing::RandomLayout;
using testing::RandomMesh;
using testing::Transposed;

uint64_t FromEnv(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

// One step of a program; all ranks do the same.
struct Step {
  enum Kind {
    kStart,        // a redistribution of tensor `source` to `to`: the next tensor
    kStartOfView,  // of its transposed view
    kAddInPlace,   // by an op
    kAddToView,    // by an op on the transposed view
    kWriteArray,   // through local()
    kWriteView,    // through the view's local()
    kDrop,         // the handle
    kKinds
  };
  Kind kind;
  size_t source;
  Placements to;  // of kStart*
};

struct Program {
  int64_t ranks;
  bool packed;
  Shape shape;
  Layout layout;  // of tensor 0
  std::vector<Step> steps;
  uint64_t seed;
};

// Whether a transposed view can be had without a move.
bool HasView(absl::Span<const Placement> placements) {
  return std::all_of(placements.begin(), placements.end(), [](const Placement& p) {
    return p.is_replicate() || (p.is_shard() && p.unit() == 1) || p == Partial();
  });
}

bool Adds(absl::Span<const Placement> placements) {
  return std::all_of(placements.begin(), placements.end(), [](const Placement& p) {
    return p.is_replicate() || p.is_shard() || p == Partial();
  });
}

Program MakeProgram(uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto draw = [&](uint64_t n) { return static_cast<int64_t>(random() % n); };
  Program program;
  program.seed = seed;
  program.ranks = 2 + draw(7);
  program.packed = draw(4) == 0;
  program.shape = {2 + draw(7), 2 + draw(7)};
  const Dims mesh = RandomMesh(program.ranks, random);
  program.layout = RandomLayout(mesh, program.shape, random);
  struct Made {
    Shape shape;
    Placements placements;
    bool dropped = false;
  };
  std::vector<Made> made = {{program.shape, program.layout.placements}};
  const int64_t steps = 2 + draw(8);
  for (int64_t i = 0; i < steps; ++i) {
    Step step{
        static_cast<Step::Kind>(draw(Step::kKinds)), static_cast<size_t>(draw(made.size())), {}};
    if (i == 0 || draw(3) == 0) step.kind = draw(3) == 0 ? Step::kStartOfView : Step::kStart;
    if (draw(2) == 0) step.source = 0;  // most sources are read by several
    const Made source = made[step.source];
    if (source.dropped || (step.kind == Step::kDrop && draw(3) != 0)) continue;
    const bool of_view = step.kind == Step::kStartOfView || step.kind == Step::kAddToView ||
                         step.kind == Step::kWriteView;
    if (of_view && !HasView(source.placements)) continue;
    if ((step.kind == Step::kAddInPlace || step.kind == Step::kAddToView) &&
        !Adds(source.placements)) {
      continue;
    }
    if (step.kind == Step::kDrop) made[step.source].dropped = true;
    if (step.kind == Step::kStart || step.kind == Step::kStartOfView) {
      Shape shape = source.shape;
      if (of_view) std::swap(shape[0], shape[1]);
      step.to = RandomLayout(mesh, shape, random).placements;
      made.push_back({shape, step.to});
    }
    program.steps.push_back(step);
  }
  return program;
}

std::string Describe(const Program& program) {
  static const char* const names[] = {"start", "start of view", "add", "add to view",
                                      "write", "write view",    "drop"};
  std::string text =
      absl::StrCat("seed ", program.seed, ", ", program.ranks, " ranks",
                   program.packed ? ", packed" : "", ": ", ToString(program.shape), " on ",
                   ToString(program.layout.mesh), " ", ToString(program.layout.placements));
  for (const Step& step : program.steps) {
    absl::StrAppend(&text, "; ", names[step.kind], " ", step.source,
                    step.to.empty() ? "" : " to " + ToString(step.to));
  }
  return text;
}

void Scale(const Tensor& local) {
  if (local.numel() == 0) return;
  const Tensor here = ValueOrThrow(ValueOrThrow(local.Contiguous()).To(DeviceType::kCpu));
  double* values = here.data_as<double>();
  for (int64_t i = 0; i < here.numel(); ++i) values[i] = values[i] * -1.5 + 0.1;
  if (!here.buffer().SharesWith(local.buffer())) Copy(here, local);
}

// Runs on one rank; what it reads of tensor k goes to reads[k], empty where it reads nothing.
class Runner {
 public:
  Runner(const Program& program, int64_t rank, bool async)
      : program_(program), async_(async), random_(program.seed * 2048 + rank) {
    const DeviceMesh mesh = *DeviceMesh::Create(program.layout.mesh);
    SpecRef spec = ValueOrThrow(RankContext::Current().specs().Intern(
        mesh, program.layout.placements, program.shape, DType::kF64));
    const Tensor local = ValueOrThrow(Tensor::Empty(spec->local_shape(), DType::kF64));
    std::mt19937_64 values(program.seed * 1024 + rank);
    for (int64_t i = 0; i < local.numel(); ++i) {
      local.data_as<double>()[i] = static_cast<double>(values() % 2001) / 7 - 140;
    }
    tensors_.push_back(
        FromLocal(OnSelf(local), mesh, program.layout.placements, {.shape = program.shape}));
    reads_.emplace_back();
  }

  std::vector<std::vector<double>> Run() {
    for (const Step& step : program_.steps) {
      ReadSome(async_ ? 4 : 1);
      Do(step);
    }
    ReadSome(async_ ? 2 : 1);
    tensors_.clear();
    return std::move(reads_);
  }

 private:
  // The value that tensor k has at its start: of those that change later it is read now or never.
  void Read(size_t k) {
    if (!reads_[k].empty() || !tensors_[k].defined()) return;
    reads_[k] = tensors_[k].local().ToVector<double>();
    reads_[k].push_back(1);  // so that an empty shard was read, too
  }
  void ReadSome(uint64_t one_in) {
    for (size_t k = 1; k < tensors_.size(); ++k) {
      for (uint64_t pause = random_() % 64; async_ && pause > 60; --pause) {
        std::this_thread::yield();
      }
      if (random_() % one_in == 0) Read(k);
    }
  }

  void Keep(size_t of, const DTensor& source, DTensor started) {
    const bool same = started.spec_ref() == source.spec_ref();
    tensors_.push_back(std::move(started));
    reads_.emplace_back();
    if (!same) return;  // else it is the source itself, and they change together
    if (of > 0) Read(of);
    Read(tensors_.size() - 1);
  }
  DTensor Start(const DTensor& source, const Placements& to) const {
    return async_ ? source.Redistribute(to, {.async = true}) : source.Redistribute(to);
  }

  void Do(const Step& step) {
    DTensor t = tensors_[step.source];
    const bool changes = step.kind != Step::kStart && step.kind != Step::kStartOfView;
    if (changes && step.source > 0) Read(step.source);
    switch (step.kind) {
      case Step::kStart:
        return Keep(step.source, t, Start(t, step.to));
      case Step::kStartOfView: {
        const DTensor view = Transposed(t);
        return Keep(step.source, view, Start(view, step.to));
      }
      case Step::kAddInPlace:
        Apply("t_add_", {t, t});
        return;
      case Step::kAddToView: {
        const DTensor view = Transposed(t);
        Apply("t_add_", {view, view});
        return;
      }
      case Step::kWriteArray:
        return Scale(t.local());
      case Step::kWriteView:
        return Scale(Transposed(t).local());
      case Step::kDrop:
        tensors_[step.source] = DTensor();
        return;
      default:
        return;
    }
  }

  const Program& program_;
  const bool async_;
  std::mt19937_64 random_;  // this rank's reads
  std::vector<DTensor> tensors_;
  std::vector<std::vector<double>> reads_;
};

using Reads = std::vector<std::vector<std::vector<double>>>;  // by rank and tensor
absl::StatusOr<Reads> RunProgram(const Program& program, bool async) {
  Reads reads(program.ranks);
  SpmdOptions options;
  options.timeout = absl::Seconds(30);
  if (program.packed) options.wrap = Packed();
  options.pin = false;
  DT_RETURN_IF_ERROR(RunSpmd(
      program.ranks,
      [&](RankContext& context) {
        reads[context.rank()] = Runner(program, context.rank(), async).Run();
        return absl::OkStatus();
      },
      options));
  return reads;
}

TEST(PendingPrograms, ReadWhatTheBlockingOnesRead) {
  testing::RegisterTestOps();
  const uint64_t first = FromEnv("DT_PENDING_SEED", 1);
  const uint64_t count = FromEnv("DT_PENDING_PROGRAMS", 400);
  int64_t compared = 0;
  for (uint64_t seed = first; seed < first + count; ++seed) {
    const Program program = MakeProgram(seed);
    SCOPED_TRACE(Describe(program));
    const absl::StatusOr<Reads> expected = RunProgram(program, /*async=*/false);
    ASSERT_TRUE(expected.ok()) << expected.status();
    const absl::StatusOr<Reads> reads = RunProgram(program, /*async=*/true);
    ASSERT_TRUE(reads.ok()) << reads.status();
    for (int64_t r = 0; r < program.ranks; ++r) {
      for (size_t k = 1; k < (*reads)[r].size(); ++k) {
        if ((*reads)[r][k].empty()) continue;
        ++compared;
        ASSERT_EQ((*reads)[r][k], (*expected)[r][k]) << "tensor " << k << " on rank " << r;
      }
    }
  }
  EXPECT_GT(compared, static_cast<int64_t>(count));
}

}  // namespace
}  // namespace dtensor::pending_programs_test
