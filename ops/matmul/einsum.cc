// einsum and what is said in its terms. The letters of an equation are the factor names of the
// products that it is made of ("contract"), so whatever is sharded stays so where a factor may.
#include <algorithm>
#include <map>
#include <optional>
#include <tuple>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "dtensor/mesh/cost.h"
#include "dtensor/ops/matmul/contract.h"
#include "dtensor/ops/matmul/labels.h"
#include "dtensor/ops/ops.h"
#include "dtensor/ops/rules.h"
#include "dtensor/rehearsal.h"

namespace dtensor {
namespace {

using Term = LabelledTensor;
using Terms = std::vector<Term>;

bool Has(const Labels& labels, int label) {
  return std::find(labels.begin(), labels.end(), label) != labels.end();
}
int DimOf(const Labels& labels, int label) {
  return static_cast<int>(std::find(labels.begin(), labels.end(), label) - labels.begin());
}

// A letter, or "..." for a dim of an ellipsis.
std::string NameOf(int label) {
  return label < 128 && absl::ascii_isalpha(static_cast<unsigned char>(label))
             ? std::string(1, static_cast<char>(label))
             : std::string("...");
}

// x with its dims in this order.
DTensor Ordered(const DTensor& x, const Dims& order) {
  return std::is_sorted(order.begin(), order.end()) ? x : permute(x, order);
}
Dims DimsOf(const Labels& labels, const Labels& order) {
  Dims dims;
  for (const int label : order) dims.push_back(DimOf(labels, label));
  return dims;
}

// --- terms made ready: no label twice, none of size 1 that is larger elsewhere, none alone

using Sizes = std::map<int, int64_t>;  // by label

Sizes SizesOf(absl::string_view op, const Terms& terms) {
  Sizes sizes;
  for (const Term& term : terms) {
    for (size_t d = 0; d < term.labels.size(); ++d) {
      const int64_t n = term.x.size(static_cast<int>(d));
      const auto [at, is_new] = sizes.emplace(term.labels[d], n);
      if (is_new || at->second == n || n == 1) continue;
      if (at->second != 1) {
        ThrowInvalid(op, absl::StrCat("dims that run together have different sizes, ", at->second,
                                      " and ", n, " (", NameOf(term.labels[d]), ")"));
      }
      at->second = n;
    }
  }
  return sizes;
}

// The diagonal of dims a < b, which comes last.
DTensor DiagonalOf(const DTensor& x, int a, int b) {
  Dims order;
  Shape shape;
  for (int d = 0; d < x.ndim(); ++d) {
    if (d == a || d == b) continue;
    order.push_back(d);
    shape.push_back(x.size(d));
  }
  order.insert(order.end(), {a, b});
  const int64_t n = x.size(a);
  shape.push_back(n * n);
  return slice(reshape(Ordered(x, order), shape), -1, 0, n * n, n + 1);
}

void TakeDiagonals(absl::string_view op, Term* term) {
  for (size_t b = 1; b < term->labels.size(); ++b) {
    const int label = term->labels[b];
    const size_t a = DimOf(term->labels, label);
    if (a == b) continue;
    const int64_t n = term->x.size(static_cast<int>(a)), m = term->x.size(static_cast<int>(b));
    if (n != m) {
      ThrowInvalid(op, absl::StrCat("a diagonal needs equal sizes, ", NameOf(label), " is ", n,
                                    " and ", m, " of one tensor"));
    }
    term->x = DiagonalOf(term->x, static_cast<int>(a), static_cast<int>(b));
    term->labels.erase(term->labels.begin() + static_cast<std::ptrdiff_t>(b));
    term->labels.erase(term->labels.begin() + static_cast<std::ptrdiff_t>(a));
    term->labels.push_back(label);
    b = 0;
  }
}

// Drops dims of size 1 that broadcast: the product has them from other terms.
void DropBroadcast(const Sizes& sizes, Term* term) {
  DimList ones;
  Labels left;
  for (size_t d = 0; d < term->labels.size(); ++d) {
    const bool broadcast = term->x.size(static_cast<int>(d)) == 1 && sizes.at(term->labels[d]) != 1;
    if (broadcast) {
      ones.push_back(static_cast<int64_t>(d));
    } else {
      left.push_back(term->labels[d]);
    }
  }
  if (!ones.empty()) term->x = squeeze(term->x, ones);
  term->labels = left;
}

bool IsNeeded(const Terms& terms, const Term* but, const Labels& output, int label) {
  return Has(output, label) || std::any_of(terms.begin(), terms.end(), [&](const Term& other) {
           return &other != but && Has(other.labels, label);
         });
}

// Sums over labels that nobody else has; int64 of integers and bools, as sums are.
void SumAlone(const Terms& terms, const Labels& output, Term* term) {
  DimList dims;
  Labels left;
  for (size_t d = 0; d < term->labels.size(); ++d) {
    if (IsNeeded(terms, term, output, term->labels[d])) {
      left.push_back(term->labels[d]);
    } else {
      dims.push_back(static_cast<int64_t>(d));
    }
  }
  if (dims.empty()) return;
  // Of one of several operands a dim of size 1 is dropped, not summed: integers keep their dtype.
  const bool summed = terms.size() == 1 || std::any_of(dims.begin(), dims.end(), [&](int64_t d) {
                        return term->x.size(static_cast<int>(d)) != 1;
                      });
  term->x = summed ? sum(term->x, dims) : squeeze(term->x, dims);
  term->labels = left;
}

// --- pairs

// What the dims of a product of two terms are.
struct PairLabels {
  Labels batch, rows, cols, shared;
};
PairLabels LabelsOfPair(const Terms& terms, size_t a, size_t b, const Labels& output) {
  const auto needed = [&](int label) {
    if (Has(output, label)) return true;
    for (size_t i = 0; i < terms.size(); ++i) {
      if (i != a && i != b && Has(terms[i].labels, label)) return true;
    }
    return false;
  };
  PairLabels all;
  for (const int label : terms[a].labels) {
    if (!Has(terms[b].labels, label)) {
      all.rows.push_back(label);
    } else {
      (needed(label) ? all.batch : all.shared).push_back(label);
    }
  }
  for (const int label : terms[b].labels) {
    if (!Has(terms[a].labels, label)) all.cols.push_back(label);
  }
  return all;
}

Labels Joined(const Labels& a, const Labels& b, const Labels& c = {}) {
  Labels all = a;
  all.insert(all.end(), b.begin(), b.end());
  all.insert(all.end(), c.begin(), c.end());
  return all;
}

// x [batch..., own...] with dims of size 1 for those of the other term.
DTensor Stretched(DTensor x, size_t at, size_t others) {
  for (size_t i = 0; i < others; ++i) x = unsqueeze(x, static_cast<int64_t>(at));
  return x;
}

Term ProductOf(const Term& a, const Term& b, const PairLabels& pair) {
  const DTensor x = Ordered(a.x, DimsOf(a.labels, Joined(pair.batch, pair.rows, pair.shared)));
  const DTensor w = Ordered(b.x, DimsOf(b.labels, Joined(pair.batch, pair.cols, pair.shared)));
  const Labels labels = Joined(pair.batch, pair.rows, pair.cols);
  const size_t batch = pair.batch.size();
  if (pair.shared.empty()) {  // nothing is summed over
    return {mul(Stretched(x, batch + pair.rows.size(), pair.cols.size()),
                Stretched(w, batch, pair.rows.size())),
            labels};
  }
  return {Contract(x, w, static_cast<int>(batch), static_cast<int>(pair.shared.size())), labels};
}

// The product of terms a < b in place of both, at the end.
Terms Joined(Terms terms, size_t a, size_t b, const Labels& output) {
  Term product = ProductOf(terms[a], terms[b], LabelsOfPair(terms, a, b, output));
  terms.erase(terms.begin() + static_cast<std::ptrdiff_t>(b));
  terms.erase(terms.begin() + static_cast<std::ptrdiff_t>(a));
  terms.push_back(std::move(product));
  return terms;
}

// --- the order of products

struct OrderCost {
  double bytes = 0, products = 0;
  bool operator<(const OrderCost& o) const {
    return std::tie(bytes, products) < std::tie(o.bytes, o.products);
  }
};
struct Pair {
  size_t a, b;
};

double ProductsOf(const PairLabels& pair, const Sizes& sizes) {
  double n = 1;
  for (const Labels* labels : {&pair.batch, &pair.rows, &pair.cols, &pair.shared}) {
    for (const int label : *labels) n *= static_cast<double>(sizes.at(label));
  }
  return n;
}

// The best first pair of `terms`, and what all products cost from here on: searched to the end for
// up to four terms, else only the next product is looked at. Runs in a rehearsal: nothing is
// computed, and every rank finds the same.
std::optional<Pair> BestPair(const Terms& terms, const Labels& output, const Sizes& sizes,
                             OrderCost* best) {
  std::optional<Pair> found;
  *best = {};
  for (size_t a = 0; a + 1 < terms.size(); ++a) {
    for (size_t b = a + 1; b < terms.size(); ++b) {
      const double before = Rehearsal::Current()->moved_bytes();
      const Terms next = Joined(terms, a, b, output);
      OrderCost cost, rest;
      if (terms.size() <= 4) BestPair(next, output, sizes, &rest);
      cost.bytes = Rehearsal::Current()->moved_bytes() - before;
      cost.products = ProductsOf(LabelsOfPair(terms, a, b, output), sizes) + rest.products;
      if (found && !(cost < *best)) continue;
      found = Pair{a, b};
      *best = cost;
    }
  }
  return found;
}

Pair NextPair(const Terms& terms, const Labels& output, const Sizes& sizes) {
  if (terms.size() == 2) return {0, 1};
  const CostModel cost;
  const Rehearsal rehearsal(cost);
  const NoGrad no_grad;
  OrderCost best;
  return *BestPair(terms, output, sizes, &best);
}

void CheckTerms(absl::string_view op, const Terms& terms, const Sizes& sizes,
                const Labels& output) {
  for (const Term& term : terms) {
    if (term.x.dtype() == terms[0].x.dtype()) continue;
    ThrowInvalid(op, absl::StrCat("tensors have different dtypes, ", TypeName(terms[0].x.dtype()),
                                  " and ", TypeName(term.x.dtype()), "; convert them with to()"));
  }
  for (size_t i = 0; i < output.size(); ++i) {
    if (sizes.count(output[i]) == 0) {
      ThrowInvalid(op, absl::StrCat("the result has ", NameOf(output[i]), ", which no tensor has"));
    }
    if (static_cast<size_t>(DimOf(output, output[i])) != i) {
      ThrowInvalid(op, absl::StrCat("the result has ", NameOf(output[i]), " twice"));
    }
  }
}

}  // namespace

DTensor ContractLabels(absl::string_view op, Terms terms, const Labels& output) {
  const Sizes sizes = SizesOf(op, terms);
  CheckTerms(op, terms, sizes, output);
  for (Term& term : terms) {
    TakeDiagonals(op, &term);
    DropBroadcast(sizes, &term);
  }
  const DType given = terms[0].x.dtype();
  for (Term& term : terms) SumAlone(terms, output, &term);
  const bool wider = std::any_of(terms.begin(), terms.end(),
                                 [&](const Term& term) { return term.x.dtype() != given; });
  for (Term& term : terms) term.x = wider ? to(term.x, DType::kI64) : term.x;
  // Of several pairs the cheapest on the mesh is next, and it decides how the result lies in memory
  // and whether it is a view. Random numbers, which count elements in memory order, and what may be
  // changed in place must not depend on the mesh.
  const bool chosen = terms.size() > 2;
  while (terms.size() > 1) {
    const Pair next = NextPair(terms, output, sizes);
    terms = Joined(std::move(terms), next.a, next.b, output);
  }
  const DTensor y = Ordered(terms[0].x, DimsOf(terms[0].labels, output));
  return chosen ? clone(contiguous(y)) : y;
}

// --- equations

namespace {

constexpr int kEllipsis = 256;  // its dims from the right: 256, 257, ...

// One side of commas: letters, and -1 for "...".
Labels ParseSubscripts(absl::string_view text) {
  Labels labels;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (text.substr(i, 3) == "...") {
      if (Has(labels, -1)) {
        ThrowInvalid("einsum", absl::StrCat("\"", text, "\" has more than one ellipsis"));
      }
      labels.push_back(-1);
      i += 2;
    } else if (absl::ascii_isalpha(static_cast<unsigned char>(c))) {
      labels.push_back(c);
    } else {
      ThrowInvalid("einsum", absl::StrCat("\"", std::string(1, c), "\" in \"", text,
                                          "\": a subscript is a letter or ..."));
    }
  }
  return labels;
}

// With the dims that the ellipsis stands for.
Labels Expanded(const Labels& labels, int ellipsis) {
  Labels all;
  for (const int label : labels) {
    if (label >= 0) all.push_back(label);
    for (int d = label >= 0 ? 0 : ellipsis; d > 0; --d) all.push_back(kEllipsis + d - 1);
  }
  return all;
}

// Without "->": what an ellipsis stands for, then letters that stand once, in order.
Labels ImplicitOutput(const std::vector<Labels>& inputs) {
  std::map<int, int> counts;
  for (const Labels& labels : inputs) {
    for (const int label : labels) ++counts[label];
  }
  Labels output;
  for (const auto& [label, count] : counts) {
    if (label < 0 || count == 1) output.push_back(label);
  }
  return output;
}

// Which dims an ellipsis stands for in a tensor: those without a letter.
int EllipsisOf(absl::string_view subscripts, const Labels& labels, size_t i, const DTensor& x) {
  const bool open = Has(labels, -1);
  const int rest = x.ndim() - static_cast<int>(labels.size()) + (open ? 1 : 0);
  if (rest < 0 || (!open && rest > 0)) {
    ThrowInvalid("einsum", absl::StrCat("\"", subscripts, "\" does not fit operand ", i,
                                        " of shape ", ToString(x.shape())));
  }
  return rest;
}

DTensor Einsum(absl::string_view equation, absl::Span<const DTensor> operands) {
  const std::string text = absl::StrReplaceAll(equation, {{" ", ""}});
  const std::vector<std::string> sides = absl::StrSplit(text, absl::MaxSplits("->", 1));
  const std::vector<std::string> subscripts = absl::StrSplit(sides[0], ',');
  if (operands.empty() || subscripts.size() != operands.size()) {
    ThrowInvalid("einsum", absl::StrCat("\"", equation, "\" has subscripts of ", subscripts.size(),
                                        " tensors, got ", operands.size()));
  }
  std::vector<Labels> inputs;
  Terms terms;
  int most = 0;
  for (size_t i = 0; i < operands.size(); ++i) {
    inputs.push_back(ParseSubscripts(subscripts[i]));
    const int ellipsis = EllipsisOf(subscripts[i], inputs[i], i, operands[i]);
    terms.push_back({operands[i], Expanded(inputs[i], ellipsis)});
    most = std::max(most, ellipsis);
  }
  const Labels output = sides.size() > 1 ? ParseSubscripts(sides[1]) : ImplicitOutput(inputs);
  return ContractLabels("einsum", std::move(terms), Expanded(output, most));
}

}  // namespace

DTensor einsum(absl::string_view equation, absl::Span<const DTensor> operands) {
  std::vector<std::string> names;
  for (size_t i = 0; i < operands.size(); ++i) names.push_back(absl::StrCat("operands", i));
  for (size_t i = 0; i < operands.size(); ++i) {
    RequireDefined("einsum", {{names[i], operands[i]}});
    RequireOwn("einsum", {{names[i], operands[i]}});  // "a->a" gives its operand, by no op
  }
  return AsOp("einsum", {}, [&] { return Einsum(equation, operands); });
}

}  // namespace dtensor
