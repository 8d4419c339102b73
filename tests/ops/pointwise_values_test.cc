// What PyTorch's samples of pointwise functions do not show: errors, 16-bit types, whole numbers
// and numbers of every size.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "dtensor/ops/ops.h"
#include "tests/common/message.h"

namespace dtensor::pointwise_values_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::MessageOf;

DTensor Of(const std::vector<double>& v, DType t) {
  return to(FromVector(v, {static_cast<int64_t>(v.size())}, {.dtype = DType::kF64}), t);
}
std::vector<double> Back(const DTensor& x) { return x.ToVector<double>(); }

TEST(PointwiseErrors, NameTheFunctionAndWhatWouldBeRight) {
  const DTensor x = ones({4, 3}), i = Of({1, 2, 3}, DType::kI64), b = Of({1, 0}, DType::kBool);
  const auto says = [](const auto& fn, const char* what) {
    EXPECT_THAT(MessageOf(fn), HasSubstr(what));
  };
  says([&] { floor_divide(i, 0); }, "a whole number is divided by 0");
  says([&] { remainder(i, Of({1, 0, 2}, DType::kI64)); }, "a whole number is divided by 0");
  says([&] { div(x, x, "round"); }, "[div] rounding_mode is \"round\"; there are \"floor\"");
  says([&] { bitwise_and(x, x); }, "[bitwise_and] takes integers and bool, not float32");
  says([&] { bitwise_not(x); }, "[bitwise_not] takes integers and bool");
  says([&] { floor(b); }, "[floor] is not defined for bool");
  says([&] { round(i, 2); }, "[round] integers are rounded to 0 decimals only");
  says([&] { heaviside(x, to(x, DType::kF64)); }, "[heaviside] x and values have different dtypes");
  says([&] { clamp(x, std::nullopt); }, "[clamp] one of min and max must be given");
  says([&] { clamp(x, DTensor(), DTensor()); }, "[clamp] one of min and max must be given");
  says([&] { hardtanh(x, 2, 1); }, "[hardtanh] min_val 2 is above max_val 1");
  says([&] { softshrink(x, -1); }, "[softshrink] lambd is -1");
  says([&] { celu(x, 0); }, "[celu] alpha is 0");
  says([&] { glu(x); }, "[glu] dim 1 is 3, which has no half");
  says([&] { glu(ones({})); }, "[glu] x has no dims");
  says([&] { prelu(x, ones({2})); }, "[prelu] weight [2] is neither one number nor one for each");
  says([&] { polygamma(-1, x); }, "[polygamma] n is -1");
  says([&] { isclose(x, x, -1); }, "[isclose] rtol -1");
  says([&] { addcdiv(i, i, i); }, "[addcdiv] a quotient of integers is no integer");
  says([&] { addcmul(i, i, i, 0.5); }, "[addcmul] value is a floating number");
  says([&] { fill(x, x); }, "[fill] value must have no dims");
  says([&] { sin(DTensor()); }, "[sin] an input is null");
}

// n + 1, of which the gradient is, is a number for the largest n.
TEST(Polygamma, OfOrdersWhoseFactorialIsInfinite) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  const DTensor x = Of({0.5, 0.25}, DType::kF64).RequiresGrad();
  EXPECT_THAT(Back(polygamma(kMost - 1, x)), ElementsAre(-HUGE_VAL, -HUGE_VAL));
  const DTensor y = polygamma(kMost, x);
  EXPECT_THAT(Back(y), ElementsAre(HUGE_VAL, HUGE_VAL));
  sum(y).Backward();
  EXPECT_THAT(Back(x.grad()), ElementsAre(-HUGE_VAL, -HUGE_VAL));
}

// x + 1 is 1 there; what is left of the pole at 0 is not.
TEST(Polygamma, BesideZeroIsThePole) {
  const DTensor x = Of({-1e-30, 1e-30, -1e-5}, DType::kF64);
  const std::vector<double> first = Back(polygamma(1, x)), second = Back(polygamma(2, x));
  for (const int i : {0, 1}) EXPECT_NEAR(first[i] * 1e-60, 1, 1e-14);
  EXPECT_NEAR(first[2], 10000000001.645, 1e-3);
  EXPECT_NEAR(second[0] * 1e-90, 2, 1e-14);
  EXPECT_NEAR(second[1] * 1e-90, -2, 1e-14);
}

TEST(NextAfter, GoesByTheStepsOfTheDtype) {
  const double inf = HUGE_VAL;
  const std::vector<double> from = {1, 1, -1, 0, 0, inf}, towards = {2, 0, -2, 1, -1, 0};
  EXPECT_THAT(Back(nextafter(Of(from, DType::kBF16), Of(towards, DType::kBF16))),
              ElementsAre(1.0078125, 0.99609375, -1.0078125, std::ldexp(1, -133),
                          -std::ldexp(1, -133), 0x1.FEp127));
  EXPECT_THAT(Back(nextafter(Of(from, DType::kF16), Of(towards, DType::kF16))),
              ElementsAre(1.0009765625, 0.99951171875, -1.0009765625, std::ldexp(1, -24),
                          -std::ldexp(1, -24), 65504));
  const double least = std::ldexp(1, -14), step = std::ldexp(1, -24);  // where steps become equal
  EXPECT_THAT(Back(nextafter(Of({least, least, 3 * step, 65504}, DType::kF16),
                             Of({1, 0, 0, inf}, DType::kF16))),
              ElementsAre(least + step, least - step, 2 * step, inf));
  EXPECT_THAT(Back(nextafter(Of({1}, DType::kF64), Of({2}, DType::kF64))),
              ElementsAre(std::nextafter(1.0, 2.0)));
}

// Functions with a shorter way for runs of usual numbers: one that is not usual changes no other.
TEST(Usual, ElementsDoNotDependOnTheirNeighbours) {
  constexpr int64_t kCount = 5000, kAt = 2500;
  std::vector<double> usual(kCount), divisors(kCount);
  for (int64_t i = 0; i < kCount; ++i) {
    usual[i] =
        std::ldexp(1.0 + static_cast<double>(i * 37 % 101) / 101, static_cast<int>(i % 30) - 14);
    divisors[i] = i % 2 == 0 ? 0.37 : -2.5;
  }
  using Fn = DTensor (*)(const DTensor&, const DTensor&);
  const Fn fns[] = {[](const DTensor& x, const DTensor&) { return sin(x); },
                    [](const DTensor& x, const DTensor&) { return cos(x); },
                    [](const DTensor& x, const DTensor&) { return tan(x); },
                    [](const DTensor& x, const DTensor&) { return log(x); },
                    [](const DTensor& x, const DTensor& y) { return fmod(x, y); },
                    [](const DTensor& x, const DTensor& y) { return remainder(x, y); },
                    [](const DTensor& x, const DTensor& y) { return floor_divide(x, y); }};
  for (const DType t : {DType::kF32, DType::kF64}) {
    for (size_t f = 0; f < std::size(fns); ++f) {
      const std::vector<double> want = Back(fns[f](Of(usual, t), Of(divisors, t)));
      for (const double other : {1e9, 1e30, HUGE_VAL, std::nan(""), 0.0, -1.0, 1e-40}) {
        std::vector<double> mixed = usual;
        mixed[kAt] = other;
        std::vector<double> got = Back(fns[f](Of(mixed, t), Of(divisors, t)));
        got[kAt] = want[kAt];
        EXPECT_EQ(got, want) << f << " beside " << other;
      }
    }
  }
  // Large angles, by the C library in float64.
  const std::vector<double> large = {131072, 1e6, 1e9, 3e38, -7e20};
  const std::vector<double> sines = Back(sin(Of(large, DType::kF32)));
  for (size_t i = 0; i < large.size(); ++i) {
    EXPECT_NEAR(sines[i], std::sin(static_cast<double>(static_cast<float>(large[i]))), 1e-7);
  }
}

TEST(Integers, DivideShiftAndCountAsInPyTorch) {
  const DTensor x = Of({-7, 7, -7, 7}, DType::kI32), y = Of({2, -2, -2, 2}, DType::kI32);
  EXPECT_THAT(Back(floor_divide(x, y)), ElementsAre(-4, -4, 3, 3));
  EXPECT_THAT(Back(div(x, y, "trunc")), ElementsAre(-3, -3, 3, 3));
  EXPECT_THAT(Back(remainder(x, y)), ElementsAre(1, -1, -1, 1));
  EXPECT_THAT(Back(fmod(x, y)), ElementsAre(-1, 1, -1, 1));
  const int64_t least = std::numeric_limits<int64_t>::min();
  const DTensor low = FromVector<int64_t>({least}, {1});
  EXPECT_EQ(floor_divide(low, -1).ToVector<int64_t>()[0], least);  // wraps around
  EXPECT_EQ(remainder(low, -1).ToVector<int64_t>()[0], 0);
  // The number wraps around as elements do; found by calls with random arguments.
  const DTensor one = FromVector<int64_t>({1}, {1});
  EXPECT_EQ(add(one, least, 3).ToVector<int64_t>()[0], least + 1);
  EXPECT_EQ(sub(one, least).ToVector<int64_t>()[0], least + 1);
  EXPECT_EQ(sub_(clone(one), least).ToVector<int64_t>()[0], least + 1);
  EXPECT_THAT(Back(bitwise_left_shift(Of({1, 1, 1, 3}, DType::kU8), Of({7, 8, 70, 7}, DType::kU8))),
              ElementsAre(128, 0, 0, 128));
  EXPECT_THAT(Back(bitwise_right_shift(Of({-8, -8, 8}, DType::kI32), Of({1, 40, 99}, DType::kI32))),
              ElementsAre(-4, -1, 0));
  EXPECT_THAT(Back(bitwise_not(Of({0, 1}, DType::kBool))), ElementsAre(1, 0));
  EXPECT_THAT(Back(bitwise_not(Of({0, 255}, DType::kU8))), ElementsAre(255, 0));
  EXPECT_THAT(Back(gcd(Of({-12, 0, 0, 7}, DType::kI64), Of({18, 5, 0, 21}, DType::kI64))),
              ElementsAre(6, 5, 0, 7));
  EXPECT_THAT(Back(lcm(Of({-4, 0, 6}, DType::kI64), Of({6, 5, 4}, DType::kI64))),
              ElementsAre(12, 0, 12));
}

TEST(Trigonometry, IsRightForNumbersOfEverySize) {
  const std::vector<double> v = {1e22, -1e300, 6381956970095103 * std::ldexp(1, 797), 1e-310,
                                 3.5e38};
  const DTensor x = Of(v, DType::kF64);
  const std::vector<double> s = Back(sin(x)), c = Back(cos(x)), t = Back(tan(x));
  for (size_t i = 0; i < v.size(); ++i) {
    EXPECT_NEAR(s[i], std::sin(v[i]), 4e-16) << v[i];
    EXPECT_NEAR(c[i], std::cos(v[i]), 4e-16) << v[i];
    EXPECT_NEAR(t[i] / std::tan(v[i]), 1, 4e-15) << v[i];
  }
  for (const double r : Back(sin(Of({HUGE_VAL, -HUGE_VAL}, DType::kF32))))
    EXPECT_TRUE(std::isnan(r));
}

// In units of the last place of float32.
double UnitsOff(double got, double exact) {
  return std::fabs(got - exact) / std::ldexp(1.0, std::max(std::ilogb(exact), -126) - 23);
}

// The floats beside whole quarter turns: of n pi / 2 three parts are taken from them, and what is
// left may be all in the third.
TEST(Trigonometry, IsRightBesideWholeQuarters) {
  std::vector<float> at;
  for (int n = 1; n < 83443; ++n) {
    const auto nearest = static_cast<float>(n * M_PI_2);
    at.insert(at.end(), {std::nextafterf(nearest, 0), nearest, -std::nextafterf(nearest, 1e9F)});
  }
  const DTensor x = FromVector(at, {static_cast<int64_t>(at.size())});
  const std::vector<double> s = Back(sin(x)), c = Back(cos(x)), t = Back(tan(x));
  double worst[3] = {};
  for (size_t i = 0; i < at.size(); ++i) {
    const double a = at[i];
    worst[0] = std::max(worst[0], UnitsOff(s[i], std::sin(a)));
    worst[1] = std::max(worst[1], UnitsOff(c[i], std::cos(a)));
    worst[2] = std::max(worst[2], UnitsOff(t[i], std::tan(a)));
  }
  EXPECT_LE(worst[0], 0.51);
  EXPECT_LE(worst[1], 0.51);
  EXPECT_LE(worst[2], 2);
}

TEST(Trigonometry, KeepsTheSignOfZero) {
  const DTensor x = Of({-0.0, 0.0, -1e-45, 1e-45}, DType::kF32);
  const double least = std::ldexp(1, -149);
  for (const DTensor& y : {sin(x), tan(x)}) {
    const std::vector<double> got = Back(y);
    EXPECT_THAT(got, ElementsAre(0, 0, -least, least));
    EXPECT_TRUE(std::signbit(got[0]));
    EXPECT_FALSE(std::signbit(got[1]));
  }
}

// Each in a run of its own, and all beside numbers that have no case of their own.
TEST(Logarithm, IsRightForNumbersOfEveryKind) {
  const float least = std::numeric_limits<float>::denorm_min(), tiny = 1.17549435e-38F;
  const std::vector<float> all = {0,         -0.0F,         -1,      -HUGE_VALF,
                                  HUGE_VALF, std::nanf(""), least,   1e-40F,
                                  tiny,      1.0F,          3.4e38F, std::nextafterf(tiny, 0),
                                  -tiny};
  std::vector<float> mixed(1000, 2.5F);
  for (size_t i = 0; i < all.size(); ++i) mixed[i * 70] = all[i];
  const std::vector<float> together = log(FromVector(mixed, {1000})).ToVector<float>();
  for (size_t i = 0; i < all.size(); ++i) {
    const std::vector<float> alone =
        log(FromVector(std::vector<float>(300, all[i]), {300})).ToVector<float>();
    const double exact = std::log(static_cast<double>(all[i]));
    for (const float got : {together[i * 70], alone[0], alone[299]}) {
      if (std::isnan(exact)) {
        EXPECT_TRUE(std::isnan(got)) << all[i];
      } else {
        EXPECT_FLOAT_EQ(got, static_cast<float>(exact)) << all[i];
      }
    }
  }
}

TEST(Erfc, IsRightAtItsEnds) {
  const std::vector<double> ends = {0.0, -0.0, HUGE_VAL, -HUGE_VAL, 10.1, 10.2, 11, 1e30, -11};
  EXPECT_THAT(Back(erfc(Of(ends, DType::kF32))), ElementsAre(1, 1, 0, 2, 0, 0, 0, 0, 2));
  EXPECT_TRUE(std::isnan(Back(erfc(Of({std::nan("")}, DType::kF32)))[0]));
  // Where it is subnormal, in units of the least number.
  const DTensor x = to(arange(0, 2000) * 5e-4 + 9.195, DType::kF32);
  const std::vector<float> at = x.ToVector<float>(), got = erfc(x).ToVector<float>();
  for (size_t i = 0; i < at.size(); ++i) {
    EXPECT_LE(UnitsOff(got[i], std::erfc(static_cast<double>(at[i]))), 2) << at[i];
  }
}

// float32 against the C library in float64.
struct Accuracy {
  const char* name;
  DTensor (*fn)(const DTensor&);
  double (*exact)(double);
  double low, high, ulp;
};
TEST(Float32, IsWithinAFewUnitsOfTheLastPlace) {
  const Accuracy all[] = {
      {"exp", exp, std::exp, -87, 88.7, 1.2},
      {"expm1", expm1, std::expm1, -17, 88, 1.6},
      {"log", log, std::log, 1e-3, 1e3, 0.9},
      {"log1p", log1p, std::log1p, -0.9, 100, 1.2},
      {"sin", sin, std::sin, -100, 100, 1},
      {"cos", cos, std::cos, -100, 100, 1},
      {"tan", tan, std::tan, -100, 100, 2.5},
      {"sin", sin, std::sin, 1e5, 131071, 1},
      {"cos", cos, std::cos, -131071, -1e5, 1},
      {"tan", tan, std::tan, 1e5, 131071, 2.5},
      {"asin", asin, std::asin, -1, 1, 2},
      {"atan", atan, std::atan, -50, 50, 1.5},
      {"tanh", tanh, std::tanh, -9, 9, 2.4},
      {"erf", erf, std::erf, -4, 4, 1.3},
      {"erfc", erfc, std::erfc, -4, 9, 4},
      {"lgamma", lgamma, std::lgamma, 0.01, 50, 0.51},
      {"sigmoid", sigmoid, [](double x) { return 1 / (1 + std::exp(-x)); }, -80, 80, 2.5},
      {"gelu", [](const DTensor& x) { return gelu(x); },
       [](double x) { return 0.5 * x * std::erfc(-x * M_SQRT1_2); }, -1, 40, 2.5},
  };
  constexpr int64_t kCount = 200001;
  for (const Accuracy& a : all) {
    const DTensor x =
        to(arange(0, kCount) * ((a.high - a.low) / (kCount - 1)) + a.low, DType::kF32);
    const std::vector<float> at = x.ToVector<float>(), got = a.fn(x).ToVector<float>();
    double worst = 0, where = 0;
    for (size_t i = 0; i < at.size(); ++i) {
      const double exact = a.exact(static_cast<double>(at[i]));
      if (exact == 0) continue;
      const double off = UnitsOff(static_cast<double>(got[i]), exact);
      if (!(off <= worst)) worst = off, where = at[i];
    }
    EXPECT_LE(worst, a.ulp) << a.name << " at " << where;
  }
}

// Far below 0 gelu is less than 1e-6, by a relative error that 1 + erf(x) would not have.
TEST(Float32, GeluIsRightBesideItsTails) {
  const std::vector<double> at = {-5.5, -5, -4, -3, -2, 0, -HUGE_VAL, HUGE_VAL, -1e30, 1e30};
  const std::vector<double> got = Back(gelu(Of(at, DType::kF32)));
  for (size_t i = 0; i < 5; ++i) {
    EXPECT_NEAR(got[i] / (0.5 * at[i] * std::erfc(-at[i] * M_SQRT1_2)), 1, 1e-5) << at[i];
  }
  EXPECT_EQ(got[5], 0);
  EXPECT_TRUE(std::isnan(got[6]));  // as in PyTorch
  EXPECT_EQ(got[7], HUGE_VAL);
  EXPECT_EQ(got[8], 0);
  EXPECT_EQ(got[9], 1e30f);
  EXPECT_TRUE(std::isnan(Back(gelu(Of({std::nan("")}, DType::kF32)))[0]));
}

TEST(Ldexp, OfWholeExponentsKeepsTheDtype) {
  const DTensor e = Of({3, 17, -20}, DType::kI64);
  for (const DType t : {DType::kF16, DType::kBF16, DType::kF32, DType::kF64}) {
    const DTensor one = full({}, 1.5, {.dtype = t});
    EXPECT_EQ(ldexp(one, e).dtype(), t);
    EXPECT_EQ(ldexp(expand(one, {3}), e).dtype(), t);
    EXPECT_EQ(ldexp(one, to(full({}, 1), DType::kI32)).dtype(), t);
  }
  EXPECT_EQ(ldexp(e, e).dtype(), DType::kF32);
  EXPECT_EQ(ldexp(Of({1}, DType::kF16), Of({1}, DType::kF32)).dtype(), DType::kF32);
  // 2^17 is no float16, 2^130 no float32, 2^1030 no float64: the products are.
  EXPECT_THAT(Back(ldexp(Of({0.0009765625, 1}, DType::kF16), Of({17, 17}, DType::kI32))),
              ElementsAre(128, HUGE_VAL));
  EXPECT_THAT(Back(ldexp(Of({0x1p-100, 0x1p100}, DType::kF32), Of({130, -140}, DType::kI64))),
              ElementsAre(0x1p30, 0x1p-40));
  EXPECT_THAT(Back(ldexp(Of({0x1p-100}, DType::kF64), Of({1030}, DType::kI64))),
              ElementsAre(0x1p930));
}

TEST(Bounds, MayBeAbsentAndOfOtherTypes) {
  const DTensor x = Of({-2, 0.5, 3, std::nan("")}, DType::kF64);
  EXPECT_EQ(Back(clamp(x, -1))[0], -1);
  EXPECT_EQ(Back(clamp(x, std::nullopt, 1))[2], 1);
  EXPECT_TRUE(std::isnan(Back(clamp(x, -1, 1))[3]));
  EXPECT_EQ(Back(clamp(x, 2, 1))[0], 1);  // max wins
  EXPECT_EQ(clamp(Of({1, 2}, DType::kI64), 1.5).dtype(), DType::kF32);
  EXPECT_THAT(Back(clamp(Of({1, 200}, DType::kU8), 2, 100)), ElementsAre(2, 100));
  EXPECT_THAT(Back(clamp(Of({1, 200}, DType::kU8), -5, 300)), ElementsAre(1, 200));
  EXPECT_THAT(MessageOf([] { clamp(Of({1}, DType::kU8), 300); }),
              HasSubstr("min is above all that uint8 holds"));
  EXPECT_THAT(MessageOf([] { clamp_max(Of({1}, DType::kI32), -(int64_t{1} << 40)); }),
              HasSubstr("max is below all that int32 holds"));
  EXPECT_THAT(Back(nan_to_num(Of({HUGE_VAL, -HUGE_VAL, std::nan("")}, DType::kF16))),
              ElementsAre(65504, -65504, 0));
}

TEST(Numbers, ComeFirst) {
  const DTensor n = Of({1, 2}, DType::kI64);
  EXPECT_THAT(Back(add(2, n, 3)), ElementsAre(5, 8));
  EXPECT_EQ(add(2.5, n).dtype(), DType::kF32);
  EXPECT_THAT(Back(add(2.5, n)), ElementsAre(3.5, 4.5));
}

}  // namespace
}  // namespace dtensor::pointwise_values_test
