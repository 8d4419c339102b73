#include "dtensor/reducer.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "dtensor/mesh/cost.h"
#include "dtensor/redistribute.h"
#include "dtensor/rehearsal.h"
#include "dtensor/tensor/status.h"

namespace dtensor::internal {
namespace {

Tensor PartOf(const Tensor& flat, int64_t start, const Tensor& like) {
  return flat.AsStrided(like.shape(), ContiguousStrides(like.shape()), flat.offset() + start);
}

}  // namespace

Reducer::Reducer() : context_(RankContext::Current()) {}

Reducer::MeshDims Reducer::SumsOver(const Spec& from, const Spec& to) {
  MeshDims dims;
  if (!(from.mesh() == to.mesh())) return dims;
  for (int m = 0; m < from.mesh().ndim(); ++m) {
    const Placement &a = from.placement(m), &b = to.placement(m);
    if (a == b || (from.mesh().size(m) == 1 && !a.is_flat() && !b.is_flat())) continue;
    const bool sum = a.is_partial() && a.reduce_op() == ReduceOp::kSum && b.is_replicate();
    if (!sum) return {};
    dims.push_back(m);
  }
  return dims;
}

// So large that the latency is a hundredth of the time. By the world's cost model, not by one that
// an explanation was given: it has to find the same buckets.
int64_t Reducer::BucketBytes(const Comm& comm) const {
  const int64_t asked = State().bucket_bytes;
  if (asked > 0) return asked;
  const CostModel& model = context_.cost_model();
  constexpr int64_t kSome = 1 << 20;
  const auto time = [&](int64_t bytes) {
    return model.CollectiveUs(CollectiveKind::kAllReduce, bytes, comm.ranks());
  };
  const double latency = time(0), per_byte = (time(kSome) - latency) / kSome;
  const auto n = static_cast<double>(comm.size());
  return static_cast<int64_t>(99 * latency / per_byte * n / (2 * (n - 1)));  // received, to held
}

absl::Status Reducer::Add(Contribution* c, const SpecRef& target) {
  const Spec& from = c->tensor.spec();
  if (c->tensor.spec_ref() == target) return absl::OkStatus();
  const MeshDims dims = SumsOver(from, *target);
  const Item item = {c, target, context_.trace().module};
  if (dims.empty() || !from.in_mesh()) return RunAlone(item);
  const auto fits = [&](const Bucket& b) {
    return b.dims == dims && b.dtype == from.dtype() && b.mesh == from.mesh();
  };
  auto at = std::find_if(buckets_.begin(), buckets_.end(), fits);
  if (at == buckets_.end()) {
    DT_ASSIGN_OR_RETURN(Comm * comm, context_.CommFor(from.mesh(), dims));
    at = buckets_.insert(buckets_.end(),
                         Bucket{from.mesh(), dims, from.dtype(), comm, BucketBytes(*comm), {}, 0});
  }
  if (from.local_bytes() >= at->most) return RunAlone(item);
  at->items.push_back(item);
  at->bytes += from.local_bytes();
  return at->bytes < at->most ? absl::OkStatus() : Empty(&*at);
}

absl::Status Reducer::Flush() {
  for (Bucket& bucket : buckets_) DT_RETURN_IF_ERROR(Empty(&bucket));
  return absl::OkStatus();
}

absl::Status Reducer::Empty(Bucket* bucket) {
  const std::vector<Item> items = std::exchange(bucket->items, {});
  bucket->bytes = 0;
  if (items.empty()) return absl::OkStatus();
  return items.size() == 1 ? RunAlone(items[0]) : RunTogether(*bucket, items);
}

absl::Status Reducer::RunAlone(const Item& item) {
  TraceState& trace = RankContext::Current().trace();
  const ScopedModule scope(trace, item.module, trace.op.empty() ? "gradient" : trace.op);
  DT_ASSIGN_OR_RETURN(item.contribution->tensor,
                      RedistributeRecorded(item.contribution->tensor, item.target));
  item.contribution->owned = true;
  return absl::OkStatus();
}

absl::Status Reducer::RunTogether(const Bucket& bucket, const std::vector<Item>& items) {
  RankContext& context = RankContext::Current();
  const std::string* module = items[0].module;
  int64_t numel = 0;
  uint64_t hash = 0;
  for (const Item& item : items) {
    const Spec& spec = item.contribution->tensor.spec();
    numel += Numel(spec.local_shape());
    hash = HashMix(HashMix(hash, spec.hash()), item.target->hash());
    if (item.module != module) module = nullptr;
  }
  const ScopedModule scope(context.trace(), module, "gradient");
  const auto text = std::make_shared<const std::string>(
      absl::StrCat("the gradients of ", items.size(), " tensors"));
  const ScopedCallTag tag(&context.call_tag(), text, hash);
  const DeviceType device = RehearsedLocal(items[0].contribution->tensor.local()).device();
  DT_ASSIGN_OR_RETURN(const Tensor flat, Tensor::Empty({numel}, bucket.dtype, device));
  int64_t at = 0;
  for (const Item& item : items) {
    const Tensor& local = item.contribution->tensor.local();
    Copy(RehearsedLocal(local), PartOf(flat, at, local));
    at += local.numel();
  }
  DT_RETURN_IF_ERROR(bucket.comm->AllReduce(flat, flat, ReduceOp::kSum).Wait());
  at = 0;
  for (const Item& item : items) {
    Contribution& c = *item.contribution;
    Tensor local = RehearsedLocal(c.tensor.local());
    const Tensor sum = PartOf(flat, at, local);
    at += local.numel();
    if (!c.owned) {
      DT_ASSIGN_OR_RETURN(local, Tensor::Empty(sum.shape(), sum.dtype(), device));
    }
    Copy(sum, local);
    c.tensor = MakeDTensor(context, item.target, std::move(local));
    c.owned = true;
  }
  return absl::OkStatus();
}

}  // namespace dtensor::internal
