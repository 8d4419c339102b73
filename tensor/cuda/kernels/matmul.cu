// Matrix products: by cuBLASLt where it can, else by tiles in shared memory, any strides, one term
// after the other of each element's sum, so that its bits depend on k alone. 16-bit floats are
// summed in f32 and rounded once, integers wrap around. An activation behind a product is taken of
// what was rounded, as by a kernel of its own; where the library does it, of the sum.
#include <type_traits>

#include "dtensor/ops/matmul/dim_group.h"
#include "dtensor/tensor/convert.h"
#include "dtensor/tensor/cuda/arrays.h"
#include "dtensor/tensor/cuda/kernels/element.h"
#include "dtensor/tensor/cuda/kernels/products.h"
#include "dtensor/tensor/cuda/math.h"

namespace dtensor::cuda {
namespace {

namespace dev = ::dtensor::device_code;

Matrix Transposed(const Matrix& m) { return {m.data, m.cols, m.rows, m.col_stride, m.row_stride}; }

// --- device code --------------------------------------------------------------------------------

constexpr int kStep = 16;  // terms of a sum that are in shared memory at a time
constexpr int kSide = 16;  // threads of a block along rows and along columns
static_assert(kSide * kSide == kThreads);

struct ProductArgs {
  Strided<3> stack;  // of c, a, b
  char *c, *a, *b;
  const void* bias;
  int64_t m, n, k, a_row, a_col, b_row, b_col, bias_stride;
  Activation activation;
  void* kept;  // null: nothing is
};

template <class T>
__device__ T Activated(Activation activation, T x) {
  switch (activation) {
    case Activation::kRelu:
      return dev::Maximum(x, T(0));
    case Activation::kSilu:
      return x * dev::Sigmoid(x);
    default:
      return dev::Gelu(x, activation == Activation::kGeluTanh);
  }
}

__device__ inline double MultiplyAdd(double a, double b, double sum) { return dev::Fma(a, b, sum); }
__device__ inline float MultiplyAdd(float a, float b, float sum) { return dev::Fma(a, b, sum); }
__device__ inline int64_t MultiplyAdd(int64_t a, int64_t b, int64_t sum) {
  return dev::Add(sum, dev::Mul(a, b));
}
// A tile of kTile rows and kStep columns, transposed: tile[column][row]. Neighbouring threads read
// neighbours in memory; what is outside is 0.
template <int kTile, class S, class Sum>
__device__ void LoadTile(const S* from, int64_t rows, int64_t cols, int64_t row_stride,
                         int64_t col_stride, int64_t row0, int64_t col0,
                         Sum (&tile)[kStep][kTile + 1]) {
  const bool along_rows = row_stride == 1;
  for (int e = static_cast<int>(threadIdx.x); e < kTile * kStep; e += kThreads) {
    const int row = along_rows ? e % kTile : e / kStep, col = along_rows ? e / kTile : e % kStep;
    const bool inside = row0 + row < rows && col0 + col < cols;
    tile[col][row] =
        inside ? AsComputed(from[(row0 + row) * row_stride + (col0 + col) * col_stride]) : Sum(0);
  }
}

// A block makes tiles of kTile x kTile elements, a thread every kSide-th row and column of them.
template <class S, int kTile, bool kActivated>
__global__ void Multiply(const __grid_constant__ ProductArgs p) {
  using Sum = ComputedAs<S>;
  constexpr int kEach = kTile / kSide;
  __shared__ Sum a_tile[kStep][kTile + 1], b_tile[kStep][kTile + 1];
  const int x = static_cast<int>(threadIdx.x) % kSide, y = static_cast<int>(threadIdx.x) / kSide;
  const int64_t tiles = (p.n + kTile - 1) / kTile;
  const int64_t row0 = blockIdx.x / tiles * kTile, col0 = blockIdx.x % tiles * kTile;
  for (uint32_t element = blockIdx.y; element < p.stack.numel; element += gridDim.y) {
    int32_t at[3];
    p.stack.Offsets(element, at);
    S* const c = reinterpret_cast<S*>(p.c) + at[0];
    S* const product = kActivated && p.kept != nullptr ? static_cast<S*>(p.kept) : c;
    const S* const a = reinterpret_cast<const S*>(p.a) + at[1];
    const S* const b = reinterpret_cast<const S*>(p.b) + at[2];
    Sum sum[kEach][kEach] = {};
    for (int64_t k0 = 0; k0 < p.k; k0 += kStep) {
      LoadTile<kTile>(a, p.m, p.k, p.a_row, p.a_col, row0, k0, a_tile);
      LoadTile<kTile>(b, p.n, p.k, p.b_col, p.b_row, col0, k0, b_tile);
      __syncthreads();
      for (int k = 0; k < kStep; ++k) {
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
#pragma unroll
          for (int j = 0; j < kEach; ++j) {
            sum[i][j] = MultiplyAdd(a_tile[k][y + i * kSide], b_tile[k][x + j * kSide], sum[i][j]);
          }
        }
      }
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const int64_t row = row0 + y + i * kSide, col = col0 + x + j * kSide;
        if (row >= p.m || col >= p.n) continue;
        Sum result = sum[i][j];
        if (p.bias != nullptr) {
          const S bias = static_cast<const S*>(p.bias)[col * p.bias_stride];
          result = dev::Add(result, AsComputed(bias));
        }
        FromNumber(result, &product[row * p.n + col]);
      }
    }
    if constexpr (kActivated) {  // a loop, for what is long; each thread reads what it wrote
#pragma unroll 1
      for (int e = 0; e < kEach * kEach; ++e) {
        const int64_t row = row0 + y + e / kEach * kSide, col = col0 + x + e % kEach * kSide;
        if (row >= p.m || col >= p.n) continue;
        const int64_t i = row * p.n + col;
        FromNumber(Activated(p.activation, AsComputed(product[i])), &c[i]);
      }
    }
  }
}

// --- launches -----------------------------------------------------------------------------------

template <class S, int kTile, bool kActivated = false>
void Launch(const KernelCall& call, const ProductArgs& args) {
  constexpr int64_t kMostElements = 65535;  // of a grid along y
  const int64_t tiles = (args.m + kTile - 1) / kTile * ((args.n + kTile - 1) / kTile);
  const int64_t elements = args.stack.numel;
  const dim3 grid(static_cast<unsigned>(tiles),
                  static_cast<unsigned>(elements < kMostElements ? elements : kMostElements));
  Multiply<S, kTile, kActivated><<<grid, kThreads, 0, StreamOf(call)>>>(args);
  CheckLaunch();
}

// By the library, with what stands behind the product where it has that.
bool ByLibrary(const KernelCall& call, const Products& p, const Strided<3>& stack,
               char* const* data) {
  if (MultiplyByLibrary(call, p, stack, data)) return true;
  if (!p.activation) return false;
  Products product = p;
  product.c = p.kept != nullptr ? p.kept : p.c;
  product.activation = std::nullopt;
  product.kept = nullptr;
  char* const at[3] = {static_cast<char*>(product.c), data[1], data[2]};
  if (!MultiplyByLibrary(call, product, stack, at)) return false;
  TensorRef from = call.out[0], to = from;
  from.data = product.c;
  to.data = p.c;
  const Attr tanh = {Attr::Kind::kInt, *p.activation == Activation::kGeluTanh, 0, nullptr, 0};
  DeviceCall device = *call.device;
  device.num_attrs = 1;
  KernelOf(OpOf(*p.activation))(
      {{&from, 1}, {&to, 1}, &tanh, {}, call.stream, call.workspace, &device});
  return true;
}

// `stack`: the sizes of the stack, and the strides of c, a and b there.
void Multiply(const KernelCall& call, const Products& p, int ndim, const int64_t* sizes,
              const int64_t* const (&strides)[3]) {
  if (p.a.rows == 0 || p.b.cols == 0) return;
  const TensorRef refs[3] = {{p.c, sizes, strides[0], ndim, p.dtype},
                             {p.a.data, sizes, strides[1], ndim, p.dtype},
                             {p.b.data, sizes, strides[2], ndim, p.dtype}};
  const TensorRef* const pointers[3] = {&refs[0], &refs[1], &refs[2]};
  const bool large = p.a.rows > 2 * kSide && p.b.cols > 2 * kSide;
  Arrays<3>(pointers).ForEach([&](const Strided<3>& stack, char* const* data) {
    if (ByLibrary(call, p, stack, data)) return;
    const ProductArgs args = {stack,          data[0],
                              data[1],        data[2],
                              p.bias,         p.a.rows,
                              p.b.cols,       p.a.cols,
                              p.a.row_stride, p.a.col_stride,
                              p.b.row_stride, p.b.col_stride,
                              p.bias_stride,  p.activation.value_or(Activation::kRelu),
                              p.kept};
    if (p.activation) {
      return VisitFloat(p.dtype, [&](auto element) {
        using S = decltype(element);
        large ? Launch<S, 64, true>(call, args) : Launch<S, kSide, true>(call, args);
      });
    }
    VisitDType(p.dtype, [&](auto element) {
      using S = typename decltype(element)::type;
      large ? Launch<S, 64>(call, args) : Launch<S, kSide>(call, args);
    });
  });
}
void Multiply(const KernelCall& call, const Matrix& a, const Matrix& b,
              const TensorRef* bias = nullptr, std::optional<Activation> activation = {}) {
  void* const kept = call.out.size() > 1 ? call.out[1].data : nullptr;
  Products p = {a, b, call.out[0].data, nullptr, 0, call.out[0].dtype, activation, kept};
  if (bias != nullptr) {
    p.bias = bias->data;
    p.bias_stride = bias->strides[0];
  }
  Multiply(call, p, 0, nullptr, {nullptr, nullptr, nullptr});
}

// An operand: a stack of matrices, the last `cols` dims as columns, those from `first` on before
// them as rows; a contiguous copy where these do not flatten.
struct Operand {
  Operand(const KernelCall& call, const TensorRef& t, int first, int cols) {
    const DimGroup row = GroupOf(t, first, t.ndim - cols), col = GroupOf(t, t.ndim - cols, t.ndim);
    matrix = {t.data, row.size, col.size, row.stride, col.stride};
    for (int d = 0; d < first; ++d) strides[d] = t.strides[d];
    if (row.flat && col.flat) return;
    int64_t stride = 1, all[kMaxDims];
    for (int d = t.ndim - 1; d >= 0; --d) {
      all[d] = stride;
      if (d < first) strides[d] = stride;
      stride *= t.sizes[d];
    }
    matrix.data = Scratch<char>(call, stride * SizeOf(t.dtype));
    matrix.row_stride = col.size;
    matrix.col_stride = 1;
    const TensorRef dense = {matrix.data, t.sizes, all, t.ndim, t.dtype};
    NoteError(static_cast<cudaError_t>(CopyArray(call.stream, &t, &dense)));
  }
  Matrix matrix;
  int64_t strides[kMaxDims];  // of the stack
};
Matrix MatrixOf(const KernelCall& call, int in) {
  return Operand(call, call.in[static_cast<size_t>(in)], 0, 1).matrix;
}

void Matmul(const KernelCall& c) { Multiply(c, MatrixOf(c, 0), MatrixOf(c, 1)); }
void MatmulTransposed(const KernelCall& c) {
  Multiply(c, MatrixOf(c, 0), Transposed(MatrixOf(c, 1)));
}
void OuterSum(const KernelCall& c) { Multiply(c, Transposed(MatrixOf(c, 0)), MatrixOf(c, 1)); }
void Linear(const KernelCall& c) {
  Multiply(c, MatrixOf(c, 0), Transposed(MatrixOf(c, 1)), &c.in[2]);
}

void LinearActivated(const KernelCall& c, Activation activation) {
  Multiply(c, MatrixOf(c, 0), Transposed(MatrixOf(c, 1)), c.in.size() == 3 ? &c.in[2] : nullptr,
           activation);
}
void LinearRelu(const KernelCall& c) { LinearActivated(c, Activation::kRelu); }
void LinearAct(const KernelCall& c) { LinearActivated(c, static_cast<Activation>(c.attrs[0].i)); }

// The stride of dim d of `out` in an operand, which repeats along dims that it lacks or has once.
int64_t StackStride(const TensorRef& t, const TensorRef& out, int d) {
  const int mine = d - (out.ndim - t.ndim);
  return mine >= 0 && t.sizes[mine] != 1 ? t.strides[mine] : 0;
}
void Bmm(const KernelCall& c) {
  const TensorRef& out = c.out[0];
  const int stack = out.ndim - 2;
  int64_t a[kMaxDims], b[kMaxDims];
  for (int d = 0; d < stack; ++d) {
    a[d] = StackStride(c.in[0], out, d);
    b[d] = StackStride(c.in[1], out, d);
  }
  const auto matrix = [](const TensorRef& t) {
    return Matrix{t.data, t.sizes[t.ndim - 2], t.sizes[t.ndim - 1], t.strides[t.ndim - 2],
                  t.strides[t.ndim - 1]};
  };
  Multiply(c, {matrix(c.in[0]), matrix(c.in[1]), out.data, nullptr, 0, out.dtype}, stack, out.sizes,
           {out.strides, a, b});
}

// x [b, m, k], w [b, n, k]; number of dims in b and in k -> [b, m, n]
void Contract(const KernelCall& c) {
  const int stack = static_cast<int>(c.attrs[0].i), shared = static_cast<int>(c.attrs[1].i);
  const TensorRef& out = c.out[0];
  const Operand x(c, c.in[0], stack, shared), w(c, c.in[1], stack, shared);
  Multiply(c, {x.matrix, Transposed(w.matrix), out.data, nullptr, 0, out.dtype}, stack, out.sizes,
           {out.strides, x.strides, w.strides});
}

}  // namespace

void AddMatmulKernels(AddKernelFn add) {
  add("matmul", &Matmul, kAllDTypes, KernelLayout::kStrided);
  add("matmul_t", &MatmulTransposed, kAllDTypes, KernelLayout::kStrided);
  add("outer_sum", &OuterSum, kAllDTypes, KernelLayout::kStrided);
  add("linear", &Linear, kAllDTypes, KernelLayout::kStrided);
  for (const char* name : {"linear_relu", "matmul_t_relu"}) {
    add(name, &LinearRelu, kFloatDTypes, KernelLayout::kStrided);
  }
  for (const char* name : {"linear_act", "matmul_t_act", "linear_act_kept", "matmul_t_act_kept"}) {
    add(name, &LinearAct, kFloatDTypes, KernelLayout::kStrided);
  }
  add("contract", &Contract, kAllDTypes, KernelLayout::kStrided);
  add("bmm", &Bmm, kAllDTypes, KernelLayout::kStrided);
}

}  // namespace dtensor::cuda
