// Convolutions: those of single channels along one dim by a kernel of ours, float32 by oneDNN,
// every other dtype (and what oneDNN does not take, small ones and those of one tap) as products of
// matrices: the inputs of every window as a column, times the weight.
#include <algorithm>
#include <cstring>
#include <utility>

#include "dtensor/ops/conv/window.h"
#include "dtensor/ops/cpu/widen.h"
#include "dtensor/ops/kernels.h"
#include "dtensor/tensor/cpu/conv.h"
#include "dtensor/tensor/cpu/gemm.h"
#include "dtensor/tensor/cpu/kernels/depthwise.h"
#include "dtensor/tensor/cpu/kernels/runs.h"

namespace dtensor {
namespace {

int64_t Product(const TensorRef& t, int from, int to) {
  int64_t n = 1;
  for (int d = from; d < to; ++d) n *= t.sizes[d];
  return n;
}

// One convolution of contiguous arrays, as this rank has them: x [n, groups c, in], w [groups o, c,
// kernel], y [n, groups o, out]; b is of whatever is made, or null.
struct Conv {
  Windows windows;
  DType dtype;
  int64_t n, groups, c, o;
  char *x, *w, *y;
  const char* b;
  Workspace* workspace;

  int64_t size() const { return SizeOf(dtype); }
  int64_t Columns() const { return c * windows.Taps(); }  // rows of the matrix of columns
  // Every window is one input, in order: x is the matrix of columns itself.
  bool IsPointwise() const {
    return std::all_of(windows.d, windows.d + 3, [](const WindowDim& d) {
      return d.kernel == 1 && d.stride == 1 && d.before == 0 && d.in == d.out;
    });
  }
  char* XOf(int64_t i, int64_t g) const {
    return x + (i * groups + g) * c * windows.InPlane() * size();
  }
  char* YOf(int64_t i, int64_t g) const {
    return y + (i * groups + g) * o * windows.OutPlane() * size();
  }
  char* WOf(int64_t g) const { return w + g * o * Columns() * size(); }
};

// Groups follow from the shapes: a rank may have some of them.
Conv ConvOf(const KernelCall& call, const TensorRef& x, const TensorRef& w, const TensorRef& y) {
  Conv c;
  c.windows = WindowsOf(call.attrs[0]);
  const int channel = x.ndim - 1 - c.windows.dims;
  c.dtype = x.dtype;
  c.n = Product(x, 0, channel);
  c.c = w.sizes[1];
  c.groups = c.c == 0 ? 1 : x.sizes[channel] / c.c;
  c.o = c.groups == 0 ? 0 : w.sizes[0] / c.groups;
  c.x = static_cast<char*>(x.data);
  c.w = static_cast<char*>(w.data);
  c.y = static_cast<char*>(y.data);
  c.b = call.in.size() == 3 ? static_cast<const char*>(call.in[2].data) : nullptr;
  c.workspace = call.workspace;
  return c;
}

// The outputs of a dim of which tap k is inside of the input: [start, end).
struct Inside {
  int64_t start, end;
};
Inside InsideOf(const WindowDim& d, int64_t k) {
  const int64_t shift = d.before - k * d.dilation;  // of output o the tap is o * stride - shift
  const int64_t start = shift <= 0 ? 0 : (shift + d.stride - 1) / d.stride;
  const int64_t last = d.in - 1 + shift;
  return {start, last < 0 ? start : std::max(start, std::min(d.out, last / d.stride + 1))};
}

// run(in, out, n): n outputs from `out` on, of a plane, read every stride-th input from `in` on, by
// the taps k of all dims.
template <class F>
void ForTap(const Windows& w, const int64_t (&k)[3], const F& run) {
  Inside in[3];
  for (int d = 0; d < 3; ++d) {
    in[d] = InsideOf(w.d[d], k[d]);
    if (in[d].start >= in[d].end) return;
  }
  const auto at = [&](int d, int64_t o) {
    return o * w.d[d].stride - w.d[d].before + k[d] * w.d[d].dilation;
  };
  for (int64_t a = in[0].start; a < in[0].end; ++a) {
    for (int64_t b = in[1].start; b < in[1].end; ++b) {
      run((at(0, a) * w.d[1].in + at(1, b)) * w.d[2].in + at(2, in[2].start),
          (a * w.d[1].out + b) * w.d[2].out + in[2].start, in[2].end - in[2].start);
    }
  }
}

// The same for the matrix of columns [c taps, outputs] of all planes of a group: n of its elements,
// from `out` on, are every stride-th of the inputs from `in` on.
template <class F>
void ForColumns(const Conv& c, const F& run) {
  const WindowDim* d = c.windows.d;
  int64_t row = 0, k[3];
  for (int64_t plane = 0; plane < c.c; ++plane) {
    for (k[0] = 0; k[0] < d[0].kernel; ++k[0]) {
      for (k[1] = 0; k[1] < d[1].kernel; ++k[1]) {
        for (k[2] = 0; k[2] < d[2].kernel; ++k[2], ++row) {
          ForTap(c.windows, k, [&](int64_t in, int64_t out, int64_t n) {
            run(plane * c.windows.InPlane() + in, row * c.windows.OutPlane() + out, n);
          });
        }
      }
    }
  }
}

void ToColumns(const Conv& c, const char* x, char* columns) {
  const int64_t size = c.size(), stride = c.windows.d[2].stride;
  const int type = static_cast<int>(c.dtype);
  const CopyRunFn copy = ActiveRuns().copy[type][type];
  std::memset(columns, 0, static_cast<size_t>(c.Columns() * c.windows.OutPlane() * size));
  ForColumns(c, [&](int64_t in, int64_t out, int64_t n) {
    copy(columns + out * size, 1, x + in * size, stride, n);
  });
}

void AddColumns(const Conv& c, const char* columns, char* x) {
  const int64_t size = c.size(), stride = c.windows.d[2].stride;
  const ReduceRunFn add = ActiveRuns().reduce[0][static_cast<int>(c.dtype)];
  ForColumns(c, [&](int64_t in, int64_t out, int64_t n) {
    add(x + in * size, stride, columns + out * size, 1, n);
  });
}

// Room for the columns of a group; null where x itself is them.
char* RoomForColumns(const Conv& c) {
  if (c.IsPointwise()) return nullptr;
  return static_cast<char*>(c.workspace->Allocate(c.Columns() * c.windows.OutPlane() * c.size()));
}
const char* ColumnsOf(const Conv& c, const char* x, char* room) {
  if (room == nullptr) return x;
  ToColumns(c, x, room);
  return room;
}

// Of one image `channels` planes with the bias of each; false, and nothing is written, without one.
bool StartWithBias(const Conv& c, char* out, int64_t channels, int64_t plane) {
  if (c.b == nullptr) return false;
  const FillRunFn fill = ActiveRuns().fill[LogSizeOf(c.dtype)];
  for (int64_t i = 0; i < channels; ++i) {
    fill(out + i * plane * c.size(), 1, c.b + i * c.size(), plane);
  }
  return true;
}

void MakeY(const Conv& c) {
  const int64_t plane = c.windows.OutPlane();
  char* room = RoomForColumns(c);
  for (int64_t i = 0; i < c.n; ++i) {
    const bool begun = StartWithBias(c, c.YOf(i, 0), c.groups * c.o, plane);
    for (int64_t g = 0; g < c.groups; ++g) {
      const char* columns = ColumnsOf(c, c.XOf(i, g), room);
      Gemm({c.o, plane, c.Columns(), c.WOf(g), c.Columns(), 1, columns, plane, 1, c.YOf(i, g),
            plane, c.dtype, begun});
    }
  }
}

void MakeX(const Conv& c) {
  const int64_t plane = c.windows.OutPlane(), channels = c.groups * c.c,
                image = channels * c.windows.InPlane();
  char* room = RoomForColumns(c);
  for (int64_t i = 0; i < c.n; ++i) {
    const bool begun = StartWithBias(c, c.XOf(i, 0), channels, c.windows.InPlane());
    if (!begun && room != nullptr) {
      std::memset(c.XOf(i, 0), 0, static_cast<size_t>(image * c.size()));
    }
    for (int64_t g = 0; g < c.groups; ++g) {
      char* columns = room == nullptr ? c.XOf(i, g) : room;
      Gemm({c.Columns(), plane, c.o, c.WOf(g), 1, c.Columns(), c.YOf(i, g), plane, 1, columns,
            plane, c.dtype, room == nullptr && begun});
      if (room != nullptr) AddColumns(c, columns, c.XOf(i, g));
    }
  }
}

void MakeW(const Conv& c) {
  const int64_t plane = c.windows.OutPlane();
  if (c.n == 0) std::memset(c.w, 0, static_cast<size_t>(c.groups * c.o * c.Columns() * c.size()));
  char* room = RoomForColumns(c);
  for (int64_t i = 0; i < c.n; ++i) {
    for (int64_t g = 0; g < c.groups; ++g) {
      const char* columns = ColumnsOf(c, c.XOf(i, g), room);
      Gemm({c.o, c.Columns(), plane, c.YOf(i, g), plane, 1, columns, 1, plane, c.WOf(g),
            c.Columns(), c.dtype, i > 0});
    }
  }
}

// Single channels along one dim, output by output.
template <class T>
bool TryDepthwiseOf(const Conv& c, ConvCall::Make make) {
  const WindowDim* d = c.windows.d;
  const auto trivial = [](const WindowDim& dim) {
    return dim.in == 1 && dim.out == 1 && dim.kernel == 1 && dim.before == 0;
  };
  if (c.c != 1 || c.o != 1 || c.IsPointwise() || !trivial(d[0]) || !trivial(d[1]) ||
      d[2].stride != 1 || d[2].kernel < 1 || d[2].kernel > kMostDepthwiseTaps) {
    return false;
  }
  const auto at = [](char* p) { return reinterpret_cast<T*>(p); };
  DepthwiseCall<T> call = {c.n,
                           c.groups,
                           d[2].in,
                           d[2].out,
                           d[2].kernel,
                           d[2].dilation,
                           d[2].before,
                           at(c.x),
                           at(c.w),
                           at(c.y),
                           reinterpret_cast<const T*>(c.b)};
  const CpuLevel level = ActiveCpuLevel();
  if (make == ConvCall::Make::kW) {
    DT_AT_CPU_LEVEL(level, DepthwiseWeight(call));
    return true;
  }
  if (make == ConvCall::Make::kX) {  // the other way round, with the last tap first
    const int64_t taps = call.taps;
    auto* w = static_cast<T*>(c.workspace->Allocate(c.groups * taps * c.size()));
    for (int64_t g = 0; g < c.groups; ++g) {
      std::reverse_copy(call.w + g * taps, call.w + (g + 1) * taps, w + g * taps);
    }
    call.w = w;
    call.before = (taps - 1) * call.dilation - call.before;
    std::swap(call.in, call.out);
    std::swap(call.x, call.y);
  }
  DT_AT_CPU_LEVEL(level, Depthwise(call));
  return true;
}
bool TryDepthwise(const Conv& c, ConvCall::Make make) {
  return c.dtype == DType::kF32   ? TryDepthwiseOf<float>(c, make)
         : c.dtype == DType::kF64 ? TryDepthwiseOf<double>(c, make)
                                  : false;
}

// oneDNN takes some milliseconds for a shape that it has not seen: not for what takes less, nor for
// products of whole matrices, which it would reorder first.
constexpr int64_t kSmallConv = 1 << 16;  // products of two numbers

bool TryOneDnn(const Conv& c, ConvCall::Make make) {
  const WindowDim* d = c.windows.d;
  const int64_t columns = c.Columns() * c.windows.OutPlane() * c.windows.InPlane();
  if (c.dtype != DType::kF32 || columns == 0 || c.IsPointwise() ||
      c.n * c.groups * c.o * c.Columns() * c.windows.OutPlane() < kSmallConv) {
    return false;
  }
  const auto floats = [](const char* p) { return reinterpret_cast<float*>(const_cast<char*>(p)); };
  ConvCall call = {
      make, c.windows.dims, c.n,         c.groups,    c.c,         c.o,        {}, {}, {}, {}, {},
      {},   floats(c.x),    floats(c.w), floats(c.y), floats(c.b), c.workspace};
  for (int k = 0; k < 3; ++k) {
    call.in[k] = d[k].in;
    call.out[k] = d[k].out;
    call.kernel[k] = d[k].kernel;
    call.stride[k] = d[k].stride;
    call.dilation[k] = d[k].dilation;
    call.before[k] = d[k].before;
  }
  if (make == ConvCall::Make::kY || c.b == nullptr) return ConvF32(call);
  call.b = nullptr;
  if (!ConvF32(call)) return false;
  const ReduceRunFn add = ActiveRuns().reduce[0][static_cast<int>(c.dtype)];
  const int64_t plane = c.windows.InPlane(), channels = c.groups * c.c;
  for (int64_t i = 0; i < c.n * channels; ++i) {
    add(c.x + i * plane * c.size(), 1, c.b + i % channels * c.size(), 0, plane);
  }
  return true;
}

template <ConvCall::Make make, void (*columns)(const Conv&)>
void RunConv(const KernelCall& call) {
  if (IsNarrow(call.in[0].dtype)) return RunWidened(call, RunConv<make, columns>);
  const TensorRef &a = call.in[0], &b = call.in[1], &out = call.out[0];
  const Conv c = make == ConvCall::Make::kY   ? ConvOf(call, a, b, out)
                 : make == ConvCall::Make::kX ? ConvOf(call, out, b, a)
                                              : ConvOf(call, a, out, b);
  if (!TryDepthwise(c, make) && !TryOneDnn(c, make)) columns(c);
}

}  // namespace

void RegisterConvKernels(AddKernelFn add) {
  using Make = ConvCall::Make;
  const auto add_all = [&](std::initializer_list<const char*> names, KernelFn fn) {
    for (const char* name : names) add(name, fn, kAllDTypes, KernelLayout::kContiguous);
  };
  add_all({"conv", "conv_bias"}, RunConv<Make::kY, MakeY>);
  add_all({"conv_input", "conv_input_bias"}, RunConv<Make::kX, MakeX>);
  add_all({"conv_weight"}, RunConv<Make::kW, MakeW>);
}

}  // namespace dtensor
