// One function of ops/ after the other, family by family, at a million elements of float32 on one
// thread: what bench/torch_families.py does in torch.
//
//   bench_families [name part]
//
// Prints lines "<family>.<name> 1 <us>": the least CPU time of many calls through dispatch, outputs
// and their memory included.
#include <cstdio>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "bench/best_time.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/ops/ops.h"

namespace dtensor {
namespace {

class Families {
 public:
  explicit Families(std::string only) : only_(std::move(only)) {}
  void Pointwise();
  void Reductions();
  void Norms();
  void Views();
  void SortAndScan();
  void Indexing();
  void Convolution();

 private:
  template <class Body>
  void Row(const char* name, const Body& body) {
    if (std::string(name).find(only_) == std::string::npos) return;
    std::printf("%s 1 %.3f\n", name, BestUs({[&] { body(); }}, 0.2)[0]);
    std::fflush(stdout);
  }
  const std::string only_;
  const DTensor x_ = randn({1024, 1024}), y_ = randn({1024, 1024});
  const DTensor p_ = rand({1024, 1024}) * 0.98 + 0.01;  // within (0, 1)
};

void Families::Pointwise() {
#define DT_ROW(name, expression) Row("pointwise." name, [&] { return expression; })
  DT_ROW("add", x_ + y_);
  DT_ROW("mul_scalar", x_ * 1.5);
  DT_ROW("div", x_ / p_);
  DT_ROW("pow_scalar", pow(p_, 1.7));
  DT_ROW("pow", pow(p_, y_));
  DT_ROW("maximum", maximum(x_, y_));
  DT_ROW("where", where(gt(x_, 0), x_, y_));
  DT_ROW("clamp", clamp(x_, -0.5, 0.5));
  DT_ROW("exp", exp(x_));
  DT_ROW("expm1", expm1(x_));
  DT_ROW("log", log(p_));
  DT_ROW("log1p", log1p(p_));
  DT_ROW("sqrt", sqrt(p_));
  DT_ROW("rsqrt", rsqrt(p_));
  DT_ROW("sin", sin(x_));
  DT_ROW("cos", cos(x_));
  DT_ROW("tan", tan(x_));
  DT_ROW("asin", asin(p_));
  DT_ROW("atan", atan(x_));
  DT_ROW("atan2", atan2(x_, y_));
  DT_ROW("sinh", sinh(x_));
  DT_ROW("tanh", tanh(x_));
  DT_ROW("acosh", acosh(p_ + 1));
  DT_ROW("erf", erf(x_));
  DT_ROW("erfc", erfc(x_));
  DT_ROW("erfinv", erfinv(p_));
  DT_ROW("lgamma", lgamma(p_));
  DT_ROW("digamma", digamma(p_));
  DT_ROW("logit", logit(p_));
  DT_ROW("xlogy", xlogy(x_, p_));
  DT_ROW("logaddexp", logaddexp(x_, y_));
  DT_ROW("hypot", hypot(x_, y_));
  DT_ROW("fmod", fmod(x_, p_));
  DT_ROW("remainder", remainder(x_, p_));
  DT_ROW("floor_divide", floor_divide(x_, p_));
  DT_ROW("round", round(x_));
  DT_ROW("sigmoid", sigmoid(x_));
  DT_ROW("relu", relu(x_));
  DT_ROW("gelu", gelu(x_));
  DT_ROW("gelu_tanh", gelu(x_, true));
  DT_ROW("silu", silu(x_));
  DT_ROW("softplus", softplus(x_));
  DT_ROW("mish", mish(x_));
  DT_ROW("elu", elu(x_));
  DT_ROW("hardswish", hardswish(x_));
  DT_ROW("logsigmoid", logsigmoid(x_));
  DT_ROW("nan_to_num", nan_to_num(x_));
  DT_ROW("isfinite", isfinite(x_));
  DT_ROW("lt", lt(x_, y_));
  DT_ROW("lerp", lerp(x_, y_, 0.3));
  DT_ROW("addcmul", addcmul(x_, y_, p_));
  DT_ROW("broadcast", x_ + select(y_, 0, 0));
  DT_ROW("transposed", x_ + t(y_));
#undef DT_ROW
}

void Families::Reductions() {
#define DT_ROW(name, expression) Row("reduction." name, [&] { return expression; })
  DT_ROW("sum_all", sum(x_));
  DT_ROW("sum_rows", sum(x_, {1}));
  DT_ROW("sum_columns", sum(x_, {0}));
  DT_ROW("mean_rows", mean(x_, {1}));
  DT_ROW("prod_rows", prod(x_, {1}));
  DT_ROW("amax_rows", amax(x_, {1}));
  DT_ROW("amax_columns", amax(x_, {0}));
  DT_ROW("argmax_rows", argmax(x_, 1));
  DT_ROW("max_rows", max(x_, 1));
  DT_ROW("var_rows", var(x_, {1}));
  DT_ROW("std_all", std(x_));
  DT_ROW("norm_all", norm(x_));
  DT_ROW("logsumexp_rows", logsumexp(x_, {1}));
  DT_ROW("any_rows", any(gt(x_, 3), {1}));
  DT_ROW("count_nonzero", count_nonzero(x_));
#undef DT_ROW
}

void Families::Norms() {
  const DTensor w = rand({1024}), b = rand({1024}), classes = randint(0, 1024, {1024});
#define DT_ROW(name, expression) Row("norm." name, [&] { return expression; })
  DT_ROW("softmax", softmax(x_, 1));
  DT_ROW("softmax_columns", softmax(x_, 0));
  DT_ROW("log_softmax", log_softmax(x_, 1));
  DT_ROW("layer_norm", layer_norm(x_, {1024}, w, b));
  DT_ROW("rms_norm", rms_norm(x_, {1024}, w));
  DT_ROW("group_norm", group_norm(reshape(x_, {16, 64, 1024}), 8));
  DT_ROW("cross_entropy", cross_entropy(x_, classes));
#undef DT_ROW
}

void Families::Views() {
  const std::vector<DTensor> both = {x_, y_};
#define DT_ROW(name, expression) Row("copy." name, [&] { return expression; })
  DT_ROW("clone", clone(x_));
  DT_ROW("transpose", contiguous(t(x_)));
  DT_ROW("permute", contiguous(permute(reshape(x_, {64, 128, 128}), {2, 0, 1})));
  DT_ROW("cat_rows", cat(both, 0));
  DT_ROW("cat_columns", cat(both, 1));
  DT_ROW("to_bf16", to(x_, DType::kBF16));
  DT_ROW("to_int", to(x_, DType::kI64));
  DT_ROW("flip", flip(x_, {1}));
  DT_ROW("roll", roll(x_, {5}, {1}));
  DT_ROW("tril", tril(x_));
#undef DT_ROW
}

void Families::SortAndScan() {
#define DT_ROW(name, expression) Row("sort." name, [&] { return expression; })
  DT_ROW("sort", sort(x_, 1));
  DT_ROW("argsort_stable", argsort(x_, 1, false, true));
  DT_ROW("topk", topk(x_, 32, 1));
  DT_ROW("kthvalue", kthvalue(x_, 100, 1));
  DT_ROW("median", median(x_, 1));
  DT_ROW("cumsum", cumsum(x_, 1));
  DT_ROW("cumsum_columns", cumsum(x_, 0));
  DT_ROW("cumprod", cumprod(x_, 1));
  DT_ROW("cummax", cummax(x_, 1));
  DT_ROW("logcumsumexp", logcumsumexp(x_, 1));
  DT_ROW("searchsorted", searchsorted(sort(select(x_, 0, 0))[0], y_));
#undef DT_ROW
}

void Families::Indexing() {
  const DTensor at = randint(0, 1024, {1024, 1024}), row = randint(0, 1024, {1024});
  const DTensor mask = gt(x_, 0);
#define DT_ROW(name, expression) Row("index." name, [&] { return expression; })
  DT_ROW("gather_columns", gather(x_, 1, at));
  DT_ROW("gather_rows", gather(x_, 0, at));
  DT_ROW("index_select", index_select(x_, 0, row));
  DT_ROW("embedding", embedding(row, x_));
  DT_ROW("scatter", scatter(x_, 1, at, y_));
  DT_ROW("scatter_add", scatter_add(x_, 1, at, y_));
  DT_ROW("index_add", index_add(x_, 0, row, y_));
  DT_ROW("masked_fill", masked_fill(x_, mask, 0));
  DT_ROW("masked_select", masked_select(x_, mask));
  DT_ROW("nonzero", nonzero(mask));
#undef DT_ROW
}

void Families::Convolution() {
  const DTensor image = randn({8, 32, 64, 64}), w = randn({32, 32, 3, 3}),
                v = randn({64, 32, 1, 1});
#define DT_ROW(name, expression) Row("conv." name, [&] { return expression; })
  DT_ROW("conv2d_3x3", conv2d(image, w, {}, {1}, 1));
  DT_ROW("conv2d_1x1", conv2d(image, v));
  DT_ROW("conv2d_stride", conv2d(image, w, {}, {2}, 1));
  DT_ROW("conv_transpose2d", conv_transpose2d(image, w, {}, {2}));
  DT_ROW("max_pool2d", max_pool2d(image, {2}));
  DT_ROW("avg_pool2d", avg_pool2d(image, {2}));
  DT_ROW("bilinear", interpolate(image, {}, {2.0}, "bilinear"));
#undef DT_ROW
}

int Main(int argc, char** argv) {
  const absl::Status status = RunSpmd(1, [&](RankContext&) {
    ManualSeed(1);
    Families families(argc > 1 ? argv[1] : "");
    families.Pointwise();
    families.Reductions();
    families.Norms();
    families.Views();
    families.SortAndScan();
    families.Indexing();
    families.Convolution();
    return absl::OkStatus();
  });
  if (!status.ok()) std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
  return status.ok() ? 0 : 1;
}

}  // namespace
}  // namespace dtensor

int main(int argc, char** argv) { return dtensor::Main(argc, argv); }
