#include "dtensor/parallel/module/parameter.h"

#include <algorithm>

#include "absl/algorithm/container.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "dtensor/impl.h"
#include "dtensor/ops/ops.h"
#include "dtensor/parallel/module/materialize.h"
#include "dtensor/parallel/module/module.h"
#include "dtensor/tensor/status.h"
#include "dtensor/tensor/trace.h"

namespace dtensor {

Init Init::Copy(const DTensor& values) {
  return Call([values](const DTensor& t) {
    if (t.mesh().device() == DeviceType::kMeta) return;
    const NoGrad no_grad;
    copy_(t, t.mesh().is_self() ? values : DistributeTensor(values, t.mesh(), t.placements()));
  });
}

Parameter::Parameter(std::string name, Shape shape, Init init, DType dtype, Role role)
    : name_(std::move(name)),
      it_(std::make_shared<Logical>(Logical{
          .shape = std::move(shape), .init = std::move(init), .dtype = dtype, .role = role})) {
  it_->names.push_back(this);
}

Parameter::~Parameter() {
  std::vector<Parameter*>& names = it_->names;
  names.erase(std::remove(names.begin(), names.end(), this), names.end());
}

const DTensor& Parameter::tensor() const {
  if (!materialized()) {
    Throw(absl::FailedPreconditionError(absl::StrCat(
        "parameter ", fqn(), " is a recipe without values; call Materialize(model) first")));
  }
  return it_->tensor;
}

std::string Parameter::fqn() const {
  const std::string prefix = owner_ == nullptr ? "" : owner_->fqn();
  return prefix.empty() ? name_ : absl::StrCat(prefix, ".", name_);
}

int64_t Parameter::numel() const { return ValueOrThrow(CheckedNumel(shape())); }

DTensor Parameter::Draw(DType dtype, const DeviceMesh& mesh, const Placements& placements) const {
  const TensorOptions options = {.dtype = dtype, .mesh = mesh, .placements = placements};
  const Init& how = init();
  if (how.kind == Init::Kind::kZeros) return zeros(shape(), options);
  if (how.kind == Init::Kind::kOnes) return ones(shape(), options);
  const DTensor t = empty(shape(), options);
  if (how.kind == Init::Kind::kNormal) normal_(t, how.a, how.b);
  if (how.kind == Init::Kind::kUniform) uniform_(t, how.a, how.b);
  if (how.kind == Init::Kind::kFunction) how.function(t);
  return t;
}

void Parameter::Materialize() {
  if (materialized()) return;
  internal::ApplyMaterializeAs(this);
  Placements placements = it_->placements;
  placements.resize(mesh().ndim());
  Own(Draw(dtype(), mesh(), placements), BecomesLeaf());
}

void Parameter::MakeMeta() {
  Own(empty(shape(), {.dtype = dtype(), .mesh = mesh(), .placements = placements()}),
      BecomesLeaf());
}

// As the module's.
struct Parameter::Listed : internal::NamedTensor {
  explicit Listed(const Logical& what) : it(what) { InsertAfter(&internal::State().named); }
  const DTensor& tensor() const override { return it.tensor; }
  std::string name() const override { return it.names.empty() ? "" : it.names.front()->fqn(); }
  const Logical& it;
};

void Parameter::Own(DTensor tensor, bool leaf) {
  it_->tensor = std::move(tensor);
  if (!RankContext::Current().rehearses()) it_->listed = std::make_shared<Listed>(*it_);
  it_->tensor.impl()->owned = true;
  if (leaf) BecomeLeaf();
}

// One whose gradient traces name after it.
void Parameter::BecomeLeaf() {
  TraceState& trace = RankContext::Current().trace();
  const ScopedModule scope(trace, owner_ == nullptr ? nullptr : owner_->TracePath());
  it_->tensor.RequiresGrad();
  const SpecRef& layout = it_->grad_layout;
  if (!layout) return;
  const bool same_mesh = layout->mesh() == it_->tensor.mesh();
  it_->tensor.SetGradLayout(layout->dtype(),
                            same_mesh ? layout->placements() : it_->tensor.placements());
}

void Parameter::KeepGradients(SpecRef layout) {
  if (!layout && !it_->grad_layout) return;
  it_->grad_layout = std::move(layout);
  if (it_->grad_layout) {
    if (requires_grad()) BecomeLeaf();
  } else if (it_->tensor.defined() && it_->tensor.impl()->node) {  // a leaf, or one that is frozen
    it_->tensor.SetGradLayout(dtype(), it_->tensor.placements());
  }
}

void Parameter::SkipMaterialize() const {
  if (materialized()) return;
  Draw(internal::MaterializedDType(*this),
       ValueOrThrow(DeviceMesh::Create({1}, {}, DeviceType::kMeta)), {Replicate()});
}

absl::Status Parameter::CheckPlace(const DeviceMesh& mesh,
                                   absl::Span<const Placement> placements) const {
  if (!this->mesh().is_self() && !(this->mesh() == mesh)) {
    return absl::InvalidArgumentError(
        absl::StrCat("is on mesh ", this->mesh().ToString(), ", not on ", mesh.ToString()));
  }
  const bool has_none = materialized() && this->mesh().device() == DeviceType::kMeta;
  if (has_none && mesh.defined() && mesh.device() != DeviceType::kMeta) {
    return absl::FailedPreconditionError(
        absl::StrCat("was materialised on meta and has no values for ", mesh.ToString(),
                     "; place it before Materialize"));
  }
  for (const Placement& p : placements) {
    if (!p.is_partial()) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "cannot be ", p.ToString(), ": an update would count once per rank; use R or S(dim)"));
  }
  RankContext& context = RankContext::Current();
  const bool runs = mesh.defined() && mesh.device() != DeviceType::kMeta;
  if (runs && mesh.MaxRank() >= context.world_size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "mesh ", mesh.ToString(), " needs ranks 0 to ", mesh.MaxRank(), ", the world has ",
        context.world_size(), ": start more ranks, or plan on a mesh of DeviceType::kMeta"));
  }
  return context.specs().Intern(mesh, placements, shape(), dtype()).status();
}

void Parameter::Place(const DeviceMesh& mesh, Placements placements, int64_t source) {
  if (mesh.defined()) placements.resize(mesh.ndim());
  const absl::Status fits = CheckPlace(mesh, placements);
  if (!fits.ok()) {
    Throw(Prefixed(absl::StrCat("parameter ", fqn()), fits));
  }
  const SpecRef spec =
      ValueOrThrow(RankContext::Current().specs().Intern(mesh, placements, shape(), dtype()));
  if (materialized()) {
    const NoGrad no_grad;
    const DTensor& old = it_->tensor;
    // Ranks may have drawn each its own: one's are those of all, as torch has it.
    if (mesh.device() == DeviceType::kMeta) source = -1;
    const DTensor moved = old.mesh() == mesh
                              ? old.Redistribute(spec->placements())
                              : DistributeTensor(old.local(), mesh, spec->placements(), source);
    const bool leaf = old.requires_grad();
    Own(moved.Detach(), leaf);
  }
  it_->mesh = mesh;
  it_->placements.assign(spec->placements().begin(), spec->placements().end());
}

void Parameter::RequiresGrad(bool value) {
  if (value && !MayRequireGrad()) {
    Throw(absl::InvalidArgumentError(
        absl::StrCat("[requires_grad] ", fqn(), " is ",
                     is_buffer() ? "a buffer" : absl::StrCat("of ", std::string(Name(dtype()))),
                     "; only floating parameters take gradients")));
  }
  it_->frozen = !value;
  if (!materialized() || !MayRequireGrad()) return;
  if (value) return BecomeLeaf();
  it_->tensor.RequiresGrad(false);
  it_->tensor.ZeroGrad();
}

void Parameter::SetDType(DType dtype) {
  if (materialized()) {
    Throw(absl::FailedPreconditionError(
        absl::StrCat("[set_dtype] parameter ", fqn(), " has values already")));
  }
  it_->dtype = dtype;
}

void Parameter::Set(const DTensor& values) {
  const DTensor& mine = tensor();
  const std::string misfit = Misfit(values, mine.spec());
  if (!misfit.empty()) {
    Throw(absl::InvalidArgumentError(
        absl::StrCat("the new value of parameter ", fqn(), " ", misfit)));
  }
  if (mesh().device() == DeviceType::kMeta && values.mesh().device() != DeviceType::kMeta) {
    Throw(absl::FailedPreconditionError(
        absl::StrCat("[set] parameter ", fqn(),
                     " was materialised on meta and holds no values; "
                     "materialise the module elsewhere, without MaterializeAs(..., kMeta)")));
  }
  internal::Here(values, "set");
  const NoGrad no_grad;
  copy_(mine, values.mesh() == mesh()
                  ? values.Redistribute(mine.placements())
                  : DistributeTensor(values.local(), mesh(), mine.placements()));
}

void Parameter::Take(DTensor values) {
  internal::Here(values, "take");
  if (materialized()) internal::Here(tensor(), "take");
  Placements placements = it_->placements;
  placements.resize(mesh().ndim());
  const SpecRef spec =
      ValueOrThrow(RankContext::Current().specs().Intern(mesh(), placements, shape(), dtype()));
  if (!(values.spec_ref() == spec)) {
    Throw(absl::InvalidArgumentError(absl::StrCat("parameter ", fqn(), " is ", spec->ToString(),
                                                  ", its new tensor ", values.spec().ToString())));
  }
  Own(values.Detach(), BecomesLeaf());
}

namespace {

absl::Status CheckTie(const Parameter& a, const Parameter& b) {
  std::string why;
  if (a.shape() != b.shape()) {
    why = absl::StrCat("have shapes ", ToString(a.shape()), " and ", ToString(b.shape()));
  } else if (a.dtype() != b.dtype()) {
    why = "have different dtypes";
  } else if (a.is_buffer() != b.is_buffer()) {
    why = "are a parameter and a buffer";
  } else if (!(a.mesh() == b.mesh()) || a.placements() != b.placements()) {
    why =
        absl::StrCat("are placed differently: ", a.mesh().ToString(), " ", ToString(a.placements()),
                     " and ", b.mesh().ToString(), " ", ToString(b.placements()));
  }
  const std::string both = absl::StrCat("[tie] ", a.fqn(), " and ", b.fqn(), " ");
  if (!why.empty()) return absl::InvalidArgumentError(both + why);
  if (a.materialized() == b.materialized()) return absl::OkStatus();
  return absl::FailedPreconditionError(both + "are one a recipe, one materialised");
}

}  // namespace

void Tie(Parameter& a, Parameter& b) {
  if (a.IsTiedTo(b)) return;
  ThrowIfError(CheckTie(a, b));
  for (const Parameter* p : {&a, &b}) {
    if (p->materialized()) internal::Here(p->tensor(), "tie");
  }
  const std::shared_ptr<Parameter::Logical> gone = b.it_;
  for (Parameter* p : gone->names) {
    p->it_ = a.it_;
    a.it_->names.push_back(p);
  }
  gone->names.clear();
}

std::vector<NamedParameter> Distinct(const std::vector<NamedParameter>& parameters) {
  std::vector<NamedParameter> out;
  absl::flat_hash_map<const void*, size_t> known;
  for (const NamedParameter& p : parameters) {
    const auto [at, fresh] = known.try_emplace(p.parameter->it_.get(), out.size());
    if (fresh) {
      out.push_back(p);
      continue;
    }
    NamedParameter& first = out[at->second];
    std::vector<std::string> names = p.aliases;
    names.insert(names.begin(), p.fqn);
    for (std::string& name : names) {
      const bool there = name == first.fqn || absl::c_linear_search(first.aliases, name);
      if (!there) first.aliases.push_back(std::move(name));
    }
  }
  return out;
}

}  // namespace dtensor
