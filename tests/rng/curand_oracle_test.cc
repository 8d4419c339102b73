// NVIDIA's own cuRAND as oracle: its device header compiled for the host, and its host generator.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <random>
#include <vector>

#include "dtensor/rng/philox.h"

#if __has_include(<curand_kernel.h>)
#define DT_HAVE_CURAND 1
#define QUALIFIERS static __inline__ __host__ __device__
#include <curand.h>
#include <curand_kernel.h>
#endif

namespace dtensor {
namespace {

#ifdef DT_HAVE_CURAND
TEST(CurandOracleTest, WordsUniformsAndNormals) {
  std::mt19937_64 random(5);
  const int cases = 20000;
  for (int i = 0; i < cases; ++i) {
    const uint64_t seed = random(), block = random() >> (2 + i % 40);
    const uint64_t thread = random() >> (i % 64);
    const PhiloxWords w = CurandBlock(MakePhiloxKeys(seed), block, thread);
    curandStatePhilox4_32_10_t state;
    const auto restart = [&] { curand_init(seed, thread, block * 4, &state); };
    restart();
    const uint4 words = curand4(&state);
    ASSERT_TRUE(words.x == w.x && words.y == w.y && words.z == w.z && words.w == w.w);
    restart();
    const float4 u = curand_uniform4(&state);
    ASSERT_EQ(u.x, UniformFloat(w.x));
    ASSERT_EQ(u.w, UniformFloat(w.w));
    restart();
    const double2 d = curand_uniform2_double(&state);
    ASSERT_EQ(d.x, UniformDouble(w.x, w.y));
    ASSERT_EQ(d.y, UniformDouble(w.z, w.w));
    // The host's libm stands in for the device's functions here.
    restart();
    const float4 n = curand_normal4(&state);
    float first, second;
    NormalPairF(w.x, w.y, &first, &second);
    ASSERT_NEAR(first, n.x, 6e-6);
    ASSERT_NEAR(second, n.y, 6e-6);
    NormalPairF(w.z, w.w, &first, &second);
    ASSERT_NEAR(first, n.z, 6e-6);
    ASSERT_NEAR(second, n.w, 6e-6);
    restart();
    const double2 m = curand_normal2_double(&state);
    double x, y;
    NormalPairD(w, &x, &y);
    ASSERT_NEAR(x, m.x, 1e-13);
    ASSERT_NEAR(y, m.y, 1e-13);
  }
  std::printf("%d cases equal to the cuRAND header\n", cases);
}

// The host generator walks 65,536 threads block by block: word i is component i mod 4 of the block
// (i / 4) / 65536 of thread (i / 4) mod 65536.
TEST(CurandOracleTest, HostGenerator) {
  void* library = nullptr;
  for (const char* name : {"libcurand.so.10", "/usr/local/cuda/lib64/libcurand.so"}) {
    if (!library) library = dlopen(name, RTLD_NOW);
  }
  if (!library) GTEST_SKIP() << "libcurand was not found: " << dlerror();
  const auto create = reinterpret_cast<decltype(&curandCreateGeneratorHost)>(
      dlsym(library, "curandCreateGeneratorHost"));
  const auto set_seed = reinterpret_cast<decltype(&curandSetPseudoRandomGeneratorSeed)>(
      dlsym(library, "curandSetPseudoRandomGeneratorSeed"));
  const auto generate =
      reinterpret_cast<decltype(&curandGenerate)>(dlsym(library, "curandGenerate"));
  const auto uniform =
      reinterpret_cast<decltype(&curandGenerateUniform)>(dlsym(library, "curandGenerateUniform"));
  const auto destroy =
      reinterpret_cast<decltype(&curandDestroyGenerator)>(dlsym(library, "curandDestroyGenerator"));
  ASSERT_TRUE(create && set_seed && generate && uniform && destroy);
  for (const uint64_t seed : {uint64_t{0}, uint64_t{42}, uint64_t{0x5EED00000007}}) {
    const size_t n = 3 * 262144;  // three blocks of every thread
    std::vector<unsigned> words(n);
    std::vector<float> uniforms(n);
    for (const bool as_words : {true, false}) {
      curandGenerator_t generator;
      ASSERT_EQ(create(&generator, CURAND_RNG_PSEUDO_PHILOX4_32_10), CURAND_STATUS_SUCCESS);
      ASSERT_EQ(set_seed(generator, seed), CURAND_STATUS_SUCCESS);
      ASSERT_EQ(
          as_words ? generate(generator, words.data(), n) : uniform(generator, uniforms.data(), n),
          CURAND_STATUS_SUCCESS);
      destroy(generator);
    }
    const PhiloxKeys keys = MakePhiloxKeys(seed);
    for (size_t i = 0; i < n; i += 4) {
      const PhiloxWords w = CurandBlock(keys, i / 4 / 65536, i / 4 % 65536);
      ASSERT_TRUE(words[i] == w.x && words[i + 1] == w.y && words[i + 2] == w.z &&
                  words[i + 3] == w.w)
          << i;
      ASSERT_EQ(uniforms[i], UniformFloat(w.x)) << i;
      ASSERT_EQ(uniforms[i + 3], UniformFloat(w.w)) << i;
    }
  }
  std::printf("3 seeds of 786432 words and uniforms equal to cuRAND's host generator\n");
}
#else
TEST(CurandOracleTest, WordsUniformsAndNormals) {
  GTEST_SKIP() << "curand_kernel.h not found: the CUDA toolkit is not installed here";
}
#endif

}  // namespace
}  // namespace dtensor
