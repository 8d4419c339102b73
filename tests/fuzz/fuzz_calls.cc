#include "tests/fuzz/fuzz_calls.h"

#include <algorithm>
#include <set>

#include "dtensor/ops/rules.h"

namespace dtensor::testing {
namespace {

using In = const std::vector<DTensor>&;

DimList SomeDims(Bytes& b) {
  DimList dims;
  for (int64_t n = b.Below(4); n > 0; --n) dims.push_back(b.Int());
  return dims;
}

// A shape for as many elements, or any.
Dims SomeShape(const DTensor& x, Bytes& b) {
  Dims shape;
  if (b.Chance(64)) {
    for (int64_t n = b.Below(4); n > 0; --n) shape.push_back(b.Int());
    return shape;
  }
  int64_t left = x.numel();
  for (int64_t n = b.Below(4); n > 0 && left > 1; --n) {
    const int64_t part = b.Between(1, 6);
    if (left % part != 0) continue;
    shape.push_back(part);
    left /= part;
  }
  shape.push_back(b.Chance(64) ? -1 : left);
  return shape;
}

Dims GrownShape(const DTensor& x, Bytes& b) {
  Dims shape;
  for (int64_t n = b.Below(2); n > 0; --n) shape.push_back(b.Between(0, 3));
  for (int64_t s : x.shape()) shape.push_back(s == 1 ? b.Between(0, 4) : b.Chance(32) ? -1 : s);
  return shape;
}

Reduction SomeReduction(Bytes& b) { return static_cast<Reduction>(b.Below(3)); }
DType SomeType(Bytes& b) { return static_cast<DType>(b.Below(kNumDTypes)); }

void AddPointwise(std::vector<FuzzCall>* all) {
  const auto unary = [all](const char* name, DTensor (*fn)(const DTensor&)) {
    all->push_back(
        {name, Shapes::kAlike, {'x'}, [fn](In in, Bytes&) -> Values { return {fn(in[0])}; }});
  };
  unary("neg", neg), unary("abs", abs), unary("exp", exp), unary("log", log);
  unary("sqrt", sqrt), unary("rsqrt", rsqrt), unary("tanh", tanh), unary("sigmoid", sigmoid);
  unary("relu", relu), unary("silu", silu), unary("logical_not", logical_not);
  unary("clone", clone), unary("contiguous", contiguous);
  unary("zeros_like", zeros_like), unary("ones_like", ones_like);
  const auto binary = [all](const char* name, DTensor (*fn)(const DTensor&, const DTensor&)) {
    all->push_back({name, Shapes::kAlike, {'x', 'x'}, [fn](In in, Bytes&) -> Values {
                      return {fn(in[0], in[1])};
                    }});
  };
  binary("mul", mul), binary("div", div), binary("pow", pow);
  binary("maximum", maximum), binary("minimum", minimum);
  binary("eq", eq), binary("ne", ne), binary("lt", lt), binary("le", le), binary("gt", gt);
  binary("ge", ge);
  binary("tanh_backward", tanh_backward), binary("sigmoid_backward", sigmoid_backward);
  binary("relu_backward", relu_backward), binary("rsqrt_backward", rsqrt_backward);
  binary("abs_backward", abs_backward), binary("silu_backward", silu_backward);
  const auto scalar = [all](const char* name, DTensor (*fn)(const DTensor&, Scalar)) {
    all->push_back({name, Shapes::kAlike, {'x'}, [fn](In in, Bytes& b) -> Values {
                      return {fn(in[0], b.Number())};
                    }});
  };
  scalar("mul number", mul), scalar("div number", div), scalar("pow number", pow);
  scalar("eq number", eq), scalar("ne number", ne), scalar("lt number", lt);
  scalar("le number", le), scalar("gt number", gt), scalar("ge number", ge);
  const auto add_call = [all](const char* name, std::vector<char> inputs,
                              std::function<Values(In, Bytes&)> run) {
    all->push_back({name, Shapes::kAlike, std::move(inputs), std::move(run)});
  };
  add_call("add", {'x', 'x'},
           [](In in, Bytes& b) -> Values { return {add(in[0], in[1], b.Number())}; });
  add_call("sub", {'x', 'x'},
           [](In in, Bytes& b) -> Values { return {sub(in[0], in[1], b.Number())}; });
  add_call("add number", {'x'}, [](In in, Bytes& b) -> Values {
    const Scalar y = b.Number();
    return {add(in[0], y, b.Number())};
  });
  add_call("number sub", {'x'}, [](In in, Bytes& b) -> Values { return {sub(b.Number(), in[0])}; });
  add_call("number div", {'x'}, [](In in, Bytes& b) -> Values { return {div(b.Number(), in[0])}; });
  add_call("number pow", {'x'}, [](In in, Bytes& b) -> Values { return {pow(b.Number(), in[0])}; });
  add_call("gelu", {'x'}, [](In in, Bytes& b) -> Values { return {gelu(in[0], b.Chance(128))}; });
  add_call("gelu_backward", {'f', 'f'},
           [](In in, Bytes& b) -> Values { return {gelu_backward(in[0], in[1], b.Chance(128))}; });
  add_call("maximum_backward", {'f', 'f', 'f'},
           [](In in, Bytes&) -> Values { return {maximum_backward(in[0], in[1], in[2])}; });
  add_call("where", {'b', 'x', 'x'},
           [](In in, Bytes&) -> Values { return {where(in[0], in[1], in[2])}; });
  add_call("where number", {'b', 'x'}, [](In in, Bytes& b) -> Values {
    return {b.Chance(128) ? where(in[0], in[1], b.Number()) : where(in[0], b.Number(), in[1])};
  });
  add_call("masked_fill", {'x', 'b'},
           [](In in, Bytes& b) -> Values { return {masked_fill(in[0], in[1], b.Number())}; });
  add_call("dropout_apply", {'f', 'b'},
           [](In in, Bytes& b) -> Values { return {dropout_apply(in[0], in[1], b.Float())}; });
  add_call("copy_", {'x', 'x'}, [](In in, Bytes&) -> Values { return {copy_(in[0], in[1])}; });
  add_call("add_", {'x', 'x'},
           [](In in, Bytes& b) -> Values { return {add_(in[0], in[1], b.Number())}; });
  add_call("add_ number", {'x'},
           [](In in, Bytes& b) -> Values { return {add_(in[0], b.Number())}; });
  add_call("mul_", {'x', 'x'}, [](In in, Bytes&) -> Values { return {mul_(in[0], in[1])}; });
  add_call("mul_ number", {'x'},
           [](In in, Bytes& b) -> Values { return {mul_(in[0], b.Number())}; });
}

void AddViews(std::vector<FuzzCall>* all) {
  const auto one = [all](const char* name, std::function<Values(const DTensor&, Bytes&)> run) {
    all->push_back({name, Shapes::kAlike, {'x'}, [run = std::move(run)](In in, Bytes& b) {
                      return run(in[0], b);
                    }});
  };
  one("reshape",
      [](const DTensor& x, Bytes& b) -> Values { return {reshape(x, SomeShape(x, b))}; });
  one("view", [](const DTensor& x, Bytes& b) -> Values { return {view(x, SomeShape(x, b))}; });
  one("flatten", [](const DTensor& x, Bytes& b) -> Values {
    const int64_t start = b.Int();
    return {flatten(x, start, b.Int())};
  });
  one("unflatten", [](const DTensor& x, Bytes& b) -> Values {
    const int64_t dim = b.Int(), first = b.Between(1, 3);
    return {unflatten(x, dim, Dims{first, b.Chance(128) ? -1 : b.Int()})};
  });
  one("transpose", [](const DTensor& x, Bytes& b) -> Values {
    const int64_t a = b.Int();
    return {transpose(x, a, b.Int())};
  });
  one("permute", [](const DTensor& x, Bytes& b) -> Values {
    Dims dims;
    for (int d = 0; d < x.ndim(); ++d) dims.insert(dims.begin() + b.Below(d + 1), d);
    if (b.Chance(32)) dims.push_back(b.Int());
    return {permute(x, dims)};
  });
  one("squeeze", [](const DTensor& x, Bytes& b) -> Values {
    return {b.Chance(128) ? squeeze(x) : squeeze(x, SomeDims(b))};
  });
  one("unsqueeze", [](const DTensor& x, Bytes& b) -> Values { return {unsqueeze(x, b.Int())}; });
  one("expand", [](const DTensor& x, Bytes& b) -> Values { return {expand(x, GrownShape(x, b))}; });
  one("slice", [](const DTensor& x, Bytes& b) -> Values {
    const int64_t dim = b.Int(), start = b.Int(), end = b.Int();
    return {slice(x, dim, start, end, b.Chance(128) ? 1 : b.Int())};
  });
  one("select", [](const DTensor& x, Bytes& b) -> Values {
    const int64_t dim = b.Int();
    return {select(x, dim, b.Int())};
  });
  one("split", [](const DTensor& x, Bytes& b) -> Values {
    const int64_t size = b.Int();
    return split(x, size, b.Int());
  });
  one("split sizes", [](const DTensor& x, Bytes& b) -> Values {
    DimList sizes = SomeDims(b);
    return split(x, std::move(sizes), b.Int());
  });
  one("to", [](const DTensor& x, Bytes& b) -> Values { return {to(x, SomeType(b))}; });
  one("cat itself", [](const DTensor& x, Bytes& b) -> Values { return {cat({x, x}, b.Int())}; });
  const auto two = [all](const char* name, std::function<Values(In, Bytes&)> run) {
    all->push_back({name, Shapes::kAlike, {'x', 'x'}, std::move(run)});
  };
  two("cat", [](In in, Bytes& b) -> Values { return {cat(in, b.Int())}; });
  two("stack", [](In in, Bytes& b) -> Values { return {stack(in, b.Int())}; });
  two("sum_to", [](In in, Bytes&) -> Values { return {sum_to(in[0], in[1].shape())}; });
}

void AddReductions(std::vector<FuzzCall>* all) {
  const auto one = [all](const char* name, std::function<Values(const DTensor&, Bytes&)> run) {
    all->push_back({name, Shapes::kAlike, {'x'}, [run = std::move(run)](In in, Bytes& b) {
                      return run(in[0], b);
                    }});
  };
  one("sum", [](const DTensor& x, Bytes& b) -> Values {
    DimList dims = SomeDims(b);
    return {sum(x, std::move(dims), b.Chance(128))};
  });
  one("sum to type",
      [](const DTensor& x, Bytes& b) -> Values { return {sum(x, {}, false, SomeType(b))}; });
  one("mean", [](const DTensor& x, Bytes& b) -> Values {
    DimList dims = SomeDims(b);
    return {mean(x, std::move(dims), b.Chance(128))};
  });
  one("amax", [](const DTensor& x, Bytes& b) -> Values {
    DimList dims = SomeDims(b);
    return {amax(x, std::move(dims), b.Chance(128))};
  });
  one("softmax", [](const DTensor& x, Bytes& b) -> Values { return {softmax(x, b.Int())}; });
  one("log_softmax",
      [](const DTensor& x, Bytes& b) -> Values { return {log_softmax(x, b.Int())}; });
  all->push_back({"layer_norm", Shapes::kNorm, {'f', '?', '?'}, [](In in, Bytes& b) -> Values {
                    const int64_t dims = b.Chance(200) ? 1 : b.Below(4);
                    const Shape& s = in[0].shape();
                    const size_t n = std::min<size_t>(static_cast<size_t>(dims), s.size());
                    return {layer_norm(in[0], IntSpan(s).last(n), in[1], in[2], b.Float())};
                  }});
  all->push_back({"rms_norm", Shapes::kNorm, {'f', '?'}, [](In in, Bytes& b) -> Values {
                    const size_t n = std::min<size_t>(1, in[0].shape().size());
                    return {rms_norm(in[0], IntSpan(in[0].shape()).last(n), in[1],
                                     b.Chance(128) ? -1 : b.Float())};
                  }});
}

void AddProducts(std::vector<FuzzCall>* all) {
  const auto add_call = [all](const char* name, Shapes shapes, std::vector<char> inputs,
                              std::function<Values(In, Bytes&)> run) {
    all->push_back({name, shapes, std::move(inputs), std::move(run)});
  };
  add_call("matmul", Shapes::kMatmul, {'x', 'x'},
           [](In in, Bytes&) -> Values { return {matmul(in[0], in[1])}; });
  add_call("bmm", Shapes::kMatmul, {'x', 'x'},
           [](In in, Bytes&) -> Values { return {bmm(in[0], in[1])}; });
  add_call("linear", Shapes::kLinear, {'f', 'f', '?'},
           [](In in, Bytes&) -> Values { return {linear(in[0], in[1], in[2])}; });
  add_call("embedding", Shapes::kTable, {'f', 'i'},
           [](In in, Bytes& b) -> Values { return {embedding(in[1], in[0], b.Between(-1, 4))}; });
  const auto loss = [](bool cross) {
    return [cross](In in, Bytes& b) -> Values {
      const int64_t ignore = b.Chance(128) ? -100 : b.Between(0, 3);
      const Reduction reduction = SomeReduction(b);
      if (!cross) return {nll_loss(in[0], in[1], in[2], ignore, reduction)};
      const double smoothing = b.Chance(128) ? 0 : b.Float();
      return {cross_entropy(in[0], in[1], in[2], ignore, reduction, smoothing)};
    };
  };
  add_call("nll_loss", Shapes::kRows, {'f', 'i', '?'}, loss(false));
  add_call("cross_entropy", Shapes::kRows, {'f', 'i', '?'}, loss(true));
  add_call("attention", Shapes::kHeads, {'f', 'f', 'f'}, [](In in, Bytes& b) -> Values {
    const bool causal = b.Chance(128), gqa = b.Chance(128);
    std::optional<double> scale;
    if (b.Chance(64)) scale = b.Float();
    return {scaled_dot_product_attention(in[0], in[1], in[2], {}, causal, scale, gqa)};
  });
  add_call("attention with mask", Shapes::kHeads, {'f', 'f', 'f', 'b'},
           [](In in, Bytes&) -> Values {
             return {scaled_dot_product_attention(in[0], in[1], in[2], in[3])};
           });
}

void AddRandom(std::vector<FuzzCall>* all) {
  const auto one = [all](const char* name, std::function<Values(const DTensor&, Bytes&)> run) {
    all->push_back({name,
                    Shapes::kAlike,
                    {'x'},
                    [run = std::move(run)](In in, Bytes& b) { return run(in[0], b); },
                    true});
  };
  one("dropout", [](const DTensor& x, Bytes& b) -> Values { return {dropout(x, b.Float())}; });
  one("feature_dropout",
      [](const DTensor& x, Bytes& b) -> Values { return {feature_dropout(x, b.Float())}; });
  one("alpha_dropout",
      [](const DTensor& x, Bytes& b) -> Values { return {alpha_dropout(x, b.Float())}; });
  one("rand_like", [](const DTensor& x, Bytes&) -> Values { return {rand_like(x)}; });
  one("randn_like", [](const DTensor& x, Bytes&) -> Values { return {randn_like(x)}; });
  one("randint_like", [](const DTensor& x, Bytes& b) -> Values {
    const int64_t low = b.Int();
    return {randint_like(x, low, b.Int())};
  });
  one("bernoulli", [](const DTensor& x, Bytes&) -> Values { return {bernoulli(x)}; });
  one("multinomial", [](const DTensor& x, Bytes& b) -> Values {
    const int64_t samples = b.Int();
    return {multinomial(x, samples, b.Chance(128))};
  });
}

// Registered ops through Dispatch: dtypes and shapes that their functions would refuse or convert.
void AddRegistered(std::vector<FuzzCall>* all) {
  RegisterOps();
  const std::set<std::string> of_dims = {"axes",  "dim",  "dims", "shape",    "a",          "b",
                                         "index", "size", "step", "num_rows", "num_classes"};
  for (const OpDef* op : OpRegistry::All()) {
    const auto& names = op->attr_names();
    if (std::any_of(names.begin(), names.end(),
                    [&](const std::string& n) { return of_dims.count(n) > 0; })) {
      continue;
    }
    const std::vector<char> inputs(op->variadic() ? 2 : op->input_names().size(), 'x');
    all->push_back({"op " + op->name(), Shapes::kAlike, inputs, [op](In in, Bytes& b) -> Values {
                      std::vector<const DTensor*> pointers;
                      for (const DTensor& t : in) pointers.push_back(&t);
                      Attrs attrs;
                      for (const std::string& name : op->attr_names()) {
                        attrs.push_back(name == "dtype"          ? DTypeAttr(SomeType(b))
                                        : name == "ignore_index" ? IntAttr(b.Int())
                                                                 : FloatAttr(b.Float()));
                      }
                      return Call(*op, pointers, attrs);
                    }});
  }
}

}  // namespace

const std::vector<FuzzCall>& FuzzCalls() {
  static const std::vector<FuzzCall>* calls = [] {
    auto* all = new std::vector<FuzzCall>;
    AddPointwise(all);
    AddViews(all);
    AddReductions(all);
    AddProducts(all);
    AddRandom(all);
    AddRegistered(all);
    return all;
  }();
  return *calls;
}

}  // namespace dtensor::testing
