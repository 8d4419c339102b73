// Test support: torch's function names and arguments as calls of our ops.
#pragma once

#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "dtensor/ops/ops.h"
#include "tests/common/torch_samples.h"

namespace dtensor::testing {

// A sample that we do not take, with the reason that is counted.
struct LeftOut {
  std::string reason;
};

// The arguments of one call by name; tensors are the DTensors given.
class Args {
 public:
  Args(const Json& sample, std::map<std::string, DTensor> tensors) : tensors_(std::move(tensors)) {
    const Json& args = sample.at("args");
    for (size_t i = 0; i < args.size(); ++i) {
      values_[sample.at("names")[i].get<std::string>()] = args[i];
    }
    for (const auto& [name, value] : sample.at("kwargs").items()) values_[name] = value;
  }

  bool Has(const std::string& name) {
    const auto it = values_.find(name);
    if (it == values_.end()) return false;
    used_.insert(name);
    return !it->second.is_null();
  }
  const Json& Get(const std::string& name) {
    if (!Has(name)) throw LeftOut{absl::StrCat("no argument ", name)};
    return values_.at(name);
  }
  bool IsTensor(const std::string& name) { return Has(name) && Get(name).is_object(); }
  DTensor T(const std::string& name) {
    if (!IsTensor(name)) throw LeftOut{absl::StrCat(name, " is a number")};
    return tensors_.at(Get(name).at("tensor").get<std::string>());
  }
  DTensor Optional(const std::string& name) { return Has(name) ? T(name) : DTensor(); }
  std::vector<DTensor> List(const std::string& name) {
    std::vector<DTensor> list;
    for (const Json& t : Get(name)) list.push_back(tensors_.at(t.at("tensor").get<std::string>()));
    return list;
  }
  int64_t Int(const std::string& name, int64_t otherwise) {
    return Has(name) ? Get(name).get<int64_t>() : otherwise;
  }
  bool Bool(const std::string& name) { return Has(name) && Get(name).get<bool>(); }
  double Float(const std::string& name, double otherwise) {
    return Has(name) ? Number(name).d : otherwise;
  }
  std::string Text(const std::string& name, std::string otherwise) {
    return Has(name) ? Get(name).get<std::string>() : otherwise;
  }
  // An int counts as a list of one; absent as empty.
  DimList Ints(const std::string& name) {
    if (!Has(name)) return {};
    const Json& v = Get(name);
    return v.is_array() ? v.get<DimList>() : DimList{v.get<int64_t>()};
  }
  std::optional<DType> Type(const std::string& name) {
    if (!Has(name)) return {};
    return DTypeOf(Get(name).get<std::string>());
  }
  Scalar Number(const std::string& name) {
    const Json& v = Get(name);
    if (v.is_string()) {
      const std::string s = v.get<std::string>();
      return s == "inf" ? HUGE_VAL : s == "-inf" ? -HUGE_VAL : std::nan("");
    }
    if (v.is_boolean()) return Scalar(v.get<bool>());
    if (v.is_number_integer()) return Scalar(v.get<int64_t>());
    if (v.is_number_float()) return Scalar(v.get<double>());
    throw LeftOut{absl::StrCat(name, " is no number")};
  }
  // Nothing may be given that the call did not look at.
  void CheckAllUsed() const {
    for (const auto& [name, value] : values_) {
      if (!value.is_null() && used_.count(name) == 0) {
        throw LeftOut{absl::StrCat("argument ", name)};
      }
    }
  }

 private:
  std::map<std::string, Json> values_;
  std::map<std::string, DTensor> tensors_;
  std::set<std::string> used_;
};

using TorchCall = std::function<Values(Args&)>;

inline Reduction ReductionOf(Args& a) {
  const std::string name = a.Text("reduction", "mean");
  return name == "none" ? Reduction::kNone : name == "sum" ? Reduction::kSum : Reduction::kMean;
}

// Binary functions with tensor or number on either side, as far as we have them.
#define DT_BINARY(name, second)                                                             \
  {#name, [](Args& a) -> Values {                                                           \
     if (a.IsTensor("self") && a.IsTensor(second)) return {name(a.T("self"), a.T(second))}; \
     if (a.IsTensor("self")) return {name(a.T("self"), a.Number(second))};                  \
     return {name(a.Number("self"), a.T(second))};                                          \
   }}
#define DT_TENSORS(name) \
  {#name, [](Args& a) -> Values { return {name(a.T("self"), a.T("other"))}; }}
#define DT_COMPARE_CALL(name)                                           \
  {#name, [](Args& a) -> Values {                                       \
     if (a.IsTensor("other")) return {name(a.T("self"), a.T("other"))}; \
     return {name(a.T("self"), a.Number("other"))};                     \
   }}
#define DT_UNARY(name, arg) {#name, [](Args& a) -> Values { return {name(a.T(arg))}; }}
#define DT_CAST(name, type) \
  {#name, [](Args& a) -> Values { return {to(a.T("self"), DType::type)}; }}

inline Values AddOrSub(Args& a, DTensor (*both)(const DTensor&, const DTensor&, Scalar),
                       DTensor (*number)(const DTensor&, Scalar, Scalar), const char* x,
                       const char* y) {
  const Scalar alpha = a.Has("alpha") ? a.Number("alpha") : Scalar(1);
  if (a.IsTensor(y)) return {both(a.T(x), a.T(y), alpha)};
  return {number(a.T(x), a.Number(y), alpha)};
}

inline std::map<std::string, TorchCall> PointwiseCalls() {
  return {
      {"add", [](Args& a) { return AddOrSub(a, add, add, "self", "other"); }},
      {"sub", [](Args& a) { return AddOrSub(a, sub, sub, "self", "other"); }},
      {"rsub",
       [](Args& a) -> Values {
         if (a.IsTensor("other")) return AddOrSub(a, sub, sub, "other", "self");
         if (a.Has("alpha")) throw LeftOut{"rsub of a number with alpha"};
         return {sub(a.Number("other"), a.T("self"))};
       }},
      {"mul",
       [](Args& a) -> Values {
         if (a.IsTensor("other")) return {mul(a.T("self"), a.T("other"))};
         return {mul(a.T("self"), a.Number("other"))};
       }},
      DT_BINARY(div, "other"),
      DT_BINARY(pow, "exponent"),
      DT_TENSORS(maximum),
      DT_TENSORS(minimum),
      {"true_divide",
       [](Args& a) -> Values {
         if (a.IsTensor("other")) return {div(a.T("self"), a.T("other"))};
         return {div(a.T("self"), a.Number("other"))};
       }},
      DT_COMPARE_CALL(eq),
      DT_COMPARE_CALL(ne),
      DT_COMPARE_CALL(lt),
      DT_COMPARE_CALL(le),
      DT_COMPARE_CALL(gt),
      DT_COMPARE_CALL(ge),
      DT_UNARY(abs, "self"),
      DT_UNARY(neg, "self"),
      DT_UNARY(exp, "self"),
      DT_UNARY(log, "self"),
      DT_UNARY(sqrt, "self"),
      DT_UNARY(rsqrt, "self"),
      DT_UNARY(tanh, "self"),
      DT_UNARY(sigmoid, "self"),
      DT_UNARY(logical_not, "self"),
      DT_UNARY(relu, "input"),
      DT_UNARY(silu, "input"),
      DT_UNARY(clone, "self"),
      DT_UNARY(contiguous, "self"),
      {"gelu",
       [](Args& a) -> Values {
         return {gelu(a.T("self"), a.Text("approximate", "none") == "tanh")};
       }},
      {"where",
       [](Args& a) -> Values {
         const DTensor c = a.T("condition");
         if (a.IsTensor("self") && a.IsTensor("other"))
           return {where(c, a.T("self"), a.T("other"))};
         if (a.IsTensor("self")) return {where(c, a.T("self"), a.Number("other"))};
         return {where(c, a.Number("self"), a.T("other"))};
       }},
      {"masked_fill",
       [](Args& a) -> Values {
         const DTensor x = a.T("self"), mask = a.T("mask");
         if (a.IsTensor("value")) return {masked_fill(x, mask, a.T("value"))};
         return {masked_fill(x, mask, a.Number("value"))};
       }},
      {"to", [](Args& a) -> Values { return {to(a.T("self"), *a.Type("dtype"))}; }},
      DT_CAST(bool, kBool),
      DT_CAST(float, kF32),
      DT_CAST(double, kF64),
      DT_CAST(half, kF16),
      DT_CAST(bfloat16, kBF16),
      DT_CAST(int, kI32),
      DT_CAST(long, kI64),
  };
}

inline std::map<std::string, TorchCall> RowCalls() {
  return {
      {"sum",
       [](Args& a) -> Values {
         return {sum(a.T("self"), a.Ints("dim"), a.Bool("keepdim"), a.Type("dtype"))};
       }},
      {"mean",
       [](Args& a) -> Values {
         return {mean(a.T("self"), a.Ints("dim"), a.Bool("keepdim"), a.Type("dtype"))};
       }},
      {"amax",
       [](Args& a) -> Values { return {amax(a.T("self"), a.Ints("dim"), a.Bool("keepdim"))}; }},
      {"softmax",
       [](Args& a) -> Values { return {softmax(a.T("self"), a.Int("dim", 0), a.Type("dtype"))}; }},
      {"log_softmax",
       [](Args& a) -> Values {
         return {log_softmax(a.T("self"), a.Int("dim", 0), a.Type("dtype"))};
       }},
      {"layer_norm",
       [](Args& a) -> Values {
         return {layer_norm(a.T("input"), a.Ints("normalized_shape"), a.Optional("weight"),
                            a.Optional("bias"), a.Float("eps", 1e-5))};
       }},
      {"rms_norm",
       [](Args& a) -> Values {
         return {rms_norm(a.T("input"), a.Ints("normalized_shape"), a.Optional("weight"),
                          a.Float("eps", -1))};
       }},
      {"nll_loss",
       [](Args& a) -> Values {
         return {nll_loss(a.T("input"), a.T("target"), a.Optional("weight"),
                          a.Int("ignore_index", -100), ReductionOf(a))};
       }},
      {"cross_entropy",
       [](Args& a) -> Values {
         return {cross_entropy(a.T("input"), a.T("target"), a.Optional("weight"),
                               a.Int("ignore_index", -100), ReductionOf(a),
                               a.Float("label_smoothing", 0))};
       }},
      {"embedding",
       [](Args& a) -> Values {
         if (a.Bool("scale_grad_by_freq")) throw LeftOut{"scale_grad_by_freq"};
         const DTensor w = a.T("weight");
         int64_t padding = a.Has("padding_idx") ? a.Int("padding_idx", 0) : -1;
         if (a.Has("padding_idx") && padding < 0) padding += w.size(0);
         return {embedding(a.T("input"), w, padding)};
       }},
      {"scaled_dot_product_attention",
       [](Args& a) -> Values {
         if (a.Float("dropout_p", 0) != 0) throw LeftOut{"dropout"};
         const std::optional<double> scale =
             a.Has("scale") ? std::optional<double>(a.Float("scale", 1)) : std::nullopt;
         return {scaled_dot_product_attention(a.T("query"), a.T("key"), a.T("value"),
                                              a.Optional("attn_mask"), a.Bool("is_causal"), scale,
                                              a.Bool("enable_gqa"))};
       }},
      {"matmul", [](Args& a) -> Values { return {matmul(a.T("self"), a.T("other"))}; }},
      {"mm", [](Args& a) -> Values { return {matmul(a.T("self"), a.T("mat2"))}; }},
      {"mv", [](Args& a) -> Values { return {matmul(a.T("self"), a.T("vec"))}; }},
      {"bmm", [](Args& a) -> Values { return {bmm(a.T("self"), a.T("mat2"))}; }},
      {"linear",
       [](Args& a) -> Values { return {linear(a.T("input"), a.T("weight"), a.Optional("bias"))}; }},
  };
}

inline Values Split(Args& a, const char* x, const char* sizes) {
  const DTensor t = a.T(x);
  const int64_t dim = a.Int("dim", 0);
  if (a.Get(sizes).is_array()) return split(t, a.Ints(sizes), dim);
  return split(t, a.Int(sizes, 1), dim);
}

inline std::map<std::string, TorchCall> ViewCalls() {
  return {
      {"view", [](Args& a) -> Values { return {view(a.T("self"), a.Ints("size"))}; }},
      {"reshape", [](Args& a) -> Values { return {reshape(a.T("self"), a.Ints("shape"))}; }},
      {"flatten",
       [](Args& a) -> Values {
         return {flatten(a.T("self"), a.Int("start_dim", 0), a.Int("end_dim", -1))};
       }},
      {"ravel", [](Args& a) -> Values { return {flatten(a.T("self"))}; }},
      {"unflatten",
       [](Args& a) -> Values {
         return {unflatten(a.T("self"), a.Int("dim", 0), a.Ints("sizes"))};
       }},
      {"squeeze",
       [](Args& a) -> Values {
         if (!a.Has("dim")) return {squeeze(a.T("self"))};
         return {squeeze(a.T("self"), a.Ints("dim"))};
       }},
      {"unsqueeze", [](Args& a) -> Values { return {unsqueeze(a.T("self"), a.Int("dim", 0))}; }},
      {"transpose",
       [](Args& a) -> Values {
         return {transpose(a.T("self"), a.Int("dim0", 0), a.Int("dim1", 0))};
       }},
      {"swapaxes",
       [](Args& a) -> Values {
         return {transpose(a.T("self"), a.Int("axis0", 0), a.Int("axis1", 0))};
       }},
      {"permute", [](Args& a) -> Values { return {permute(a.T("self"), a.Ints("dims"))}; }},
      {"expand", [](Args& a) -> Values { return {expand(a.T("self"), a.Ints("size"))}; }},
      {"select",
       [](Args& a) -> Values { return {select(a.T("self"), a.Int("dim", 0), a.Int("index", 0))}; }},
      {"slice",
       [](Args& a) -> Values {
         return {slice(a.T("self"), a.Int("dim", 0), a.Int("start", 0), a.Int("end", INT64_MAX),
                       a.Int("step", 1))};
       }},
      {"split", [](Args& a) { return Split(a, "tensor", "split_size_or_sections"); }},
      {"split_with_sizes", [](Args& a) { return Split(a, "self", "split_sizes"); }},
      {"cat", [](Args& a) -> Values { return {cat(a.List("tensors"), a.Int("dim", 0))}; }},
      {"stack", [](Args& a) -> Values { return {stack(a.List("tensors"), a.Int("dim", 0))}; }},
      {"zeros_like",
       [](Args& a) -> Values {
         const DTensor y = zeros_like(a.T("self"));
         return {a.Has("dtype") ? to(y, *a.Type("dtype")) : y};
       }},
      {"ones_like",
       [](Args& a) -> Values {
         const DTensor y = ones_like(a.T("self"));
         return {a.Has("dtype") ? to(y, *a.Type("dtype")) : y};
       }},
  };
}

inline std::map<std::string, TorchCall> FactoryCalls() {
  const auto typed = [](Args& a) {
    TensorOptions options;
    options.dtype = a.Type("dtype").value_or(DType::kF32);
    return options;
  };
  return {
      {"zeros", [=](Args& a) -> Values { return {zeros(a.Ints("size"), typed(a))}; }},
      {"ones", [=](Args& a) -> Values { return {ones(a.Ints("size"), typed(a))}; }},
      {"full",
       [=](Args& a) -> Values {
         if (!a.Has("dtype") && !a.Number("fill_value").is_float) {
           throw LeftOut{"full of an integer without dtype: ours is float32"};
         }
         return {full(a.Ints("size"), a.Number("fill_value"), typed(a))};
       }},
      {"arange",
       [=](Args& a) -> Values {
         if (!a.Has("dtype") && !a.Number("end").is_float) {
           throw LeftOut{"arange of integers without dtype: ours is float32"};
         }
         const Scalar start = a.Has("start") ? a.Number("start") : Scalar(0);
         const Scalar step = a.Has("step") ? a.Number("step") : Scalar(1);
         return {arange(start, a.Number("end"), step, typed(a))};
       }},
  };
}

inline std::map<std::string, TorchCall> TorchCalls() {
  std::map<std::string, TorchCall> all = PointwiseCalls();
  all.merge(RowCalls());
  all.merge(ViewCalls());
  all.merge(FactoryCalls());
  return all;
}

}  // namespace dtensor::testing
