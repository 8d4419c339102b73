#include "dtensor/rng/check.h"

#include <cmath>
#include <limits>
#include <string>

#include "absl/strings/str_cat.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

absl::Status Bad(const RandomOp& op, absl::string_view why) {
  return InFunction(op.name, absl::InvalidArgumentError(why));
}

double LargestFinite(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return 65504.0;
    case DType::kBF16:
      return 0x1.FEp127;
    case DType::kF32:
      return std::numeric_limits<float>::max();
    default:
      return std::numeric_limits<double>::max();
  }
}

absl::Status CheckUniform(const RandomOp& op, DType dtype) {
  if (!(op.a <= op.b)) {
    return Bad(op, absl::StrCat("from (", op.a, ") must not be above to (", op.b, ")"));
  }
  const double largest = LargestFinite(dtype);
  if (op.a < -largest || op.b > largest || op.b - op.a > largest) {
    return Bad(op, absl::StrCat("the range from ", op.a, " to ", op.b, " does not fit in ",
                                std::string(Name(dtype))));
  }
  return absl::OkStatus();
}

// The largest whole number up to which a dtype holds all of them; what random_() draws up to.
int64_t LargestCount(DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return int64_t{1} << 53;
    case DType::kF32:
      return int64_t{1} << 24;
    case DType::kF16:
      return int64_t{1} << 11;
    case DType::kBF16:
      return int64_t{1} << 8;
    case DType::kI32:
      return std::numeric_limits<int32_t>::max();
    case DType::kU8:
      return 255;
    case DType::kBool:
      return 1;
    default:
      return std::numeric_limits<int64_t>::max();
  }
}

// Bounds beyond what the dtype can hold are errors; floating ones that round to outside of the
// range are moved inside, as torch does.
absl::Status FitRange(RandomOp* op, DType dtype) {
  if (op->from >= op->to) {
    return Bad(*op, absl::StrCat("from (", op->from, ") must be below to (", op->to, ")"));
  }
  const bool floating = IsFloating(dtype);
  const double largest = floating ? LargestFinite(dtype) : 0;
  const int64_t top =
      floating || dtype == DType::kI64 ? std::numeric_limits<int64_t>::max() : LargestCount(dtype);
  const int64_t bottom = floating || dtype == DType::kI64 ? std::numeric_limits<int64_t>::min()
                         : dtype == DType::kI32           ? -top - 1
                                                          : 0;
  const bool outside = floating ? static_cast<double>(op->from) < -largest ||
                                      static_cast<double>(op->to - 1) > largest
                                : op->from < bottom || op->to - 1 > top;
  if (outside) {
    return Bad(*op, absl::StrCat("whole numbers in [", op->from, ", ", op->to, ") do not fit in ",
                                 std::string(Name(dtype))));
  }
  if (!floating || dtype == DType::kF64) return absl::OkStatus();
  const auto rounded = [&](int64_t v) -> double {
    const auto f = static_cast<float>(v);
    if (dtype == DType::kF16) return ToFloat(ToHalf(f));
    if (dtype == DType::kBF16) return ToFloat(ToBFloat16(f));
    return f;
  };
  while (op->to - 1 > op->from && rounded(op->to - 1) >= static_cast<double>(op->to)) {
    op->to -= std::max<int64_t>(1, op->to >> (dtype == DType::kF16    ? 11
                                              : dtype == DType::kBF16 ? 8
                                                                      : 24));
  }
  return absl::OkStatus();
}

absl::Status ChooseWords(RandomOp* op, DType dtype, const Profile& profile) {
  if (op->full_range) {
    op->from = 0;
    const int64_t largest = LargestCount(dtype);
    op->to = dtype == DType::kI64 ? std::numeric_limits<int64_t>::min()  // 2^63, as unsigned
                                  : largest + 1;
    const bool wide = dtype == DType::kI64 || dtype == DType::kF64;
    op->kind = wide ? RandomKind::kWords64 : RandomKind::kWords32;
    return absl::OkStatus();
  }
  DT_RETURN_IF_ERROR(FitRange(op, dtype));
  const uint64_t range = static_cast<uint64_t>(op->to) - static_cast<uint64_t>(op->from);
  const bool wide_type =
      dtype == DType::kI64 || dtype == DType::kF64 || dtype == DType::kF32 || dtype == DType::kBF16;
  const bool wide =
      profile.old_wide_range ? range >= uint64_t{1} << 32 && wide_type : range >= uint64_t{1} << 28;
  op->kind = wide ? RandomKind::kWords64 : RandomKind::kWords32;
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<RandomOp> CheckedRandomOp(const RandomOp& wanted, DType dtype,
                                         const Profile& profile) {
  RandomOp op = wanted;
  const auto needs = [&](bool ok, absl::string_view what, double got) {
    return ok ? absl::OkStatus() : Bad(op, absl::StrCat(what, ", got ", got));
  };
  const bool whole = op.kind == RandomKind::kWords32 || op.kind == RandomKind::kBernoulli ||
                     op.kind == RandomKind::kGeometric;
  if (!(kAllDTypes & DTypeBit(dtype))) {
    return Bad(op, absl::StrCat("no values are drawn in ", std::string(Name(dtype)),
                                "; draw in a wider dtype and convert"));
  }
  if (!whole && !IsFloating(dtype)) {
    return Bad(op, absl::StrCat("needs a floating dtype, not ", std::string(Name(dtype))));
  }
  switch (op.kind) {
    case RandomKind::kUniform:
      DT_RETURN_IF_ERROR(CheckUniform(op, dtype));
      break;
    case RandomKind::kNormal:
    case RandomKind::kLogNormal:
      DT_RETURN_IF_ERROR(
          needs(op.kind == RandomKind::kNormal ? op.b >= 0 : op.b > 0,
                op.kind == RandomKind::kNormal ? "std must be >= 0" : "std must be > 0", op.b));
      break;
    case RandomKind::kWords32:
    case RandomKind::kWords64:
      DT_RETURN_IF_ERROR(ChooseWords(&op, dtype, profile));
      break;
    case RandomKind::kBernoulli:
      DT_RETURN_IF_ERROR(needs(op.a >= 0 && op.a <= 1, "p must be in [0, 1]", op.a));
      break;
    case RandomKind::kExponential:
      DT_RETURN_IF_ERROR(needs(op.a > 0, "lambda must be > 0", op.a));
      break;
    case RandomKind::kCauchy:
      DT_RETURN_IF_ERROR(needs(op.b > 0, "sigma must be > 0", op.b));
      break;
    case RandomKind::kGeometric:
      DT_RETURN_IF_ERROR(needs(op.a > 0 && op.a < 1, "p must be in (0, 1)", op.a));
      if (dtype == DType::kBool) return Bad(op, "needs a number dtype, not bool");
      break;
  }
  return op;
}

DrawParams SamplerParams(const RandomOp& op, const Profile& profile) {
  DrawParams p;
  p.a = op.kind == RandomKind::kGeometric ? std::log1p(-op.a) : op.a;
  p.b = op.b;
  p.from = op.from;
  p.range = static_cast<uint64_t>(op.to) - static_cast<uint64_t>(op.from);
  p.plain_log = profile.old_exponential_log;
  p.flip_raw_uniform = profile.flip_raw_uniform;
  p.hardware_math = profile.hardware_math;
  return p;
}

}  // namespace dtensor
