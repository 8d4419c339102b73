// NVIDIA's own cuRAND device header, compiled for the host, as oracle.
#include <gtest/gtest.h>

#include <cstdio>
#include <random>

#include "rng/philox.h"

#if __has_include(<curand_kernel.h>)
#define DT_HAVE_CURAND 1
#define QUALIFIERS static __inline__ __host__ __device__
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
#else
TEST(CurandOracleTest, WordsUniformsAndNormals) {
  GTEST_SKIP() << "curand_kernel.h not found: the CUDA toolkit is not installed here";
}
#endif

}  // namespace
}  // namespace dtensor
