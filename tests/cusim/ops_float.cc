// Floating point. Compiled with -frounding-math: instructions that round otherwise than to nearest
// run in the host's mode (see decode.cc).
#include "tests/cusim/ops.h"

namespace cusim {
namespace {

template <class T>
T Saturated(T v) {  // a NaN is +0
  const auto x = Real(v);
  return FromReal<T>(x > 0 ? std::min<decltype(x)>(x, 1) : decltype(x)(0));
}
template <class T>
T Relu(T v) {  // a NaN stays one
  const auto x = Real(v);
  return x > 0 || x != x ? FromReal<T>(x) : FromReal<T>(decltype(x)(0));
}
template <class T>
T Flushed(T v) {  // for what takes the bits as they are
  if constexpr (std::is_same_v<T, FlushedF32>) v.value = Flush(v.value);
  return v;
}
template <class T, class F>
T Sure(F f, T a) {
  return FromReal<T>(f(static_cast<double>(Real(a))));
}

template <class T, class F>
OpFn Finished(const Insn& in, F) {  // binary or ternary, with .sat or .relu
  constexpr bool ternary = std::is_invocable_v<F, T, T, T>;
  if constexpr (ternary) {
    if (in.saturate) return Ternary<T>([](T a, T b, T c) { return Saturated(F{}(a, b, c)); });
    if (in.relu) return Ternary<T>([](T a, T b, T c) { return Relu(F{}(a, b, c)); });
    return Ternary<T>(F{});
  } else {
    if (in.saturate) return Binary<T>([](T a, T b) { return Saturated(F{}(a, b)); });
    return Binary<T>(F{});
  }
}

template <class T>
T Divided(T a, T b) {
  return FromReal<T>(Real(a) / Real(b));
}

OpFn FindApproximate(const Opcode& op, Insn* in) {
  const std::string& b = op.base;
  return ForFloat(*in, [&]<class T>(Tag<T>) -> OpFn {
    if (b == "rsqrt") {
      return Unary<T>([](T a) { return Sure<T>([](double x) { return 1 / std::sqrt(x); }, a); });
    }
    if (b == "ex2") {
      return Unary<T>([](T a) { return Sure<T>([](double x) { return std::exp2(x); }, a); });
    }
    if (b == "lg2") {
      return Unary<T>([](T a) { return Sure<T>([](double x) { return std::log2(x); }, a); });
    }
    if (b == "sin") {
      return Unary<T>([](T a) { return Sure<T>([](double x) { return std::sin(x); }, a); });
    }
    if (b == "cos") {
      return Unary<T>([](T a) { return Sure<T>([](double x) { return std::cos(x); }, a); });
    }
    if (b == "tanh") {
      return Unary<T>([](T a) { return Sure<T>([](double x) { return std::tanh(x); }, a); });
    }
    return nullptr;
  });
}

OpFn FindExtreme(const Opcode& op, const Insn& in) {
  const bool larger = op.base == "max", nan = op.Has("NaN");
  if (op.Has("xorsign")) return nullptr;
  return ForFloat(in, [&]<class T>(Tag<T>) -> OpFn {
    if (larger && nan) return Binary<T>([](T a, T b) { return Extreme(a, b, true, true); });
    if (larger) return Binary<T>([](T a, T b) { return Extreme(a, b, true, false); });
    if (nan) return Binary<T>([](T a, T b) { return Extreme(a, b, false, true); });
    return Binary<T>([](T a, T b) { return Extreme(a, b, false, false); });
  });
}

// A lane's two halves through a function of one each.
template <class T, class F, int operands>
void PairOp(Exec& e, const Insn& in, uint32_t mask) {
  uint64_t* const d = e.Reg(in.d[0]);
  const uint64_t* s[3];
  for (int i = 0; i < 3; ++i) s[i] = e.Reg(i < operands ? in.s[i] : in.s[0]);
  EachLane(mask, [&](int l) {
    uint64_t r = 0;
    for (int h = 0; h < 2; ++h) {
      T x[3];
      for (int i = 0; i < 3; ++i) x[i] = {static_cast<uint16_t>(s[i][l] >> (16 * h))};
      T y;
      if constexpr (operands == 1) y = F{}(x[0]);
      if constexpr (operands == 2) y = F{}(x[0], x[1]);
      if constexpr (operands == 3) y = F{}(x[0], x[1], x[2]);
      r |= static_cast<uint64_t>(y.bits) << (16 * h);
    }
    d[l] = r;
  });
}
template <class T, int operands, class F>
OpFn Pair(F) {
  return &PairOp<T, F, operands>;
}

}  // namespace

OpFn FindPair(const Opcode& op, Insn* in) {
  if (in->type != Type::kF16x2 && in->type != Type::kBF16x2) return nullptr;
  const std::string& b = op.base;
  const bool nan = op.Has("NaN"), saturate = in->saturate, relu = in->relu;
  const auto of = [&]<class T>(Tag<T>) -> OpFn {
    if (b == "add") {
      if (saturate) return Pair<T, 2>([](T x, T y) { return Saturated(Add(x, y)); });
      return Pair<T, 2>([](T x, T y) { return Add(x, y); });
    }
    if (b == "sub") {
      if (saturate) return Pair<T, 2>([](T x, T y) { return Saturated(Add(x, Negate(y))); });
      return Pair<T, 2>([](T x, T y) { return Add(x, Negate(y)); });
    }
    if (b == "mul") {
      if (saturate) return Pair<T, 2>([](T x, T y) { return Saturated(Mul(x, y)); });
      return Pair<T, 2>([](T x, T y) { return Mul(x, y); });
    }
    if (b == "fma") {
      if (saturate) return Pair<T, 3>([](T x, T y, T z) { return Saturated(Fma(x, y, z)); });
      if (relu) return Pair<T, 3>([](T x, T y, T z) { return Relu(Fma(x, y, z)); });
      return Pair<T, 3>([](T x, T y, T z) { return Fma(x, y, z); });
    }
    if (b == "min") {
      if (nan) return Pair<T, 2>([](T x, T y) { return Extreme(x, y, false, true); });
      return Pair<T, 2>([](T x, T y) { return Extreme(x, y, false, false); });
    }
    if (b == "max") {
      if (nan) return Pair<T, 2>([](T x, T y) { return Extreme(x, y, true, true); });
      return Pair<T, 2>([](T x, T y) { return Extreme(x, y, true, false); });
    }
    if (b == "neg") return Pair<T, 1>([](T x) { return Negate(x); });
    if (b == "abs")
      return Pair<T, 1>([](T x) { return T{static_cast<uint16_t>(x.bits & 0x7fff)}; });
    if (b == "ex2") {
      return Pair<T, 1>([](T x) { return Sure<T>([](double v) { return std::exp2(v); }, x); });
    }
    if (b == "tanh") {
      return Pair<T, 1>([](T x) { return Sure<T>([](double v) { return std::tanh(v); }, x); });
    }
    return nullptr;
  };
  return in->type == Type::kF16x2 ? of(Tag<F16>()) : of(Tag<BF16>());
}

OpFn FindFloat(const Opcode& op, Insn* in) {
  if (!IsFloat(in->type)) return nullptr;
  const std::string& b = op.base;
  if (b == "min" || b == "max") return FindExtreme(op, *in);
  if (const OpFn f = FindApproximate(op, in)) return f;
  return ForFloat(*in, [&]<class T>(Tag<T>) -> OpFn {
    if (b == "add") return Finished<T>(*in, [](T x, T y) { return Add(x, y); });
    if (b == "sub") {
      return Finished<T>(*in, [](T x, T y) {
        if constexpr (sizeof(T) == 2) return Add(x, Negate(y));
        if constexpr (sizeof(T) != 2) return FromReal<T>(Real(x) - Real(y));
      });
    }
    if (b == "mul") return Finished<T>(*in, [](T x, T y) { return Mul(x, y); });
    if (b == "fma" || b == "mad") {
      return Finished<T>(*in, [](T x, T y, T z) { return Fma(x, y, z); });
    }
    if (b == "div") return Binary<T>([](T x, T y) { return Divided(x, y); });
    if (b == "rcp") return Unary<T>([](T x) { return FromReal<T>(1 / Real(x)); });
    if (b == "sqrt") return Unary<T>([](T x) { return FromReal<T>(std::sqrt(Real(x))); });
    if (b == "neg") return Unary<T>([](T x) { return Negate(Flushed(x)); });
    if (b == "abs") {
      return Unary<T>(
          [](T x) { return Get<T>(Put(Flushed(x)) & ~(uint64_t{1} << (sizeof(T) * 8 - 1))); });
    }
    if (b == "copysign") {
      return Binary<T>([](T x, T y) {  // the sign of x, the rest of y
        const uint64_t sign = uint64_t{1} << (sizeof(T) * 8 - 1);
        return Get<T>((Put(x) & sign) | (Put(y) & ~sign));
      });
    }
    if (b == "testp") {
      if (op.Has("finite")) return Unary<T>([](T x) { return std::isfinite(double(Real(x))); });
      if (op.Has("infinite")) return Unary<T>([](T x) { return std::isinf(double(Real(x))); });
      if (op.Has("number")) return Unary<T>([](T x) { return !std::isnan(double(Real(x))); });
      if (op.Has("notanumber")) return Unary<T>([](T x) { return std::isnan(double(Real(x))); });
      if (op.Has("normal")) return Unary<T>([](T x) { return std::isnormal(Real(x)); });
      return Unary<T>(
          [](T x) { return Real(x) != 0 && std::isfinite(Real(x)) && !std::isnormal(Real(x)); });
    }
    return nullptr;
  });
}

}  // namespace cusim
