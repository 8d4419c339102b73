#include "dtensor/call_list.h"

#include <algorithm>
#include <iterator>
#include <memory>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "dtensor/call_workspace.h"
#include "dtensor/impl.h"
#include "dtensor/tensor/status.h"

namespace dtensor {

bool HasChangingNumbers(const OpDef& op) {
  const std::vector<std::string>& names = op.attr_names();
  return std::any_of(names.begin(), names.end(),
                     [](const std::string& n) { return n == "lr" || n == "step"; });
}

std::string ListKernelName(absl::string_view op) { return absl::StrCat(op, "[]"); }

namespace internal {
namespace {

std::pair<const char*, const char*> RangeOf(const Tensor& t) {
  const char* begin = static_cast<const char*>(t.data());
  const char* last = begin;
  for (int d = 0; d < t.ndim(); ++d) {
    if (t.size(d) == 0) return {begin, begin};
    const int64_t reach = (t.size(d) - 1) * t.strides()[d] * SizeOf(t.dtype());
    (reach < 0 ? begin : last) += reach;
  }
  return {begin, last + SizeOf(t.dtype())};
}

}  // namespace

void AddressRanges::Add(const Tensor& t) {
  auto [begin, end] = RangeOf(t);
  if (begin == end) return;
  auto at = ranges_.upper_bound(begin);
  if (at != ranges_.begin() && std::prev(at)->second >= begin) --at;
  while (at != ranges_.end() && at->first <= end) {
    begin = std::min(begin, at->first);
    end = std::max(end, at->second);
    at = ranges_.erase(at);
  }
  ranges_.emplace(begin, end);
}

bool AddressRanges::Meets(const Tensor& t) const {
  const auto [begin, end] = RangeOf(t);
  const auto after = ranges_.lower_bound(end);  // the first that begins behind it
  return begin != end && after != ranges_.begin() && std::prev(after)->second > begin;
}

}  // namespace internal

CallList::CallList() : state_(internal::State()), outer_(state_.call_list) {
  if (outer_ != nullptr) outer_->Run();
  state_.call_list = this;
}

CallList::~CallList() {
  state_.call_list = outer_;
  try {
    Run();
  } catch (const Error&) {
    // An error is on its way already, or the device tells of it where the host waits.
  }
}

void CallList::Keep(const OpDef& op, const Kernel& list, RankDevice& device, std::vector<Tensor> in,
                    std::vector<Tensor> out, absl::Span<const Attr> attrs) {
  const auto any = [](const internal::AddressRanges& ranges, const std::vector<Tensor>& tensors) {
    return std::any_of(tensors.begin(), tensors.end(),
                       [&](const Tensor& t) { return ranges.Meets(t); });
  };
  if (calls_.op != &op || any(written_, in) || any(written_, out) || any(read_, out)) Run();
  calls_.op = &op;
  calls_.list = list;
  calls_.device = &device;
  for (const Tensor& t : in) read_.Add(t);
  for (const Tensor& t : out) written_.Add(t);
  const auto append = [](std::vector<Tensor> more, std::vector<Tensor>* to) {
    to->insert(to->end(), std::move_iterator(more.begin()), std::move_iterator(more.end()));
  };
  append(std::move(in), &calls_.in);
  append(std::move(out), &calls_.out);
  calls_.attrs.insert(calls_.attrs.end(), attrs.begin(), attrs.end());
}

void CallList::Run() {
  if (calls_.op == nullptr) return;
  const auto calls = std::make_shared<internal::KeptCalls>(std::exchange(calls_, {}));
  read_.Clear();
  written_.Clear();
  DeviceGraph* const graph = DeviceGraph::Current();
  if (graph == nullptr || !HasChangingNumbers(*calls->op)) return calls->Run(calls->attrs);
  for (size_t i = 0; i < calls->attrs.size(); ++i) {
    if (calls->AttrName(i) != "lr" || calls->attrs[i].d == graph->start().lr) continue;
    ThrowIfError(DeviceGraph::Allows(
        absl::StrCat(calls->op->name(), " has the learning rate ", calls->attrs[i].d,
                     ", the optimizer whose step is captured ", graph->start().lr)));
  }
  graph->AddNumbers(graph->numbers()->used,
                    [calls](const DeviceGraph::Change& change, NumberBlock* block) {
                      calls->Run(calls->Changed(change), block);
                    });
  calls->Run(calls->attrs, graph->numbers());
}

namespace internal {

absl::string_view KeptCalls::AttrName(size_t i) const {
  return op->attr_names()[i % op->attr_names().size()];
}

std::vector<Attr> KeptCalls::Changed(const DeviceGraph::Change& change) const {
  std::vector<Attr> now = attrs;
  for (size_t i = 0; i < now.size(); ++i) {
    if (AttrName(i) == "lr") now[i] = FloatAttr(change.lr);
    if (AttrName(i) == "step") now[i] = IntAttr(attrs[i].i + change.steps);
  }
  return now;
}

void KeptCalls::Run(const std::vector<Attr>& with, NumberBlock* numbers) const {
  std::vector<TensorRef> in_refs, out_refs;
  for (const Tensor& t : in) in_refs.push_back(t.ref());
  for (const Tensor& t : out) out_refs.push_back(t.ref());
  CallWorkspace workspace(device);
  const DeviceCall call = {list.self, op->name().c_str(), static_cast<int>(with.size()),
                           device->error_word()};
  const Attr none;
  if (numbers != nullptr) device->table().numbers(numbers);
  const absl::Cleanup back = [&] {
    if (numbers != nullptr) device->table().numbers(nullptr);
  };
  list.fn({in_refs,
           out_refs,
           with.empty() ? &none : with.data(),
           {},
           device->stream(),
           &workspace,
           &call});
  if (workspace.error().empty()) return;
  Throw(RankLocal(
      absl::InvalidArgumentError(absl::StrCat("[", op->name(), "] ", workspace.error()))));
}

}  // namespace internal

}  // namespace dtensor
