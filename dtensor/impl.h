// What DTensor handles and autograd edges point to. Internal to dtensor/.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/attributes.h"
#include "absl/container/inlined_vector.h"
#include "dtensor/autograd.h"
#include "dtensor/cache.h"
#include "dtensor/distributed_tensor.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/mesh/spec.h"
#include "dtensor/op.h"
#include "dtensor/redistribute.h"
#include "dtensor/tensor/memory_report.h"
#include "dtensor/tensor/tensor.h"

namespace dtensor::internal {

class CallWatcher;
class Node;
class RecomputeRegion;
struct RecomputeRun;
}  // namespace dtensor::internal
namespace dtensor {
class BackwardPass;
class CallList;
class InterceptCalls;
class Rehearsal;
}  // namespace dtensor
namespace dtensor::internal {

// Counted handle on a Node (not atomic: tapes belong to one rank).
class NodeRef {
 public:
  NodeRef() = default;
  explicit NodeRef(Node* node);  // takes over one reference
  NodeRef(const NodeRef& o);
  NodeRef(NodeRef&& o) noexcept : node_(std::exchange(o.node_, nullptr)) {}
  NodeRef& operator=(NodeRef o) noexcept {
    std::swap(node_, o.node_);
    return *this;
  }
  ~NodeRef();
  Node* get() const { return node_; }
  Node* operator->() const { return node_; }
  explicit operator bool() const { return node_ != nullptr; }

 private:
  Node* node_ = nullptr;
};

// A redistribution of one value, kept on it: dtensor/memo.h.
struct Memo {
  DTensor result;
  uint64_t source_version, result_version;
  bool recorded;      // made while recording: has a history if the source has one
  bool in_call;       // the module call that made it runs
  int64_t saved = 0;  // by how many nodes whose backward has not passed
};

// Member of a list of what lives on a rank, in a ring; leaves it by itself.
struct Live {
  Live *before = this, *after = this;
  Live() = default;
  Live(const Live&) = delete;
  ~Live() {
    before->after = after;
    after->before = before;
  }
  void InsertAfter(Live* o) {
    before = o;
    after = o->after;
    after->before = this;
    o->after = this;
  }
};

// A tensor that a higher layer has a name for, until this is destroyed: for reports of memory.
struct NamedTensor : Live {
  virtual ~NamedTensor() = default;
  virtual const DTensor& tensor() const = 0;  // null: none yet
  virtual std::string name() const = 0;
};

// What few tensors have.
struct Rare : Live {  // listed while it has memos
  // Of the one-device tensor that this one stands for, where it is not row-major: random ops fill
  // in its memory order.
  Strides memory_strides;
  ~Rare();
  std::vector<Memo> memo;
  DTensorImpl* memo_of = nullptr;        // this is the result of a memo of that tensor
  std::unique_ptr<PendingMove> pending;  // its result becomes `local` at the first read
  absl::Status failed;                   // of that read, for all later ones
  // Where the tensor was to be a view but is a copy, since what it views had to be moved first: the
  // memory it was to view, as it was then. Every reader asks whether it was changed since.
  Buffer copy_of;
  uint64_t copied_version = 0;
  uint64_t context_id = 0;  // while pending, and of such a copy
};

struct DTensorImpl : DTensorHead {
  DTensorImpl() = default;
  // A new tensor, in memory as its spec says; where that is null the rank has none of it.
  ABSL_ATTRIBUTE_ALWAYS_INLINE DTensorImpl(uint64_t id, const SpecRef& made, Buffer memory,
                                           DeviceType device)
      : DTensorHead{1, id, made},
        local(Tensor::RowMajor(), std::move(memory), made->local_shape(), made->local_strides(),
              made->dtype(), device) {}
  Tensor local;
  NodeRef node;  // producer, or the leaf's accumulator; null without history
  int slot = 0;  // which output of the producer
  bool requires_grad = false;
  bool is_view = false;       // shares memory with another DTensor
  bool detached = false;      // a view by Detach: on purpose without its base's history
  bool unrecorded = false;    // a view made under NoGrad of what had a history, or of such a view
  bool owned = false;         // a module's: its memos end with the call (dtensor/memo.h)
  uint64_t born_version = 0;  // of a view's buffer
  std::unique_ptr<Rare> rare;
};

DTensor MakeDTensor(RankContext& context, SpecRef spec, Tensor local);
inline Rare& RareOf(DTensorImpl& t) {
  if (!t.rare) t.rare = std::make_unique<Rare>();
  return *t.rare;
}
// Of the one-device tensor; empty: row-major. The same on every rank.
inline IntSpan MemoryStrides(const DTensorImpl& t) {
  if (t.rare && !t.rare->memory_strides.empty()) return t.rare->memory_strides;
  return t.spec->mesh().is_self() && t.local.defined() ? IntSpan(t.local.strides()) : IntSpan();
}
// For a result that is the same one-device tensor as `from`, moved or seen again.
inline void KeepMemoryStrides(const DTensorImpl& from, DTensorImpl* to) {
  if (!from.rare || from.rare->memory_strides.empty()) return;
  RareOf(*to).memory_strides = from.rare->memory_strides;
}
// What a public function works on where it is given `t`: itself, settled; in a rehearsal its twin.
//   Errors: InvalidArgument for a tensor of another rank or world, or of a rehearsal; those of
//   pending communication.
absl::StatusOr<const DTensor*> Entered(const DTensor& t);
// The same; throws "[function] ...", also for a null tensor.
const DTensor& HereSlowly(const DTensor& t, absl::string_view function);
inline const DTensor& Here(const DTensor& t, absl::string_view function) {
  const bool ours = t.defined() && t.impl()->context_id == RankContext::Current().id();
  return ours ? t : HereSlowly(t, function);
}
// Whether the tensor was made by the calling rank in this world. Settles it.
absl::Status CheckOwner(const DTensor& t);
absl::Status NotOurs(const DTensorImpl& t);  // the error that says so
// The id of the rank, or rehearsal, that made it.
inline uint64_t OriginOf(const DTensorImpl& t) {
  return t.context_id != 0 ? t.context_id : t.rare->context_id;
}
// Makes `t` a copy that was to be a view of `buffer` (Rare::copy_of).
void BecomeCopyOf(const Buffer& buffer, uint64_t version, DTensorImpl* t);
// For a result that shares the memory of `from`: what that was to view, it was to view.
inline void KeepCopyOf(const DTensorImpl& from, DTensorImpl* to) {
  if (!from.rare || !from.rare->copy_of) return;
  BecomeCopyOf(from.rare->copy_of, from.rare->copied_version, to);
}
// Waits for pending communication of the tensor. Errors: those of the redistribution;
// FailedPrecondition for a copy that was to be a view of what has been changed since.
absl::Status Settle(DTensorImpl& t);
// Whether a view still has the history that it was made with. Errors: FailedPrecondition.
absl::Status CheckFreshView(const DTensorImpl& t);
inline absl::Status CheckFresh(const DTensorImpl& t) {
  return !t.is_view || t.detached ? absl::OkStatus() : CheckFreshView(t);
}
// Whether writing to it in place would do what the program says. Its memos end.
absl::Status CheckWritable(DTensorImpl& t);

// Where a gradient goes: output `slot` of `node`. Null node: nowhere.
struct Edge {
  NodeRef node;
  int slot = 0;
};

struct Saved {
  DTensor tensor;
  uint64_t version = 0;
  // The memory whose version counts: of the input, where the tensor is a redistributed view of it
  // on some ranks and a copy on others, so that all find out alike that it was changed.
  Buffer watched = {};
  uint64_t current_version() const {
    return watched ? watched.version() : tensor.local().buffer().version();
  }
};

// A box of a tensor: where it starts and its steps, per dim. Empty: the whole tensor.
struct GradBox {
  Dims start, step;
  bool whole() const { return start.empty(); }
  friend bool operator==(const GradBox&, const GradBox&) = default;
};

// A term of a value's gradient, or of a box of it; in any placements.
struct Contribution {
  DTensor tensor;
  bool owned = false;  // nobody else holds it: may be added to in place
  GradBox box = {};
};
using Contributions = absl::InlinedVector<Contribution, 2>;

// Gradients that reached a leaf: those already in its placement (grad), and those as they came.
struct LeafState {
  DTensor grad;
  Contributions pending;
};

// One recorded step. Its `seq` grows, so a node's consumers have larger ones.
class Node : public Live {
 public:
  enum class Kind : uint8_t { kOp, kRedistribute, kToLocal, kFromLocal, kCustom, kLeaf };

  int64_t refs = 1;
  uint64_t seq = 0;
  Kind kind = Kind::kOp;
  bool released = false;  // a backward has passed: saved values are gone
  // A leaf of a rehearsal where the run has a history: Backward ends here.
  bool stands_in = false;
  // Bit m: a reader of the output shards over mesh dim m what the output does not have, so the
  // gradient will come as a sum that is pending there.
  uint32_t pends = 0;
  const OpDef* op = nullptr;
  const std::string* module = nullptr;  // that ran when this was recorded (TraceState::module)
  absl::InlinedVector<Edge, 3> edges;   // per input
  absl::InlinedVector<SpecRef, 3> in_specs;
  absl::InlinedVector<SpecRef, 2> out_specs;
  absl::InlinedVector<Saved, 3> saved_in, saved_out;  // by index where kept, else null
  Attrs attrs;

  struct Extra {
    std::string name;
    CustomBackward custom;
    std::vector<int64_t> ints;  // storage of attrs
    bool passes_sums = false;   // of a custom function: see CustomFunction
    Placements grad_placements;
    LeafState leaf;
    SpecRef grad_spec;  // of a leaf whose gradient is not kept as the leaf is (SetGradLayout)
    std::shared_ptr<RecomputeRegion> region;  // that gives back what was not saved
    size_t step = 0;                          // of the region
    ~Extra();
  };
  std::unique_ptr<Extra> extra;

  absl::string_view Name() const;
  VjpCall MakeCall(Values grads) const { return VjpCall(*this, std::move(grads)); }
};

// Mesh dims over which no gradient moves for a leaf's sake.
struct GradSyncHold {
  bool all = false;
  std::vector<std::string> names;
  bool any() const { return all || !names.empty(); }
  bool Holds(const DeviceMesh& mesh, int mesh_dim) const;
};

class MemoScope;

// Per-rank engine state.
struct EngineState {
  Live nodes, memos, named;  // Node, Rare and NamedTensor
  bool grad_enabled = true, strict = false, implicit_replication = false;
  GradSyncHold hold;                            // of the NoGradSync scopes that are open
  int64_t bucket_bytes = 0;                     // GradientBuckets; 0: by the cost model
  Rehearsal* rehearsal = nullptr;               // the innermost that is open
  CallWatcher* watcher = nullptr;               // the innermost: a rehearsal, or WatchCalls
  const InterceptCalls* interceptor = nullptr;  // the innermost
  CallList* call_list = nullptr;                // the innermost
  uint64_t next_seq = 1;
  DispatchCache cache;
  BackwardPass* backward = nullptr;   // the innermost one that runs
  MemoScope* memo_scope = nullptr;    // of the innermost module call
  RecomputeRun* recompute = nullptr;  // the innermost call of Recompute that runs
  ScopedMemoryReport memory_report;
  EngineState();
};
inline EngineState& State() { return RankContext::Current().Slot<EngineState>(); }
// DTensorImpl::unrecorded of a view of `base` that is made now.
inline bool StaysUnrecorded(const DTensorImpl& base, const EngineState& state) {
  return base.unrecorded || (base.requires_grad && !state.grad_enabled);
}
absl::Status ViewIsUnrecorded();  // the error of writing to one while recording

NodeRef NewNode(Node::Kind kind);
// Null unless t requires a gradient.
inline Edge EdgeOf(const DTensor& t) {
  if (!t.defined() || !t.impl()->requires_grad) return {};
  return {t.impl()->node, t.impl()->slot};
}
// Makes `t` output `slot` of `node`.
void SetHistory(const DTensor& t, const NodeRef& node, int slot);
// Sets Node::pends of the producers of a node's inputs.
void MarkPending(absl::Span<const uint32_t> inputs_pend, Node* node);
void KeepAttrs(absl::Span<const Attr> attrs, Node* node);

// Redistributes, recording. `implicit`: inserted by dispatch, so shared, and refused in strict
// mode. To where t is: t itself, or a copy if it is async or `own` memory is asked for.
absl::StatusOr<DTensor> RedistributeRecorded(const DTensor& t, const SpecRef& target,
                                             RedistributeOptions options = {},
                                             bool implicit = false, bool own = false);

// The placements a gradient of a value with `spec` has: Partial becomes Replicate.
absl::StatusOr<SpecRef> GradientSpec(const Spec& spec);

inline NodeRef::NodeRef(Node* node) : node_(node) {}
inline NodeRef::NodeRef(const NodeRef& o) : node_(o.node_) {
  if (node_) ++node_->refs;
}
void DeleteNode(Node* node);
inline NodeRef::~NodeRef() {
  if (node_ && --node_->refs == 0) DeleteNode(node_);
}

// Free lists of the engine's fixed-size objects, per thread: any thread may free what another made.
template <class T>
class Pool {
 public:
  template <class... A>
  ABSL_ATTRIBUTE_ALWAYS_INLINE static T* New(A&&... args) {
    FreeList& list = list_;
    void* memory;
    if (list.head != nullptr) {
      memory = list.head;
      list.head = *static_cast<void**>(memory);
      ++list.room;
    } else {
      memory = ::operator new(sizeof(T));
    }
    // Without parentheses where there are no arguments: they would fill it with zeros first.
    if constexpr (sizeof...(A) == 0) {
      return new (memory) T;
    } else {
      return new (memory) T(std::forward<A>(args)...);
    }
  }
  static void Delete(T* object) {
    object->~T();
    if (list_.room <= 0 && !MakeRoom()) {
      ::operator delete(object);
      return;
    }
    *reinterpret_cast<void**>(object) = list_.head;
    list_.head = object;
    --list_.room;
  }

 private:
  // Known without a constructor, so that no call asks whether it ran. The first that is freed in a
  // thread makes room, and who empties the list when the thread ends.
  struct FreeList {
    void* head = nullptr;
    int64_t room = 0;
    bool opened = false;
  };
  struct Closer {
    ~Closer() {
      list_.room = 0;
      while (list_.head != nullptr) {
        void* const next = *static_cast<void**>(list_.head);
        ::operator delete(list_.head);
        list_.head = next;
      }
    }
  };
  [[gnu::noinline]] static bool MakeRoom() {
    constexpr int64_t kMost = 4096;
    if (list_.opened) return false;  // full, or the thread ends
    static thread_local Closer closer;
    (void)closer;
    list_ = {.head = nullptr, .room = kMost, .opened = true};
    return true;
  }
  static constinit inline thread_local FreeList list_ = {};
};

}  // namespace dtensor::internal
