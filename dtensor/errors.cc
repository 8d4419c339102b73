#include "dtensor/errors.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "dtensor/impl.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/rehearsal.h"
#include "dtensor/tensor/status.h"
#include "dtensor/tensor/text.h"

namespace dtensor {

absl::Status ExplainError(absl::string_view op, absl::Span<const NamedInput> inputs,
                          const absl::Status& cause) {
  std::vector<const NamedInput*> shown;
  for (const NamedInput& in : inputs) {
    if (!in.optional || in.value.defined()) shown.push_back(&in);
  }
  RankContext& context = RankContext::Current();
  const std::string* const module = context.trace().module;
  const std::string list = JoinSome(shown, [](std::string* out, const NamedInput* in) {
    absl::StrAppend(out, in->name, " = ",
                    in->value.defined() ? in->value.spec().ToString() : "null");
  });
  return InFunction(
      op, cause,
      absl::StrCat(shown.empty() ? "" : "; inputs: ", list, " (rank ", context.rank(), " of ",
                   context.world_size(), module == nullptr ? "" : ", in module ",
                   module == nullptr ? "" : *module, ")"));
}

absl::Status CheckOwn(const DTensor& t) {
  const internal::DTensorImpl& impl = *t.impl();
  if (internal::OriginOf(impl) == RankContext::Current().id()) return absl::OkStatus();
  Rehearsal* const rehearsal = Rehearsal::Current();
  return rehearsal == nullptr ? internal::NotOurs(impl) : rehearsal->Enter(t).status();
}

std::string Misfit(const DTensor& value, const Spec& wanted) {
  if (!value.defined()) return "is null";
  std::vector<std::string> is, must_be;
  if (value.dtype() != wanted.dtype()) {
    is.emplace_back(Name(value.dtype()));
    must_be.emplace_back(Name(wanted.dtype()));
  }
  if (value.shape() != wanted.shape()) {
    is.push_back(ToString(value.shape()));
    must_be.push_back(ToString(wanted.shape()));
  }
  if (!(value.mesh() == wanted.mesh() || value.mesh().is_self())) {
    is.push_back(absl::StrCat("on mesh ", value.mesh().ToString()));
    must_be.push_back(absl::StrCat("on mesh ", wanted.mesh().ToString()));
  }
  if (value.mesh().device() == DeviceType::kMeta && wanted.mesh().device() != DeviceType::kMeta) {
    is.emplace_back("without values (on a meta mesh)");
    must_be.emplace_back("one that has them");
  }
  if (is.empty()) return "";
  return absl::StrCat("is ", absl::StrJoin(is, " "), ", must be ", absl::StrJoin(must_be, " "));
}

std::pair<double, double> RangeOf(DType t) {
  if (t == DType::kBool) return {0, 2};
  if (t == DType::kU8) return {0, 256};
  const double end = t == DType::kI32 ? 0x1p31 : 0x1p63;
  return {-end, end};
}

std::string Misfit(const Scalar& value, DType t) {
  if (IsFloating(t) || t == DType::kBool || (t == DType::kI64 && !value.is_float)) return "";
  const auto [least, end] = RangeOf(t);
  const double start = t == DType::kU8 && !value.is_float ? -255 : least;
  if (value.d >= start && value.d < end) return "";
  const std::string text = value.is_float ? absl::StrCat(value.d) : absl::StrCat(value.i);
  const char* holds = t == DType::kU8    ? "0 to 255"
                      : t == DType::kI32 ? "-2147483648 to 2147483647"
                                         : "-9223372036854775808 to 9223372036854775807";
  return absl::StrCat("value ", text, " does not fit ", View(Name(t)), ", which holds ", holds);
}

absl::Status TellPeers(const DeviceMesh& mesh, const absl::Status& status) {
  if (!IsRankLocal(status) || !mesh.defined() || mesh.size() == 1) return status;
  RankContext& context = RankContext::Current();
  const bool runs = mesh.device() != DeviceType::kMeta && !context.rehearses();
  if (!runs) return status;
  if (context.trace().functions > 0) {
    context.trace().untold = status;
  } else {
    context.AbortAll(status);
  }
  return status;
}

}  // namespace dtensor
