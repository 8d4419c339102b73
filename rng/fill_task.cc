#include "dtensor/rng/fill_task.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <optional>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "dtensor/rng/generator.h"
#include "dtensor/rng/keep_mask.h"
#include "dtensor/rng/sweep.h"
#include "dtensor/tensor/device.h"
#include "dtensor/tensor/device_graph.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

constexpr int64_t kLanes = 512;
constexpr char kBadChance[] = "a probability is outside of [0, 1]";

// The box in groups of `vec` neighbours, if it cuts none of them.
std::optional<RunBox> InGroups(const RunBox& box, int vec) {
  RunBox groups = box;
  const auto whole = [&](int64_t* v) {
    if (*v % vec != 0) return false;
    *v /= vec;
    return true;
  };
  if (box.run().local_stride != 1 && vec > 1) return std::nullopt;
  if (!whole(&groups.first_g) || !whole(&groups.local_offset)) return std::nullopt;
  if (!whole(&groups.dims.back().size)) return std::nullopt;
  for (size_t d = 0; d + 1 < groups.dims.size(); ++d) {
    if (!whole(&groups.dims[d].g_stride) || !whole(&groups.dims[d].local_stride)) {
      return std::nullopt;
    }
  }
  return groups;
}

// Draws the groups that cover [begin, end), `item` results each, and hands stretches of them to
// take(g, results, n).
template <class T, class Take>
void DrawGroups(const FillTask& task, DrawFn draw, DrawCall call, int64_t begin, int64_t end,
                const Take& take) {
  const RandomSegment& segment = task.plan.segments[0];
  alignas(64) T results[kLanes * 8];
  const int64_t last = (end - 1) / task.vec;
  for (int64_t j = begin / task.vec; j <= last;) {
    const int64_t thread = j % segment.threads;
    const int64_t n = std::min({kLanes, segment.threads - thread, last + 1 - j});
    call.block = segment.offset / 4 + static_cast<uint64_t>(j / segment.threads * task.plan.blocks);
    call.first_thread = static_cast<uint32_t>(thread);
    call.n = n;
    call.out[0] = results;
    draw(call);
    const int64_t first = std::max(begin, j * task.vec), stop = std::min(end, (j + n) * task.vec);
    take(first, results + (first - j * task.vec), stop - first);
    j += n;
  }
}

// A box that cuts groups, or is not contiguous.
void FillCutGroups(const FillTask& task, const RunBox& box, DrawFn draw, const DrawCall& call,
                   bool* data) {
  const int64_t stride = box.run().local_stride;
  for (RunCursor run(box); !run.done(); run.Next()) {
    DrawGroups<bool>(task, draw, call, run.begin(), run.end(),
                     [&](int64_t g, const bool* keep, int64_t n) {
                       bool* const to = data + run.LocalAt(g);
                       for (int64_t i = 0; i < n; ++i) to[i * stride] = keep[i];
                     });
  }
}

void Draw(const FillTask& task, const DrawCall& call, void* data) {
  const DrawFn draw = FindDraw(task.op, task.dtype, ActiveCpuLevel());
  DT_CHECK(draw != nullptr);
  Sweeper sweeper(draw, call, data, SizeOf(task.dtype));
  for (const RunBox& box : task.boxes) sweeper.Fill(box, task.plan);
}

void Mask(const FillTask& task, const DrawCall& call, bool* data) {
  const GroupKind kind = task.vec == 2   ? GroupKind::kMask2
                         : task.vec == 4 ? GroupKind::kMask4
                                         : GroupKind::kMask8;
  const DrawFn draw = task.vec > 1
                          ? FindGroupDraw(kind, ActiveCpuLevel())
                          : FindDraw(RandomKind::kBernoulli, DType::kBool, ActiveCpuLevel());
  Sweeper sweeper(draw, call, data, task.vec);
  for (const RunBox& box : task.boxes) {
    if (const std::optional<RunBox> groups = InGroups(box, task.vec)) {
      sweeper.Fill(*groups, task.plan);
    } else {
      FillCutGroups(task, box, draw, call, data);
    }
  }
}

// False if a probability is none.
bool Chance(const FillTask& task, const DrawCall& call, const double* chance, bool* data) {
  const DrawFn draw = FindGroupDraw(GroupKind::kUniform4, ActiveCpuLevel());
  bool good = true;
  for (const RunBox& box : task.boxes) {
    const int64_t stride = box.run().local_stride;
    for (RunCursor run(box); !run.done(); run.Next()) {
      DrawGroups<float>(task, draw, call, run.begin(), run.end(),
                        [&](int64_t g, const float* u, int64_t count) {
                          int64_t at = run.LocalAt(g);
                          for (int64_t i = 0; i < count; ++i, at += stride) {
                            const double p_i = chance[at];
                            good &= p_i >= 0 && p_i <= 1;
                            data[at] = static_cast<double>(u[i]) <= p_i;
                          }
                        });
    }
  }
  return good;
}

bool RunInline(const FillTask& task, void* out, const void* p) {
  DrawCall call;
  static_cast<DrawParams&>(call) = task.params;
  call.keys = MakePhiloxKeys(task.seed);
  switch (task.kind) {
    case FillTask::Kind::kDraw:
      Draw(task, call, out);
      return true;
    case FillTask::Kind::kMask:
      Mask(task, call, static_cast<bool*>(out));
      return true;
    case FillTask::Kind::kChance:
      return Chance(task, call, static_cast<const double*>(p), static_cast<bool*>(out));
  }
  return true;
}

void FillKernel(const KernelCall& call) {
  const FillTask task =
      FillTask::FromWords({call.attrs[0].ints, static_cast<size_t>(call.attrs[0].n)});
  if (!RunInline(task, call.out[0].data, call.in.empty() ? nullptr : call.in[0].data)) {
    call.workspace->Fail(kBadChance);
  }
}

// Plain values as 64-bit words, in the order in which they are named.
class Writer {
 public:
  template <class... T>
  Writer& operator()(const T&... values) {
    (Put(values), ...);
    return *this;
  }
  std::vector<int64_t> words;

 private:
  template <class T>
  void Put(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    int64_t raw[(sizeof(T) + 7) / 8] = {};
    std::memcpy(raw, static_cast<const void*>(&value), sizeof(T));
    words.insert(words.end(), std::begin(raw), std::end(raw));
  }
};
class Reader {
 public:
  explicit Reader(absl::Span<const int64_t> words) : words_(words) {}
  template <class... T>
  Reader& operator()(T&... values) {
    (Get(&values), ...);
    return *this;
  }

 private:
  template <class T>
  void Get(T* value) {
    DT_CHECK(at_ + (sizeof(T) + 7) / 8 <= words_.size());
    std::memcpy(static_cast<void*>(value), &words_[at_], sizeof(T));
    at_ += (sizeof(T) + 7) / 8;
  }
  absl::Span<const int64_t> words_;
  size_t at_ = 0;
};

// In a graph that is being captured: what the stream that it began with has drawn since goes on
// from launch to launch, and nothing else does.
const uint64_t* ShiftOf(const FillTask& task) {
  const DeviceGraph* graph = DeviceGraph::Current();
  if (graph == nullptr) return task.shift;
  const uint64_t end = DefaultGenerator().offset();
  for (const RandomSegment& s : task.plan.segments) {
    if (task.seed == graph->start().seed && s.offset >= graph->start().offset && s.offset < end) {
      continue;
    }
    ThrowIfError(DeviceGraph::Allows(absl::StrCat(
        task.name, " draws from another stream of random numbers than the rank's default one")));
  }
  return graph->shift();
}

}  // namespace

std::vector<int64_t> FillTask::ToWords() const {
  Writer out;
  out(kind, op, dtype, vec, params, seed, ShiftOf(*this), plan.unroll, plan.blocks, plan.advance,
      plan.segments.size(), boxes.size());
  for (const RandomSegment& s : plan.segments) out(s);
  for (const RunBox& box : boxes) {
    out(box.first_g, box.local_offset, box.dims.size());
    for (const RunDim& dim : box.dims) out(dim);
  }
  return std::move(out.words);
}

FillTask FillTask::FromWords(absl::Span<const int64_t> words) {
  Reader in(words);
  FillTask task;
  size_t segments = 0, boxes = 0, dims = 0;
  in(task.kind, task.op, task.dtype, task.vec, task.params, task.seed, task.shift, task.plan.unroll,
     task.plan.blocks, task.plan.advance, segments, boxes);
  task.plan.segments.resize(segments);
  for (RandomSegment& s : task.plan.segments) in(s);
  task.boxes.resize(boxes);
  for (RunBox& box : task.boxes) {
    in(box.first_g, box.local_offset, dims);
    box.dims.resize(dims);
    for (RunDim& dim : box.dims) in(dim);
  }
  return task;
}

absl::Status FillTask::Run(const Tensor& out, const Tensor& p) const {
  if (IsHost(out.device())) {
    const bool good = RunInline(*this, out.data(), p.defined() ? p.data() : nullptr);
    return good ? absl::OkStatus() : RankLocal(absl::InvalidArgumentError(kBadChance));
  }
  [[maybe_unused]] static const bool registered = [] {
    RegisterKernel(kFillKernel, DeviceType::kCpu, {&FillKernel, ~0u, KernelLayout::kStrided});
    return true;
  }();
  const TensorRef to[] = {out.ref()};
  if (!p.defined()) return Queue(kFillKernel, {}, to, out.device(), 1);
  const TensorRef chance[] = {p.ref()};
  return Queue(kFillKernel, chance, to, out.device(), 1);
}

absl::Status FillTask::RunDropout(const Tensor& mask, const Tensor& x, const Tensor& y,
                                  double scale) const {
  const TensorRef in[] = {x.ref()}, out[] = {y.ref(), mask.ref()};
  return Queue(kDropoutKernel, in, out, mask.device(), scale);
}

absl::Status FillTask::Queue(const char* kernel_name, absl::Span<const TensorRef> in,
                             absl::Span<const TensorRef> out, DeviceType on, double scale) const {
  const Kernel* kernel = FindKernel(kernel_name, on);
  if (kernel == nullptr) {
    return absl::UnimplementedError(
        absl::StrCat("device ", DeviceName(on), " has no kernel ", kernel_name));
  }
  DT_ASSIGN_OR_RETURN(RankDevice * device, RankDevices::Current().Get(on));
  const std::vector<int64_t> words = ToWords();
  const Attr attrs[] = {{Attr::Kind::kInts, 0, 0, words.data(), static_cast<int64_t>(words.size())},
                        {Attr::Kind::kFloat, static_cast<int64_t>(scale), scale, nullptr, 0}};
  const DeviceCall call = {kernel->self, name, 2, device->error_word()};
  kernel->fn({{in.data(), in.size()},
              {out.data(), out.size()},
              attrs,
              {},
              device->stream(),
              nullptr,
              &call});
  return absl::OkStatus();
}

void DrawKeepMask(const int64_t* words, int64_t num_words, int64_t first, int64_t rows,
                  int64_t row_step, int64_t n, bool* out, int64_t out_row) {
  FillTask task = FillTask::FromWords({words, static_cast<size_t>(num_words)});
  RunBox box{.first_g = first, .local_offset = 0, .dims = {}};
  if (rows > 1) box.dims.push_back({rows, row_step, out_row});
  box.dims.push_back({n, 1, 1});
  task.boxes = {box};
  RunInline(task, out, nullptr);
}

}  // namespace dtensor
