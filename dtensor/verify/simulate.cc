#include "dtensor/verify/simulate.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/sharding.h"
#include "dtensor/tensor/status.h"

namespace dtensor::internal {
namespace {

class PlainWorkspace final : public Workspace {
 public:
  void* Allocate(int64_t bytes) override {
    buffers_.push_back(ValueOrThrow(Buffer::Allocate(CurrentAllocator(), bytes)));
    return buffers_.back().data();
  }
  void Fail(std::string_view message) override {
    if (error_.empty()) error_ = message.empty() ? "the kernel failed" : message;
  }
  const std::string& error() const { return error_; }

 private:
  std::vector<Buffer> buffers_;
  std::string error_;
};

struct PlainCall {
  std::vector<Tensor> in;
  std::vector<Shape> out_shapes;
  absl::Span<const FactorRange> ranges;
};

absl::StatusOr<std::vector<Tensor>> MakeOutputs(const OpDef& op, const std::vector<DType>& dtypes,
                                                PlainCall* call) {
  std::vector<Tensor> outs;
  if (op.in_place()) {
    for (int o = 0; o < op.num_outputs(); ++o) {
      DT_ASSIGN_OR_RETURN(call->in[o], call->in[o].Clone());
      outs.push_back(call->in[o]);
    }
    return outs;
  }
  for (size_t o = 0; o < call->out_shapes.size(); ++o) {
    DT_ASSIGN_OR_RETURN(Tensor out, Tensor::Empty(call->out_shapes[o], dtypes[o]));
    // What the kernel leaves out must not look right by chance.
    if (IsFloating(dtypes[o])) Fill(out, std::numeric_limits<double>::quiet_NaN());
    outs.push_back(std::move(out));
  }
  return outs;
}

// The op's kernel or view on plain arrays.
absl::StatusOr<std::vector<Tensor>> RunPlain(const OpDef& op, const std::vector<DType>& dtypes,
                                             const Attrs& attrs, PlainCall call) {
  if (op.view() != nullptr) {
    DT_ASSIGN_OR_RETURN(Tensor out, op.view()(call.in[0], call.out_shapes[0], attrs, call.ranges));
    return std::vector<Tensor>{std::move(out)};
  }
  const Kernel* kernel = FindHostKernel(std::string_view(op.name()));
  if (kernel == nullptr || !(kernel->dtypes & DTypeBit(call.in[0].dtype()))) {
    return absl::UnimplementedError("no kernel takes these inputs");
  }
  DT_ASSIGN_OR_RETURN(std::vector<Tensor> outs, MakeOutputs(op, dtypes, &call));
  if (op.pointwise()) {
    for (Tensor& t : call.in) t = t.Expand(outs[0].shape());
  }
  std::vector<TensorRef> in_refs, out_refs;
  for (const Tensor& t : call.in) in_refs.push_back(t.ref());
  for (const Tensor& t : outs) out_refs.push_back(t.ref());
  PlainWorkspace workspace;
  kernel->fn({in_refs,
              out_refs,
              attrs.data(),
              {call.ranges.data(), call.ranges.size()},
              nullptr,
              &workspace});
  if (!workspace.error().empty()) return absl::InvalidArgumentError(workspace.error());
  return outs;
}

// Row-major positions of a coordinate's elements.
std::vector<int64_t> Positions(const Spec& spec, const Dims& coordinate) {
  std::vector<int64_t> positions = {0};
  const Strides strides = ContiguousStrides(spec.shape());
  const auto index = LocalIndex(spec, coordinate);
  for (size_t d = 0; d < index.size(); ++d) {
    std::vector<int64_t> next;
    for (int64_t p : positions) {
      for (const Interval& run : index[d]) {
        for (int64_t j = run.start; j < run.end; ++j) next.push_back(p + j * strides[d]);
      }
    }
    positions = std::move(next);
  }
  for (int m = 0; m < spec.mesh().ndim(); ++m) {
    const Placement& p = spec.placement(m);
    if (!p.is_flat()) continue;
    std::vector<Interval> held;
    LocalIntervals(p, static_cast<int64_t>(positions.size()), spec.mesh().size(m), coordinate[m],
                   &held);
    std::vector<int64_t> next;
    for (const Interval& run : held) {
      next.insert(next.end(), positions.begin() + run.start, positions.begin() + run.end);
    }
    positions = std::move(next);
  }
  return positions;
}

// The local shape, of which flat placements hold a piece.
Shape ShapeBeforeFlat(const Spec& spec, const Dims& coordinate) {
  Shape shape;
  for (const std::vector<Interval>& held : LocalIndex(spec, coordinate)) {
    shape.push_back(0);
    for (const Interval& run : held) shape.back() += run.length();
  }
  return shape;
}

Dims CoordinateOf(const DeviceMesh& mesh, int64_t rank) {
  Dims coordinate;
  mesh.Coordinate(rank, &coordinate);
  return coordinate;
}

// Solves for one local size per factor. A bracketed factor of one operand alone (the dim that cat
// joins, that slice cuts) is a size that the kernel knows from elsewhere: it must be whole.
class LocalSizes {
 public:
  LocalSizes(const FactorMap& map, const std::vector<Shape>& in, const std::vector<Shape>& out)
      : map_(map), sizes_(map.sizes.size(), -1), minor_(map.sizes.size(), false) {
    for (size_t i = 0; i < in.size(); ++i) Add(map->inputs[i], in[i]);
    for (size_t o = 0; o < out.size(); ++o) Add(map->outputs[o], out[o]);
  }
  // Also false for a lone bracketed factor that is cut, and sets unusual().
  bool Fit() {
    while (SolveSome() || AssumeWholeMinor()) {
    }
    if (!Agree()) return false;
    std::vector<int> operands(sizes_.size(), 0);
    for (const auto& [dim, size] : dims_) {
      for (int f : *dim) ++operands[f];
    }
    for (size_t f = 0; f < sizes_.size(); ++f) {
      const bool cut = sizes_[f] >= 0 && sizes_[f] != map_.sizes[f];
      unusual_ |= cut && (map_->whole[f] || minor_[f]);
      if (cut && map_->whole[f] && operands[f] == 1) return false;
    }
    return true;
  }
  // Cuts what is to be read whole, or a minor factor of a composite dim.
  bool unusual() const { return unusual_; }
  // For some of the operands: false if others could not make them fit.
  bool MayFit() {
    while (SolveSome()) {
    }
    return Agree();
  }

 private:
  // Every dim whose factors are known is their product.
  bool Agree() const {
    for (const auto& [dim, size] : dims_) {
      int64_t product = 1;
      bool known = true;
      for (int f : *dim) {
        known &= sizes_[f] >= 0;
        product *= sizes_[f];
      }
      if (known && product != size) return false;
    }
    for (size_t f = 0; f < map_->parts.size(); ++f) {
      const auto [known, unknowns] = PartsOf(f);
      if (map_->parts[f].empty() || sizes_[f] < 0) continue;
      if (unknowns == 0 ? known != sizes_[f] : known > sizes_[f]) return false;
    }
    return true;
  }
  // The sum of the parts that are known, and how many are not.
  std::pair<int64_t, int> PartsOf(size_t joined) const {
    int64_t known = 0;
    int unknowns = 0;
    for (const int part : map_->parts[joined]) {
      if (sizes_[part] < 0) {
        ++unknowns;
      } else {
        known += sizes_[part];
      }
    }
    return {known, unknowns};
  }
  bool SolveJoined() {
    bool solved = false;
    for (size_t f = 0; f < map_->parts.size(); ++f) {
      const auto [known, unknowns] = PartsOf(f);
      if (map_->parts[f].empty()) continue;
      if (unknowns == 0 && sizes_[f] < 0) {
        sizes_[f] = known;
        solved = true;
      }
      if (unknowns != 1 || sizes_[f] < known) continue;
      for (const int part : map_->parts[f]) {
        if (sizes_[part] < 0) sizes_[part] = sizes_[f] - known;
      }
      solved = true;
    }
    return solved;
  }
  void Add(const FactorOperand& operand, const Shape& shape) {
    for (size_t d = 0; d < shape.size(); ++d) {
      dims_.emplace_back(&operand[d], shape[d]);
      for (size_t k = 1; k < operand[d].size(); ++k) minor_[operand[d][k]] = true;
    }
  }
  bool SolveSome() {
    bool solved = SolveJoined();
    for (const auto& [dim, size] : dims_) {
      int unknown = -1, unknowns = 0;
      int64_t known = 1;
      for (int f : *dim) {
        if (sizes_[f] < 0) {
          unknown = f;
          ++unknowns;
        } else {
          known *= sizes_[f];
        }
      }
      if (unknowns != 1 || known == 0 || size % known != 0) continue;
      sizes_[unknown] = size / known;
      solved = true;
    }
    return solved;
  }
  // Blocks of a composite dim are blocks of its major factor; where they could not be, the minor
  // one is cut, for every index of the major.
  bool AssumeWholeMinor() {
    for (const auto& [dim, size] : dims_) {
      const auto unknown =
          std::find_if(dim->rbegin(), dim->rend(), [this](int f) { return sizes_[f] < 0; });
      if (dim->size() < 2 || unknown == dim->rend()) continue;
      const int64_t whole = map_.sizes[*unknown];
      const int major = dim->front();
      const bool cut = whole == 0 || size % whole != 0;
      const int assumed = cut && sizes_[major] < 0 ? major : *unknown;
      sizes_[assumed] = map_.sizes[assumed];
      return true;
    }
    return false;
  }

  const FactorMap& map_;
  std::vector<int64_t> sizes_;
  std::vector<std::pair<const FactorDim*, int64_t>> dims_;
  std::vector<bool> minor_;
  bool unusual_ = false;
};

// Whether the op takes inputs of these shapes at all.
bool PassesCheck(const OpDef& op, const VerifySample& sample, const Attrs& attrs,
                 const std::vector<Shape>& shapes) {
  if (!op.check()) return true;
  VerifySample part = sample;
  for (size_t i = 0; i < shapes.size(); ++i) part.inputs[i].shape = shapes[i];
  const absl::StatusOr<std::vector<SpecRef>> specs =
      SpecsOf(DeviceMesh::Self(), part, std::vector<Placements>(shapes.size()));
  if (!specs.ok()) return false;
  std::vector<const Spec*> pointers;
  for (const SpecRef& s : *specs) pointers.push_back(s.get());
  return op.check()(OpCall(op, pointers, attrs)).ok();
}

double Tolerance(DType t) {
  if (t == DType::kF64) return 1e-9;
  return t == DType::kF32 ? 1e-4 : IsFloating(t) ? 0.05 : 0;
}

// The product of two integers wraps around, too; it is one double where it fits 53 bits.
double Product(double x, double y, DType dtype) {
  if (IsFloating(dtype)) return x * y;
  const auto of = [](double v) { return static_cast<uint64_t>(static_cast<int64_t>(v)); };
  const auto product = static_cast<int64_t>(of(x) * of(y));
  if (dtype == DType::kI64) return static_cast<double>(product);
  if (dtype == DType::kI32) return static_cast<int32_t>(product);
  return dtype == DType::kU8 ? static_cast<uint8_t>(product) : product != 0 ? 1 : 0;
}

void Reduce(ReduceOp op, DType dtype, double x, double* acc) {
  const bool nan = std::isnan(x) || std::isnan(*acc);
  if (op == ReduceOp::kSum) *acc = Wrapped(*acc + x, dtype);
  if (op == ReduceOp::kProd) *acc = Product(x, *acc, dtype);
  if (op == ReduceOp::kMax || op == ReduceOp::kMin) {
    const double sign = op == ReduceOp::kMax ? 1 : -1;  // 0 is more than -0
    const bool wins = sign * x > sign * *acc || (x == *acc && !std::signbit(sign * x));
    if (nan) {
      *acc = std::numeric_limits<double>::quiet_NaN();
    } else if (wins) {
      *acc = x;
    }
  }
}

// Infinite or not a number on one rank stays so in a sum, whatever the other terms are.
bool Agree(double got, double want, double tolerance, bool sum) {
  if (got == want || (std::isnan(got) && std::isnan(want))) return true;
  if (sum && !std::isfinite(want) && !std::isfinite(got)) return true;
  return std::fabs(got - want) <= tolerance;
}

// Functions that keep the order tell by a zero's sign from which side they come to it.
bool SameZero(double got, double want) {
  return got != 0 || want != 0 || std::signbit(got) == std::signbit(want);
}

// 2^63 is no int64: the greatest stands for it, which as a double is that again.
absl::StatusOr<Tensor> TensorOf(const WholeValues& values, const Shape& shape, DType dtype) {
  if (dtype != DType::kI64) return Tensor::FromVector(values, shape, dtype);
  std::vector<int64_t> wide;
  for (const double v : values) {
    wide.push_back(v >= 0x1p63 ? std::numeric_limits<int64_t>::max() : static_cast<int64_t>(v));
  }
  return Tensor::FromVector(wide, shape, dtype);
}

}  // namespace

absl::StatusOr<Tensor> PartOf(const VerifyInput& in, size_t i, Draw draw, const DeviceMesh& mesh,
                              const Placements& placements, IntSpan coordinate) {
  DT_ASSIGN_OR_RETURN(const SpecRef spec,
                      RankContext::Current().specs().Intern(mesh, placements, in.shape, in.dtype));
  int64_t terms = 1, term = 0;
  ReduceOp op = ReduceOp::kSum;
  for (size_t m = 0; m < placements.size(); ++m) {
    if (!placements[m].is_partial()) continue;
    terms *= mesh.size(static_cast<int>(m));
    term = term * mesh.size(static_cast<int>(m)) + coordinate[m];
    op = placements[m].reduce_op();
  }
  WholeValues mine = Drawn(in, i + 1, draw);
  if (terms > 1) mine = Term(mine, in, op, term, terms, i + 1, draw);
  WholeValues part;
  const Dims at(coordinate.begin(), coordinate.end());
  for (int64_t p : Positions(*spec, at)) part.push_back(mine[p]);
  return TensorOf(part, LocalShape(*spec, coordinate), in.dtype);
}

absl::Status CheckValues(const std::vector<VerifyInput>& inputs) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    const VerifyInput& in = inputs[i];
    DT_ASSIGN_OR_RETURN(const int64_t numel, CheckedNumel(in.shape));
    if (in.values.empty() || static_cast<int64_t>(in.values.size()) == numel) continue;
    return absl::InvalidArgumentError(absl::StrCat("input ", i, " of a sample has ",
                                                   in.values.size(), " values for shape ",
                                                   ToString(in.shape)));
  }
  return absl::OkStatus();
}

absl::Status CheckSample(const OpDef& op, const VerifySample& sample) {
  if (!op.Takes(sample.inputs.size())) {
    return absl::InvalidArgumentError(
        absl::StrCat("a sample has ", sample.inputs.size(), " inputs; the op is ", op.signature()));
  }
  const size_t attrs = op.attr_names().size();
  if (sample.attrs.size() != attrs) {
    return absl::InvalidArgumentError(absl::StrCat("a sample has ", sample.attrs.size(),
                                                   " attributes; the op is ", op.signature()));
  }
  if (sample.ints_attr >= static_cast<int>(attrs)) {
    return absl::InvalidArgumentError(absl::StrCat("ints_attr of a sample is ", sample.ints_attr,
                                                   "; the op is ", op.signature()));
  }
  return CheckValues(sample.inputs);
}

absl::StatusOr<std::vector<SpecRef>> SpecsOf(const DeviceMesh& mesh, const VerifySample& sample,
                                             const std::vector<Placements>& placements) {
  std::vector<SpecRef> specs;
  for (size_t i = 0; i < sample.inputs.size(); ++i) {
    DT_ASSIGN_OR_RETURN(SpecRef spec,
                        RankContext::Current().specs().Intern(
                            mesh, placements[i], sample.inputs[i].shape, sample.inputs[i].dtype));
    specs.push_back(std::move(spec));
  }
  return specs;
}

Attrs AttrsOf(const VerifySample& sample) {
  Attrs attrs = sample.attrs;
  if (sample.ints_attr >= 0) attrs[sample.ints_attr] = IntsAttr(sample.ints);
  return attrs;
}

Simulation::Simulation(const OpDef& op, const VerifySample& sample)
    : op_(op), sample_(sample), attrs_(AttrsOf(sample)) {}

absl::StatusOr<std::unique_ptr<Simulation>> Simulation::Create(const OpDef& op,
                                                               const VerifySample& sample,
                                                               Draw draw) {
  std::unique_ptr<Simulation> simulation(new Simulation(op, sample));
  DT_RETURN_IF_ERROR(simulation->Truth(draw));
  return simulation;
}

absl::Status Simulation::Truth(Draw draw) {
  draw_ = draw;
  const DeviceMesh& self = DeviceMesh::Self();
  DT_ASSIGN_OR_RETURN(const std::vector<SpecRef> specs,
                      SpecsOf(self, sample_, std::vector<Placements>(sample_.inputs.size())));
  std::vector<const Spec*> pointers;
  for (const SpecRef& s : specs) pointers.push_back(s.get());
  const OpCall call(op_, pointers, attrs_);
  DT_ASSIGN_OR_RETURN(const OpPlan plan, PlanOp(call, nullptr));
  DT_ASSIGN_OR_RETURN(maps_, FactorMapsOf(call));
  out_shapes_ = plan.out_shapes;
  out_dtypes_ = plan.out_dtypes;
  PlainCall plain;
  plain.out_shapes = out_shapes_;
  plain.ranges = plan.offsets;
  for (size_t i = 0; i < sample_.inputs.size(); ++i) {
    const VerifyInput& in = sample_.inputs[i];
    DT_ASSIGN_OR_RETURN(Tensor t, TensorOf(Drawn(in, i + 1, draw), in.shape, in.dtype));
    plain.in.push_back(std::move(t));
  }
  DT_ASSIGN_OR_RETURN(const std::vector<Tensor> outs,
                      RunPlain(op_, out_dtypes_, attrs_, std::move(plain)));
  for (const Tensor& t : outs) truth_.push_back(t.ToVector<double>());
  return absl::OkStatus();
}

bool Simulation::MayBeCallable(const DeviceMesh& mesh, const std::vector<Placement>& chosen) const {
  const bool all = chosen.size() == sample_.inputs.size() + out_shapes_.size();
  const auto fits = [&](const FactorMap* map) {
    for (int64_t r = 0; r < mesh.size(); ++r) {
      std::vector<Shape> in, out;
      for (size_t k = 0; k < chosen.size(); ++k) {
        const bool input = k < sample_.inputs.size();
        Shape part = input ? sample_.inputs[k].shape : out_shapes_[k - sample_.inputs.size()];
        if (chosen[k].cuts_dim()) {
          int64_t& size = part[chosen[k].dim()];
          std::vector<Interval> held;
          LocalIntervals(chosen[k], size, mesh.size(), r, &held);
          size = 0;
          for (const Interval& run : held) size += run.length();
        }
        (input ? in : out).push_back(std::move(part));
      }
      if (map != nullptr ? !LocalSizes(*map, in, out).MayFit() : !(ShapesOf(in) == out)) {
        return false;
      }
    }
    return true;
  };
  if (maps_.empty()) return !all || !op_.shapes() || fits(nullptr);
  return std::any_of(maps_.begin(), maps_.end(), [&](const FactorMap& map) { return fits(&map); });
}

// What the op says that it makes of these; nothing if it refuses them.
std::vector<Shape> Simulation::ShapesOf(const std::vector<Shape>& inputs) const {
  std::vector<SpecRef> specs;
  std::vector<const Spec*> pointers;
  for (size_t k = 0; k < inputs.size(); ++k) {
    absl::StatusOr<SpecRef> spec = RankContext::Current().specs().Intern(
        DeviceMesh::Self(), {}, inputs[k], sample_.inputs[k].dtype);
    if (!spec.ok()) return {};
    specs.push_back(*std::move(spec));
    pointers.push_back(specs.back().get());
  }
  return op_.shapes()(OpCall(op_, pointers, attrs_)).value_or(std::vector<Shape>());
}

std::vector<PlacedCall> Simulation::Callable(const DeviceMesh& mesh, const PlacedCall& call) const {
  std::vector<PlacedCall> calls;
  if (maps_.empty()) return {{call.inputs, call.outputs, {}}};
  const absl::StatusOr<std::vector<SpecRef>> specs = SpecsOf(mesh, sample_, call.inputs);
  if (!specs.ok()) return calls;
  std::vector<const Spec*> pointers;
  for (const SpecRef& s : *specs) pointers.push_back(s.get());
  std::vector<SpecRef> outs;
  for (size_t o = 0; o < out_shapes_.size(); ++o) {
    absl::StatusOr<SpecRef> spec = RankContext::Current().specs().Intern(
        mesh, call.outputs[o], out_shapes_[o], out_dtypes_[o]);
    if (!spec.ok()) return calls;
    outs.push_back(*std::move(spec));
  }
  for (const FactorMap& map : maps_) {
    PlacedCall placed{call.inputs, call.outputs, {}};
    bool fits = true;
    for (int64_t r = 0; fits && r < mesh.size(); ++r) {
      const Dims at = CoordinateOf(mesh, r);
      std::vector<Shape> in_shapes, shapes;
      for (const SpecRef& s : *specs) in_shapes.push_back(ShapeBeforeFlat(*s, at));
      for (const SpecRef& s : outs) shapes.push_back(ShapeBeforeFlat(*s, at));
      LocalSizes sizes(map, in_shapes, shapes);
      fits = sizes.Fit() && (!sizes.unusual() || PassesCheck(op_, sample_, attrs_, in_shapes));
      placed.ranges.push_back(
          FactorRanges(OpCall(op_, pointers, attrs_), map, call.inputs, call.outputs, at));
    }
    if (fits) calls.push_back(std::move(placed));
  }
  return calls;
}

absl::StatusOr<Simulation::Parts> Simulation::Run(const DeviceMesh& mesh,
                                                  const PlacedCall& call) const {
  if (Callable(mesh, call).empty()) {
    return absl::InvalidArgumentError("no factor string of the op gives parts of these shapes");
  }
  Parts parts;
  for (int64_t r = 0; r < mesh.size(); ++r) {
    const Dims at = CoordinateOf(mesh, r);
    PlainCall plain;
    for (size_t i = 0; i < sample_.inputs.size(); ++i) {
      DT_ASSIGN_OR_RETURN(Tensor t, PartOf(sample_.inputs[i], i, draw_, mesh, call.inputs[i], at));
      plain.in.push_back(std::move(t));
    }
    for (size_t o = 0; o < out_shapes_.size(); ++o) {
      DT_ASSIGN_OR_RETURN(const SpecRef spec,
                          RankContext::Current().specs().Intern(mesh, call.outputs[o],
                                                                out_shapes_[o], out_dtypes_[o]));
      plain.out_shapes.push_back(LocalShape(*spec, at));
    }
    if (r < static_cast<int64_t>(call.ranges.size())) plain.ranges = call.ranges[r];
    const absl::StatusOr<std::vector<Tensor>> outs =
        RunPlain(op_, out_dtypes_, attrs_, std::move(plain));
    if (!outs.ok()) {
      return absl::Status(outs.status().code(),
                          absl::StrCat("rank ", r, " fails: ", outs.status().message()));
    }
    parts.emplace_back();
    for (const Tensor& t : *outs) parts.back().push_back(t.ToVector<double>());
  }
  return parts;
}

std::string Simulation::Differs(const DeviceMesh& mesh, int o, const Placements& placements,
                                const Parts& parts) const {
  const absl::StatusOr<SpecRef> spec =
      RankContext::Current().specs().Intern(mesh, placements, out_shapes_[o], out_dtypes_[o]);
  if (!spec.ok()) return std::string(spec.status().message());
  ReduceOp reduce = ReduceOp::kSum;
  bool pending = false;
  for (const Placement& p : placements) {
    if (!p.is_partial()) continue;
    pending = true;
    reduce = p.reduce_op();
  }
  // Ranks that differ on pending dims only hold terms of the same elements: reduced together, with
  // the rounding of the largest. Others' elements must agree where they meet.
  struct Held {
    std::vector<int64_t> positions;
    WholeValues values, largest;
  };
  std::map<Dims, Held> groups;
  for (int64_t r = 0; r < mesh.size(); ++r) {
    const Dims at = CoordinateOf(mesh, r);
    Dims group;
    for (size_t m = 0; m < placements.size(); ++m) {
      if (!placements[m].is_partial()) group.push_back(at[m]);
    }
    std::vector<int64_t> positions = Positions(**spec, at);
    const WholeValues& held = parts[r][o];
    if (held.size() != positions.size()) {
      return absl::StrCat("rank ", r, " gives ", held.size(), " elements, its part has ",
                          positions.size());
    }
    const auto [it, fresh] = groups.try_emplace(group, Held{std::move(positions), held, held});
    Held& all = it->second;
    for (size_t k = 0; k < held.size(); ++k) {
      all.largest[k] = std::max(std::fabs(all.largest[k]), std::fabs(held[k]));
      if (!fresh) Reduce(reduce, out_dtypes_[o], held[k], &all.values[k]);
    }
  }
  const WholeValues& truth = truth_[o];
  double scale = 1;
  for (double t : truth) scale = std::max(scale, std::isfinite(t) ? std::fabs(t) : 0);
  const double relative = sample_.exact ? 0 : Tolerance(out_dtypes_[o]);
  std::vector<bool> covered(truth.size(), false);
  for (const auto& [group, elements] : groups) {
    for (size_t k = 0; k < elements.positions.size(); ++k) {
      const int64_t at = elements.positions[k];
      const double got = elements.values[k];
      const bool sum = pending && reduce == ReduceOp::kSum;
      const bool ordered = pending && (reduce == ReduceOp::kMax || reduce == ReduceOp::kMin) &&
                           IsFloating(out_dtypes_[o]);
      const double term = sum && std::isfinite(elements.largest[k]) ? elements.largest[k] : 0;
      covered[at] = true;
      if (!Agree(got, truth[at], relative * std::max(scale, term), sum) ||
          (ordered && !SameZero(got, truth[at]))) {
        return absl::StrCat("output ", o, " element ", at, " is ", got, ", must be ", truth[at]);
      }
    }
  }
  const auto hole = std::find(covered.begin(), covered.end(), false);
  if (hole == covered.end()) return "";
  return absl::StrCat("output ", o, " element ", hole - covered.begin(), " is held by no rank");
}

std::string Simulation::Check(const DeviceMesh& mesh, const PlacedCall& call) const {
  const absl::StatusOr<Parts> parts = Run(mesh, call);
  if (!parts.ok()) return std::string(parts.status().message());
  for (size_t o = 0; o < out_shapes_.size(); ++o) {
    std::string why = Differs(mesh, static_cast<int>(o), call.outputs[o], *parts);
    if (!why.empty()) return why;
  }
  return "";
}

}  // namespace dtensor::internal
