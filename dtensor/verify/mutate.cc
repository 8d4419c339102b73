#include "dtensor/verify/mutate.h"

#include <algorithm>
#include <cctype>
#include <functional>
#include <set>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "dtensor/factors.h"
#include "dtensor/forms.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/tensor/status.h"
#include "dtensor/verify/simulate.h"

namespace dtensor {
namespace {

using TextEdit = std::function<std::string(const std::string&)>;

// Calls `edit` with each name of the text and the operand it stands in; its answer replaces it.
std::string EditNames(
    const std::string& text,
    const std::function<std::string(const std::string& name, int operand)>& edit) {
  std::string out;
  int operand = 0;
  for (size_t at = 0; at < text.size();) {
    if (!std::isalpha(static_cast<unsigned char>(text[at]))) {
      if (text[at] == ',' || text[at] == '>') ++operand;
      out += text[at++];
      continue;
    }
    const size_t start = at;
    while (at < text.size() && (std::isalnum(text[at]) || text[at] == '_')) ++at;
    out += edit(text.substr(start, at - start), operand);
  }
  return out;
}

std::string WithoutBracket(const std::string& text, const std::string& name) {
  std::string out = text;
  const std::string bracketed = absl::StrCat("[", name, "]");
  for (size_t at; (at = out.find(bracketed)) != std::string::npos;) {
    out.replace(at, bracketed.size(), name);
  }
  return out;
}

std::string WithBracket(const std::string& text, const std::string& name) {
  return EditNames(text, [&name](const std::string& n, int) {
    return n == name ? absl::StrCat("[", n, "]") : n;
  });
}

std::string Renamed(const std::string& text, const std::string& name, int operand) {
  return EditNames(text, [&](const std::string& n, int at) {
    return n == name && at == operand ? n + "_other" : n;
  });
}

std::string Merged(const std::string& text, const std::string& name, const std::string& into) {
  return EditNames(text, [&](const std::string& n, int) { return n == name ? into : n; });
}

std::string FormText(const LinearSum& sum, const std::vector<std::string>& inputs) {
  const auto names = [&inputs](const std::vector<int>& list, const char* between) {
    return absl::StrJoin(list, between,
                         [&](std::string* s, int i) { absl::StrAppend(s, inputs[i]); });
  };
  std::vector<std::string> products;
  for (const LinearProduct& p : sum) {
    if (p.linear.empty() && p.params.empty()) continue;
    products.push_back(
        absl::StrCat(names(p.linear, " * "),
                     p.params.empty() ? "" : absl::StrCat("(", names(p.params, ", "), ")")));
  }
  return absl::StrJoin(products, " + ");
}

bool IsNew(const VerifyFinding& missing, const std::set<std::string>& known) {
  return !known.count(missing.pattern) ||
         std::any_of(missing.follows.begin(), missing.follows.end(),
                     [&known](const std::string& p) { return !known.count(p); });
}

// Whether every line of b is one of a.
bool Includes(const std::string& a, const std::string& b) {
  const std::set<std::string> have = absl::StrSplit(a, '\n');
  for (const std::string& line : std::vector<std::string>(absl::StrSplit(b, '\n'))) {
    if (!have.count(line)) return false;
  }
  return true;
}

}  // namespace

// Makes declarations that differ from the op's in one thing.
class OpMutator {
 public:
  OpMutator(const OpDef& op, const std::vector<VerifySample>& samples)
      : op_(op), samples_(samples) {}

  absl::StatusOr<std::vector<Mutant>> All() {
    for (size_t f = 0; f < op_.factors_.size(); ++f) DT_RETURN_IF_ERROR(Factors(f));
    for (size_t l = 0; l < op_.linear_.size(); ++l) Linear(l);
    for (const std::string& output : op_.outputs_) NewLinear(output);
    Reduce();
    Monotone();
    for (size_t o = 0; o < op_.offsets_.size(); ++o) {
      Add(absl::StrCat("offset of ", op_.offsets_[o], " not handed over"),
          [o](OpDef* d) { d->offsets_[o].clear(); });
      if (op_.in_blocks(op_.offsets_[o])) {
        Add(absl::StrCat("offset of ", op_.offsets_[o], " taken for a count"),
            [o](OpDef* d) { d->counted_.push_back(d->offsets_[o]); });
      }
    }
    if (op_.elementwise_) {
      Add("takes no flat pieces", [](OpDef* d) { d->elementwise_ = false; });
    }
    return std::move(mutants_);
  }

 private:
  void Add(std::string what, const std::function<void(OpDef*)>& change) {
    if (!seen_.insert(what).second) return;  // two ways to the same
    auto copy = std::make_unique<OpDef>(op_);
    copy->id_ = -1;  // not the registered one: nothing may be cached for it
    change(copy.get());
    mutants_.push_back({std::move(what), std::move(copy)});
  }

  // What a factor source says for the samples.
  absl::StatusOr<std::vector<std::string>> Texts(const OpDef::FactorSource& source) const {
    std::vector<std::string> texts;
    if (!source.fn) return std::vector<std::string>{source.text};
    for (const VerifySample& sample : samples_) {
      DT_ASSIGN_OR_RETURN(const std::vector<SpecRef> specs,
                          internal::SpecsOf(DeviceMesh::Self(), sample,
                                            std::vector<Placements>(sample.inputs.size())));
      std::vector<const Spec*> pointers;
      for (const SpecRef& s : specs) pointers.push_back(s.get());
      const Attrs attrs = internal::AttrsOf(sample);
      DT_ASSIGN_OR_RETURN(const FactorText text, source.fn(OpCall(op_, pointers, attrs)));
      texts.push_back(text.text);
    }
    return texts;
  }

  absl::Status Factors(size_t f) {
    if (op_.factors_.size() > 1) {
      Add(absl::StrCat("factor string ", f, " dropped"),
          [f](OpDef* d) { d->factors_.erase(d->factors_.begin() + static_cast<int64_t>(f)); });
    }
    DT_ASSIGN_OR_RETURN(const std::vector<std::string> texts, Texts(op_.factors_[f]));
    std::set<std::string> tried;
    for (const std::string& text : texts) {
      std::vector<std::pair<std::string, int>> uses;  // name, operand
      EditNames(text, [&uses](const std::string& n, int at) {
        uses.emplace_back(n, at);
        return n;
      });
      std::set<std::string> names;
      for (const auto& [name, at] : uses) names.insert(name);
      const auto edit = [&](const std::string& what, const TextEdit& change) {
        if (change(text) != text && tried.insert(what).second) {
          EditFactors(f, op_.factors_.size() > 1 ? absl::StrCat("string ", f, ": ", what) : what,
                      change);
        }
      };
      for (const std::string& name : names) {
        edit(absl::StrCat(name, " no longer read whole"),
             [name](const std::string& t) { return WithoutBracket(t, name); });
        if (WithoutBracket(text, name) == text) {
          edit(absl::StrCat(name, " read whole"),
               [name](const std::string& t) { return WithBracket(t, name); });
        }
        for (const std::string& into : names) {
          if (into == name) continue;
          edit(absl::StrCat(name, " merged with ", into),
               [name, into](const std::string& t) { return Merged(t, name, into); });
        }
      }
      for (const auto& [name, at] : uses) {
        edit(absl::StrCat(name, " renamed in operand ", at),
             [name = name, at = at](const std::string& t) { return Renamed(t, name, at); });
      }
    }
    return absl::OkStatus();
  }

  void EditFactors(size_t f, const std::string& what, const TextEdit& change) {
    const OpDef::FactorSource& source = op_.factors_[f];
    if (!source.fn && !ParseFactors(change(source.text)).ok()) {
      mutants_.push_back({what, nullptr});
      return;
    }
    Add(what, [&](OpDef* d) {
      if (!source.fn) {
        d->factors_[f].text = change(source.text);
        return;
      }
      d->factors_[f].fn = [fn = source.fn, change](const OpCall& call) {
        absl::StatusOr<FactorText> text = fn(call);
        if (text.ok()) text->text = change(text->text);
        return text;
      };
    });
  }

  // --- forms -------------------------------------------------------------------------------------

  void Linear(size_t l) {
    const OpDef::LinearForm& form = op_.linear_[l];
    const std::string of = form.output.empty() ? "" : absl::StrCat(" of ", form.output);
    Add(absl::StrCat("linear form dropped", of),
        [l](OpDef* d) { d->linear_.erase(d->linear_.begin() + static_cast<int64_t>(l)); });
    if (form.when) {
      Add(absl::StrCat("condition of the linear form dropped", of),
          [l](OpDef* d) { d->linear_[l].when = nullptr; });
    }
    if (op_.variadic_) return;  // its form is the sum of all inputs, whatever the text
    const LinearSum sum = *ParseLinear(form.form, op_.inputs_);
    for (size_t p = 0; p < sum.size(); ++p) EditProduct(l, sum, p);
    for (int i = 0; i < static_cast<int>(op_.inputs_.size()); ++i) {
      if (std::any_of(sum.begin(), sum.end(), [i](const auto& p) { return p.Mentions(i); })) {
        continue;
      }
      LinearSum wider = sum;
      wider.push_back({{i}, {}});
      EditForm(l, wider);
    }
    if (sum.size() > 1) {
      LinearSum joined = sum;
      const LinearProduct last = joined.back();
      joined.pop_back();
      joined[0].linear.insert(joined[0].linear.end(), last.linear.begin(), last.linear.end());
      joined[0].params.insert(joined[0].params.end(), last.params.begin(), last.params.end());
      EditForm(l, joined);
    }
  }

  void EditProduct(size_t l, const LinearSum& sum, size_t p) {
    const auto with = [&](const std::function<void(LinearSum*)>& change) {
      LinearSum changed = sum;
      change(&changed);
      EditForm(l, changed);
    };
    with([p](LinearSum* s) { s->erase(s->begin() + static_cast<int64_t>(p)); });
    const LinearProduct& product = sum[p];
    for (size_t k = 0; k < product.linear.size(); ++k) {
      const auto at = static_cast<int64_t>(k);
      with([=](LinearSum* s) { (*s)[p].linear.erase((*s)[p].linear.begin() + at); });
      with([=](LinearSum* s) {
        (*s)[p].params.push_back((*s)[p].linear[k]);
        (*s)[p].linear.erase((*s)[p].linear.begin() + at);
      });
    }
    for (size_t k = 0; k < product.params.size(); ++k) {
      const auto at = static_cast<int64_t>(k);
      with([=](LinearSum* s) { (*s)[p].params.erase((*s)[p].params.begin() + at); });
      with([=](LinearSum* s) {
        (*s)[p].linear.push_back((*s)[p].params[k]);
        (*s)[p].params.erase((*s)[p].params.begin() + at);
      });
    }
    if (product.linear.size() > 1) {  // x * w becomes x + w
      with([=](LinearSum* s) {
        s->push_back({{(*s)[p].linear.back()}, (*s)[p].params});
        (*s)[p].linear.pop_back();
      });
    }
  }

  void EditForm(size_t l, const LinearSum& sum) {
    const OpDef::LinearForm& form = op_.linear_[l];
    const std::string text = FormText(sum, op_.inputs_);
    const std::string what =
        absl::StrCat(form.output, form.output.empty() ? "" : ": ", "\"",
                     absl::StripAsciiWhitespace(form.form), "\" became \"", text, "\"");
    Add(what, [&](OpDef* d) { d->linear_[l].form = text; });
  }

  // An output without a form: linear in each input, the others parameters.
  void NewLinear(const std::string& output) {
    for (const OpDef::LinearForm& form : op_.linear_) {
      if (form.output.empty() || form.output == output) return;
    }
    if (op_.variadic_) return;
    for (int i = 0; i < static_cast<int>(op_.inputs_.size()); ++i) {
      LinearProduct product{{i}, {}};
      for (int k = 0; k < static_cast<int>(op_.inputs_.size()); ++k) {
        if (k != i) product.params.push_back(k);
      }
      const std::string text = FormText({product}, op_.inputs_);
      Add(absl::StrCat(output, " linear: \"", text, "\""),
          [&](OpDef* d) { d->linear_.push_back({output, text, nullptr}); });
    }
  }

  void Reduce() {
    if (!op_.has_reduce_) {
      Add("reduces by max", [](OpDef* d) { d->Reduces(ReduceOp::kMax); });
      return;
    }
    Add("reduction dropped", [](OpDef* d) { d->has_reduce_ = false; });
    for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin, ReduceOp::kProd}) {
      if (op == op_.reduce_op_) continue;
      Add(absl::StrCat("reduces by another: ", static_cast<int>(op)),
          [op](OpDef* d) { d->reduce_op_ = op; });
    }
  }

  void Monotone() {
    if (op_.outputs_.size() > 1 || op_.variadic_) return;
    for (size_t m = 0; m < op_.monotone_.size(); ++m) {
      Add("monotone form dropped",
          [m](OpDef* d) { d->monotone_.erase(d->monotone_.begin() + static_cast<int64_t>(m)); });
      if (op_.monotone_[m].when) {
        Add(absl::StrCat("condition of monotone form ", m, " dropped"),
            [m](OpDef* d) { d->monotone_[m].when = nullptr; });
      }
      Add("monotone form flipped",
          [m](OpDef* d) { d->monotone_[m].decreasing = !d->monotone_[m].decreasing; });
    }
    for (const std::string& input : op_.inputs_) {
      const bool has = std::any_of(
          op_.monotone_.begin(), op_.monotone_.end(), [&input](const OpDef::MonotoneForm& form) {
            return std::count(form.args.begin(), form.args.end(), input) > 0;
          });
      if (!has) Add(absl::StrCat("monotone in ", input), [&](OpDef* d) { d->Monotone(input); });
    }
  }

  const OpDef& op_;
  const std::vector<VerifySample>& samples_;
  std::vector<Mutant> mutants_;
  std::set<std::string> seen_;
};

absl::StatusOr<std::vector<Mutant>> MutantsOf(const OpDef& op,
                                              const std::vector<VerifySample>& samples) {
  absl::StatusOr<std::vector<Mutant>> mutants;
  DT_RETURN_IF_ERROR(RunFake({}, [&](RankContext&) {
    mutants = OpMutator(op, samples).All();
    return mutants.status();
  }));
  return mutants;
}

void MutationReport::Add(const MutationReport& other) {
  wrong += other.wrong;
  missing += other.missing;
  refused += other.refused;
  equivalent += other.equivalent;
  modest.insert(modest.end(), other.modest.begin(), other.modest.end());
  survivors.insert(survivors.end(), other.survivors.begin(), other.survivors.end());
}

absl::StatusOr<MutationReport> MutateOp(const OpDef& op, const std::vector<VerifySample>& samples) {
  const VerifyOptions options = {.most = 60, .stop_at_wrong = true};
  const std::unique_ptr<Verifier> verifier = Verifier::Create(op, samples);
  DT_ASSIGN_OR_RETURN(const VerifyReport base, verifier->Verify(op, options));
  if (!base.wrong.empty()) {
    return absl::FailedPreconditionError(absl::StrCat("already wrong: ", base.wrong[0].row));
  }
  std::set<std::string> known;
  for (const VerifyFinding& f : base.missing) {
    known.insert(f.pattern);
    known.insert(f.follows.begin(), f.follows.end());
  }
  DT_ASSIGN_OR_RETURN(const std::vector<Mutant> mutants, MutantsOf(op, samples));
  MutationReport report;
  for (const Mutant& mutant : mutants) {
    if (mutant.declaration == nullptr) {
      ++report.refused;
      continue;
    }
    const absl::StatusOr<VerifyReport> verdict = verifier->Verify(*mutant.declaration, options);
    if (!verdict.ok()) {
      ++report.refused;
    } else if (verdict->claims == base.claims) {
      ++report.equivalent;
    } else if (!verdict->wrong.empty()) {
      ++report.wrong;
    } else if (std::any_of(verdict->missing.begin(), verdict->missing.end(),
                           [&](const auto& f) { return IsNew(f, known); })) {
      ++report.missing;
    } else if (Includes(verdict->claims, base.claims)) {
      report.modest.push_back(absl::StrCat(op.name(), ": ", mutant.what));
    } else {
      report.survivors.push_back(absl::StrCat(op.name(), ": ", mutant.what));
    }
  }
  return report;
}

}  // namespace dtensor
