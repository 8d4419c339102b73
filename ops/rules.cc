#include "dtensor/ops/rules.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "dtensor/tensor/status.h"

namespace dtensor {

const OpDef& GetOp(absl::string_view name) {
  RegisterOps();
  return *ValueOrThrow(OpRegistry::Find(name));
}

void ThrowInvalid(absl::string_view op, absl::string_view why,
                  std::initializer_list<NamedInput> inputs) {
  Throw(ExplainError(op, absl::MakeConstSpan(inputs.begin(), inputs.size()),
                     absl::InvalidArgumentError(why)));
}

void FunctionScope::Tell() {
  try {
    RankContext::Current().AbortAll(std::exchange(trace_.untold, absl::OkStatus()));
  } catch (...) {  // no memory: the end of the rank tells
  }
}

void ThrowAs(absl::string_view op, std::initializer_list<NamedInput> inputs,
             const absl::Status& status) {
  const std::optional<ErrorOrigin> origin = OriginOf(status);
  if (!origin && IsNoValues(status)) Throw(InFunction(op, status));  // who asked for them
  if (!origin) Throw(status);  // says by itself who failed, and where
  const bool inner = origin->function != op;
  const absl::Status named = ExplainError(
      op, absl::MakeConstSpan(inputs.begin(), inputs.size()),
      inner ? Prefixed(absl::StrCat("in ", origin->function), origin->cause) : origin->cause);
  absl::Status& untold = RankContext::Current().trace().untold;
  if (!untold.ok()) untold = named;
  Throw(named);
}

void RequireOwn(absl::string_view op, std::initializer_list<NamedInput> inputs) {
  for (const NamedInput& in : inputs) {
    const absl::Status own = CheckOwn(in.value);
    if (own.ok()) continue;
    Throw(ExplainError(op, absl::MakeConstSpan(inputs.begin(), inputs.size()),
                       Prefixed(absl::StrCat("input ", in.name), own)));
  }
}

int64_t CountClasses(absl::string_view op, const DTensor& x) {
  const int64_t most = amax(x).ToVector<int64_t>()[0];
  if (most == INT64_MAX) {
    ThrowInvalid(op, absl::StrCat("x holds ", most, ", and so many classes and one are no int64"));
  }
  return most + 1;
}

int CheckedDim(absl::string_view op, int64_t dim, int ndim) {
  absl::StatusOr<int> d = NormalizeDim(dim, std::max(ndim, 1));
  if (!d.ok()) {
    Throw(InFunction(op, d.status()));
  }
  return *d;
}

Dims CheckedDims(absl::string_view op, IntSpan dims, int ndim) {
  Dims out;
  if (dims.empty()) {
    for (int d = 0; d < ndim; ++d) out.push_back(d);
    return out;
  }
  for (int64_t dim : dims) out.push_back(CheckedDim(op, dim, ndim));
  std::sort(out.begin(), out.end());
  const auto twice = std::adjacent_find(out.begin(), out.end());
  if (twice != out.end()) ThrowInvalid(op, absl::StrCat("dim ", *twice, " is named twice"));
  if (ndim == 0) out.clear();
  return out;
}

void ThrowNull(absl::string_view op, std::initializer_list<NamedInput> inputs) {
  const auto null = std::find_if(inputs.begin(), inputs.end(), [](const NamedInput& in) {
    return !in.value.defined() && !in.optional;
  });
  ThrowInvalid(op, absl::StrCat("input ", null->name, " is null"), inputs);
}

void RequireFloating(absl::string_view op, const DTensor& x) {
  if (!IsFloating(x.dtype())) {
    ThrowInvalid(op, absl::StrCat("needs a floating tensor, got ", TypeName(x.dtype())));
  }
}

void RequireHolds(absl::string_view op, DType t, const Scalar& value,
                  std::initializer_list<NamedInput> inputs) {
  const std::string misfit = Misfit(value, t);
  if (!misfit.empty()) ThrowInvalid(op, misfit, inputs);
}

absl::Status RequireDim(absl::string_view attr, int64_t dim, int64_t end) {
  if (dim >= 0 && dim < end) return absl::OkStatus();
  return absl::OutOfRangeError(
      absl::StrCat("attribute ", attr, " = ", dim, " is not in [0, ", end, ")"));
}

absl::Status RequireDims(absl::string_view attr, IntSpan dims, int64_t end) {
  for (const int64_t dim : dims) DT_RETURN_IF_ERROR(RequireDim(attr, dim, end));
  if (std::adjacent_find(dims.begin(), dims.end(), std::greater_equal<>()) == dims.end()) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("attribute ", attr, " = ", ToString(dims), " does not ascend"));
}

absl::Status SameDTypes(const OpCall& call) {
  for (int i = 1; i < call.num_inputs(); ++i) {
    if (call.dtype(i) != call.dtype(0)) {
      return absl::InvalidArgumentError(
          absl::StrCat("dtypes differ: ", call.op().InputName(0), " is ", TypeName(call.dtype(0)),
                       ", ", call.op().InputName(i), " is ", TypeName(call.dtype(i))));
    }
  }
  return absl::OkStatus();
}

absl::Status SameComputeTypes(const OpCall& call, int inputs) {
  int first = -1;
  for (int i = 0; i < inputs; ++i) {
    if (!IsFloating(call.dtype(i))) continue;
    if (first < 0) first = i;
    if (ComputeType(call.dtype(i)) == ComputeType(call.dtype(first))) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "dtypes differ: ", call.op().InputName(first), " is ", TypeName(call.dtype(first)), ", ",
        call.op().InputName(i), " is ", TypeName(call.dtype(i)), "; convert one with to()"));
  }
  return absl::OkStatus();
}

absl::Status SameLeading(const OpCall& call, std::initializer_list<int> trailing) {
  IntSpan first;
  for (int i = 0; i < call.num_inputs(); ++i) {
    const int after = trailing.begin()[i];
    if (after < 0) continue;
    const IntSpan leading = IntSpan(call.shape(i)).first(call.in(i).ndim() - after);
    if (i == 0) first = leading;
    if (leading == first) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("leading dims differ: ", call.op().InputName(0), " ", ToString(call.shape(0)),
                     ", ", call.op().InputName(i), " ", ToString(call.shape(i))));
  }
  return absl::OkStatus();
}

std::string TypeName(DType t) { return std::string(Name(t)); }

DType ComputeType(DType t) { return IsNarrow(t) ? DType::kF32 : t; }

std::string DimName(int dim) { return absl::StrCat("d", dim); }

DimTexts DimNames(int ndim) {
  DimTexts names;
  for (int d = 0; d < ndim; ++d) names.push_back(DimName(d));
  return names;
}

std::string Whole(absl::string_view name) { return absl::StrCat("[", name, "]"); }

std::string FactorString(const std::vector<DimTexts>& inputs,
                         const std::vector<DimTexts>& outputs) {
  const auto side = [](const std::vector<DimTexts>& operands) {
    return absl::StrJoin(operands, ", ", [](std::string* out, const DimTexts& dims) {
      absl::StrAppend(out, absl::StrJoin(dims, " "));
    });
  };
  return absl::StrCat(side(inputs), " -> ", side(outputs));
}

bool Contains(IntSpan list, int64_t value) {
  return std::find(list.begin(), list.end(), value) != list.end();
}

}  // namespace dtensor
