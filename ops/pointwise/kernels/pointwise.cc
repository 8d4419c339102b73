// The loops of ops/pointwise/elementwise.inc, one per computing type, and their registration.
#include "dtensor/ops/cpu/math.h"
#include "dtensor/ops/kernels.h"
#include "dtensor/ops/pointwise/pointwise_run.h"

namespace dtensor {
namespace DT_LEVEL_NS {
namespace {

DT_MATH double AttrAs(const Attr& a, double) { return a.d; }
DT_MATH float AttrAs(const Attr& a, float) { return static_cast<float>(a.d); }
DT_MATH int64_t AttrAs(const Attr& a, int64_t) { return a.i; }

// torch.pow's exact cases; the choice is the same for a whole loop.
template <class T>
DT_MATH T PowScalar(T x, T s) {
  if (s == T(2)) return Mul(x, x);
  if (s == T(3)) return Mul(Mul(x, x), x);
  if (s == T(1)) return x;
  if (s == T(0)) return T(1);
  return Pow(x, s);
}
DT_MATH double PowScalar(double x, double s) {
  if (s == 0.5) return Sqrt(x);
  if (s == -0.5) return 1.0 / Sqrt(x);
  if (s == -1.0) return 1.0 / x;
  if (s == -2.0) return 1.0 / (x * x);
  return PowScalar<double>(x, s);
}
DT_MATH float PowScalar(float x, float s) {
  if (s == 0.5f) return Sqrt(x);
  if (s == -0.5f) return 1.0f / Sqrt(x);
  if (s == -1.0f) return 1.0f / x;
  if (s == -2.0f) return 1.0f / (x * x);
  return PowScalar<float>(x, s);
}

// ivdep: the output may be the first input, element for element.
#define DT_LOOP(OutT, loads, kernel)                                                \
  static void Run(void* out, const void* const* in, int64_t n, const Attr* attrs) { \
    auto* o = static_cast<OutT*>(out);                                              \
    const T s_0 = AttrAs(attrs[0], T());                                            \
    const int64_t i_0 = attrs[0].i;                                                 \
    (void)s_0;                                                                      \
    (void)i_0;                                                                      \
    DT_POINTERS_##loads;                                                            \
    _Pragma("GCC ivdep") for (int64_t i = 0; i < n; ++i) {                          \
      DT_LOADS_##loads;                                                             \
      o[i] = static_cast<OutT>(kernel);                                             \
    }                                                                               \
  }
#define DT_POINTERS_A const auto* pa = static_cast<const T*>(in[0])
#define DT_LOADS_A const T a = pa[i]
#define DT_POINTERS_AB \
  DT_POINTERS_A;       \
  const auto* pb = static_cast<const T*>(in[1])
#define DT_LOADS_AB \
  DT_LOADS_A;       \
  const T b = pb[i]
#define DT_POINTERS_ABC \
  DT_POINTERS_AB;       \
  const auto* pc = static_cast<const T*>(in[2])
#define DT_LOADS_ABC \
  DT_LOADS_AB;       \
  const T c = pc[i]
#define DT_POINTERS_AM \
  DT_POINTERS_A;       \
  const auto* pm = static_cast<const uint8_t*>(in[1])
#define DT_LOADS_AM \
  DT_LOADS_A;       \
  const bool m = pm[i] != 0
#define DT_POINTERS_MAB                                \
  const auto* pm = static_cast<const uint8_t*>(in[0]); \
  const auto* pa = static_cast<const T*>(in[1]);       \
  const auto* pb = static_cast<const T*>(in[2])
#define DT_LOADS_MAB         \
  const bool m = pm[i] != 0; \
  const T a = pa[i];         \
  const T b = pb[i]

#define DT_BODY_Unary(kernel) DT_LOOP(T, A, kernel)
#define DT_BODY_Binary(kernel) DT_LOOP(T, AB, kernel)
#define DT_BODY_Ternary(kernel) DT_LOOP(T, ABC, kernel)
#define DT_BODY_Compare1(kernel) DT_LOOP(uint8_t, A, kernel)
#define DT_BODY_Compare2(kernel) DT_LOOP(uint8_t, AB, kernel)
#define DT_BODY_MaskFill(kernel) DT_LOOP(T, AM, kernel)
#define DT_BODY_Where(kernel) DT_LOOP(T, MAB, kernel)
#define DT_SHAPE_Unary -1, false
#define DT_SHAPE_Binary -1, false
#define DT_SHAPE_Ternary -1, false
#define DT_SHAPE_Compare1 -1, true
#define DT_SHAPE_Compare2 -1, true
#define DT_SHAPE_MaskFill 1, false
#define DT_SHAPE_Where 0, false
#define DT_RUNS_Float(Loop) &Loop<double>::Run, &Loop<float>::Run, nullptr
#define DT_RUNS_Any(Loop) &Loop<double>::Run, &Loop<float>::Run, &Loop<int64_t>::Run

#define S(k) s_##k
#define I(k) i_##k
#define DT_POINTWISE(kind, user, name, sig, types, decl, kernel, saves, grad, domain)       \
  template <class T>                                                                        \
  struct Loop_##name {                                                                      \
    DT_BODY_##kind((kernel))                                                                \
  };                                                                                        \
  void Kernel_##name(const KernelCall& call) {                                              \
    static constexpr PointwiseLoop kLoop = {DT_RUNS_##types(Loop_##name), DT_SHAPE_##kind}; \
    RunPointwise(call, kLoop);                                                              \
  }
#include "dtensor/ops/pointwise/elementwise.inc"
#undef S
#undef I

}  // namespace

void RegisterPointwise(AddKernelFn add) {
#define DT_TYPES_Float kFloatDTypes
#define DT_TYPES_Any kAllDTypes
#define DT_INPUT_Where(types) DTypeBit(DType::kBool)
#define DT_INPUT_Unary(types) types
#define DT_INPUT_Binary(types) types
#define DT_INPUT_Ternary(types) types
#define DT_INPUT_Compare1(types) types
#define DT_INPUT_Compare2(types) types
#define DT_INPUT_MaskFill(types) types
#define DT_POINTWISE(kind, user, name, sig, types, decl, kernel, saves, grad, domain) \
  add(#name, Kernel_##name, DT_INPUT_##kind(DT_TYPES_##types), KernelLayout::kStrided);
#include "dtensor/ops/pointwise/elementwise.inc"
}

}  // namespace DT_LEVEL_NS
}  // namespace dtensor
