// Calls of which the plan holds the launch on a device take a path of their own, as a small
// op there is what its host does.
#include "dtensor/cache.h"
#include "dtensor/dispatch.h"
#include "dtensor/impl.h"
#include "dtensor/tensor/rank_state.h"

namespace dtensor {
namespace {

using internal::DispatchEntry;
using internal::DTensorImpl;
using internal::EngineState;

// Whether any of these is there.
bool AnyOf(const void* a, const void* b, const void* c = nullptr) {
  return (reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b) |
          reinterpret_cast<uintptr_t>(c)) != 0;
}

// A call of which the plan holds the launch (DeviceLaunch), and which has nothing else to do. Null,
// with nothing done, where it has to go the ordinary way: it is recorded or watched, an input is no
// row-major run or begins between two vectors, or no memory is at hand.
[[gnu::always_inline]] inline DTensorImpl* LaunchAgain(const RankState& rank, const OpDef& op,
                                                       Inputs inputs, absl::Span<const Attr> attrs,
                                                       const Spec* like) {
  constexpr size_t kMost = 4;
  constexpr uintptr_t kVector = 16;
  RankContext* const context = rank.context;
  if (context == nullptr || AnyOf(rank.timeline, rank.capture)) [[unlikely]]
    return nullptr;
  const uint64_t id = context->id();
  EngineState& state = context->Slot<EngineState>();
  if (AnyOf(state.interceptor, state.watcher, state.call_list)) [[unlikely]]
    return nullptr;
  if (inputs.empty() || inputs.size() > kMost) [[unlikely]]
    return nullptr;
  const Tensor* in[kMost];
  uintptr_t addresses = 0;
  bool runs = true, histories_matter = false;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const DTensorImpl* const impl = inputs[i]->impl();
    if (impl == nullptr || impl->context_id != id) [[unlikely]]
      return nullptr;
    in[i] = &impl->local;
    addresses |= reinterpret_cast<uintptr_t>(impl->local.data());
    runs &= impl->local.made_row_major();
    histories_matter |= impl->requires_grad | impl->is_view;
  }
  // In a rehearsal there is no memory.
  if (addresses % kVector != 0 || !runs || in[0]->data() == nullptr) [[unlikely]]
    return nullptr;
  if (histories_matter && state.grad_enabled) return nullptr;
  const DispatchEntry* const entry = state.cache.Find(op, inputs, attrs, like);
  if (entry == nullptr) [[unlikely]]
    return nullptr;
  if (entry->launch.run == nullptr) {
    --state.cache.stats.hits;  // the ordinary way counts it
    return nullptr;
  }
  DeviceLaunch& launch = entry->launch;
  const SpecRef& spec = *entry->outs.data();
  Buffer memory = Buffer::AtHand(entry->device->memory(), spec->local_bytes());
  if (!memory) [[unlikely]] {
    --state.cache.stats.hits;
    return nullptr;
  }
  void** const arguments = launch.addresses;
  arguments[0] = memory.data();
  for (size_t i = 0; i < inputs.size(); ++i) arguments[1 + i] = in[i]->data();
  launch.run(launch, attrs.data(), entry->device->stream());
  ++state.cache.stats.kept_launches;
  return internal::Pool<DTensorImpl>::New(id, spec, std::move(memory), in[0]->device());
}

}  // namespace

DTensor internal::CallOrLaunchAgain(const OpDef& op, Inputs inputs, absl::Span<const Attr> attrs,
                                    const DispatchOptions& options) {
  const RankState& rank = *RankState::IfAny();
  DTensorImpl* output;
  if (inputs.size() == 2) [[likely]] {
    output = LaunchAgain(rank, op, {inputs.data(), 2}, attrs, options.like);
  } else {
    output = LaunchAgain(rank, op, inputs, attrs, options.like);
  }
  if (output != nullptr) [[likely]]
    return DTensor::Adopt(output);
  return CallInGeneral(op, inputs, attrs, options);
}

}  // namespace dtensor
