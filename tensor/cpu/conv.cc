#include "dtensor/tensor/cpu/conv.h"

#include <array>
#include <memory>
#include <unordered_map>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "dtensor/tensor/cpu/gemm.h"
#include "dtensor/tensor/cpu/onednn.h"
#include "dtensor/tensor/kernel.h"

namespace dtensor {
namespace {

using dnnl::memory;

// An operand as it comes and as the primitive wants it.
struct Side {
  memory::desc plain, wanted;
  dnnl::reorder reorder;  // from the one to the other, or, of a result, back; none where equal
  bool same() const { return plain == wanted; }
};

// What is prepared for one shape.
struct Prepared {
  dnnl::primitive primitive;
  Side x, w, y;
  memory::desc bias, scratchpad;
};

memory::dims DimsOf(const ConvCall& c, const int64_t (&all)[3], int64_t minus = 0) {
  memory::dims dims;
  for (int d = 3 - c.dims; d < 3; ++d) dims.push_back(all[d] - minus);
  return dims;
}

memory::desc Plain(memory::dims sizes) {
  memory::dims strides(sizes.size(), 1);
  for (size_t d = sizes.size() - 1; d-- > 0;) strides[d] = strides[d + 1] * sizes[d + 1];
  return {sizes, memory::data_type::f32, strides};
}

memory::desc Any(const memory::desc& plain) {
  return {plain.dims(), memory::data_type::f32, memory::format_tag::any};
}

// The convolution as oneDNN describes it.
struct Description {
  memory::desc x, w, y, b;
  memory::dims stride, dilation, before, behind;
};

Description Describe(const ConvCall& c) {
  const auto with = [&](memory::dims first, const int64_t(&spatial)[3]) {
    const memory::dims more = DimsOf(c, spatial);
    first.insert(first.end(), more.begin(), more.end());
    return Plain(first);
  };
  Description d;
  d.x = with({c.n, c.groups * c.c}, c.in);
  d.w = c.groups == 1 ? with({c.o, c.c}, c.kernel) : with({c.groups, c.o, c.c}, c.kernel);
  d.y = with({c.n, c.groups * c.o}, c.out);
  if (c.b != nullptr) d.b = Plain({c.groups * c.o});
  d.stride = DimsOf(c, c.stride);
  d.dilation = DimsOf(c, c.dilation, 1);
  d.before = DimsOf(c, c.before);
  for (int k = 3 - c.dims; k < 3; ++k) {
    d.behind.push_back((c.out[k] - 1) * c.stride[k] + (c.kernel[k] - 1) * c.dilation[k] + 1 -
                       c.in[k] - c.before[k]);
  }
  return d;
}

dnnl::primitive_attr Attributes() {
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  return attributes;
}

dnnl::convolution_forward::primitive_desc Forward(const Description& d, dnnl::prop_kind kind) {
  using Conv = dnnl::convolution_forward;
  const dnnl::algorithm direct = dnnl::algorithm::convolution_direct;
  const memory::desc x = Any(d.x), w = Any(d.w), y = Any(d.y);
  const Conv::desc desc =
      d.b.is_zero()
          ? Conv::desc(kind, direct, x, w, y, d.stride, d.dilation, d.before, d.behind)
          : Conv::desc(kind, direct, x, w, d.b, y, d.stride, d.dilation, d.before, d.behind);
  return {desc, Attributes(), OneDnnEngine()};
}

// `result`: the side that is computed.
void SetReorders(Prepared* p, const Side* result) {
  for (Side* side : {&p->x, &p->w, &p->y}) {
    if (side->same()) continue;
    const bool back = side == result;
    side->reorder = dnnl::reorder(
        dnnl::reorder::primitive_desc(OneDnnEngine(), back ? side->wanted : side->plain,
                                      OneDnnEngine(), back ? side->plain : side->wanted));
  }
}

template <class Desc>
void SetSides(const Description& d, const Desc& pd, const memory::desc& x, const memory::desc& w,
              const memory::desc& y, Prepared* p) {
  p->x = {d.x, x, {}};
  p->w = {d.w, w, {}};
  p->y = {d.y, y, {}};
  p->bias = d.b;
  p->scratchpad = pd.scratchpad_desc();
}

Prepared Prepare(const ConvCall& c) {
  const Description d = Describe(c);
  const dnnl::algorithm direct = dnnl::algorithm::convolution_direct;
  Prepared p;
  if (c.make == ConvCall::Make::kY) {
    const auto pd = Forward(d, dnnl::prop_kind::forward_inference);
    SetSides(d, pd, pd.src_desc(), pd.weights_desc(), pd.dst_desc(), &p);
    p.primitive = dnnl::convolution_forward(pd);
    SetReorders(&p, &p.y);
    return p;
  }
  const auto hint = Forward(d, dnnl::prop_kind::forward_training);
  if (c.make == ConvCall::Make::kX) {
    using Conv = dnnl::convolution_backward_data;
    const Conv::primitive_desc pd(
        Conv::desc(direct, Any(d.x), Any(d.w), Any(d.y), d.stride, d.dilation, d.before, d.behind),
        Attributes(), OneDnnEngine(), hint);
    SetSides(d, pd, pd.diff_src_desc(), pd.weights_desc(), pd.diff_dst_desc(), &p);
    p.primitive = Conv(pd);
    SetReorders(&p, &p.x);
    return p;
  }
  using Conv = dnnl::convolution_backward_weights;
  const Conv::primitive_desc pd(
      Conv::desc(direct, Any(d.x), Any(d.w), Any(d.y), d.stride, d.dilation, d.before, d.behind),
      Attributes(), OneDnnEngine(), hint);
  SetSides(d, pd, pd.src_desc(), pd.diff_weights_desc(), pd.diff_dst_desc(), &p);
  p.primitive = Conv(pd);
  SetReorders(&p, &p.w);
  return p;
}

// Null where oneDNN refuses. The same for every call of the shape.
const Prepared* PreparedFor(const ConvCall& c) {
  using Key = std::array<int64_t, 7 + 18>;
  static thread_local absl::flat_hash_map<Key, std::unique_ptr<Prepared>> cache;
  Key key = {static_cast<int64_t>(c.make), c.dims, c.n, c.groups, c.c, c.o, c.b != nullptr};
  auto* at = key.data() + 7;
  for (const auto* numbers : {&c.in, &c.out, &c.kernel, &c.stride, &c.dilation, &c.before}) {
    for (const int64_t n : *numbers) *at++ = n;
  }
  const auto found = cache.find(key);
  if (found != cache.end()) return found->second.get();
  if (cache.size() >= 512) cache.clear();
  std::unique_ptr<Prepared> prepared;
  try {
    prepared = std::make_unique<Prepared>(Prepare(c));
  } catch (const dnnl::error&) {
  }
  return (cache[key] = std::move(prepared)).get();
}

class Run {
 public:
  Run(const ConvCall& call, const Prepared& prepared) : call_(call), p_(prepared) {}

  void Execute() {
    using Make = ConvCall::Make;
    const bool x = call_.make == Make::kX, w = call_.make == Make::kW, y = call_.make == Make::kY;
    std::unordered_map<int, memory> args = {
        {x ? DNNL_ARG_DIFF_SRC : DNNL_ARG_SRC, Wanted(p_.x, call_.x, x)},
        {w ? DNNL_ARG_DIFF_WEIGHTS : DNNL_ARG_WEIGHTS, Wanted(p_.w, call_.w, w)},
        {y ? DNNL_ARG_DST : DNNL_ARG_DIFF_DST, Wanted(p_.y, call_.y, y)}};
    if (y && call_.b != nullptr) {
      args.emplace(DNNL_ARG_BIAS, memory(p_.bias, OneDnnEngine(), const_cast<float*>(call_.b)));
    }
    if (p_.scratchpad.get_size() > 0) args.emplace(DNNL_ARG_SCRATCHPAD, Scratch(p_.scratchpad));
    p_.primitive.execute(stream_, args);
    if (result_ != nullptr) result_->reorder.execute(stream_, made_, plain_);
    stream_.wait();
  }

 private:
  memory Scratch(const memory::desc& desc) {
    return {desc, OneDnnEngine(), call_.workspace->Allocate(static_cast<int64_t>(desc.get_size()))};
  }

  memory Wanted(const Side& side, float* data, bool result) {
    const memory plain(side.plain, OneDnnEngine(), data);
    if (side.same()) return plain;
    memory wanted = Scratch(side.wanted);
    if (result) {
      result_ = &side;
      made_ = wanted;
      plain_ = plain;
    } else {
      memory from = plain;
      side.reorder.execute(stream_, from, wanted);
    }
    return wanted;
  }

  const ConvCall& call_;
  const Prepared& p_;
  dnnl::stream stream_{OneDnnEngine()};
  const Side* result_ = nullptr;  // what is still to be reordered
  memory made_, plain_;
};

}  // namespace

bool ConvF32(const ConvCall& call) {
  SetUpMathLibraries();
  const Prepared* prepared = PreparedFor(call);
  if (prepared == nullptr) return false;
  Run(call, *prepared).Execute();
  return true;
}

}  // namespace dtensor
