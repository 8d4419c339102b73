#include "dtensor/call_list.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "dtensor/call_workspace.h"
#include "dtensor/impl.h"
#include "dtensor/tensor/status.h"

namespace dtensor {

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
  const internal::KeptCalls calls = std::exchange(calls_, {});
  read_.Clear();
  written_.Clear();
  calls.Run();
}

void internal::KeptCalls::Run() const {
  std::vector<TensorRef> in_refs, out_refs;
  for (const Tensor& t : in) in_refs.push_back(t.ref());
  for (const Tensor& t : out) out_refs.push_back(t.ref());
  CallWorkspace workspace(device->memory());
  const DeviceCall call = {list.self, op->name().c_str(), static_cast<int>(attrs.size()),
                           device->error_word()};
  const Attr none;
  list.fn({in_refs,
           out_refs,
           attrs.empty() ? &none : attrs.data(),
           {},
           device->stream(),
           &workspace,
           &call});
  if (workspace.error().empty()) return;
  Throw(RankLocal(
      absl::InvalidArgumentError(absl::StrCat("[", op->name(), "] ", workspace.error()))));
}

}  // namespace dtensor
