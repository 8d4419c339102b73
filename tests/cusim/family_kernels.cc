#include "tests/cusim/family_kernels.h"

#include <cuda_runtime.h>
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <stdexcept>
#include <string_view>

#include "dtensor/ops/ops.h"
#include "dtensor/tensor/device_table.h"
#include "dtensor/tensor/tensor.h"

namespace dtensor::testing {
namespace {

// The plugin of this build.
const DeviceTable& Plugin() {
  static const DeviceTable* const table = [] {
    void* const library = dlopen(DT_CUDA_PLUGIN, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) throw std::runtime_error(dlerror());
    return reinterpret_cast<const DeviceTable* (*)()>(dlsym(library, "dtensor_cuda_table"))();
  }();
  return *table;
}

void Check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

// One of each for all calls: the stand-in keeps an account of every stream that there was.
cudaStream_t TheStream() {
  static const cudaStream_t stream = [] {
    cudaStream_t made;
    Check(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking));
    return made;
  }();
  return stream;
}
ErrorWord* TheErrorWord() {
  static ErrorWord* const word = [] {
    ErrorWord* made = nullptr;
    Check(cudaMallocHost(reinterpret_cast<void**>(&made), sizeof(ErrorWord)));
    return made;
  }();
  return word;
}

constexpr size_t kGuard = 128;  // bytes on either side of an operand's that nobody may write

// Memory of an operand on both sides, with guards.
struct Array {
  Array(const Operand& operand, uint64_t seed) : sizes(operand.sizes), dtype(operand.dtype) {
    strides = operand.strides.empty() ? ContiguousStrides(sizes)
                                      : Strides(operand.strides.begin(), operand.strides.end());
    int64_t last = 0;
    for (size_t d = 0; d < sizes.size(); ++d) last += (sizes[d] - 1) * strides[d];
    const auto elements = static_cast<size_t>(Numel(sizes) == 0 ? 0 : last + 1);
    front = kGuard + static_cast<size_t>(operand.behind * SizeOf(dtype));
    host.assign(front + elements * static_cast<size_t>(SizeOf(dtype)) + kGuard, 0x5A);
    std::mt19937_64 random(seed);
    VisitDType(dtype, [&](auto element) {
      using T = typename decltype(element)::type;
      for (size_t i = 0; i < elements; ++i) {
        const T v = Value<T>(operand, i, random);
        std::memcpy(host.data() + front + i * sizeof(T), &v, sizeof(T));
      }
    });
    Check(cudaMalloc(&device, host.size()));
    Check(cudaMemcpy(device, host.data(), host.size(), cudaMemcpyHostToDevice));
  }
  Array(const Array&) = delete;
  ~Array() { cudaFree(device); }

  template <class T>
  static T Value(const Operand& operand, size_t i, std::mt19937_64& random) {
    if constexpr (std::is_integral_v<T> || std::is_same_v<T, Bool>) {
      std::uniform_int_distribution<int64_t> whole(static_cast<int64_t>(operand.low),
                                                   static_cast<int64_t>(operand.high));
      if constexpr (std::is_same_v<T, Bool>)
        return {static_cast<uint8_t>(whole(random) & 1)};
      else
        return static_cast<T>(whole(random));
    } else {
      const double drawn =
          std::uniform_real_distribution<double>(operand.low, operand.high)(random);
      const double v = operand.values.empty() ? drawn : operand.values[i % operand.values.size()];
      if constexpr (std::is_floating_point_v<T>) {
        return static_cast<T>(v);
      } else {
        T rounded;
        RoundTo(static_cast<float>(v), &rounded);
        return rounded;
      }
    }
  }

  TensorRef OnHost() {
    return {host.data() + front, sizes.data(), strides.data(), static_cast<int>(sizes.size()),
            dtype};
  }
  TensorRef OnDevice() const {
    return {static_cast<char*>(device) + front, sizes.data(), strides.data(),
            static_cast<int>(sizes.size()), dtype};
  }
  std::vector<char> Download() const {
    std::vector<char> back(host.size());
    Check(cudaMemcpy(back.data(), device, back.size(), cudaMemcpyDeviceToHost));
    return back;
  }

  Shape sizes;
  Strides strides;
  DType dtype;
  size_t front;  // bytes in front of the first element
  std::vector<char> host;
  void* device = nullptr;
};

class HostWorkspace final : public Workspace {
 public:
  void* Allocate(int64_t bytes) override {
    blocks_.emplace_back(std::aligned_alloc(64, static_cast<size_t>((bytes + 64) / 64 * 64)),
                         &std::free);
    return blocks_.back().get();
  }
  void Fail(std::string_view message) override { error = message; }
  std::string error;

 private:
  std::vector<std::unique_ptr<void, decltype(&std::free)>> blocks_;
};
class DeviceWorkspace final : public Workspace {
 public:
  ~DeviceWorkspace() override {
    for (void* block : blocks_) cudaFree(block);
  }
  void* Allocate(int64_t bytes) override {
    void* block = nullptr;
    Check(cudaMalloc(&block, static_cast<size_t>(bytes) + 1));
    blocks_.push_back(block);
    return block;
  }
  void Fail(std::string_view message) override { error = message; }
  std::string error;

 private:
  std::vector<void*> blocks_;
};

double Epsilon(DType t) {
  return t == DType::kF64    ? std::numeric_limits<double>::epsilon()
         : t == DType::kF32  ? std::numeric_limits<float>::epsilon()
         : t == DType::kBF16 ? 1.0 / 128
         : t == DType::kF16  ? 1.0 / 1024
                             : 0;
}

std::vector<double> AsDoubles(const TensorRef& from) {
  const Shape sizes(from.sizes, from.sizes + from.ndim);
  std::vector<double> values(static_cast<size_t>(Numel(sizes)));
  const Strides strides = ContiguousStrides(sizes);
  const TensorRef to = {values.data(), sizes.data(), strides.data(), from.ndim, DType::kF64};
  if (!values.empty()) CopyRef(from, to);
  return values;
}

// `got` and the guards beside it against what the CPU wrote.
void CompareArrays(const std::vector<char>& want, const std::vector<char>& got, const Array& layout,
                   double ulps, bool each, DType computed_in, const std::string& what) {
  if (want == got) return;
  ASSERT_EQ(want.size(), got.size()) << what;
  const auto ref = [&](const std::vector<char>& memory) {
    return TensorRef{const_cast<char*>(memory.data()) + layout.front, layout.sizes.data(),
                     layout.strides.data(), static_cast<int>(layout.sizes.size()), layout.dtype};
  };
  for (size_t i = 0; i < layout.front; ++i) {
    ASSERT_EQ(want[i], got[i]) << what << ": wrote in front of its memory";
  }
  for (size_t i = 0; i < kGuard; ++i) {
    ASSERT_EQ(want[want.size() - 1 - i], got[got.size() - 1 - i]) << what << ": wrote behind it";
  }
  const std::vector<double> w = AsDoubles(ref(want)), g = AsDoubles(ref(got));
  double most = 0;
  for (const double v : w) most = std::isfinite(v) ? std::max(most, std::fabs(v)) : most;
  // What is computed in float32 has no more digits in float64.
  const bool wider = layout.dtype == DType::kF64 && computed_in == DType::kF32;
  for (size_t i = 0; i < w.size(); ++i) {
    const double of = each ? std::fabs(w[i]) : most;
    const double limit = ulps * Epsilon(wider ? computed_in : layout.dtype) * of;
    const bool same =
        w[i] == g[i] || (std::isnan(w[i]) && std::isnan(g[i])) || std::fabs(w[i] - g[i]) <= limit;
    ASSERT_TRUE(same) << what << ", element " << i << ": " << g[i] << ", not " << w[i]
                      << " (within " << limit << ")";
  }
}

std::string Describe(const KernelCase& call) {
  std::string text = call.op;
  for (const Operand& o : call.in) {
    text += " " + std::string(Name(o.dtype)) + ToString(o.sizes);
  }
  return text;
}

}  // namespace

std::string Compare(const KernelCase& call) {
  RegisterOps();
  const std::string what = Describe(call);
  Kernel kernel;
  Plugin().kernel(call.op, &kernel);
  if (kernel.fn == nullptr) {
    ADD_FAILURE() << "the device has no " << call.op;
    return "";
  }
  Kernel own;
  own.fn = call.host;
  const Kernel* const cpu = call.host != nullptr ? &own : FindHostKernel(call.op);
  std::vector<std::unique_ptr<Array>> arrays, dense;
  std::vector<TensorRef> in, out, host_in, host_out;
  uint64_t seed = 1;
  for (const Operand& operand : call.in) {
    arrays.push_back(std::make_unique<Array>(operand, seed++));
    in.push_back(arrays.back()->OnDevice());
    Operand contiguous = operand;
    contiguous.strides.clear();
    dense.push_back(std::make_unique<Array>(contiguous, 0));
    if (Numel(operand.sizes) > 0) CopyRef(arrays.back()->OnHost(), dense.back()->OnHost());
    // What is written in place is so wherever it lies.
    const bool keeps =
        cpu->layout == KernelLayout::kStrided || static_cast<int>(host_in.size()) < call.writes;
    host_in.push_back(keeps ? arrays.back()->OnHost() : dense.back()->OnHost());
  }
  for (int i = 0; i < call.writes; ++i) {
    out.push_back(in[static_cast<size_t>(i)]);
    host_out.push_back(host_in[static_cast<size_t>(i)]);
  }
  for (const Operand& operand : call.out) {
    arrays.push_back(std::make_unique<Array>(operand, seed));
    out.push_back(arrays.back()->OnDevice());
    host_out.push_back(arrays.back()->OnHost());
  }
  ErrorWord* const word = TheErrorWord();
  std::memset(word, 0, sizeof(*word));
  DeviceWorkspace device_memory;
  HostWorkspace host_memory;
  const DeviceCall device = {nullptr, call.op, static_cast<int>(call.attrs.size()), word};
  const cudaStream_t stream = TheStream();
  kernel.fn({in, out, call.attrs.data(), call.factors, stream, &device_memory, &device});
  Check(cudaStreamSynchronize(stream));
  cpu->fn({host_in, host_out, call.attrs.data(), call.factors, nullptr, &host_memory, nullptr});
  std::string error = device_memory.error;
  if (word->code != 0) error = std::string(word->op) + ": " + word->text;
  EXPECT_EQ(error.empty(), host_memory.error.empty())
      << what << ": the device says \"" << error << "\", the CPU \"" << host_memory.error << '"';
  if (error.empty()) {
    const DType computed_in = call.in.empty() ? call.out[0].dtype : call.in[0].dtype;
    for (size_t i = 0; i < arrays.size(); ++i) {
      CompareArrays(arrays[i]->host, arrays[i]->Download(), *arrays[i], call.ulps, call.each,
                    computed_in,
                    what + (i < call.in.size() ? ", operand " + std::to_string(i)
                                               : ", output " + std::to_string(i - call.in.size())));
    }
  }
  return error;
}

std::vector<std::vector<char>> OutputsOf(const KernelCase& call) {
  Kernel kernel;
  Plugin().kernel(call.op, &kernel);
  std::vector<std::unique_ptr<Array>> arrays;
  std::vector<TensorRef> in, out;
  uint64_t seed = 1;
  for (const Operand& operand : call.in) {
    arrays.push_back(std::make_unique<Array>(operand, seed++));
    in.push_back(arrays.back()->OnDevice());
  }
  for (const Operand& operand : call.out) {
    arrays.push_back(std::make_unique<Array>(operand, seed));
    out.push_back(arrays.back()->OnDevice());
  }
  DeviceWorkspace memory;
  const DeviceCall device = {nullptr, call.op, static_cast<int>(call.attrs.size()), TheErrorWord()};
  kernel.fn({in, out, call.attrs.data(), call.factors, TheStream(), &memory, &device});
  Check(cudaStreamSynchronize(TheStream()));
  std::vector<std::vector<char>> written;
  for (size_t i = call.in.size(); i < arrays.size(); ++i) {
    const std::vector<char> all = arrays[i]->Download();
    written.emplace_back(all.begin() + static_cast<std::ptrdiff_t>(arrays[i]->front),
                         all.end() - static_cast<std::ptrdiff_t>(kGuard));
  }
  return written;
}

void CompareFill(const Operand& to, double value) {
  Array array(to, 1);
  const Strides none(to.sizes.size(), 0);
  const TensorRef here = array.OnHost(), there = array.OnDevice();
  CopyRef({&value, array.sizes.data(), none.data(), here.ndim, DType::kF64}, here);
  Check(static_cast<cudaError_t>(Plugin().fill(TheStream(), &there, &value, DType::kF64)));
  Check(cudaStreamSynchronize(TheStream()));
  CompareArrays(array.host, array.Download(), array, 0, false, array.dtype,
                "fill " + std::string(Name(to.dtype)) + ToString(to.sizes));
}

}  // namespace dtensor::testing
