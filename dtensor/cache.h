// The dispatch cache of a rank: (op, interned specs, attributes the rule read) -> what to do.
// Bounded: when full, all entries go (counted), since refilling costs microseconds each.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/base/attributes.h"
#include "absl/container/inlined_vector.h"
#include "dtensor/dispatch.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/op.h"

namespace dtensor::internal {

// What to do for one cache key. Pins the specs of the key.
struct DispatchEntry {
  uint64_t hash = 0;
  absl::InlinedVector<SpecRef, 3> inputs;
  SpecRef like;
  Attrs attrs;  // those the rule read; kNone elsewhere
  std::vector<int64_t> attr_ints;

  bool decompose = false;                   // cheaper as other ops
  bool moves = false;                       // some target is set
  bool stretch = false;                     // pointwise kernel whose inputs differ in local shape
  bool any_input = false;                   // each call takes its local inputs as they are
  bool plain = false;                       // inputs as they are, to new outputs, by a kernel
  RankDevice* device = nullptr;             // whose stream the kernel is queued on; null: inline
  DeviceCall device_call;                   // what its kernel gets
  mutable DeviceLaunch launch;              // what its kernel left for further calls
  Kernel kernel;                            // null for views and where this rank holds no data
  Kernel list;                              // the device's for many calls at once (CallList); null
  absl::InlinedVector<SpecRef, 3> targets;  // per input; null = as it is
  absl::InlinedVector<SpecRef, 2> outs;
  absl::InlinedVector<FactorRange, 2> offsets;
  // Per input, bit m: an output is cut over mesh dim m where the input is not, so its gradient
  // comes as a pending sum (Node::pends).
  absl::InlinedVector<uint32_t, 3> inputs_pend;
  bool pends = false;  // some bit is set
  double cost_bytes = 0;
  // Where inputs move: what their collectives are for (CallTag).
  SharedText call_text;
  uint64_t call_hash = 0;
};

class DispatchCache {
 public:
  // Null on a miss. Most calls of an op repeat its last one's key.
  ABSL_ATTRIBUTE_ALWAYS_INLINE const DispatchEntry* Find(const OpDef& op, Inputs inputs,
                                                         absl::Span<const Attr> attrs,
                                                         const Spec* like) {
    Table* const at = tables_.data() + op.id();
    if (at >= std::to_address(tables_.end()) || at->last == nullptr) return nullptr;
    if (attrs.size() != op.attr_names().size()) return nullptr;  // refused by FindOrPlan
    Table& table = *at;
    if (!Matches(*table.last, inputs, attrs, table.attrs_read, like)) {
      if (!FindInTable(&table, inputs, attrs, like)) return nullptr;
    }
    ++stats.hits;
    return table.last;
  }
  // Plans on a miss. Inputs are on one mesh.
  absl::StatusOr<const DispatchEntry*> FindOrPlan(RankContext& context, const OpDef& op,
                                                  Inputs inputs, absl::Span<const Attr> attrs,
                                                  const Spec* like);
  void Clear();
  // While one lives what is dropped stays: a decomposed op reads its entry after others have run.
  class Hold {
   public:
    explicit Hold(DispatchCache& cache) : cache_(cache) { ++cache_.holds_; }
    ~Hold() {
      if (--cache_.holds_ == 0) cache_.dropped_.clear();
    }
    Hold(const Hold&) = delete;

   private:
    DispatchCache& cache_;
  };
  int64_t entries() const { return entries_; }
  DispatchStats stats;

 private:
  static constexpr int64_t kMaxEntries = 16384;
  // Open addressing; capacity a power of two.
  struct Table {
    uint32_t attrs_read = 0;              // union over this op's entries
    const DispatchEntry* last = nullptr;  // that was found or inserted; null: there are none
    std::vector<std::unique_ptr<DispatchEntry>> slots;
    int64_t used = 0;
  };
  ABSL_ATTRIBUTE_ALWAYS_INLINE static bool Matches(const DispatchEntry& e, Inputs inputs,
                                                   absl::Span<const Attr> attrs, uint32_t read,
                                                   const Spec* like) {
    if (e.inputs.size() != inputs.size() || e.like.get() != like) return false;
    const SpecRef* const specs = e.inputs.data();
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (specs[i].get() != Head(inputs[i]->impl())->spec.get()) return false;
    }
    return read == 0 || SameAttrs(e.attrs, attrs, read);
  }
  static bool SameAttrs(absl::Span<const Attr> a, absl::Span<const Attr> b, uint32_t read);
  bool FindInTable(Table* table, Inputs inputs, absl::Span<const Attr> attrs, const Spec* like);
  void Insert(Table* table, std::unique_ptr<DispatchEntry> entry);
  void Drop(Table* table);
  std::vector<Table> tables_;                            // by op id
  std::vector<std::unique_ptr<DispatchEntry>> dropped_;  // while holds_
  int64_t entries_ = 0, holds_ = 0;
};

}  // namespace dtensor::internal
