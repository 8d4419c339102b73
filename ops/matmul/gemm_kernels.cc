// Matrix products on Gemm: strides are handed on where BLAS takes them, else packed once.
#include "dtensor/ops/kernels.h"
#include "dtensor/ops/matmul/activation.h"
#include "dtensor/ops/matmul/dim_group.h"
#include "dtensor/tensor/cpu/gemm.h"
#include "dtensor/tensor/cpu/kernels/runs.h"
#include "dtensor/tensor/shape.h"
#include "dtensor/tensor/status.h"
#include "dtensor/tensor/tensor.h"

namespace dtensor {
namespace {

// An operand as a matrix: all dims but the last flattened into rows (rows_dims = ndim - 1).
struct Matrix {
  const void* data;
  int64_t rows, cols, row_stride, col_stride;
};

int64_t Product(const TensorRef& t, int from, int to) {
  int64_t n = 1;
  for (int d = from; d < to; ++d) n *= t.sizes[d];
  return n;
}

// Row-major copy of a strided array in workspace memory.
void* Packed(const TensorRef& t, Workspace* workspace) {
  const IntSpan sizes(t.sizes, t.ndim);
  void* const out = workspace->Allocate(Numel(sizes) * SizeOf(t.dtype));
  const Strides strides = ContiguousStrides(sizes);
  CopyRef(t, {out, t.sizes, strides.data(), t.ndim, t.dtype});
  return out;
}

// Flattens dims [0, ndim - 1) to rows if their strides allow, else packs.
Matrix Flatten(const TensorRef& t, Workspace* workspace) {
  DT_CHECK(t.ndim >= 1 && t.ndim <= 64);
  const int last = t.ndim - 1;
  Matrix m = {t.data, Product(t, 0, last), t.sizes[last], 0, t.strides[last]};
  bool flat = true;
  int64_t expected = -1;
  for (int d = last - 1; d >= 0; --d) {
    if (t.sizes[d] == 1) continue;
    if (expected < 0) {
      m.row_stride = t.strides[d];
    } else if (t.strides[d] != expected) {
      flat = false;
    }
    expected = t.strides[d] * t.sizes[d];
  }
  if (m.rows == 1) m.row_stride = m.cols;
  if (flat) return m;
  return {Packed(t, workspace), m.rows, m.cols, m.cols, 1};
}

GemmCall Product2(const Matrix& a, const Matrix& b, const TensorRef& out) {
  GemmCall g{};
  g.m = a.rows;
  g.k = a.cols;
  g.n = b.cols;
  g.a = a.data;
  g.a_row = a.row_stride;
  g.a_col = a.col_stride;
  g.b = b.data;
  g.b_row = b.row_stride;
  g.b_col = b.col_stride;
  g.c = out.data;
  g.c_row = b.cols;
  g.dtype = out.dtype;
  return g;
}

Matrix Transposed(const Matrix& m) { return {m.data, m.cols, m.rows, m.col_stride, m.row_stride}; }

void MatmulKernel(const KernelCall& c) {
  Gemm(Product2(Flatten(c.in[0], c.workspace), Flatten(c.in[1], c.workspace), c.out[0]));
}

void MatmulTransposedKernel(const KernelCall& c) {
  Gemm(
      Product2(Flatten(c.in[0], c.workspace), Transposed(Flatten(c.in[1], c.workspace)), c.out[0]));
}

void OuterSumKernel(const KernelCall& c) {
  Gemm(
      Product2(Transposed(Flatten(c.in[0], c.workspace)), Flatten(c.in[1], c.workspace), c.out[0]));
}

// x w^T with every row starting from the bias.
void LinearInto(const KernelCall& c, const TensorRef& out) {
  const Matrix x = Flatten(c.in[0], c.workspace);
  GemmCall g = Product2(x, Transposed(Flatten(c.in[1], c.workspace)), out);
  const int64_t size = SizeOf(g.dtype);
  const CopyRunFn copy = ActiveRuns().copy[static_cast<int>(g.dtype)][static_cast<int>(g.dtype)];
  for (int64_t i = 0; i < g.m; ++i) {
    copy(static_cast<char*>(g.c) + i * g.n * size, 1, c.in[2].data, c.in[2].strides[0], g.n);
  }
  g.accumulate = true;
  Gemm(g);
}

void LinearKernel(const KernelCall& c) { LinearInto(c, c.out[0]); }

// The product and then the activation, by the kernels of these: the same bits. The product goes to
// the second output, if there is one, else it is changed in place.
void ActivatedKernel(const KernelCall& c, Activation activation) {
  const TensorRef& product = c.out[c.out.size() - 1];
  if (c.in.size() == 3) {
    LinearInto(c, product);
  } else {
    Gemm(Product2(Flatten(c.in[0], c.workspace), Transposed(Flatten(c.in[1], c.workspace)),
                  product));
  }
  const Kernel* const kernel = FindHostKernel(OpOf(activation));
  DT_CHECK(kernel != nullptr);
  const Attr tanh = {Attr::Kind::kInt, activation == Activation::kGeluTanh, 0, nullptr, 0};
  kernel->fn({{&product, 1}, c.out.first(1), &tanh, {}, nullptr, c.workspace});
}
void LinearReluKernel(const KernelCall& c) { ActivatedKernel(c, Activation::kRelu); }
void LinearActKernel(const KernelCall& c) {
  ActivatedKernel(c, static_cast<Activation>(c.attrs[0].i));
}

// Where the matrix of a batch element starts; an operand repeats along dims that it lacks or has
// once.
int64_t MatrixAt(const TensorRef& t, const TensorRef& out, int64_t element) {
  int64_t offset = 0;
  for (int d = out.ndim - 3; d >= 0; --d) {
    const int64_t at = element % out.sizes[d];
    element /= out.sizes[d];
    const int mine = d - (out.ndim - t.ndim);
    if (mine >= 0 && t.sizes[mine] != 1) offset += at * t.strides[mine];
  }
  return offset;
}

Matrix MatrixOf(const TensorRef& t, const TensorRef& out, int64_t element) {
  const int row = t.ndim - 2, col = t.ndim - 1;
  return {static_cast<char*>(t.data) + MatrixAt(t, out, element) * SizeOf(t.dtype), t.sizes[row],
          t.sizes[col], t.strides[row], t.strides[col]};
}

void BmmKernel(const KernelCall& c) {
  const TensorRef& out = c.out[0];
  const int64_t batch = Product(out, 0, out.ndim - 2);
  for (int64_t i = 0; i < batch; ++i) {
    GemmCall g = Product2(MatrixOf(c.in[0], out, i), MatrixOf(c.in[1], out, i), out);
    g.c = static_cast<char*>(out.data) + MatrixAt(out, out, i) * SizeOf(out.dtype);
    Gemm(g);
  }
}

// An operand of contract: a matrix per element of the batch, packed where its dims do not flatten.
class Stack {
 public:
  Stack(const TensorRef& t, int batch, int shared, Workspace* workspace)
      : t_(t), batch_(batch), size_(SizeOf(t.dtype)) {
    const DimGroup rows = GroupOf(t, batch, t.ndim - shared);
    const DimGroup cols = GroupOf(t, t.ndim - shared, t.ndim);
    first_ = {t.data, rows.size, cols.size, rows.stride, cols.stride};
    packed_ = !rows.flat || !cols.flat;
    if (packed_) first_ = {Packed(t, workspace), rows.size, cols.size, cols.size, 1};
  }
  Matrix At(int64_t element) const {
    Matrix m = first_;
    int64_t offset = packed_ ? element * m.rows * m.cols : 0;
    for (int d = batch_ - 1; d >= 0 && !packed_; --d) {
      offset += element % t_.sizes[d] * t_.strides[d];
      element /= t_.sizes[d];
    }
    m.data = static_cast<const char*>(m.data) + offset * size_;
    return m;
  }

 private:
  const TensorRef& t_;
  const int batch_;
  const int64_t size_;
  Matrix first_;
  bool packed_;
};

// x [b, m, k], w [b, n, k]; number of dims in b and in k -> [b, m, n]
void ContractKernel(const KernelCall& c) {
  const int batch = static_cast<int>(c.attrs[0].i), shared = static_cast<int>(c.attrs[1].i);
  const TensorRef& out = c.out[0];
  const Stack x(c.in[0], batch, shared, c.workspace), w(c.in[1], batch, shared, c.workspace);
  const int64_t elements = Product(out, 0, batch);
  for (int64_t i = 0; i < elements; ++i) {
    GemmCall g = Product2(x.At(i), Transposed(w.At(i)), out);
    g.c = static_cast<char*>(out.data) + i * g.m * g.n * SizeOf(out.dtype);
    Gemm(g);
  }
}

}  // namespace

void RegisterGemmKernels(AddKernelFn add) {
  add("matmul", MatmulKernel, kAllDTypes, KernelLayout::kStrided);
  add("matmul_t", MatmulTransposedKernel, kAllDTypes, KernelLayout::kStrided);
  add("outer_sum", OuterSumKernel, kAllDTypes, KernelLayout::kStrided);
  add("linear", LinearKernel, kAllDTypes, KernelLayout::kStrided);
  for (const char* name : {"linear_relu", "matmul_t_relu"}) {
    add(name, LinearReluKernel, kFloatDTypes, KernelLayout::kStrided);
  }
  for (const char* name : {"linear_act", "matmul_t_act", "linear_act_kept", "matmul_t_act_kept"}) {
    add(name, LinearActKernel, kFloatDTypes, KernelLayout::kStrided);
  }
  add("contract", ContractKernel, kAllDTypes, KernelLayout::kStrided);
  add("bmm", BmmKernel, kAllDTypes, KernelLayout::kStrided);
}

}  // namespace dtensor
