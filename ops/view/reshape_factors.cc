#include "dtensor/ops/view/reshape_factors.h"

#include <numeric>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "dtensor/ops/rules.h"

namespace dtensor {
namespace {

// One side of the reshape, consumed from the left.
class ShapeSide {
 public:
  explicit ShapeSide(IntSpan shape) : shape_(shape), parts_(shape.size()) { SkipOnes(); }

  bool done() const { return at_ == shape_.size(); }
  int64_t rest() const { return rest_; }  // what is left of the current dim

  // Takes a piece of `size`, which divides rest().
  void Take(const std::string& part, int64_t size) {
    parts_[at_].push_back(part);
    rest_ /= size;
    if (rest_ > 1) return;
    ++at_;
    SkipOnes();
  }

  DimTexts Texts() const {
    DimTexts texts;
    for (const std::vector<std::string>& p : parts_) {
      texts.push_back(p.empty()       ? "1"
                      : p.size() == 1 ? p[0]
                                      : absl::StrCat("(", absl::StrJoin(p, " "), ")"));
    }
    return texts;
  }

 private:
  void SkipOnes() {
    while (at_ < shape_.size() && shape_[at_] == 1) ++at_;
    if (at_ < shape_.size()) rest_ = shape_[at_];
  }

  IntSpan shape_;
  std::vector<std::vector<std::string>> parts_;
  size_t at_ = 0;
  int64_t rest_ = 1;
};

class Walk {
 public:
  Walk(IntSpan in, IntSpan out) : in_(in), out_(out) {}

  FactorText Run() {
    while (!in_.done()) {
      const int64_t shared = std::gcd(in_.rest(), out_.rest());
      if (shared > 1) {
        const std::string f = New("f", shared);
        in_.Take(f, shared);
        out_.Take(f, shared);
      } else {
        SkipTangle();
      }
    }
    return {FactorString({in_.Texts()}, {out_.Texts()}), std::move(sizes_)};
  }

 private:
  std::string New(absl::string_view kind, int64_t size) {
    std::string name = absl::StrCat(kind, sizes_.size());
    sizes_.emplace_back(name, size);
    return name;
  }

  // Reads dims whole until both sides have consumed equally much.
  void SkipTangle() {
    int64_t in = 1, out = 1;
    do {
      ShapeSide& side = in <= out ? in_ : out_;
      const int64_t size = side.rest();
      (in <= out ? in : out) *= size;
      side.Take(Whole(New("w", size)), size);
    } while (in != out);
  }

  ShapeSide in_, out_;
  std::vector<std::pair<std::string, int64_t>> sizes_;
};

}  // namespace

FactorText ReshapeFactors(IntSpan in, IntSpan out) {
  if (!Contains(in, 0)) return Walk(in, out).Run();
  FactorText text;
  const auto whole = [&](absl::string_view kind, IntSpan shape) {
    DimTexts texts;
    for (size_t d = 0; d < shape.size(); ++d) {
      const std::string name = absl::StrCat(kind, d);
      text.sizes.emplace_back(name, shape[d]);
      texts.push_back(Whole(name));
    }
    return texts;
  };
  text.text = FactorString({whole("a", in)}, {whole("b", out)});
  return text;
}

}  // namespace dtensor
