#include "dtensor/forms.h"

#include <algorithm>
#include <cctype>

#include "absl/strings/str_cat.h"

namespace dtensor {
namespace {

class Parser {
 public:
  Parser(absl::string_view text, const std::vector<std::string>& inputs)
      : text_(text), inputs_(inputs) {}

  absl::StatusOr<LinearSum> Sum() {
    LinearSum sum;
    if (Peek() == '\0') return sum;  // depends on nothing
    while (true) {
      absl::StatusOr<LinearProduct> product = Product();
      if (!product.ok()) return product.status();
      sum.push_back(*std::move(product));
      const char c = Peek();
      if (c == '\0') return sum;
      if (c != '+' && c != '-') return Bad();
      ++at_;
    }
  }

 private:
  absl::StatusOr<LinearProduct> Product() {
    LinearProduct product;
    while (true) {
      if (Peek() != '(') {
        absl::StatusOr<int> name = Name();
        if (!name.ok()) return name.status();
        product.linear.push_back(*name);
      }
      if (Peek() == '(') {
        absl::Status status = Params(&product.params);
        if (!status.ok()) return status;
      }
      if (Peek() != '*') return product;
      ++at_;
    }
  }

  absl::Status Params(std::vector<int>* params) {
    ++at_;
    while (true) {
      absl::StatusOr<int> name = Name();
      if (!name.ok()) return name.status();
      params->push_back(*name);
      const char c = Peek();
      ++at_;
      if (c == ')') return absl::OkStatus();
      if (c != ',') return Bad();
    }
  }

  absl::StatusOr<int> Name() {
    Peek();
    const size_t start = at_;
    while (at_ < text_.size() && (std::isalnum(text_[at_]) || text_[at_] == '_')) ++at_;
    const absl::string_view name = text_.substr(start, at_ - start);
    for (size_t i = 0; i < inputs_.size(); ++i) {
      if (name == inputs_[i]) return static_cast<int>(i);
    }
    return Bad();
  }

  char Peek() {
    while (at_ < text_.size() && std::isspace(text_[at_])) ++at_;
    return at_ < text_.size() ? text_[at_] : '\0';
  }
  absl::Status Bad() const {
    return absl::InvalidArgumentError(
        absl::StrCat("linear form \"", text_, "\" is malformed at character ", at_));
  }

  absl::string_view text_;
  const std::vector<std::string>& inputs_;
  size_t at_ = 0;
};

}  // namespace

bool LinearProduct::Mentions(int input) const {
  return std::find(linear.begin(), linear.end(), input) != linear.end() ||
         std::find(params.begin(), params.end(), input) != params.end();
}

absl::StatusOr<LinearSum> ParseLinear(absl::string_view form,
                                      const std::vector<std::string>& inputs) {
  return Parser(form, inputs).Sum();
}

}  // namespace dtensor
