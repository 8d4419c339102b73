#include "dtensor/verify/verify_text.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace dtensor::internal {
namespace {

using Naming = std::string (*)(const Placements&);

std::string Exactly(const Placements& p) { return p.size() == 1 ? p[0].ToString() : ToString(p); }

// Without the sizes of segments and pieces, which are those of one sample.
std::string InKind(const Placements& placements) {
  std::vector<std::string> kinds;
  for (const Placement& p : placements) {
    kinds.push_back(p.is_segmented() ? absl::StrCat("Segmented(", p.dim(), ")")
                    : p.is_flat()    ? "Flat"
                                     : p.ToString());
  }
  if (kinds.size() == 1) return kinds[0];
  return absl::StrCat("[", absl::StrJoin(kinds, ", "), "]");
}

std::string InputsText(const OpDef& op, const std::vector<Placements>& inputs, Naming name,
                       const VerifySample* sample = nullptr) {
  std::vector<std::string> texts;
  for (size_t i = 0; i < inputs.size(); ++i) {
    texts.push_back(absl::StrCat(op.InputName(static_cast<int>(i)), " ",
                                 sample ? ToString(sample->inputs[i].shape) + " " : "",
                                 name(inputs[i])));
  }
  return absl::StrJoin(texts, ", ");
}

std::string Outputs(const std::vector<Placements>& outputs, Naming name) {
  return absl::StrJoin(
      outputs, ", ", [name](std::string* s, const Placements& p) { absl::StrAppend(s, name(p)); });
}

// --- C++ ---

std::string Braces(const std::vector<std::string>& items) {
  return absl::StrCat("{", absl::StrJoin(items, ", "), "}");
}

template <class List>
std::string Numbers(const List& list) {
  return absl::StrCat("{", absl::StrJoin(list, ", "), "}");
}

std::string Code(const std::vector<Placements>& operands) {
  std::vector<std::string> texts;
  for (const Placements& placements : operands) {
    std::vector<std::string> one;
    for (const Placement& p : placements) one.push_back(p.ToCode());
    texts.push_back(absl::StrCat("Placements", Braces(one)));
  }
  return Braces(texts);
}

std::string Code(const Attr& a) {
  switch (a.kind) {
    case Attr::Kind::kInt:
      return absl::StrCat("IntAttr(", a.i, ")");
    case Attr::Kind::kFloat:
      return absl::StrFormat("FloatAttr(%.17g)", a.d);
    default:
      return "Attr()";
  }
}

std::string Code(const VerifySample& sample) {
#define DT_ENUMERATOR(name, ...) #name,
  static constexpr const char* kTypes[] = {DT_DTYPES(DT_ENUMERATOR)};
#undef DT_ENUMERATOR
  std::vector<std::string> inputs, attrs;
  for (const VerifyInput& in : sample.inputs) {
    std::vector<std::string> parts = {Numbers(in.shape)};
    if (in.dtype != DType::kF64 || !in.values.empty()) {
      parts.push_back(absl::StrCat("DType::", kTypes[static_cast<int>(in.dtype)]));
    }
    if (!in.values.empty()) parts.push_back(Numbers(in.values));
    inputs.push_back(absl::StrCat("VerifyInput", Braces(parts)));
  }
  for (const Attr& a : sample.attrs) attrs.push_back(Code(a));
  std::vector<std::string> parts = {Braces(inputs)};
  if (!attrs.empty()) parts.push_back(Braces(attrs));
  if (sample.ints_attr >= 0) {
    parts.push_back(Numbers(sample.ints));
    parts.push_back(absl::StrCat(sample.ints_attr));
  }
  return absl::StrCat("VerifySample", Braces(parts));
}

}  // namespace

std::string Pattern(const OpDef& op, const std::vector<Placements>& inputs,
                    const std::vector<Placements>& outputs) {
  return absl::StrCat(InputsText(op, inputs, InKind), " -> ", Outputs(outputs, InKind));
}

std::string RowText(const OpDef& op, const std::vector<Placements>& inputs,
                    const std::vector<Placements>& outputs) {
  return absl::StrCat(InputsText(op, inputs, Exactly), " -> ", Outputs(outputs, Exactly));
}

std::string OutputPattern(const OpDef& op, const std::vector<Placements>& inputs, int output,
                          const Placements& placements) {
  return absl::StrCat(InputsText(op, inputs, InKind), " -> ", op.output_names()[output], " ",
                      InKind(placements));
}

VerifyFinding Finding(const OpDef& op, const VerifySample& sample, IntSpan mesh,
                      const std::vector<Placements>& inputs, const std::vector<Placements>& outputs,
                      std::string why) {
  VerifyFinding f;
  f.pattern = Pattern(op, inputs, outputs);
  f.row = absl::StrCat(InputsText(op, inputs, Exactly, &sample), " -> ",
                       outputs.empty() ? "nothing" : Outputs(outputs, Exactly), " on mesh ",
                       absl::StrJoin(mesh, "x"));
  f.why = std::move(why);
  if (outputs.empty()) return f;  // no strategy: it is the op that has to be changed
  f.reproducer = absl::StrCat("EXPECT_TRUE(VerifyStrategy(**OpRegistry::Find(\"", op.name(),
                              "\"), ", Code(sample), ", ", Numbers(mesh), ", ", Code(inputs), ", ",
                              Code(outputs), ").ok());");
  return f;
}

}  // namespace dtensor::internal
