// Attention in blocks of query rows: scores and products by GEMM, softmax rows here.
#include "dtensor/ops/cpu/rows.h"
#include "dtensor/ops/cpu/widen.h"
#include "dtensor/ops/kernels.h"
#include "dtensor/tensor/cpu/gemm.h"

namespace dtensor {
namespace DT_LEVEL_NS {
namespace {

constexpr int64_t kBlock = 64;  // query rows per block

template <class T>
constexpr DType TypeOf() {
  return sizeof(T) == 8 ? DType::kF64 : DType::kF32;
}

// Sizes, and which kv head a query head reads. factors: {s, h}; global < 0 where the op is not
// sharded by that factor.
struct Geometry {
  Geometry(const KernelCall& c, int q, int k, int v) {
    const TensorRef &tq = c.in[q], &tk = c.in[k], &tv = c.in[v];
    b = tq.sizes[0];
    h = tq.sizes[1];
    s = tq.sizes[2];
    d = tq.sizes[3];
    g = tk.sizes[1];
    t = tk.sizes[2];
    e = tv.sizes[3];
    scale = c.attrs[0].d;
    causal = c.attrs[1].i != 0;
    if (c.factors.size() > 0 && c.factors[0].global >= 0) first_query = c.factors[0].start;
    if (c.factors.size() > 1 && c.factors[1].global >= 0) {
      first_head = c.factors[1].start;
      heads = c.factors[1].global;
    } else {
      heads = h;
    }
  }
  int64_t KvHead(int64_t head) const {
    const int64_t group = g > 0 && heads >= g ? heads / g : 1;
    return (first_head + head) / group;
  }
  // False where a declaration handed over what is not so: no memory is touched then.
  bool Fits(Workspace* workspace) const {
    const bool fits = h == 0 || (first_head >= 0 && KvHead(h - 1) < g);
    if (!fits) workspace->Fail("a query head without a key head");
    return fits;
  }
  // Keys that the query rows [i, i + n) may see.
  int64_t Keys(int64_t i, int64_t n) const {
    const int64_t last = first_query + i + n;
    return causal && last < t ? last : t;
  }
  int64_t b, h, s, d, g, t, e, first_query = 0, first_head = 0, heads;
  double scale;
  bool causal;
};

template <class T>
void Product(int64_t m, int64_t n, int64_t k, const T* a, int64_t a_row, int64_t a_col, const T* b,
             int64_t b_row, int64_t b_col, T* out, int64_t out_row, bool accumulate) {
  GemmCall call{};
  call.m = m;
  call.n = n;
  call.k = k;
  call.a = a;
  call.a_row = a_row;
  call.a_col = a_col;
  call.b = b;
  call.b_row = b_row;
  call.b_col = b_col;
  call.c = out;
  call.c_row = out_row;
  call.dtype = TypeOf<T>();
  call.accumulate = accumulate;
  Gemm(call);
}

// Keys in front of which query row i is causal: columns [visible, keys) get no weight.
DT_MATH int64_t Visible(const Geometry& z, int64_t row, int64_t keys) {
  const int64_t n = z.first_query + row + 1;
  return z.causal && n < keys ? n : keys;
}

template <class T>
void Attention(const KernelCall& c) {
  const Geometry z(c, 0, 1, 2);
  if (!z.Fits(c.workspace)) return;
  const T scale = static_cast<T>(z.scale);
  T* p = static_cast<T*>(c.workspace->Allocate(kBlock * z.t * static_cast<int64_t>(sizeof(T))));
  for (int64_t head = 0; head < z.b * z.h; ++head) {
    const int64_t kv = head / z.h * z.g + z.KvHead(head % z.h);
    const T* q = static_cast<const T*>(c.in[0].data) + head * z.s * z.d;
    const T* k = static_cast<const T*>(c.in[1].data) + kv * z.t * z.d;
    const T* v = static_cast<const T*>(c.in[2].data) + kv * z.t * z.e;
    T* o = static_cast<T*>(c.out[0].data) + head * z.s * z.e;
    T* lse = static_cast<T*>(c.out[1].data) + head * z.s;
    for (int64_t i = 0; i < z.s; i += kBlock) {
      const int64_t rows = z.s - i < kBlock ? z.s - i : kBlock, keys = z.Keys(i, rows);
      Product(rows, keys, z.d, q + i * z.d, z.d, int64_t{1}, k, int64_t{1}, z.d, p, keys, false);
      for (int64_t r = 0; r < rows; ++r) {
        T* row = p + r * keys;
        const int64_t seen = Visible(z, i + r, keys);
        for (int64_t j = 0; j < seen; ++j) row[j] *= scale;
        const T m = MaxOf(row, seen);
        for (int64_t j = 0; j < seen; ++j) row[j] = Exp(row[j] - m);
        const T sum = SumOf<T>(seen, [row](int64_t j) { return row[j]; });
        const T inverse = T(1) / sum;
        for (int64_t j = 0; j < seen; ++j) row[j] *= inverse;
        for (int64_t j = seen; j < keys; ++j) row[j] = T(0);
        lse[i + r] = m + Log(sum);
      }
      Product(rows, z.e, keys, p, keys, int64_t{1}, v, z.e, int64_t{1}, o + i * z.e, z.e, false);
    }
  }
}

// do, q, k, v, o, lse -> dq, dk, dv
template <class T>
class AttentionGradient {
 public:
  explicit AttentionGradient(const KernelCall& c) : c_(c), z_(c, 1, 2, 3) {
    const int64_t bytes = kBlock * z_.t * static_cast<int64_t>(sizeof(T));
    p_ = static_cast<T*>(c.workspace->Allocate(bytes));
    dp_ = static_cast<T*>(c.workspace->Allocate(bytes));
  }

  void Run() {
    if (!z_.Fits(c_.workspace)) return;
    Zero(1, z_.b * z_.g * z_.t * z_.d);
    Zero(2, z_.b * z_.g * z_.t * z_.e);
    for (int64_t head = 0; head < z_.b * z_.h; ++head) {
      for (int64_t i = 0; i < z_.s; i += kBlock) Block(head, i);
    }
  }

 private:
  void Zero(int out, int64_t n) {
    T* p = static_cast<T*>(c_.out[out].data);
    for (int64_t i = 0; i < n; ++i) p[i] = T(0);
  }
  const T* In(int i) const { return static_cast<const T*>(c_.in[i].data); }
  T* Out(int i) const { return static_cast<T*>(c_.out[i].data); }

  void Block(int64_t head, int64_t i) {
    const int64_t kv = head / z_.h * z_.g + z_.KvHead(head % z_.h);
    const int64_t rows = z_.s - i < kBlock ? z_.s - i : kBlock, keys = z_.Keys(i, rows);
    const int64_t qd = (head * z_.s + i) * z_.d, oe = (head * z_.s + i) * z_.e;
    const T *q = In(1) + qd, *k = In(2) + kv * z_.t * z_.d, *v = In(3) + kv * z_.t * z_.e;
    const T *dout = In(0) + oe, *o = In(4) + oe, *lse = In(5) + head * z_.s + i;
    Product(rows, keys, z_.d, q, z_.d, int64_t{1}, k, int64_t{1}, z_.d, p_, keys, false);
    Product(rows, keys, z_.e, dout, z_.e, int64_t{1}, v, int64_t{1}, z_.e, dp_, keys, false);
    for (int64_t r = 0; r < rows; ++r) Row(i + r, keys, dout + r * z_.e, o + r * z_.e, lse[r], r);
    // p now holds the weights, dp the gradient of the scores before scaling.
    Product(keys, z_.e, rows, p_, int64_t{1}, keys, dout, z_.e, int64_t{1},
            Out(2) + kv * z_.t * z_.e, z_.e, true);
    Product(rows, z_.d, keys, dp_, keys, int64_t{1}, k, z_.d, int64_t{1}, Out(0) + qd, z_.d, false);
    Product(keys, z_.d, rows, dp_, int64_t{1}, keys, q, z_.d, int64_t{1}, Out(1) + kv * z_.t * z_.d,
            z_.d, true);
  }

  void Row(int64_t query, int64_t keys, const T* dout, const T* o, T lse, int64_t r) {
    const T scale = static_cast<T>(z_.scale);
    T *p = p_ + r * keys, *dp = dp_ + r * keys;
    const int64_t seen = Visible(z_, query, keys);
    const T dot = SumOf<T>(z_.e, [dout, o](int64_t j) { return dout[j] * o[j]; });
    for (int64_t j = 0; j < seen; ++j) p[j] = Exp(scale * p[j] - lse);
    for (int64_t j = 0; j < seen; ++j) dp[j] = scale * p[j] * (dp[j] - dot);
    for (int64_t j = seen; j < keys; ++j) p[j] = dp[j] = T(0);
  }

  const KernelCall& c_;
  const Geometry z_;
  T *p_, *dp_;
};

template <class T>
void AttentionBackward(const KernelCall& c) {
  AttentionGradient<T>(c).Run();
}
void AttentionKernel(const KernelCall& c) { RunFloating(c, Attention<double>, Attention<float>); }
void AttentionBackwardKernel(const KernelCall& c) {
  RunFloating(c, AttentionBackward<double>, AttentionBackward<float>);
}

}  // namespace

void RegisterAttention(AddKernelFn add) {
  add("attention", AttentionKernel, kFloatDTypes, KernelLayout::kContiguous);
  add("attention_backward", AttentionBackwardKernel, kFloatDTypes, KernelLayout::kContiguous);
}

}  // namespace DT_LEVEL_NS
}  // namespace dtensor
