#include "dtensor/cache.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "dtensor/call_list.h"
#include "dtensor/impl.h"
#include "dtensor/rehearsal.h"
#include "dtensor/sharding.h"
#include "dtensor/tensor/status.h"
#include "dtensor/tensor/text.h"

namespace dtensor::internal {
namespace {

inline uint64_t Mix(uint64_t h, uint64_t v) {
  const auto product = static_cast<unsigned __int128>(h ^ v) * 0x9E3779B97F4A7C15ull;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

uint64_t HashAttr(uint64_t h, const Attr& a) {
  uint64_t bits;
  static_assert(sizeof(a.d) == sizeof(bits));
  __builtin_memcpy(&bits, &a.d, sizeof(bits));
  h = Mix(h, static_cast<uint64_t>(a.i) ^ bits);
  for (int64_t k = 0; k < a.n; ++k) h = Mix(h, static_cast<uint64_t>(a.ints[k]) + 1);
  return h;
}

inline uint64_t HashKey(Inputs inputs, absl::Span<const Attr> attrs, uint32_t read,
                        const Spec* like) {
  uint64_t h = 0x243F6A8885A308D3ull;
  for (const DTensor* t : inputs) {
    h = Mix(h, reinterpret_cast<uintptr_t>(t->impl()->spec.get()));
  }
  if (like != nullptr) h = Mix(h, reinterpret_cast<uintptr_t>(like) + 1);
  for (uint32_t rest = read; rest != 0; rest &= rest - 1) {
    h = HashAttr(h, attrs[__builtin_ctz(rest)]);
  }
  return h;
}

bool SameAttr(const Attr& a, const Attr& b) {
  // Bitwise for floats: NaN equals itself, 0.0 differs from -0.0.
  return a.kind == b.kind && a.i == b.i && __builtin_memcmp(&a.d, &b.d, sizeof(a.d)) == 0 &&
         a.n == b.n && std::equal(a.ints, a.ints + a.n, b.ints);
}

void KeepKeyAttrs(absl::Span<const Attr> attrs, uint32_t read, DispatchEntry* entry) {
  entry->attrs.assign(attrs.size(), Attr());
  size_t total = 0;
  for (const Attr& a : attrs) total += static_cast<size_t>(a.n);
  entry->attr_ints.reserve(total);
  for (size_t i = 0; i < attrs.size(); ++i) {
    if (!((read >> i) & 1)) continue;
    Attr a = attrs[i];
    const int64_t* start = entry->attr_ints.data() + entry->attr_ints.size();
    entry->attr_ints.insert(entry->attr_ints.end(), a.ints, a.ints + a.n);
    if (a.kind == Attr::Kind::kInts) a.ints = start;
    entry->attrs[i] = a;
  }
}

// Modelled bytes of the decomposition, found by rehearsing it.
absl::StatusOr<double> DecompositionCost(const OpDef& op, Inputs inputs,
                                         absl::Span<const Attr> attrs) {
  const CostModel cost;
  const Rehearsal rehearsal(cost);
  try {
    const NoGrad no_grad;
    absl::InlinedVector<DTensor, 4> values;
    for (const DTensor* t : inputs) {  // not their twins: plans must not depend on what is memoised
      const SpecRef& spec = t->spec_ref();
      Tensor local;
      if (spec->in_mesh()) {
        DT_ASSIGN_OR_RETURN(local,
                            Tensor::Empty(spec->local_shape(), spec->dtype(), DeviceType::kMeta));
      }
      values.push_back(MakeDTensor(RankContext::Current(), spec, std::move(local)));
    }
    op.decompose()(values, attrs);
  } catch (const Error& error) {
    return error.status();
  }
  return rehearsal.moved_bytes();
}

absl::Status BindKernel(const OpDef& op, const DeviceMesh& mesh, DType dtype,
                        DispatchEntry* entry) {
  if (!entry->inputs[0]->in_mesh() || mesh.device() == DeviceType::kMeta || op.view() != nullptr ||
      entry->decompose) {
    return absl::OkStatus();
  }
  const Kernel* kernel = FindKernel(std::string_view(op.name()), mesh.device());
  if (kernel == nullptr) {
    return absl::UnimplementedError(
        "no kernel is registered for this device; add one with RegisterKernel");
  }
  if (!(kernel->dtypes & DTypeBit(dtype))) {
    std::string names;
    for (int t = 0; t < kNumDTypes; ++t) {
      if (kernel->dtypes & (1u << t)) {
        const std::string_view name = Name(static_cast<DType>(t));
        absl::StrAppend(&names, names.empty() ? "" : ", ",
                        absl::string_view(name.data(), name.size()));
      }
    }
    return absl::InvalidArgumentError(absl::StrCat("takes dtypes ", names));
  }
  entry->kernel = *kernel;
  if (IsRemote(mesh.device())) {
    DT_ASSIGN_OR_RETURN(entry->device, RankDevices::Current().Get(mesh.device()));
    entry->device_call = {kernel->self, op.name().c_str(), static_cast<int>(op.attr_names().size()),
                          entry->device->error_word()};
    const Kernel* list = FindKernel(ListKernelName(op.name()), mesh.device());
    if (list != nullptr && entry->offsets.empty()) entry->list = *list;
  }
  return absl::OkStatus();
}

absl::Status FillEntry(RankContext& context, const OpCall& call, const OpPlan& plan,
                       DispatchEntry* entry) {
  const OpDef& op = call.op();
  for (int i = 0; i < call.num_inputs(); ++i) {
    DT_ASSIGN_OR_RETURN(SpecRef target, context.specs().Intern(call.mesh(), plan.strategy.inputs[i],
                                                               call.shape(i), call.dtype(i)));
    const bool same = target.get() == &call.in(i);
    if (!same && op.in_place() && i < op.num_outputs()) {
      return absl::FailedPreconditionError(absl::StrCat("the in-place op would have to move ",
                                                        i == 0 ? "self" : op.InputName(i), " to ",
                                                        target->ToString()));
    }
    entry->moves |= !same;
    entry->targets.push_back(same ? SpecRef() : target);
  }
  for (int o = 0; o < op.num_outputs(); ++o) {
    DT_ASSIGN_OR_RETURN(SpecRef out,
                        context.specs().Intern(call.mesh(), plan.strategy.outputs[o],
                                               plan.out_shapes[o], plan.out_dtypes[o]));
    entry->outs.push_back(std::move(out));
  }
  entry->offsets.assign(plan.offsets.begin(), plan.offsets.end());
  if (op.pointwise()) {
    for (int i = 0; i < call.num_inputs(); ++i) {
      const Spec& in = entry->targets[i] ? *entry->targets[i] : call.in(i);
      entry->stretch |= in.local_shape() != entry->outs[0]->local_shape();
    }
  }
  return absl::OkStatus();
}

// Which gradients will come as pending sums: see DispatchEntry::inputs_pend.
void FindPending(DispatchEntry* entry) {
  for (size_t i = 0; i < entry->inputs.size(); ++i) {
    const Spec& in = entry->targets[i] ? *entry->targets[i] : *entry->inputs[i];
    uint32_t bits = 0;
    for (int m = 0; m < in.mesh().ndim() && m < 32; ++m) {
      if (!in.placement(m).is_replicate()) continue;
      for (const SpecRef& out : entry->outs) {
        const Placement& p = out->placement(m);
        if (!p.is_replicate() && !p.is_partial()) bits |= uint32_t{1} << m;
      }
    }
    entry->inputs_pend.push_back(bits);
    entry->pends |= bits != 0;
  }
}

// "matmul(x = float32 [4, 6] on tp=2 [S(1)] -> [R], w = ...)" and a hash of op, specs and plan,
// equal on all ranks that plan the same.
void TagCollectives(const OpDef& op, DispatchEntry* entry) {
  uint64_t hash = 0;
  for (char c : op.name()) hash = HashMix(hash, static_cast<unsigned char>(c));
  std::vector<int> inputs;
  for (size_t i = 0; i < entry->inputs.size(); ++i) {
    const Spec* target = entry->targets[i].get();
    hash = HashMix(hash, entry->inputs[i]->hash());
    hash = HashMix(hash, target == nullptr ? 0 : target->hash());
    inputs.push_back(static_cast<int>(i));
  }
  for (const SpecRef& out : entry->outs) hash = HashMix(hash, out->hash());
  const std::string list = JoinSome(inputs, [&](std::string* out, int i) {
    const Spec* target = entry->targets[i].get();
    absl::StrAppend(out, op.InputName(i), " = ", entry->inputs[i]->ToString(),
                    target == nullptr ? "" : " -> " + ToString(target->placements()));
  });
  entry->call_text = std::make_shared<const std::string>(absl::StrCat(op.name(), "(", list, ")"));
  entry->call_hash = hash;
}

}  // namespace

bool DispatchCache::SameAttrs(absl::Span<const Attr> a, absl::Span<const Attr> b, uint32_t read) {
  for (uint32_t rest = read; rest != 0; rest &= rest - 1) {
    const int i = __builtin_ctz(rest);
    if (!SameAttr(a[i], b[i])) return false;
  }
  return true;
}

// Makes it the table's last.
bool DispatchCache::FindInTable(Table* table, Inputs inputs, absl::Span<const Attr> attrs,
                                const Spec* like) {
  const uint64_t hash = HashKey(inputs, attrs, table->attrs_read, like);
  const uint64_t mask = table->slots.size() - 1;
  for (uint64_t at = hash & mask; table->slots[at]; at = (at + 1) & mask) {
    const DispatchEntry& e = *table->slots[at];
    if (e.hash == hash && Matches(e, inputs, attrs, table->attrs_read, like)) {
      table->last = &e;
      return true;
    }
  }
  return false;
}

absl::StatusOr<const DispatchEntry*> DispatchCache::FindOrPlan(RankContext& context,
                                                               const OpDef& op, Inputs inputs,
                                                               absl::Span<const Attr> attrs,
                                                               const Spec* like) {
  if (const DispatchEntry* hit = Find(op, inputs, attrs, like)) return hit;
  if (attrs.size() != op.attr_names().size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("takes ", op.attr_names().size(), " attributes, got ", attrs.size()));
  }
  ++stats.misses;
  op.NotePlanned();
  auto entry = std::make_unique<DispatchEntry>();
  absl::InlinedVector<const Spec*, 4> specs;
  for (const DTensor* t : inputs) {
    entry->inputs.push_back(t->spec_ref());
    specs.push_back(t->impl()->spec.get());
  }
  if (like != nullptr) entry->like = SpecRef(like);
  OpCall call(op, specs, attrs);
  DT_ASSIGN_OR_RETURN(OpPlan plan, PlanOp(call, like));
  entry->cost_bytes = plan.strategy.cost_bytes;
  if (op.decompose() != nullptr && plan.strategy.cost_bytes > 0) {
    DT_ASSIGN_OR_RETURN(const double cost, DecompositionCost(op, inputs, attrs));
    entry->decompose = cost < plan.strategy.cost_bytes;
  }
  if (!entry->decompose) {
    DT_RETURN_IF_ERROR(FillEntry(context, call, plan, entry.get()));
    FindPending(entry.get());
  }
  if (entry->moves) TagCollectives(op, entry.get());
  DT_RETURN_IF_ERROR(BindKernel(op, call.mesh(), call.dtype(0), entry.get()));
  entry->any_input = entry->kernel.layout == KernelLayout::kStrided && !entry->stretch &&
                     !op.in_place() && entry->list.fn == nullptr;
  entry->plain = entry->any_input && !entry->moves;
  if (entry->plain && entry->kernel.keeps_launch && op.num_outputs() == 1) {
    entry->device_call.launch = &entry->launch;
    RankState::Current().keeps_launches = true;
  }
  if (entries_ >= kMaxEntries) {
    stats.evictions += entries_;
    Clear();
  }
  if (op.id() >= static_cast<int>(tables_.size())) tables_.resize(op.id() + 1);
  Table& table = tables_[op.id()];
  const uint32_t read = table.attrs_read | call.attrs_read();
  if (read != table.attrs_read) {  // the rule read more than ever before: old keys are too short
    Drop(&table);
    table.attrs_read = read;
  }
  KeepKeyAttrs(attrs, read, entry.get());
  entry->hash = HashKey(inputs, attrs, read, like);
  const DispatchEntry* raw = entry.get();
  Insert(&table, std::move(entry));
  ++entries_;
  return raw;
}

void DispatchCache::Insert(Table* table, std::unique_ptr<DispatchEntry> entry) {
  if (2 * (table->used + 1) > static_cast<int64_t>(table->slots.size())) {
    std::vector<std::unique_ptr<DispatchEntry>> old = std::move(table->slots);
    table->slots.clear();
    table->slots.resize(std::max<size_t>(8, 2 * old.size()));
    table->used = 0;
    for (auto& e : old) {
      if (e) Insert(table, std::move(e));
    }
  }
  const uint64_t mask = table->slots.size() - 1;
  uint64_t at = entry->hash & mask;
  while (table->slots[at]) at = (at + 1) & mask;
  table->last = entry.get();
  table->slots[at] = std::move(entry);
  ++table->used;
}

void DispatchCache::Drop(Table* table) {
  if (holds_ > 0) {
    for (auto& entry : table->slots) {
      if (entry) dropped_.push_back(std::move(entry));
    }
  }
  entries_ -= table->used;
  table->slots.clear();
  table->last = nullptr;
  table->used = 0;
}

void DispatchCache::Clear() {
  for (Table& table : tables_) Drop(&table);
}

}  // namespace dtensor::internal
