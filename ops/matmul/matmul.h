// Products of matrices, and of tensors along any dims.
#pragma once

#include "dtensor/ops/family.h"
#include "dtensor/ops/matmul/activation.h"

namespace dtensor {

// Matrix product over the last dim of x and the second last of w (the only one of a vector).
//   Shapes:   x [..., m, k], w [k, n] -> [..., m, n]; x [..., m, k], w [..., k, n] with broadcast
//             leading dims; a vector on either side is a row or a column that the result drops.
//   Types:    the same dtype; accumulates in float32 or wider.
//   Sharding: "... k, k n -> ... n" or "b m k, b k n -> b m n", linear in x and in w. Sharding k
//             gives Partial(sum).
//   Comm:     none of its own; inputs may be redistributed first (see Explain).
//   Errors:   InvalidArgument if inner sizes, batch dims or dtypes differ. Same on every rank.
//   Source:   torch.matmul
DTensor matmul(const DTensor& x, const DTensor& w);
// A matrix product per batch element.
//   Shapes:   x [b, m, k], w [b, k, n] -> [b, m, n]
//   Types, Sharding, Comm, Errors: as matmul.
DTensor bmm(const DTensor& x, const DTensor& w);
// x w^T + b.
//   Shapes:   x [..., k], w [n, k], b [n] or [] or null -> [..., n]; w [k], b [] or null -> [...]
//   Types:    the same dtype; accumulates in float32 or wider.
//   Sharding: "... k, n k, n -> ... n", linear: "x * w + b". With k sharded b must be Partial too,
//             and becomes so without communication.
//   Comm:     none of its own.
//   Errors:   InvalidArgument if sizes or dtypes differ.
//   Source:   torch.nn.functional.linear
DTensor linear(const DTensor& x, const DTensor& w, const DTensor& b = {});
// activation(linear(x, w, b)) as one op: the product's kernel applies it where it can. For the
// gradient what the activation is taken of is kept, of relu the result alone.
//   Shapes:   those of linear.
//   Types:    floating, the same. On the CPU the bits of the two ops; on CUDA cuBLASLt does not
//             round to a narrow type in between, and its relu may take a NaN for 0.
//   Sharding: "... [k], n [k], n -> ... n": an activation wants the sum. Where k is cut, or an
//             input is a pending sum, it is the two ops, linear first.
//   Comm:     none of its own; between the two ops an all-reduce of what is pending.
//   Errors:   those of linear; InvalidArgument for integers.
//   Source:   the name is ours; torch has _addmm_activation (relu and gelu)
DTensor linear_activation(const DTensor& x, const DTensor& w, const DTensor& b,
                          Activation activation);

// matmul of two matrices, of a matrix and a vector, of two vectors.
//   Shapes:   [m, k], [k, n] -> [m, n]; [m, k], [k] -> [m]; [k], [k] -> []
//   Types, Sharding, Comm, Errors: as matmul; InvalidArgument for other numbers of dims. dot sums
//   in the next wider floating type, over ranks too: one number has to be as good as many.
DTensor mm(const DTensor& self, const DTensor& mat2);
DTensor mv(const DTensor& self, const DTensor& vec);
DTensor dot(const DTensor& self, const DTensor& tensor);
// self[i] * vec2[j]: a product of [n, 1] and [m] as mul makes it, dtypes promoted.
DTensor outer(const DTensor& self, const DTensor& vec2);

// beta * self + alpha * product, where the product is mm, mv, bmm, the sum of bmm over the batch,
// outer. For beta = 0 self is not read: NaN in it does not count.
//   Shapes:   self broadcasts to the product.
//   Types:    the same dtype (addr promotes); numbers for integers are cut to whole ones. addr of
//             bools is of bools: sums are "or", and a number counts as whether it is 0.
//   Sharding: as the product; where that is a pending sum, self becomes one without communication.
//   Errors:   those of the product; InvalidArgument for a self that does not fit.
//   Source:   torch.addmm, ...
DTensor addmm(const DTensor& self, const DTensor& mat1, const DTensor& mat2, Scalar beta = 1,
              Scalar alpha = 1);
DTensor addmv(const DTensor& self, const DTensor& mat, const DTensor& vec, Scalar beta = 1,
              Scalar alpha = 1);
DTensor baddbmm(const DTensor& self, const DTensor& batch1, const DTensor& batch2, Scalar beta = 1,
                Scalar alpha = 1);
DTensor addbmm(const DTensor& self, const DTensor& batch1, const DTensor& batch2, Scalar beta = 1,
               Scalar alpha = 1);
DTensor addr(const DTensor& self, const DTensor& vec1, const DTensor& vec2, Scalar beta = 1,
             Scalar alpha = 1);
// In place: self has the product's shape. Each returns its first argument.
DTensor addmm_(const DTensor& self, const DTensor& mat1, const DTensor& mat2, Scalar beta = 1,
               Scalar alpha = 1);
DTensor addmv_(const DTensor& self, const DTensor& mat, const DTensor& vec, Scalar beta = 1,
               Scalar alpha = 1);
DTensor baddbmm_(const DTensor& self, const DTensor& batch1, const DTensor& batch2, Scalar beta = 1,
                 Scalar alpha = 1);
DTensor addbmm_(const DTensor& self, const DTensor& batch1, const DTensor& batch2, Scalar beta = 1,
                Scalar alpha = 1);
DTensor addr_(const DTensor& self, const DTensor& vec1, const DTensor& vec2, Scalar beta = 1,
              Scalar alpha = 1);

// Einstein's summation: "bhid,bhjd->bhij". Letters that the result lacks are summed over, one that
// stands twice in a tensor is its diagonal, "..." are dims that broadcast; without "->" the result
// has the letters that stand once, in order.
//   Shapes:   a letter has one size, or 1.
//   Types:    one dtype; products accumulate as in matmul, sums in the dtype.
//   Sharding: letters are factors: any of them may be sharded where it stands, a summed one gives
//             Partial(sum), linear in every operand. A letter that stands twice is read whole.
//   Comm:     none of its own. Of three operands or more the order of the products is the one that
//             moves the fewest bytes, then takes the fewest multiplications.
//   Errors:   InvalidArgument naming what of the equation does not fit.
//   Source:   torch.einsum
DTensor einsum(absl::string_view equation, absl::Span<const DTensor> operands);
// Sums over the last `dims` dims of a and the first of b, or over pairs of dims; the result has the
// others, a's first.
//   Types, Sharding, Comm: as einsum.
//   Errors:   InvalidArgument and OutOfRange for dims; sizes are equal, or one of them is 1.
DTensor tensordot(const DTensor& a, const DTensor& b, int64_t dims = 2);
DTensor tensordot(const DTensor& a, const DTensor& b, DimList dims_a, DimList dims_b);
// Over the last dims; a tensor without dims multiplies.
DTensor inner(const DTensor& self, const DTensor& other);
// Products of all elements of self with the whole of other, in blocks. Promotes dtypes as mul.
DTensor kron(const DTensor& self, const DTensor& other);
// sum(x * y) over dim, of tensors that broadcast. Types: floating, the same.
DTensor linalg_vecdot(const DTensor& x, const DTensor& y, int64_t dim = -1);
// y[..., o] = sum over i, j of input1[..., i] * weight[o, i, j] * input2[..., j], plus bias[o].
//   Errors:   InvalidArgument if shapes or dtypes do not fit.
//   Source:   torch.nn.functional.bilinear
DTensor bilinear(const DTensor& input1, const DTensor& input2, const DTensor& weight,
                 const DTensor& bias = {});

}  // namespace dtensor
