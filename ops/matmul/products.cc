// Sums of a tensor and a product, and products that are said in labels of their dims.
#include <algorithm>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "dtensor/ops/matmul/labels.h"
#include "dtensor/ops/ops.h"
#include "dtensor/ops/pointwise/front.h"
#include "dtensor/ops/rules.h"

namespace dtensor {
namespace {

void RequireDims(absl::string_view op, absl::string_view name, const DTensor& x, int ndim) {
  if (x.ndim() == ndim) return;
  ThrowInvalid(op, absl::StrCat(name, " must have ", ndim, ndim == 1 ? " dim" : " dims",
                                ", has shape ", ToString(x.shape())));
}

void RequireSameType(absl::string_view op, const DTensor& x, const DTensor& y) {
  if (x.dtype() == y.dtype()) return;
  ThrowInvalid(op, absl::StrCat("tensors have different dtypes, ", TypeName(x.dtype()), " and ",
                                TypeName(y.dtype()), "; convert them with to()"));
}

// In which a dot product is formed, so that it is rounded once, on a mesh too.
DType DotType(DType t) { return t == DType::kF32 ? DType::kF64 : ComputeType(t); }

void RequireFits(absl::string_view op, const DTensor& self, const DTensor& product) {
  const absl::StatusOr<Shape> shape = BroadcastShapes(self.shape(), product.shape());
  if (shape.ok() && *shape == product.shape()) return;
  ThrowInvalid(op, absl::StrCat("self ", ToString(self.shape()), " does not broadcast to ",
                                ToString(product.shape()), ", the shape of the product"));
}

// beta * self + alpha * product. Of integers whole numbers, as torch takes them; self counts
// nothing, NaN included, for beta = 0.
DTensor Blend(absl::string_view op, const DTensor& self, const DTensor& product, Scalar beta,
              Scalar alpha) {
  RequireSameType(op, self, product);
  RequireFits(op, self, product);
  if (!IsFloating(product.dtype())) {
    const bool is_bool = product.dtype() == DType::kBool;
    beta = is_bool ? Scalar(beta.i != 0) : Scalar(beta.i);
    alpha = is_bool ? Scalar(alpha.i != 0) : Scalar(alpha.i);
  }
  const DTensor scaled = alpha.d == 1 ? product : mul(product, alpha);
  if (beta.d != 0) return add(scaled, self, beta);
  RequireOwn(op, {{"self", self}});  // no op looks at it
  return scaled;
}

// 0, 1, ... from `first` on.
Labels Counted(int first, int n) {
  Labels labels;
  for (int i = 0; i < n; ++i) labels.push_back(first + i);
  return labels;
}
constexpr int kOther = 1000;  // labels of a second tensor's own dims

}  // namespace

DTensor mm(const DTensor& self, const DTensor& mat2) {
  return AsOp("mm", {{"self", self}, {"mat2", mat2}}, [&] {
    RequireDims("mm", "self", self, 2);
    RequireDims("mm", "mat2", mat2, 2);
    return matmul(self, mat2);
  });
}

DTensor mv(const DTensor& self, const DTensor& vec) {
  return AsOp("mv", {{"self", self}, {"vec", vec}}, [&] {
    RequireDims("mv", "self", self, 2);
    RequireDims("mv", "vec", vec, 1);
    return matmul(self, vec);
  });
}

DTensor dot(const DTensor& self, const DTensor& tensor) {
  return AsOp("dot", {{"self", self}, {"tensor", tensor}}, [&] {
    RequireDims("dot", "self", self, 1);
    RequireDims("dot", "tensor", tensor, 1);
    RequireSameType("dot", self, tensor);
    const DType wide = DotType(self.dtype());
    return to(matmul(to(self, wide), to(tensor, wide)), self.dtype());
  });
}

DTensor outer(const DTensor& self, const DTensor& vec2) {
  return AsOp("outer", {{"self", self}, {"vec2", vec2}}, [&] {
    RequireDims("outer", "self", self, 1);
    RequireDims("outer", "vec2", vec2, 1);
    return mul(unsqueeze(self, 1), vec2);
  });
}

DTensor addmm(const DTensor& self, const DTensor& mat1, const DTensor& mat2, Scalar beta,
              Scalar alpha) {
  return AsOp("addmm", {{"self", self}, {"mat1", mat1}, {"mat2", mat2}},
              [&] { return Blend("addmm", self, mm(mat1, mat2), beta, alpha); });
}

DTensor addmv(const DTensor& self, const DTensor& mat, const DTensor& vec, Scalar beta,
              Scalar alpha) {
  return AsOp("addmv", {{"self", self}, {"mat", mat}, {"vec", vec}},
              [&] { return Blend("addmv", self, mv(mat, vec), beta, alpha); });
}

DTensor baddbmm(const DTensor& self, const DTensor& batch1, const DTensor& batch2, Scalar beta,
                Scalar alpha) {
  return AsOp("baddbmm", {{"self", self}, {"batch1", batch1}, {"batch2", batch2}},
              [&] { return Blend("baddbmm", self, bmm(batch1, batch2), beta, alpha); });
}

DTensor addbmm(const DTensor& self, const DTensor& batch1, const DTensor& batch2, Scalar beta,
               Scalar alpha) {
  return AsOp("addbmm", {{"self", self}, {"batch1", batch1}, {"batch2", batch2}}, [&] {
    RequireDims("addbmm", "batch1", batch1, 3);
    RequireDims("addbmm", "batch2", batch2, 3);
    if (batch1.size(0) != batch2.size(0) || batch1.size(2) != batch2.size(1)) {
      ThrowInvalid("addbmm", absl::StrCat("matrices do not fit: batch1 ", ToString(batch1.shape()),
                                          ", batch2 ", ToString(batch2.shape())));
    }
    const DTensor product = einsum("bik,bkj->ij", {batch1, batch2});
    return Blend("addbmm", self, product, beta, alpha);
  });
}

DTensor addr(const DTensor& self, const DTensor& vec1, const DTensor& vec2, Scalar beta,
             Scalar alpha) {
  return AsOp("addr", {{"self", self}, {"vec1", vec1}, {"vec2", vec2}}, [&] {
    // Of floats in the type of all three: rounded to a narrower one first it would be another.
    const DType type = pointwise::AllTypes("addr", {&self, &vec1, &vec2});
    const bool wide = IsFloating(type);
    const DTensor product = wide ? outer(to(vec1, type), to(vec2, type)) : outer(vec1, vec2);
    RequireFits("addr", self, product);
    const bool whole = !IsFloating(product.dtype()) && !IsFloating(self.dtype());
    if (whole && (alpha.is_float || beta.is_float)) {
      ThrowInvalid("addr", "of integers alpha and beta must be whole numbers");
    }
    if (product.dtype() == DType::kBool && self.dtype() == DType::kBool) {
      const DTensor counted = alpha.d == 0 ? zeros_like(product) : product;
      return logical_or(counted, beta.d == 0 ? zeros_like(self) : self);
    }
    const DTensor scaled = alpha.d == 1 ? product : mul(product, alpha);
    return add(scaled, beta.d == 0 ? zeros_like(self) : self, beta);
  });
}

#define DT_ADDS_INTO(name, a, b)                                                              \
  DTensor name##_(const DTensor& self, const DTensor& a, const DTensor& b, Scalar beta,       \
                  Scalar alpha) {                                                             \
    return internal::WriteInto(#name "_", self, /*keep=*/false,                               \
                               [&](const DTensor& x) { return name(x, a, b, beta, alpha); }); \
  }
DT_ADDS_INTO(addmm, mat1, mat2)
DT_ADDS_INTO(addmv, mat, vec)
DT_ADDS_INTO(baddbmm, batch1, batch2)
DT_ADDS_INTO(addbmm, batch1, batch2)
DT_ADDS_INTO(addr, vec1, vec2)
#undef DT_ADDS_INTO

DTensor inner(const DTensor& self, const DTensor& other) {
  return AsOp("inner", {{"self", self}, {"other", other}}, [&] {
    if (self.ndim() == 0 || other.ndim() == 0) return mul(self, other);
    RequireSameType("inner", self, other);
    if (self.ndim() == 1 && other.ndim() == 1 && self.size(0) == other.size(0)) {
      return dot(self, other);
    }
    if (self.size(-1) != other.size(-1)) {
      ThrowInvalid("inner", absl::StrCat("last dims differ: self ", ToString(self.shape()),
                                         ", other ", ToString(other.shape())));
    }
    return tensordot(self, other, DimList{-1}, DimList{-1});
  });
}

DTensor tensordot(const DTensor& a, const DTensor& b, DimList dims_a, DimList dims_b) {
  return AsOp("tensordot", {{"a", a}, {"b", b}}, [&] {
    if (dims_a.size() != dims_b.size()) {
      ThrowInvalid("tensordot", absl::StrCat("as many dims of a as of b, got ", dims_a.size(),
                                             " and ", dims_b.size()));
    }
    const int na = a.ndim();
    Labels of_a = Counted(0, na), of_b = Counted(kOther, b.ndim()), output;
    for (size_t i = 0; i < dims_a.size(); ++i) {
      const int at = CheckedDim("tensordot", dims_b[i], b.ndim());
      const int label = CheckedDim("tensordot", dims_a[i], na);
      const bool twice = of_b[at] < kOther || std::count(of_b.begin(), of_b.end(), label) > 0;
      if (twice) ThrowInvalid("tensordot", "a dim is named twice");
      of_b[at] = label;
    }
    for (const Labels* of : {&of_a, &of_b}) {
      const Labels& others = of == &of_a ? of_b : of_a;
      std::copy_if(of->begin(), of->end(), std::back_inserter(output), [&](int label) {
        return std::find(others.begin(), others.end(), label) == others.end();
      });
    }
    // Integers keep their dtype, also where a dim of one of them alone is summed.
    return to(ContractLabels("tensordot", {{a, of_a}, {b, of_b}}, output), a.dtype());
  });
}

DTensor tensordot(const DTensor& a, const DTensor& b, int64_t dims) {
  return AsOp("tensordot", {{"a", a}, {"b", b}}, [&] {
    if (dims < 0 || dims > std::min(a.ndim(), b.ndim())) {
      ThrowInvalid("tensordot", absl::StrCat("dims = ", dims, " is no number of dims of a ",
                                             ToString(a.shape()), " and b ", ToString(b.shape())));
    }
    DimList dims_a, dims_b;
    for (int64_t d = 0; d < dims; ++d) {
      dims_a.push_back(a.ndim() - dims + d);
      dims_b.push_back(d);
    }
    return tensordot(a, b, dims_a, dims_b);
  });
}

DTensor kron(const DTensor& self, const DTensor& other) {
  return AsOp("kron", {{"self", self}, {"other", other}}, [&] {
    const int n = std::max(self.ndim(), other.ndim());
    Shape x, y, out;
    for (int d = 0; d < n; ++d) {
      const int a = d - (n - self.ndim()), b = d - (n - other.ndim());
      const int64_t of_self = a < 0 ? 1 : self.size(a), of_other = b < 0 ? 1 : other.size(b);
      x.insert(x.end(), {of_self, 1});
      y.insert(y.end(), {1, of_other});
      out.push_back(of_self * of_other);
    }
    return reshape(mul(reshape(self, x), reshape(other, y)), out);
  });
}

DTensor linalg_vecdot(const DTensor& x, const DTensor& y, int64_t dim) {
  return AsOp("linalg_vecdot", {{"x", x}, {"y", y}}, [&] {
    RequireFloating("linalg_vecdot", x);
    RequireSameType("linalg_vecdot", x, y);
    const int n = std::max(x.ndim(), y.ndim());
    if (n == 0) return mul(x, y);
    const int summed = CheckedDim("linalg_vecdot", dim, n);
    Labels output = Counted(0, n);
    output.erase(output.begin() + summed);
    const DType wide = DotType(x.dtype());
    const DTensor dots = ContractLabels("linalg_vecdot",
                                        {{to(x, wide), Counted(n - x.ndim(), x.ndim())},
                                         {to(y, wide), Counted(n - y.ndim(), y.ndim())}},
                                        output);
    return to(dots, x.dtype());
  });
}

DTensor bilinear(const DTensor& input1, const DTensor& input2, const DTensor& weight,
                 const DTensor& bias) {
  return AsOp(
      "bilinear",
      {{"input1", input1}, {"input2", input2}, {"weight", weight}, {"bias", bias, true}}, [&] {
        const IntSpan a = input1.shape(), b = input2.shape(), w = weight.shape();
        const bool fits = !a.empty() && a.size() == b.size() && w.size() == 3 &&
                          a.first(a.size() - 1) == b.first(b.size() - 1) && a.back() == w[1] &&
                          b.back() == w[2];
        if (!fits) {
          ThrowInvalid("bilinear",
                       absl::StrCat("needs input1 [..., i], input2 [..., j] and weight [o, i, j], "
                                    "got ",
                                    ToString(a), ", ", ToString(b), " and ", ToString(w)));
        }
        const DTensor y = einsum("...i,oij,...j->...o", {input1, weight, input2});
        return bias.defined() ? Blend("bilinear", bias, y, 1, 1) : y;
      });
}

}  // namespace dtensor
