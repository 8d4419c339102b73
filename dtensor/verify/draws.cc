#include "dtensor/verify/draws.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace dtensor::internal {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

class Numbers {
 public:
  explicit Numbers(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15u + 77) {}
  int64_t Below(int64_t n) {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return static_cast<int64_t>((state_ >> 33) % static_cast<uint64_t>(n));
  }

 private:
  uint64_t state_;
};

double Lowest(DType t) {
  if (IsFloating(t)) return -kInfinity;
  return t == DType::kI64 ? -0x1p63 : t == DType::kI32 ? -0x1p31 : 0;
}
double Highest(DType t) {
  if (IsFloating(t)) return kInfinity;
  if (t == DType::kI64) return 0x1p63;  // what is next to it: no double is nearer (TensorOf)
  return t == DType::kI32 ? 0x1p31 - 1 : t == DType::kU8 ? 255 : 1;
}
double Number(Numbers* numbers, DType dtype, Draw draw);

// Of all int64 the multiples of this are doubles, and so are their sums.
constexpr double kWideStep = 0x1p11;

// The highest among whole values.
double HighestDrawn(DType t) { return t == DType::kI64 ? 0x1p63 - kWideStep : Highest(t); }

double ExtremeNumber(Numbers* numbers, DType dtype) {
  const int64_t kind = numbers->Below(16);
  if (kind == 0) return Lowest(dtype);
  if (kind == 1) return HighestDrawn(dtype);
  if (kind <= 3) return IsFloating(dtype) ? kNaN : 0;
  if (kind <= 5) return 0;
  const double number = Number(numbers, dtype, Draw::kSigned);
  return dtype == DType::kI64 ? number * kWideStep : number;
}

// Mostly true in two drawings and mostly false in two.
bool MostlyTrue(Draw draw) { return draw == Draw::kPositive || draw == Draw::kExtreme; }
double Truth(Numbers* numbers, Draw draw) {
  if (draw == Draw::kSigned) return static_cast<double>(numbers->Below(2));
  return (numbers->Below(12) != 0) == MostlyTrue(draw) ? 1 : 0;
}

double Number(Numbers* numbers, DType dtype, Draw draw) {
  if (dtype == DType::kBool) return Truth(numbers, draw);
  if (IsExtreme(draw)) return ExtremeNumber(numbers, dtype);
  if (draw == Draw::kTies) {
    return static_cast<double>(numbers->Below(5) - (dtype == DType::kU8 ? 0 : 2));
  }
  if (!IsFloating(dtype)) {
    const bool sign = draw == Draw::kSigned && dtype != DType::kU8;
    return static_cast<double>(sign ? numbers->Below(19) - 9 : numbers->Below(9) + 1);
  }
  const double d = static_cast<double>(numbers->Below(768)) / 256;  // [0, 3)
  if (draw == Draw::kPositive) return 0.25 + d;
  return numbers->Below(2) ? d : -d;
}

// The ends that a drawing of extremes has for certain, those first that two numbers show.
std::vector<double> Ends(DType dtype, Draw draw) {
  std::vector<double> ends = {HighestDrawn(dtype), Lowest(dtype)};
  if (IsFloating(dtype)) ends.insert(ends.end(), {kNaN, -0.0, 0.0});
  if (draw == Draw::kExtremeAgain) std::swap(ends[0], ends[1]);
  return ends;
}

// Puts the ends into places of their own, spread over half of the elements.
void PutEnds(const std::vector<double>& ends, int64_t first, WholeValues* v) {
  const size_t n = v->size(), places = std::min(ends.size(), (n + 1) / 2);
  for (size_t k = 0; k < places; ++k) {
    (*v)[(static_cast<size_t>(first) + k * (n / places)) % n] = ends[k];
  }
}

// A term of a sum, of which `rest` is left: those of narrow integers do not fit the type together.
double SumTerm(double rest, Numbers* numbers, DType dtype, Draw draw) {
  const bool given = std::fmod(rest, kWideStep) != 0;  // and near 0
  if (dtype == DType::kI64 && given) draw = Draw::kSigned;
  const double drawn = Number(numbers, dtype, draw);
  if (dtype == DType::kU8) return Wrapped(drawn + 200, dtype);
  return dtype == DType::kI32 ? Wrapped(drawn + 0x7FFFFF00, dtype) : drawn;
}

// How the ranks stand to the one that holds a maximum or minimum: they lose to it.
struct Contest {
  ReduceOp op;
  DType dtype;
  Draw draw;

  double sign() const { return op == ReduceOp::kMax ? -1 : 1; }
  double nothing() const { return op == ReduceOp::kMax ? Lowest(dtype) : Highest(dtype); }
  bool Loses(double y, double x) const { return sign() * y >= sign() * x; }

  // The term of `x` on the rank that stands `place` ranks (1 and up) after the one that holds it.
  double Loser(double x, double noise, int64_t place) const {
    if (IsExtreme(draw)) return ExtremeLoser(x, noise, place);
    if (draw == Draw::kTies && place % 2 == 1 && Loses(0, x)) return 0;
    const double worse = x + sign() * std::fabs(noise);
    return dtype == DType::kBool ? std::min(worse, 1.0) : worse;
  }
  double ExtremeLoser(double x, double noise, int64_t place) const {
    if ((place + static_cast<int64_t>(draw)) % 2 == 0) return nothing();
    if (std::isnan(x)) return place == 1 ? -nothing() : x;
    if (x == 0 && IsFloating(dtype)) return 0.0 * sign();  // the zero that loses
    if (std::isnan(noise)) return x;                       // ranks that hold the same
    return Loses(noise, x) ? noise : nothing();
  }
};

// Term `term` of a sum whose value is `rest`.
double Summand(double rest, std::vector<Numbers>* numbers, int64_t term, bool opposed, DType dtype,
               Draw draw) {
  const auto terms = static_cast<int64_t>(numbers->size());
  double mine = 0;
  for (int64_t t = 0; t < terms; ++t) {
    double noise = SumTerm(rest, &(*numbers)[t], dtype, draw);
    const bool alike = std::isnan(noise) && !std::isfinite(rest);  // the same infinity, or NaN
    if (!std::isfinite(noise)) noise = 1;
    if (t == term) mine = alike || t == terms - 1 ? rest : noise;
    rest = Wrapped(rest - noise, dtype);
  }
  if (!opposed) return mine;
  return term == 0 ? kInfinity : term == 1 ? -kInfinity : 1;
}

}  // namespace

double Wrapped(double sum, DType dtype) {
  if (dtype == DType::kBool) return sum != 0 ? 1 : 0;
  if (dtype == DType::kI64) return sum - 0x1p64 * std::floor((sum + 0x1p63) / 0x1p64);
  if (dtype == DType::kU8) return static_cast<uint8_t>(static_cast<int64_t>(sum));
  return dtype == DType::kI32 ? static_cast<int32_t>(static_cast<int64_t>(sum)) : sum;
}

WholeValues Drawn(const VerifyInput& in, uint64_t seed, Draw draw) {
  if (!in.values.empty()) return in.values;
  Numbers numbers(seed + 1000 * static_cast<uint64_t>(draw));
  WholeValues v(static_cast<size_t>(Numel(in.shape)));
  for (double& x : v) x = Number(&numbers, in.dtype, draw);
  if (!IsExtreme(draw) || v.empty()) return v;
  const int64_t first = numbers.Below(static_cast<int64_t>(v.size()));
  if (in.dtype == DType::kBool) {
    std::fill(v.begin(), v.end(), MostlyTrue(draw) ? 1 : 0);
    v[first] = 1 - v[first];
    return v;
  }
  const std::vector<double> ends = Ends(in.dtype, draw);
  if (v.size() > 1) {
    PutEnds(ends, first, &v);
  } else if ((seed + static_cast<uint64_t>(draw)) % 2 == 0) {
    v[0] = ends[seed / 2 % 2];
  } else {
    v[0] = Number(&numbers, in.dtype, Draw::kSigned);
    if (in.dtype == DType::kI64) v[0] *= kWideStep;
  }
  return v;
}

WholeValues Term(const WholeValues& whole, const VerifyInput& in, ReduceOp op, int64_t term,
                 int64_t terms, uint64_t seed, Draw draw) {
  if (in.dtype == DType::kBool && op == ReduceOp::kSum) op = ReduceOp::kMax;  // the same
  WholeValues mine = whole;
  std::vector<Numbers> numbers;
  for (int64_t t = 0; t < terms; ++t) numbers.emplace_back(1000 * seed + 7 * (t + 1));
  const bool natural = in.dtype == DType::kU8 || in.dtype == DType::kBool;  // 0 and up
  const Contest contest = {op, in.dtype, draw};
  int64_t nans = 0;
  for (double& x : mine) {
    const int64_t owner = numbers[0].Below(terms);  // of a max or min
    if (op == ReduceOp::kSum) {
      const bool opposed = std::isnan(x) && nans++ % 2 == 0;
      x = Summand(x, &numbers, term, opposed, in.dtype, draw);
      continue;
    }
    const double held = x;
    for (int64_t t = 0; t < terms; ++t) {
      double noise = Number(&numbers[t], in.dtype, draw);
      if (natural && op == ReduceOp::kMax) noise = std::min(noise, held);
      if (t == term && t != owner) x = contest.Loser(held, noise, (t - owner + terms) % terms);
    }
  }
  return mine;
}

}  // namespace dtensor::internal
