#include "dtensor/tensor/cpu/kernels/runs.h"

namespace dtensor {
namespace DT_LEVEL_NS {
namespace {

struct Bool {
  uint8_t value;
};

template <DType T>
struct TypeOf;
template <>
struct TypeOf<DType::kF64> {
  using type = double;
};
template <>
struct TypeOf<DType::kF32> {
  using type = float;
};
template <>
struct TypeOf<DType::kBF16> {
  using type = BFloat16;
};
template <>
struct TypeOf<DType::kF16> {
  using type = Half;
};
template <>
struct TypeOf<DType::kI64> {
  using type = int64_t;
};
template <>
struct TypeOf<DType::kI32> {
  using type = int32_t;
};
template <>
struct TypeOf<DType::kU8> {
  using type = uint8_t;
};
template <>
struct TypeOf<DType::kBool> {
  using type = Bool;
};

// What arithmetic on an element type is done in.
inline double Widen(double v) { return v; }
inline float Widen(float v) { return v; }
inline float Widen(BFloat16 v) { return ToFloat(v); }
inline float Widen(Half v) { return ToFloat(v); }
inline int64_t Widen(int64_t v) { return v; }
inline int32_t Widen(int32_t v) { return v; }
inline uint8_t Widen(uint8_t v) { return v; }
inline uint8_t Widen(Bool v) { return v.value != 0; }

// Out of range (and NaN) gives the lowest integer, as the hardware instruction does.
inline int64_t Truncate(double v) {
  return v > -9223372036854775808.0 && v < 9223372036854775808.0 ? static_cast<int64_t>(v)
                                                                 : INT64_MIN;
}
inline int64_t Integer(double v) { return Truncate(v); }
inline int64_t Integer(float v) { return Truncate(v); }
template <class T>
inline int64_t Integer(T v) {
  return static_cast<int64_t>(v);
}

template <class S>
inline void Narrow(S v, double* out) {
  *out = static_cast<double>(v);
}
template <class S>
inline void Narrow(S v, float* out) {
  *out = static_cast<float>(v);
}
template <class S>
inline void Narrow(S v, BFloat16* out) {
  *out = ToBFloat16(static_cast<float>(v));
}
template <class S>
inline void Narrow(S v, Half* out) {
  *out = ToHalf(static_cast<float>(v));
}
template <class S>
inline void Narrow(S v, int64_t* out) {
  *out = Integer(v);
}
template <class S>
inline void Narrow(S v, int32_t* out) {
  *out = static_cast<int32_t>(Integer(v));
}
template <class S>
inline void Narrow(S v, uint8_t* out) {
  *out = static_cast<uint8_t>(Integer(v));
}
template <class S>
inline void Narrow(S v, Bool* out) {
  out->value = v != S(0);
}

template <class S, class D>
void ConvertRun(void* dst, int64_t ds, const void* src, int64_t ss, int64_t n) {
  auto* d = static_cast<D*>(dst);
  const auto* s = static_cast<const S*>(src);
  if (ds == 1 && ss == 1) {
    for (int64_t i = 0; i < n; ++i) Narrow(Widen(s[i]), &d[i]);
    return;
  }
  for (int64_t i = 0; i < n; ++i) Narrow(Widen(s[i * ss]), &d[i * ds]);
}

template <class T>
void SameRun(void* dst, int64_t ds, const void* src, int64_t ss, int64_t n) {
  auto* d = static_cast<T*>(dst);
  const auto* s = static_cast<const T*>(src);
  if (ds == 1 && ss == 1) {
    __builtin_memcpy(d, s, static_cast<size_t>(n) * sizeof(T));
    return;
  }
  for (int64_t i = 0; i < n; ++i) d[i * ds] = s[i * ss];
}

template <class T>
void FillRun(void* dst, int64_t stride, const void* value, int64_t n) {
  auto* d = static_cast<T*>(dst);
  const T v = *static_cast<const T*>(value);
  if (stride == 1) {
    for (int64_t i = 0; i < n; ++i) d[i] = v;
    return;
  }
  for (int64_t i = 0; i < n; ++i) d[i * stride] = v;
}

template <class T>
void CopyPlane(void* dst, int64_t d0, int64_t d1, const void* src, int64_t s0, int64_t s1,
               int64_t n0, int64_t n1) {
  constexpr int64_t kBlock = 32;
  auto* d = static_cast<T*>(dst);
  const auto* s = static_cast<const T*>(src);
  for (int64_t i0 = 0; i0 < n0; i0 += kBlock) {
    const int64_t i1 = i0 + kBlock < n0 ? i0 + kBlock : n0;
    for (int64_t j0 = 0; j0 < n1; j0 += kBlock) {
      const int64_t j1 = j0 + kBlock < n1 ? j0 + kBlock : n1;
      for (int64_t i = i0; i < i1; ++i) {
        for (int64_t j = j0; j < j1; ++j) d[i * d0 + j * d1] = s[i * s0 + j * s1];
      }
    }
  }
}

// Integer arithmetic wraps around.
struct SumOp {
  static double Apply(double a, double b) { return a + b; }
  static float Apply(float a, float b) { return a + b; }
  static int64_t Apply(int64_t a, int64_t b) {
    return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
  }
};
struct ProdOp {
  static double Apply(double a, double b) { return a * b; }
  static float Apply(float a, float b) { return a * b; }
  static int64_t Apply(int64_t a, int64_t b) {
    return static_cast<int64_t>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
  }
};
// NaN on either side wins.
struct MaxOp {
  template <class T>
  static T Apply(T a, T b) {
    return a > b || a != a ? a : b;
  }
};
struct MinOp {
  template <class T>
  static T Apply(T a, T b) {
    return a < b || a != a ? a : b;
  }
};
inline double Wide(double v) { return v; }
inline float Wide(float v) { return v; }
template <class T>
inline int64_t Wide(T v) {
  return static_cast<int64_t>(v);
}

template <class T, class Op>
void ReduceRun(void* acc, int64_t as, const void* x, int64_t xs, int64_t n) {
  auto* a = static_cast<T*>(acc);
  const auto* b = static_cast<const T*>(x);
  if (as == 1 && xs == 1) {
    for (int64_t i = 0; i < n; ++i) Narrow(Op::Apply(Wide(Widen(a[i])), Wide(Widen(b[i]))), &a[i]);
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    Narrow(Op::Apply(Wide(Widen(a[i * as])), Wide(Widen(b[i * xs]))), &a[i * as]);
  }
}

template <class S>
void FillCopies(CopyRunFn* row) {
  row[0] = ConvertRun<S, double>;
  row[1] = ConvertRun<S, float>;
  row[2] = ConvertRun<S, BFloat16>;
  row[3] = ConvertRun<S, Half>;
  row[4] = ConvertRun<S, int64_t>;
  row[5] = ConvertRun<S, int32_t>;
  row[6] = ConvertRun<S, uint8_t>;
  row[7] = ConvertRun<S, Bool>;
}

template <class Op>
void FillReduces(ReduceRunFn* row) {
  row[0] = ReduceRun<double, Op>;
  row[1] = ReduceRun<float, Op>;
  row[2] = ReduceRun<BFloat16, Op>;
  row[3] = ReduceRun<Half, Op>;
  row[4] = ReduceRun<int64_t, Op>;
  row[5] = ReduceRun<int32_t, Op>;
  row[6] = ReduceRun<uint8_t, Op>;
  row[7] = ReduceRun<Bool, Op>;
}

RunTable MakeTable() {
  RunTable t{};
  FillCopies<double>(t.copy[0]);
  FillCopies<float>(t.copy[1]);
  FillCopies<BFloat16>(t.copy[2]);
  FillCopies<Half>(t.copy[3]);
  FillCopies<int64_t>(t.copy[4]);
  FillCopies<int32_t>(t.copy[5]);
  FillCopies<uint8_t>(t.copy[6]);
  FillCopies<Bool>(t.copy[7]);
  t.copy[0][0] = t.copy[4][4] = SameRun<uint64_t>;
  t.copy[1][1] = t.copy[5][5] = SameRun<uint32_t>;
  t.copy[2][2] = t.copy[3][3] = SameRun<uint16_t>;
  t.copy[6][6] = SameRun<uint8_t>;
  t.fill[0] = FillRun<uint8_t>;
  t.fill[1] = FillRun<uint16_t>;
  t.fill[2] = FillRun<uint32_t>;
  t.fill[3] = FillRun<uint64_t>;
  t.plane[0] = CopyPlane<uint8_t>;
  t.plane[1] = CopyPlane<uint16_t>;
  t.plane[2] = CopyPlane<uint32_t>;
  t.plane[3] = CopyPlane<uint64_t>;
  FillReduces<SumOp>(t.reduce[0]);
  FillReduces<MaxOp>(t.reduce[1]);
  FillReduces<MinOp>(t.reduce[2]);
  FillReduces<ProdOp>(t.reduce[3]);
  return t;
}

}  // namespace

const RunTable& TensorRuns() {
  static const RunTable table = MakeTable();
  return table;
}

}  // namespace DT_LEVEL_NS
}  // namespace dtensor
