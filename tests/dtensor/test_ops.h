// A few ops registered by the tests themselves, as a user would: the engine is tested without ops/.
#pragma once

#include <cmath>
#include <functional>
#include <mutex>
#include <vector>

#include "dtensor/autograd.h"
#include "dtensor/dispatch.h"
#include "dtensor/distribute.h"
#include "dtensor/distributed_tensor.h"
#include "dtensor/op.h"
#include "tests/common/message.h"

namespace dtensor::testing {

inline double At(const TensorRef& t, const std::vector<int64_t>& index) {
  int64_t offset = 0;
  for (int d = 0; d < t.ndim; ++d) offset += index[d] * t.strides[d];
  return static_cast<double*>(t.data)[offset];
}
inline double& RefAt(const TensorRef& t, const std::vector<int64_t>& index) {
  int64_t offset = 0;
  for (int d = 0; d < t.ndim; ++d) offset += index[d] * t.strides[d];
  return static_cast<double*>(t.data)[offset];
}
// Calls fn for every index of the array.
inline void ForEach(const TensorRef& t,
                    const std::function<void(const std::vector<int64_t>&)>& fn) {
  int64_t numel = 1;
  for (int d = 0; d < t.ndim; ++d) numel *= t.sizes[d];
  std::vector<int64_t> index(t.ndim, 0);
  for (int64_t k = 0; k < numel; ++k) {
    fn(index);
    for (int d = t.ndim - 1; d >= 0 && ++index[d] == t.sizes[d]; --d) index[d] = 0;
  }
}

inline void AddKernel(const KernelCall& c) {
  ForEach(c.out[0], [&](const auto& i) { RefAt(c.out[0], i) = At(c.in[0], i) + At(c.in[1], i); });
}
inline void MulKernel(const KernelCall& c) {
  ForEach(c.out[0], [&](const auto& i) { RefAt(c.out[0], i) = At(c.in[0], i) * At(c.in[1], i); });
}
inline void ReluKernel(const KernelCall& c) {
  ForEach(c.out[0], [&](const auto& i) { RefAt(c.out[0], i) = std::max(0.0, At(c.in[0], i)); });
}
inline void StepKernel(const KernelCall& c) {  // dy where y > 0
  ForEach(c.out[0],
          [&](const auto& i) { RefAt(c.out[0], i) = At(c.in[1], i) > 0 ? At(c.in[0], i) : 0; });
}
inline void ScaleKernel(const KernelCall& c) {
  ForEach(c.out[0], [&](const auto& i) { RefAt(c.out[0], i) = At(c.in[0], i) * c.attrs[0].d; });
}
inline void MatmulKernel(const KernelCall& c) {
  ForEach(c.out[0], [&](const auto& i) {
    double sum = 0;
    for (int64_t k = 0; k < c.in[0].sizes[1]; ++k) {
      sum += At(c.in[0], {i[0], k}) * At(c.in[1], {k, i[1]});
    }
    RefAt(c.out[0], i) = sum;
  });
}
inline void SumKernel(const KernelCall& c) {  // all elements
  double sum = 0;
  ForEach(c.in[0], [&](const auto& i) { sum += At(c.in[0], i); });
  *static_cast<double*>(c.out[0].data) = sum;
}
inline void FillLikeKernel(const KernelCall& c) {  // a scalar into every element
  ForEach(c.out[0], [&](const auto& i) { RefAt(c.out[0], i) = At(c.in[0], {}); });
}
inline void FailKernel(const KernelCall& c) { c.workspace->Fail("no luck today"); }
inline void AddInPlaceKernel(const KernelCall& c) {
  ForEach(c.out[0], [&](const auto& i) { RefAt(c.out[0], i) += At(c.in[1], i); });
}

inline DTensor Apply(const char* name, std::vector<DTensor> inputs, Attrs attrs = {}) {
  std::vector<const DTensor*> pointers;
  for (const DTensor& t : inputs) pointers.push_back(&t);
  return Call1(*ValueOrThrow(OpRegistry::Find(name)), pointers, attrs);
}
inline DTensor Matmul(const DTensor& x, const DTensor& w) { return Apply("t_matmul", {x, w}); }
inline DTensor Transposed(const DTensor& x) { return Apply("t_transpose", {x}); }

inline absl::StatusOr<Tensor> TransposeView(const Tensor& in, const Shape&, absl::Span<const Attr>,
                                            absl::Span<const FactorRange>) {
  return in.Transpose(0, 1);
}

inline void RegisterTestKernels() {
  const auto add = [](const char* name, KernelFn fn) {
    RegisterKernel(name, DeviceType::kCpu, {fn, DTypeBit(DType::kF64), KernelLayout::kStrided});
  };
  add("t_add", AddKernel);
  add("t_mul", MulKernel);
  add("t_relu", ReluKernel);
  add("t_relu_backward", StepKernel);
  add("t_scale", ScaleKernel);
  add("t_matmul", MatmulKernel);
  add("t_sum", SumKernel);
  add("t_spread", FillLikeKernel);
  add("t_fail", FailKernel);
  add("t_add_", AddInPlaceKernel);
  add("t_undeclared", ReluKernel);
  add("t_rows", ReluKernel);
}

// Declares the ops once per process.
inline void RegisterTestOps() {
  static std::once_flag once;
  std::call_once(once, [] {
    RegisterTestKernels();
    Op("t_add(x, y)")
        .Factors("..., ... -> ...")
        .Linear("x + y")
        .Monotone("{x, y}")
        .Pointwise()
        .Vjp([](VjpCall& c) {
          c.set(0, c.grad());
          c.set(1, c.grad());
        });
    Op("t_mul(x, y)")
        .Factors("..., ... -> ...")
        .Linear("x * y")
        .Pointwise()
        .Vjp(
            [](VjpCall& c) {
              c.set(0, Apply("t_mul", {c.grad(), c.in(1)}));
              c.set(1, Apply("t_mul", {c.grad(), c.in(0)}));
            },
            "x, y");
    Op("t_relu(x)")
        .Factors("... -> ...")
        .Monotone("x")
        .Pointwise()
        .Vjp([](VjpCall& c) { c.set(0, Apply("t_relu_backward", {c.grad(), c.out()})); }, "out");
    Op("t_relu_backward(dy, y)").Factors("..., ... -> ...").Linear("dy(y)").Pointwise();
    Op("t_scale(x; s)").Factors("... -> ...").Linear("x").Pointwise().Vjp([](VjpCall& c) {
      c.set(0, Apply("t_scale", {c.grad()}, {FloatAttr(c.Float("s"))}));
    });
    Op("t_matmul(x, w)")
        .Factors("m k, k n -> m n")
        .Linear("x * w")
        .Vjp(
            [](VjpCall& c) {
              if (c.needs(0)) c.set(0, Matmul(c.grad(), Transposed(c.in(1))));
              if (c.needs(1)) c.set(1, Matmul(Transposed(c.in(0)), c.grad()));
            },
            "x, w");
    Op("t_transpose(x)").Factors("a b -> b a").Linear("x").View(TransposeView).Vjp([](VjpCall& c) {
      c.set(0, Transposed(c.grad()));
    });
    Op("t_sum(x)")
        .Factors([](const OpCall& call) -> absl::StatusOr<FactorText> {
          std::string text;
          for (int d = 0; d < call.in(0).ndim(); ++d) text += "d" + std::to_string(d) + " ";
          return FactorText{text + "->", {}};
        })
        .Linear("x")
        .Vjp([](VjpCall& c) {
          const Shape& shape = c.in_spec(0).shape();
          c.set(0, Apply("t_spread", {c.grad()}, {IntsAttr(shape)}));
        });
    Op("t_spread(x; shape)")
        .Factors([](const OpCall& call) -> absl::StatusOr<FactorText> {
          FactorText text;
          text.text = "->";
          int d = 0;
          for (int64_t size : call.Ints("shape")) {
            text.text += " n" + std::to_string(d);
            text.sizes.push_back({"n" + std::to_string(d++), size});
          }
          return text;
        })
        .Linear("x");
    Op("t_fail(x)").Factors("... -> ...");
    Op("t_add_(x, y)")
        .Factors("..., ... -> ...")
        .Linear("x + y")
        .Pointwise()
        .InPlace()
        .Vjp([](VjpCall& c) {
          c.set(0, c.grad());
          c.set(1, c.grad());
        });
    Op("t_undeclared(x)").Shapes([](const OpCall& call) -> absl::StatusOr<std::vector<Shape>> {
      return std::vector<Shape>{call.shape(0)};
    });
    Op("t_rows(x)")
        .Shapes([](const OpCall& call) -> absl::StatusOr<std::vector<Shape>> {
          return std::vector<Shape>{call.shape(0)};
        })
        .Strategies({{{Shard(0)}, {Shard(0)}}, {{Replicate()}, {Replicate()}}});
  });
}

// Integer-valued f64 test data: exact under any order of summation.
inline Tensor Ints(IntSpan shape, int64_t seed) {
  std::vector<double> values;
  for (int64_t i = 0; i < Numel(shape); ++i) {
    values.push_back(static_cast<double>((i * 7 + seed * 13 + i * i) % 11 - 5));
  }
  return ValueOrThrow(Tensor::FromVector(values, shape));
}

}  // namespace dtensor::testing
