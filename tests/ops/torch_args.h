// Test support: a sample of PyTorch's as the arguments of a case line (ops/cases.h).
#pragma once

#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "dtensor/ops/cases.h"
#include "tests/common/torch_samples.h"

namespace dtensor::testing {

// A sample that we do not take, with the reason that is counted.
struct LeftOut {
  std::string reason;
};

// The arguments of one call by name; tensors are the DTensors given.
class TorchArgs : public CaseArgs {
 public:
  TorchArgs(const Json& sample, std::map<std::string, DTensor> tensors)
      : tensors_(std::move(tensors)) {
    const Json& args = sample.at("args");
    for (size_t i = 0; i < args.size(); ++i) {
      names_.push_back(sample.at("names")[i].get<std::string>());
      values_[names_.back()] = args[i];
    }
    for (const auto& [name, value] : sample.at("kwargs").items()) {
      // Where a function has two forms the first argument may go by the name of another.
      if (!names_.empty() && name == names_[0]) {
        values_["self"] = values_[name];
        names_[0] = "self";
      }
      names_.push_back(name);
      values_[name] = value;
    }
  }

  bool Has(const std::string& name) override {
    const auto it = values_.find(name);
    if (it == values_.end()) return false;
    used_.insert(name);
    return !it->second.is_null();
  }
  bool IsTensor(const std::string& name) override { return Has(name) && Get(name).is_object(); }
  bool IsList(const std::string& name) override { return Has(name) && Get(name).is_array(); }
  bool IsText(const std::string& name) override { return Has(name) && Get(name).is_string(); }
  std::string NameAt(size_t i) override {
    if (i >= names_.size()) LeaveOut(absl::StrCat("no argument ", i));
    return names_[i];
  }
  DTensor T(const std::string& name) override {
    if (!IsTensor(name)) LeaveOut(absl::StrCat(name, " is a number"));
    return TensorOf(Get(name));
  }
  std::vector<DTensor> List(const std::string& name) override {
    std::vector<DTensor> list;
    for (const Json& t : Get(name)) list.push_back(t.is_null() ? DTensor() : TensorOf(t));
    return list;
  }
  std::vector<TensorIndex> Indices(const std::string& name) override {
    std::vector<TensorIndex> all;
    for (const Json& at : Get(name)) {
      if (at.is_null()) {
        all.emplace_back(kNewDim);
      } else if (at.is_number()) {
        all.emplace_back(at.get<int64_t>());
      } else if (at.contains("ellipsis")) {
        all.emplace_back(kEllipsis);
      } else if (at.contains("slice")) {
        const Json& s = at.at("slice");
        const auto end = [&](int i) {
          return s[i].is_null() ? std::optional<int64_t>() : s[i].get<int64_t>();
        };
        all.emplace_back(Slice(end(0), end(1), end(2).value_or(1)));
      } else {
        all.emplace_back(TensorOf(at));
      }
    }
    return all;
  }
  Scalar Number(const std::string& name) override {
    const Json& v = Get(name);
    if (v.is_object()) {  // a tensor of one number
      const DTensor t = TensorOf(v);
      return IsFloating(t.dtype()) ? Scalar(t.Item()) : Scalar(static_cast<int64_t>(t.Item()));
    }
    if (v.is_string()) {
      const std::string s = v.get<std::string>();
      return s == "inf" ? HUGE_VAL : s == "-inf" ? -HUGE_VAL : std::nan("");
    }
    if (v.is_boolean()) return Scalar(v.get<bool>());
    if (v.is_number_integer()) return Scalar(v.get<int64_t>());
    if (v.is_number_float()) return Scalar(v.get<double>());
    throw LeftOut{absl::StrCat(name, " is no number")};
  }
  // None in a list (a size that stays) is -1.
  DimList Ints(const std::string& name) override {
    return Numbers<int64_t>(name,
                            [](const Json& v) { return v.is_null() ? -1 : v.get<int64_t>(); });
  }
  std::vector<double> Floats(const std::string& name) override {
    return Numbers<double>(name, [](const Json& v) { return v.get<double>(); });
  }
  std::string Text(const std::string& name) override { return Get(name).get<std::string>(); }
  // The copy takes the place of the sample's tensor: After() is what the call made of it.
  DTensor Written(const std::string& name) override {
    const DTensor copy = clone(T(name));
    return tensors_[Get(name).at("tensor").get<std::string>()] = copy;
  }
  DTensor After(const std::string& key) const { return tensors_.at(key); }
  [[noreturn]] void LeaveOut(const std::string& reason) override { throw LeftOut{reason}; }

  // Nothing may be given that the call did not look at.
  void CheckAllUsed() {
    for (const auto& [name, value] : values_) {
      if (!value.is_null() && used_.count(name) == 0) LeaveOut(absl::StrCat("argument ", name));
    }
  }

 private:
  // Of a list of lists one after the other.
  template <class Element, class F>
  std::vector<Element> Numbers(const std::string& name, const F& number) {
    if (!Has(name)) return {};
    std::vector<Element> all;
    const std::function<void(const Json&)> add = [&](const Json& v) {
      if (!v.is_array()) return all.push_back(number(v));
      for (const Json& part : v) add(part);
    };
    add(Get(name));
    return all;
  }
  const Json& Get(const std::string& name) {
    if (!Has(name)) LeaveOut(absl::StrCat("no argument ", name));
    return values_.at(name);
  }
  DTensor TensorOf(const Json& value) const {
    return tensors_.at(value.at("tensor").get<std::string>());
  }
  std::vector<std::string> names_;  // in the order of the call
  std::map<std::string, Json> values_;
  std::map<std::string, DTensor> tensors_;
  std::set<std::string> used_;
};

}  // namespace dtensor::testing
