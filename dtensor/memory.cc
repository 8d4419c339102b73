#include "dtensor/memory.h"

#include <algorithm>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "dtensor/impl.h"

namespace dtensor {
namespace {

using internal::Live;
using internal::Node;
using Held = MemoryReport::Held;

// Collects tensors, each block of memory once.
class Collector {
 public:
  explicit Collector(MemoryReport* report) : report_(report) {}

  void Add(Held by, int64_t* bytes, const DTensor& t, const std::string* module,
           absl::string_view op) {
    if (!t.defined() || !t.impl()->local.defined()) return;
    const Buffer& buffer = t.impl()->local.buffer();
    if (buffer.data() == nullptr) return;
    const int64_t own = t.impl()->local.nbytes();
    const auto [it, fresh] = seen_.try_emplace(buffer.data(), Seen{report_->largest.size(), own});
    if (!fresh) {  // of a tensor and its views the tensor is named
      MemoryReport::Item& item = report_->largest[it->second.item];
      if (item.by == by && own > it->second.bytes) {
        item.spec = t.impl()->spec->ToString();
        it->second.bytes = own;
      }
      return;
    }
    *bytes += buffer.bytes();
    report_->largest.push_back({by, module == nullptr ? "" : *module, std::string(op),
                                t.impl()->spec->ToString(), buffer.bytes()});
  }

 private:
  struct Seen {
    size_t item;    // in `largest`
    int64_t bytes;  // of the tensor that it names
  };
  MemoryReport* const report_;
  absl::flat_hash_map<const void*, Seen> seen_;
};

const char* Name(Held by) {
  switch (by) {
    case Held::kSaved:
      return "saved";
    case Held::kGradient:
      return "gradient";
    case Held::kMemo:
      return "memo";
    case Held::kNamed:
      return "module";
  }
  return "";
}

}  // namespace

MemoryReport DescribeMemory(size_t most) {
  MemoryReport report;
  report.stats = RankContext::Current().device_allocator()->stats();
  internal::EngineState& state = internal::State();
  Collector collector(&report);
  const auto nodes = [&](const auto& visit) {
    for (const Live* l = state.nodes.after; l != &state.nodes; l = l->after) {
      visit(static_cast<const Node&>(*l));
    }
  };
  nodes([&](const Node& node) {
    for (const auto* saved : {&node.saved_in, &node.saved_out}) {
      for (const internal::Saved& s : *saved) {
        collector.Add(Held::kSaved, &report.saved_bytes, s.tensor, node.module, node.Name());
      }
    }
  });
  nodes([&](const Node& node) {
    if (node.kind != Node::Kind::kLeaf) return;
    const internal::LeafState& leaf = node.extra->leaf;
    collector.Add(Held::kGradient, &report.gradient_bytes, leaf.grad, node.module, "gradient");
    for (const internal::Contribution& c : leaf.pending) {
      collector.Add(Held::kGradient, &report.gradient_bytes, c.tensor, node.module, "gradient");
    }
  });
  for (const Live* l = state.memos.after; l != &state.memos; l = l->after) {
    for (const internal::Memo& m : static_cast<const internal::Rare&>(*l).memo) {
      const Node* node = m.result.impl()->node.get();
      collector.Add(Held::kMemo, &report.memo_bytes, m.result,
                    node == nullptr ? nullptr : node->module, "redistribute");
    }
  }
  for (const Live* l = state.named.after; l != &state.named; l = l->after) {
    const auto& named = static_cast<const internal::NamedTensor&>(*l);
    const std::string name = named.name();
    collector.Add(Held::kNamed, &report.named_bytes, named.tensor(), &name, "parameter");
  }
  std::stable_sort(report.largest.begin(), report.largest.end(),
                   [](const auto& a, const auto& b) { return a.bytes > b.bytes; });
  if (report.largest.size() > most) {
    report.others = static_cast<int64_t>(report.largest.size() - most);
    report.largest.resize(most);
  }
  return report;
}

std::string MemoryReport::ToString() const {
  const int64_t rest = stats.in_use_bytes - saved_bytes - gradient_bytes - memo_bytes - named_bytes;
  std::string text =
      absl::StrCat("bytes in use ", stats.in_use_bytes, " (peak ", stats.peak_bytes, "), cached ",
                   cached_bytes(), "; saved for backward ", saved_bytes, ", gradients ",
                   gradient_bytes, ", memoised redistributions ", memo_bytes, ", other parameters ",
                   named_bytes, ", others ", rest, "\n");
  for (const Item& i : largest) {
    absl::StrAppendFormat(&text, "%16d  %-8s  %s  %s  %s\n", i.bytes, Name(i.by),
                          i.module.empty() ? "-" : i.module, i.op, i.spec);
  }
  if (others > 0) absl::StrAppend(&text, "  and ", others, " smaller ones\n");
  return text;
}

}  // namespace dtensor
