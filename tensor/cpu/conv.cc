#include "dtensor/tensor/cpu/conv.h"

#include <algorithm>
#include <array>
#include <memory>
#include <unordered_map>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "dtensor/tensor/cpu/gemm.h"
#include "dtensor/tensor/cpu/kernels/runs.h"
#include "dtensor/tensor/cpu/onednn.h"
#include "dtensor/tensor/kernel.h"

namespace dtensor {
namespace {

using dnnl::memory;

// An operand as it comes and as the primitive wants it.
struct Side {
  memory::desc plain, wanted;
  bool channels_last;     // wanted so, which CopyPlane does faster than oneDNN
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

// The same numbers, each pixel's channels beside each other.
memory::desc ChannelsLast(const memory::dims& sizes) {
  memory::dims strides(sizes.size(), sizes[1]);
  strides[1] = 1;
  for (size_t d = sizes.size() - 1; d-- > 2;) strides[d] = strides[d + 1] * sizes[d + 1];
  strides[0] = strides[2] * sizes[2];
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
    if (side->same() || side->channels_last) continue;
    const bool back = side == result;
    side->reorder = dnnl::reorder(
        dnnl::reorder::primitive_desc(OneDnnEngine(), back ? side->wanted : side->plain,
                                      OneDnnEngine(), back ? side->plain : side->wanted));
  }
}

template <class Desc>
void SetSides(const Description& d, const Desc& pd, const memory::desc& x, const memory::desc& w,
              const memory::desc& y, Prepared* p) {
  p->x = {d.x, x, x == ChannelsLast(d.x.dims()), {}};
  p->w = {d.w, w, false, {}};
  p->y = {d.y, y, y == ChannelsLast(d.y.dims()), {}};
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
std::shared_ptr<const Prepared> PreparedFor(const ConvCall& c) {
  using Key = std::array<int64_t, 7 + 18>;
  static thread_local absl::flat_hash_map<Key, std::shared_ptr<const Prepared>> cache;
  Key key = {static_cast<int64_t>(c.make), c.dims, c.n, c.groups, c.c, c.o, c.b != nullptr};
  auto* at = key.data() + 7;
  for (const auto* numbers : {&c.in, &c.out, &c.kernel, &c.stride, &c.dilation, &c.before}) {
    for (const int64_t n : *numbers) *at++ = n;
  }
  const auto found = cache.find(key);
  if (found != cache.end()) return found->second;
  if (cache.size() >= 512) cache.clear();
  std::shared_ptr<const Prepared> prepared;
  try {
    prepared = std::make_shared<const Prepared>(Prepare(c));
  } catch (const dnnl::error&) {
  }
  return cache[key] = std::move(prepared);
}

// Calls of one shape, which share the memory for what is reordered.
class Runs {
 public:
  Runs(const ConvCall& call, const Prepared& prepared)
      : call_(call), p_(prepared), x_(Room(p_.x)), w_(Room(p_.w)), y_(Room(p_.y)) {
    if (p_.scratchpad.get_size() > 0) args_.emplace(DNNL_ARG_SCRATCHPAD, Scratch(p_.scratchpad));
    const bool y = call.make == ConvCall::Make::kY, w = call.make == ConvCall::Make::kW;
    if (y && call.b != nullptr) {
      args_.emplace(DNNL_ARG_BIAS, memory(p_.bias, OneDnnEngine(), const_cast<float*>(call.b)));
    }
    args_.emplace(w ? DNNL_ARG_DIFF_WEIGHTS : DNNL_ARG_WEIGHTS, Given(p_.w, call.w, w_, w));
  }

  void Execute(float* x, float* y) {
    using Make = ConvCall::Make;
    const Make make = call_.make;
    args_.insert_or_assign(make == Make::kX ? DNNL_ARG_DIFF_SRC : DNNL_ARG_SRC,
                           Given(p_.x, x, x_, make == Make::kX));
    args_.insert_or_assign(make == Make::kY ? DNNL_ARG_DST : DNNL_ARG_DIFF_DST,
                           Given(p_.y, y, y_, make == Make::kY));
    p_.primitive.execute(stream_, args_);
    if (make == Make::kX) TakeBack(p_.x, x_, x);
    if (make == Make::kW) TakeBack(p_.w, w_, call_.w);
    if (make == Make::kY) TakeBack(p_.y, y_, y);
    stream_.wait();
  }

 private:
  memory Scratch(const memory::desc& desc) {
    return {desc, OneDnnEngine(), call_.workspace->Allocate(static_cast<int64_t>(desc.get_size()))};
  }
  memory Room(const Side& side) { return side.same() ? memory() : Scratch(side.wanted); }

  memory Given(const Side& side, float* data, memory room, bool result) {
    memory plain(side.plain, OneDnnEngine(), data);
    if (side.same()) return plain;
    if (!result && side.channels_last) {
      SwapChannels(side, data, static_cast<float*>(room.get_data_handle()), true);
    } else if (!result) {
      side.reorder.execute(stream_, plain, room);
    }
    return room;
  }
  void TakeBack(const Side& side, memory room, float* data) {
    if (side.same()) return;
    if (side.channels_last) {
      SwapChannels(side, static_cast<const float*>(room.get_data_handle()), data, false);
      return;
    }
    memory plain(side.plain, OneDnnEngine(), data);
    side.reorder.execute(stream_, room, plain);
  }
  // Channels become the last dim, or the second one again.
  static void SwapChannels(const Side& side, const float* from, float* to, bool last) {
    const memory::dims sizes = side.plain.dims();
    const int64_t channels = sizes[1];
    int64_t pixels = 1;
    for (size_t d = 2; d < sizes.size(); ++d) pixels *= sizes[d];
    const int64_t rows = last ? pixels : channels, columns = last ? channels : pixels;
    const CopyPlaneFn copy = ActiveRuns().plane[2];  // of four bytes
    for (int64_t i = 0; i < sizes[0]; ++i, from += rows * columns, to += rows * columns) {
      copy(to, columns, 1, from, 1, rows, rows, columns);
    }
  }

  const ConvCall& call_;
  const Prepared& p_;
  dnnl::stream stream_{OneDnnEngine()};
  memory x_, w_, y_;  // as the primitive wants them, where that is otherwise
  std::unordered_map<int, memory> args_;
};

// Images that are convolved at once. What is reordered for them stays in the cache; a weight's
// gradient is a sum over all.
int64_t ImagesAtOnce(const ConvCall& c) {
  if (c.make == ConvCall::Make::kW) return c.n;
  constexpr int64_t kCached = 512 << 10;
  int64_t x = c.groups * c.c, y = c.groups * c.o;
  for (int d = 0; d < 3; ++d) {
    x *= c.in[d];
    y *= c.out[d];
  }
  const int64_t image = (x + y) * static_cast<int64_t>(sizeof(float));
  return std::clamp<int64_t>(image == 0 ? c.n : kCached / image, 1, std::max<int64_t>(c.n, 1));
}

}  // namespace

bool ConvF32(const ConvCall& call) {
  SetUpMathLibraries();
  const int64_t images = ImagesAtOnce(call), rest = call.n % images;
  ConvCall first = call, last = call;
  first.n = images;
  last.n = rest;
  const std::shared_ptr<const Prepared> many = PreparedFor(first);
  const std::shared_ptr<const Prepared> few = rest == 0 ? many : PreparedFor(last);
  if (many == nullptr || few == nullptr) return false;
  const auto at = [&](int64_t i, int64_t channels, const int64_t(&size)[3]) {
    return i * call.groups * channels * size[0] * size[1] * size[2];
  };
  const auto run = [&](const ConvCall& some, const Prepared& prepared, int64_t from, int64_t to) {
    Runs runs(some, prepared);
    for (int64_t i = from; i < to; i += some.n) {
      runs.Execute(call.x + at(i, call.c, call.in), call.y + at(i, call.o, call.out));
    }
  };
  run(first, *many, 0, call.n - rest);
  if (rest != 0) run(last, *few, call.n - rest, call.n);
  return true;
}

}  // namespace dtensor
