#include "tests/ops/program_cases.h"

#include <deque>
#include <map>
#include <memory>
#include <set>

#include "absl/strings/match.h"

namespace dtensor::testing {

const std::vector<ProgramCase>& ProgramCases() {
  static const std::vector<ProgramCase>* cases = [] {
    auto* all = new std::vector<ProgramCase>;
    static auto* const names = new std::deque<std::string>;  // which entries point to
    for (const OpCase& line : AllCases().cases) {
      if ((line.is & kDraws) || absl::EndsWith(line.name, "_backward")) continue;
      // Results of one rank, not of the mesh; operands that are written and not returned.
      static const std::set<std::string> left_out = {"equal", "allclose", "batch_norm",
                                                     "instance_norm"};
      if (left_out.count(line.name) > 0) continue;
      int number = 0;
      for (CasePattern& pattern : PatternsOf(line)) {
        const bool writes = absl::EndsWith(line.name, "_");
        // What it does to numbers is not known: it may add any of them, so all have to be small.
        const uint32_t is = kLinear | kSums | kView | (writes ? kWrites : 0u);
        const std::string& name =
            names->emplace_back(absl::StrCat("case ", line.name, " ", number++));
        static const std::set<std::string> sharing = {"amax", "amin",   "aminmax",  "max",
                                                      "min",  "median", "nanmedian"};
        all->push_back({&line,
                        std::move(pattern),
                        {name.c_str(), 0, is, nullptr},
                        sharing.count(line.name) > 0});
      }
    }
    return all;
  }();
  return *cases;
}

const ProgramCase* FindProgramCase(const std::string& step) {
  static const auto* by_name = [] {
    auto* all = new std::map<std::string, const ProgramCase*>;
    for (const ProgramCase& c : ProgramCases()) (*all)[c.entry.name] = &c;
    return all;
  }();
  if (!absl::StartsWith(step, "case ")) return nullptr;
  const auto it = by_name->find(step);
  if (it == by_name->end()) ThrowIfError(absl::NotFoundError(step));
  return it->second;
}

CaseSample SampleOf(const ProgramCase& c, const Shape& letters,
                    const std::vector<Shape>& operands) {
  return c.pattern.At([&](char letter) { return letters[c.pattern.letters().find(letter)]; },
                      [&](size_t i) { return i < operands.size() ? operands[i] : Shape(); });
}

Values RunCase(const ProgramCase& c, const Step& step, const std::vector<DTensor>& operands) {
  std::vector<Shape> shapes;
  for (const DTensor& t : operands) shapes.push_back(t.shape());
  const CaseSample sample = SampleOf(c, step.shape, shapes);
  SampleArgs args(sample, operands, /*writes=*/true);
  return c.line->call(args);
}

}  // namespace dtensor::testing
