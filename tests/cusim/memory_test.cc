// Loads, stores, atomics, asynchronous copies, and what is said of wrong ones.
#include <gmock/gmock.h>

#include "tests/cusim/lanes.h"

namespace cusim::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string Kernel(const std::string& body) {
  return ".visible .entry k(.param .u64 a, .param .u64 b)\n{\n.reg .pred %p<9>;\n.reg .b16 %h<9>;\n"
         ".reg .b32 %r<19>;\n.reg .b64 %rd<19>;\nld.param.u64 %rd1, [a];\nld.param.u64 %rd2, [b];\n"
         "mov.u32 %r1, %tid.x;\nmov.u32 %r2, %ctaid.x;\nmul.wide.u32 %rd3, %r1, 8;\n"
         "add.s64 %rd4, %rd1, %rd3;\nadd.s64 %rd5, %rd2, %rd3;\n" +
         body + "ret;\n}\n";
}

// The only report that a launch makes: "kind: text".
std::string Only(const Outcome& out) {
  if (out.reports.empty()) return "nothing";
  return out.reports[0].kind + ": " + out.reports[0].text +
         (out.reports.size() > 1 ? " and more: " + out.reports[1].text : "");
}

class MemoryTest : public ::testing::Test {
 protected:
  MemoryTest() {
    a_ = device_.Put(std::vector<uint64_t>(64, 7));
    b_ = device_.Put(std::vector<uint64_t>(64, 0));
  }
  Outcome Run(const std::string& body, uint32_t threads = 32, uint32_t blocks = 1,
              const Options& options = {}) {
    return device_.Run(Kernel(body), {blocks}, {threads}, {a_, b_}, options);
  }
  Device device_;
  uint64_t a_, b_;
};

TEST_F(MemoryTest, VectorsOfAllWidths) {
  std::vector<uint64_t> bytes(64);
  for (size_t i = 0; i < 64; ++i) bytes[i] = 0x8070605040302010 + i * 0x0101010101010101;
  a_ = device_.Put(bytes);
  EXPECT_EQ(
      Only(Run("shl.b64 %rd6, %rd3, 1;\nadd.s64 %rd4, %rd1, %rd6;\nadd.s64 %rd5, %rd2, %rd6;\n"
               "ld.global.v4.u32 {%r3, %r4, %r5, %r6}, [%rd4];\n"
               "st.global.v2.u32 [%rd5], {%r5, %r6};\nst.global.v2.u32 [%rd5+8], {%r3, %r4};\n")),
      "nothing");
  auto got = device_.Take(b_, 64);
  for (size_t i = 0; i < 64; ++i) EXPECT_EQ(got[i], bytes[i ^ 1]);
  EXPECT_EQ(
      Only(Run("ld.global.v4.u8 {%h1, %h2, %h3, %h4}, [%rd4];\nld.global.s8 %r3, [%rd4+7];\n"
               "st.global.v4.u8 [%rd5], {%h4, %h3, %h2, %h1};\nst.global.u32 [%rd5+4], %r3;\n")),
      "nothing");
  got = device_.Take(b_, 32);
  EXPECT_EQ(got[0], 0xffffff8010203040);  // the sign goes on
}

TEST_F(MemoryTest, Atomics) {
  const auto run = [&](const std::string& op, uint64_t start, const std::string& operands) {
    b_ = device_.Put({start, 0});
    EXPECT_EQ(Only(Run("add.s32 %r3, %r1, 1;\ncvt.u64.u32 %rd6, %r3;\natom.global." + op +
                           ", [%rd2], " + operands + ";\n",
                       64, 4)),
              "nothing");
    return device_.Take(b_, 1)[0];
  };
  EXPECT_EQ(run("add.u32 %r4", 5, "%r3"), 5u + 4 * 64 * 65 / 2);
  EXPECT_EQ(run("add.u64 %rd7", ~0ull, "%rd6"), 4u * 64 * 65 / 2 - 1);
  EXPECT_EQ(run("max.s32 %r4", 0xfffffff0, "%r3"), 64u);
  EXPECT_EQ(run("max.u32 %r4", 0xfffffff0, "%r3"), 0xfffffff0u);
  EXPECT_EQ(run("min.u32 %r4", 30, "%r3"), 1u);
  EXPECT_EQ(run("or.b32 %r4", 0, "%r3"), 127u);
  EXPECT_EQ(run("and.b32 %r4", 255, "%r3"), 0u);
  EXPECT_EQ(run("xor.b32 %r4", 3, "%r3"), 3u);
  EXPECT_EQ(run("inc.u32 %r4", 0, "6"), 256u % 7);
  EXPECT_EQ(run("dec.u32 %r4", 0, "6"), (7 - 256 % 7) % 7);
  EXPECT_EQ(run("cas.b32 %r4", 0, "0, 9"), 9u);
  EXPECT_EQ(run("exch.b64 %rd7", 0, "77"), 77u);
  EXPECT_EQ(run("add.f32 %r4", Put(0.5f), "0f3F800000"), Put(256.5f));
  EXPECT_EQ(run("add.f64 %rd7", Put(0.5), "0d3FF0000000000000"), Put(256.5));
  // Sums of 16 bits stop where one is below half the last place: 256 of bf16, 2048 of f16.
  EXPECT_EQ(run("add.noftz.f16x2 %r4", 0, "0x3C003C00"), 0x5c005c00u);
  EXPECT_EQ(run("add.noftz.bf16x2 %r4", 0, "0x3F803F80"), 0x43804380u);
  EXPECT_EQ(run("cas.b16 %h1", 0, "0, 9"), 9u);
}

TEST_F(MemoryTest, SharedLocalAndGenericAddresses) {
  EXPECT_EQ(
      Only(Run(
          ".shared .align 8 .b8 s[256];\n.local .align 8 .b8 l[16];\nmov.u64 %rd6, s;\n"
          "cvta.shared.u64 %rd7, %rd6;\nadd.s64 %rd7, %rd7, %rd3;\ncvt.u64.u32 %rd8, %r1;\n"
          "st.u64 [%rd7], %rd8;\nbar.sync 0;\nsub.s32 %r3, 31, %r1;\nmul.wide.u32 %rd9, %r3, 8;\n"
          "add.s64 %rd9, %rd9, %rd6;\nld.shared.u64 %rd10, [%rd9];\nst.local.u64 [l+8], %rd10;\n"
          "mov.u64 %rd11, l;\ncvta.local.u64 %rd11, %rd11;\nld.u64 %rd12, [%rd11+8];\n"
          "st.global.u64 [%rd5], %rd12;\n")),
      "nothing");
  const auto got = device_.Take(b_, 32);
  for (size_t i = 0; i < 32; ++i) EXPECT_EQ(got[i], 31 - i);
}

TEST_F(MemoryTest, SpacesOfAddresses) {
  // Of an address in each space, whether it is there: bits of global, shared and local memory.
  const std::string ask =
      "isspacep.global %p1, %rd6;\nisspacep.shared %p2, %rd6;\nisspacep.local %p3, %rd6;\n"
      "selp.b32 %r3, 1, 0, %p1;\nselp.b32 %r4, 2, 0, %p2;\nselp.b32 %r5, 4, 0, %p3;\n"
      "or.b32 %r3, %r3, %r4;\nor.b32 %r3, %r3, %r5;\nst.global.u32 [%rd5], %r3;\n";
  const std::string places = ".shared .align 8 .b8 s[256];\n.local .align 8 .b8 l[16];\n";
  const std::pair<std::string, uint64_t> cases[] = {
      {"mov.u64 %rd6, %rd4;\n", 1},
      {"mov.u64 %rd6, s;\ncvta.shared.u64 %rd6, %rd6;\nadd.s64 %rd6, %rd6, %rd3;\n", 2},
      {"mov.u64 %rd6, l;\ncvta.local.u64 %rd6, %rd6;\nadd.s64 %rd6, %rd6, 15;\n", 4},
      // Where lanes have addresses in different spaces.
      {"mov.u64 %rd6, s;\ncvta.shared.u64 %rd6, %rd6;\nsetp.lt.u32 %p4, %r1, 7;\n"
       "@%p4 mov.u64 %rd6, %rd4;\n",
       0}};
  for (const auto& [address, bits] : cases) {
    EXPECT_EQ(Only(Run(places + address + ask)), "nothing");
    const auto got = device_.Take(b_, 32);
    for (size_t i = 0; i < 32; ++i) {
      EXPECT_EQ(got[i], bits != 0 ? bits : i < 7 ? 1u : 2u) << address << i;
    }
  }
  // There and back.
  for (const std::string space : {"shared", "local", "global"}) {
    EXPECT_EQ(Only(Run("cvta." + space + ".u64 %rd6, %rd3;\ncvta.to." + space +
                       ".u64 %rd7, %rd6;\nst.global.u64 [%rd5], %rd7;\n")),
              "nothing");
    EXPECT_EQ(device_.Take(b_, 32)[31], 8u * 31) << space;
  }
  EXPECT_THAT(Only(Run("isspacep.const %p1, %rd4;\n")), HasSubstr("unknown instruction"));
}

// What each lane reads, or a lane's own location after an atomic operation, on random operands: the
// last operand's location is that of %rd1.
template <class T, class F>
void CheckAtomic(const std::string& op, int operands, F want, bool real = false) {
  constexpr int bits = sizeof(T) * 8;
  std::vector<std::vector<uint64_t>> s;
  for (int i = 0; i <= operands; ++i) {
    s.push_back(Operands(bits, 600, 60 + static_cast<uint64_t>(i), real));
  }
  for (size_t i = 0; i < 600; i += 3) s[0][i] = s.back()[i];  // equal ones, for cas
  std::string tail = ", [%rd1], %s0";
  if (operands == 2) tail += ", %s1";
  const std::string scratch = bits == 64 ? "%rd3" : bits == 32 ? "%r5" : "%h0";
  const std::vector<int> widths(s.size(), bits);
  const auto old = RunOp({"atom.global." + op + " %d" + tail, bits, widths, ""}, s);
  const std::string load = ";\nld.global.b" + std::to_string(bits) + " %d, [%rd1]";
  const auto now = RunOp({"atom.global." + op + " " + scratch + tail + load, bits, widths, ""}, s);
  std::vector<uint64_t> red;
  if (op.find("cas") == std::string::npos && op.find("exch") == std::string::npos) {
    red = RunOp({"red.global." + op + tail.substr(1) + load, bits, widths, ""}, s);
  }
  for (size_t i = 0; i < 600; ++i) {
    const T a = Get<T>(s.back()[i]), b = Get<T>(s[0][i]);
    const T expected = want(a, b, operands == 2 ? Get<T>(s[1][i]) : b);
    const auto same = [](T x, T y) { return Put(x) == Put(y) || (x != x && y != y); };
    ASSERT_EQ(old[i], Put(a)) << op;
    ASSERT_TRUE(same(Get<T>(now[i]), expected)) << op << std::hex << Put(a) << " " << Put(b);
    if (!red.empty()) {
      ASSERT_EQ(red[i], now[i]) << op;
    }
  }
}

template <class T>
void CheckIntegerAtomics(const std::string& u, const std::string& s, const std::string& b) {
  using S = std::make_signed_t<T>;
  CheckAtomic<T>("add." + u, 1, [](T x, T y, T) { return T(x + y); });
  CheckAtomic<T>("min." + u, 1, [](T x, T y, T) { return std::min(x, y); });
  CheckAtomic<T>("max." + u, 1, [](T x, T y, T) { return std::max(x, y); });
  CheckAtomic<S>("min." + s, 1, [](S x, S y, S) { return std::min(x, y); });
  CheckAtomic<S>("max." + s, 1, [](S x, S y, S) { return std::max(x, y); });
  CheckAtomic<T>("and." + b, 1, [](T x, T y, T) { return T(x & y); });
  CheckAtomic<T>("or." + b, 1, [](T x, T y, T) { return T(x | y); });
  CheckAtomic<T>("xor." + b, 1, [](T x, T y, T) { return T(x ^ y); });
  CheckAtomic<T>("exch." + b, 1, [](T, T y, T) { return y; });
  CheckAtomic<T>("cas." + b, 2, [](T x, T y, T z) { return x == y ? z : x; });
}

TEST(AtomicTest, OnRandomOperands) {
  CheckIntegerAtomics<uint32_t>("u32", "s32", "b32");
  CheckIntegerAtomics<uint64_t>("u64", "s64", "b64");
  using T = uint32_t;
  CheckAtomic<T>("inc.u32", 1, [](T x, T y, T) { return x >= y ? 0 : x + 1; });
  CheckAtomic<T>("dec.u32", 1, [](T x, T y, T) { return x == 0 || x > y ? y : x - 1; });
  CheckAtomic<uint16_t>("cas.b16", 2,
                        [](uint16_t x, uint16_t y, uint16_t z) { return x == y ? z : x; });
  CheckAtomic<float>("add.f32", 1, [](float x, float y, float) { return x + y; }, true);
  CheckAtomic<double>("add.f64", 1, [](double x, double y, double) { return x + y; }, true);
  // Of 16 bits; a sum is rounded once, and of all NaNs there is one.
  const auto f16 = [](uint16_t x, uint16_t y) -> uint16_t {
    const _Float16 sum = Get<_Float16>(x) + Get<_Float16>(y);
    return sum == sum ? static_cast<uint16_t>(Put(sum)) : 0x7fff;
  };
  const auto bf16 = [](uint16_t x, uint16_t y) -> uint16_t {
    // In double exact enough: exponents are at most 276 apart, and what is lost decides no tie
    // but where the smaller one is below 2^-53 of the larger, which then is the sum.
    const double sum = double{Get<float>(uint64_t{x} << 16)} + Get<float>(uint64_t{y} << 16);
    return Narrow<7, 127>(sum);
  };
  CheckAtomic<uint16_t>(
      "add.noftz.f16", 1, [=](uint16_t x, uint16_t y, uint16_t) { return f16(x, y); }, true);
  CheckAtomic<uint16_t>(
      "add.noftz.bf16", 1, [=](uint16_t x, uint16_t y, uint16_t) { return bf16(x, y); }, true);
  CheckAtomic<uint32_t>("add.noftz.f16x2", 1, [=](uint32_t x, uint32_t y, uint32_t) {
    return uint32_t{f16(uint16_t(x), uint16_t(y))} |
           uint32_t{f16(uint16_t(x >> 16), uint16_t(y >> 16))} << 16;
  });
  CheckAtomic<uint32_t>("add.noftz.bf16x2", 1, [=](uint32_t x, uint32_t y, uint32_t) {
    return uint32_t{bf16(uint16_t(x), uint16_t(y))} |
           uint32_t{bf16(uint16_t(x >> 16), uint16_t(y >> 16))} << 16;
  });
}

TEST(AtomicTest, LoadsExtendAndStoresCut) {
  const auto s = Operands(64, 600, 70);
  const auto check = [&](const std::string& type, auto want) {
    // Stored in 64 bits of ones, and loaded into a register that is wider.
    const auto got = RunOp({"ld.global." + type + " %d, [%rd1]", 64, {64}, ""}, {s});
    const auto put = RunOp({"mov.u64 %rd3, %rd1;\nst.global.u64 [%rd3], -1;\nst.global." + type +
                                " [%rd3], %s0;\nld.global.u64 %d, [%rd3]",
                            64,
                            {64},
                            ""},
                           {s});
    for (size_t i = 0; i < s.size(); ++i) {
      const auto v = Get<decltype(want)>(s[i]);
      const uint64_t extended = std::is_signed_v<decltype(want)>
                                    ? static_cast<uint64_t>(static_cast<int64_t>(v))
                                    : static_cast<uint64_t>(v);
      ASSERT_EQ(got[i], extended) << type;
      const uint64_t rest = sizeof(v) == 8 ? 0 : ~0ull << (8 * sizeof(v) % 64);
      ASSERT_EQ(put[i], (s[i] & ~rest) | rest) << type;
    }
  };
  check("u8", uint8_t{}), check("s8", int8_t{}), check("u16", uint16_t{}), check("s16", int16_t{});
  check("u32", uint32_t{}), check("s32", int32_t{}), check("b64", uint64_t{});
}

TEST_F(MemoryTest, CopiesOfAllSizes) {
  std::vector<uint64_t> bytes(64);
  for (size_t i = 0; i < 64; ++i) bytes[i] = 0x8070605040302010 + i * 0x0101010101010101;
  a_ = device_.Put(bytes);
  for (const int size : {4, 8, 16}) {
    for (const int taken : {0, size / 2, size}) {
      b_ = device_.Put(std::vector<uint64_t>(64, 0));
      const std::string by = std::to_string(size), shift = size == 4 ? "2" : size == 8 ? "3" : "4";
      const std::string how = size == 16 ? "cg" : "ca";
      EXPECT_EQ(
          Only(Run(".shared .align 16 .b8 s[512];\nmov.u32 %r3, s;\nshl.b32 %r4, %r1, " + shift +
                   ";\nadd.s32 %r3, %r3, %r4;\ncvt.u64.u32 %rd6, %r4;\nadd.s64 %rd7, %rd1, "
                   "%rd6;\nadd.s64 %rd8, %rd2, %rd6;\ncp.async." +
                   how + ".shared.global [%r3], [%rd7], " + by + ", " + std::to_string(taken) +
                   ";\ncp.async.wait_all;\nmov.u32 %r5, 0;\nMORE:\nld.shared.u32 %r6, [%r3];\n"
                   "st.global.u32 [%rd8], %r6;\nadd.s32 %r3, %r3, 4;\nadd.s64 %rd8, %rd8, 4;\n"
                   "add.s32 %r5, %r5, 4;\nsetp.lt.s32 %p1, %r5, " +
                   by + ";\n@%p1 bra MORE;\n")),
          "nothing");
      const auto got = device_.Take(b_, 64);
      const auto byte = [](const std::vector<uint64_t>& v, int i) {
        return v[static_cast<size_t>(i / 8)] >> (i % 8 * 8) & 255;
      };
      for (int i = 0; i < 32 * size; ++i) {  // what is not taken is zeros
        ASSERT_EQ(byte(got, i), i % size < taken ? byte(bytes, i) : 0) << size << " " << taken;
      }
    }
  }
}

TEST_F(MemoryTest, HintsChangeNothing) {
  EXPECT_EQ(Only(Run("prefetch.global.L2 [%rd4];\nnanosleep.u32 100;\nnanosleep.u32 %r1;\n"
                     "ld.global.u64 %rd6, [%rd4];\nst.global.u64 [%rd5], %rd6;\n")),
            "nothing");
  EXPECT_EQ(device_.Take(b_, 32), std::vector<uint64_t>(32, 7));
  // Who sleeps lets others go on: the first warp waits for what the second one does.
  for (uint64_t seed = 0; seed < 5; ++seed) {
    b_ = device_.Put(std::vector<uint64_t>(64, 0));
    Options options;
    options.seed = seed;
    EXPECT_EQ(Only(Run("setp.ge.u32 %p1, %r1, 32;\n@%p1 bra SET;\nWAIT:\nnanosleep.u32 20;\n"
                       "ld.relaxed.gpu.global.u32 %r3, [%rd2+504];\nsetp.ne.s32 %p2, %r3, 9;\n"
                       "@%p2 bra WAIT;\nst.global.u32 [%rd5], %r3;\nbra OUT;\nSET:\n"
                       "setp.ne.u32 %p3, %r1, 32;\n@%p3 bra OUT;\n"
                       "st.relaxed.gpu.global.u32 [%rd2+504], 9;\nOUT:\n",
                       64, 1, options)),
              "nothing");
    EXPECT_EQ(device_.Take(b_, 32), std::vector<uint64_t>(32, 9)) << seed;
  }
}

TEST_F(MemoryTest, FunctionsAreCalled) {
  const std::string text =
      ".func (.param .b64 r) twice(.param .b64 x)\n{\n.reg .b64 %t<3>;\nld.param.u64 %t1, [x];\n"
      "shl.b64 %t2, %t1, 1;\nst.param.b64 [r], %t2;\nret;\n}\n" +
      Kernel(
          "ld.global.u64 %rd6, [%rd4];\n{\n.param .b64 p0;\nst.param.b64 [p0], %rd6;\n"
          ".param .b64 q0;\ncall.uni (q0), twice, (p0);\nld.param.b64 %rd7, [q0];\n}\n"
          "{\n.param .b64 p1;\nst.param.b64 [p1], %rd7;\n.param .b64 q1;\n"
          "call.uni (q1), twice, (p1);\nld.param.b64 %rd8, [q1];\n}\nst.global.u64 [%rd5], "
          "%rd8;\n");
  EXPECT_EQ(Only(device_.Run(text, {1}, {32}, {a_, b_})), "nothing");
  EXPECT_THAT(device_.Take(b_, 2), ElementsAre(28, 28));
}

TEST_F(MemoryTest, AsynchronousCopiesComeWhenWaitedFor) {
  const std::string copy =
      ".shared .align 16 .b8 s[512];\nmov.u32 %r3, s;\nshl.b32 %r4, %r1, 3;\nadd.s32 %r3, %r3, "
      "%r4;\n"
      "cp.async.ca.shared.global [%r3], [%rd4], 8, 4;\ncp.async.commit_group;\n";
  EXPECT_EQ(Only(Run(copy + "cp.async.wait_group 0;\nld.shared.u64 %rd6, [%r3];\n"
                            "st.global.u64 [%rd5], %rd6;\n")),
            "nothing");
  EXPECT_THAT(device_.Take(b_, 1), ElementsAre(7));
  const Outcome early = Run(copy + "ld.shared.u64 %rd6, [%r3];\ncp.async.wait_all;\n");
  EXPECT_THAT(Only(early), HasSubstr("uninitialised read: shared memory that nothing has written"));
}

// Of a tile that is not full, kernels carry through shared memory what they never use.
TEST_F(MemoryTest, SharedMemoryMayHoldUnsetRegisters) {
  // Threads 0 to 19 load %r5; all store it.
  const std::string start =
      ".shared .align 16 .b8 s[256];\nmov.u32 %r3, s;\nshl.b32 %r4, %r1, 3;\nadd.s32 %r3, %r3, "
      "%r4;\nsetp.lt.u32 %p1, %r1, 20;\n@%p1 ld.global.u32 %r5, [%rd4];\n";
  const std::string stored = start + "st.shared.u32 [%r3], %r5;\nbar.sync 0;\n";
  const std::string unset = "uninitialised read: a register that nothing has written in kernel k";
  const std::string never =
      "uninitialised read: shared memory that nothing has written in kernel k";

  const std::string taken = "ld.shared.u32 %r6, [%r3];\nadd.s32 %r7, %r6, 1;\n";
  EXPECT_EQ(Only(Run(stored + taken + "@%p1 st.global.u32 [%rd5], %r7;\n")), "nothing");
  EXPECT_THAT(device_.Take(b_, 21), ::testing::Each(::testing::AnyOf(8, 0)));
  EXPECT_THAT(device_.Take(b_, 1), ElementsAre(8));

  const Outcome written = Run(stored + taken + "st.global.u32 [%rd5], %r7;\n");
  EXPECT_THAT(Only(written), HasSubstr(unset));
  EXPECT_THAT(Only(written), HasSubstr("thread (20,0,0): st.global.u32 [%rd5], %r7;"));
  EXPECT_THAT(Only(Run(stored + taken + "setp.eq.u32 %p2, %r7, 8;\n@%p2 bra END;\nEND:\n")),
              HasSubstr(unset));
  EXPECT_THAT(Only(Run(stored + taken +
                       "and.b32 %r7, %r7, 4;\nmov.u32 %r8, s;\nadd.s32 %r8, "
                       "%r8, %r7;\nst.shared.u32 [%r8], %r1;\n")),
              HasSubstr(unset));
  EXPECT_THAT(Only(Run(stored + "red.shared.add.u32 [%r3], 1;\n")), HasSubstr(never));
  EXPECT_EQ(
      Only(Run(stored + "st.shared.u32 [%r3], %r1;\n" + taken + "st.global.u32 [%rd5], %r7;\n")),
      "nothing");
  // What nothing has been stored to is no different than before.
  EXPECT_THAT(Only(Run(start + taken + "st.shared.u32 [%r3], %r5;\n")), HasSubstr(never));

  // Elements of vectors, and generic addresses, of both kinds of memory.
  const std::string pair = start +
                           "st.shared.v2.u32 [%r3], {%r1, %r5};\nbar.sync 0;\n"
                           "ld.shared.v2.u32 {%r6, %r7}, [%r3];\n";
  EXPECT_EQ(Only(Run(pair + "st.global.u32 [%rd5], %r6;\n")), "nothing");
  EXPECT_THAT(Only(Run(pair + "st.global.u32 [%rd5], %r7;\n")), HasSubstr(unset));
  const std::string generic = start +
                              "cvt.u64.u32 %rd6, %r3;\ncvta.shared.u64 %rd7, %rd6;\n"
                              "st.u32 [%rd7], %r5;\nld.u32 %r6, [%rd7];\n";
  EXPECT_EQ(Only(Run(generic + "@%p1 st.u32 [%rd5], %r6;\n")), "nothing");
  EXPECT_THAT(Only(Run(generic + "st.u32 [%rd5], %r6;\n")), HasSubstr(unset));

  Options blind;
  blind.uninitialised = false;
  EXPECT_EQ(Only(Run(stored + taken + "st.global.u32 [%rd5], %r7;\n", 32, 1, blind)), "nothing");
}

TEST_F(MemoryTest, WrongAccessesAreNamed) {
  const std::string where = " in kernel k (line 0), block (0,0,0), thread (";
  EXPECT_THAT(Only(Run("st.global.u64 [%rd5+512], %rd3;\n", 9)),
              HasSubstr("out of bounds: write of 8 bytes at 0x"));
  const Outcome last = Run("st.global.u64 [%rd4+480], %rd3;\n");
  EXPECT_EQ(last.kind, Outcome::kIllegalAddress);
  EXPECT_THAT(Only(last),
              HasSubstr("0 bytes behind an allocation of 520 bytes" + where + "5,0,0)"));
  EXPECT_THAT(Only(Run("ld.global.u64 %rd6, [%rd4+4];\n")), HasSubstr("misaligned: 8 bytes at 0x"));
  EXPECT_THAT(Only(Run("mov.u64 %rd6, 0;\nld.global.u32 %r3, [%rd6];\n")),
              HasSubstr("no device memory"));
  EXPECT_THAT(Only(Run(".shared .align 4 .b8 s[64];\nld.shared.u32 %r3, [s+64];\n")),
              HasSubstr("of shared memory at 0x40, of which there are 64"));
  const uint64_t fresh = device_.memory().Allocate(64);
  a_ = fresh;
  EXPECT_THAT(Only(Run("ld.global.u32 %r3, [%rd1];\n", 1)),
              HasSubstr("uninitialised read: global memory"));
  device_.memory().Free(fresh);
  EXPECT_THAT(Only(Run("ld.global.u32 %r3, [%rd1];\n", 1)), HasSubstr("use after free: read"));
}

TEST_F(MemoryTest, Races) {
  // The race that is reported, the same kind under any seed.
  const auto race = [&](const std::string& body, uint32_t threads, uint32_t blocks) {
    std::string found;
    for (uint64_t seed = 0; seed < 4; ++seed) {
      Options options;
      options.seed = seed;
      options.uninitialised = false;
      const std::string now = Only(Run(body, threads, blocks, options));
      if (seed > 0) {
        EXPECT_EQ(now.substr(0, 8), found.substr(0, 8)) << body;
      }
      found = now;
    }
    return found;
  };
  const std::string shared =
      ".shared .align 8 .b8 s[1024];\nmul.wide.u32 %rd6, %r1, 4;\nmov.u64 %rd7, s;\n"
      "add.s64 %rd7, %rd7, %rd6;\n";
  const std::string put = "st.shared.u32 [%rd7], %r1;\n";
  const std::string take =
      "xor.b32 %r5, %r1, 32;\nmul.wide.u32 %rd6, %r5, 4;\nmov.u64 %rd7, s;\n"
      "add.s64 %rd7, %rd7, %rd6;\nld.shared.u32 %r4, [%rd7];\n";
  EXPECT_EQ(race(shared + put + "bar.sync 0;\n" + take, 64, 1), "nothing");
  EXPECT_THAT(race(shared + put + "bar.warp.sync 0xffffffff;\n" + take, 64, 1), HasSubstr("race"));
  EXPECT_THAT(race("st.global.u32 [%rd1], %r2;\n", 1, 2), HasSubstr("global race: write"));
  EXPECT_EQ(race("atom.global.add.u32 %r4, [%rd1], 1;\n", 32, 2), "nothing");
  EXPECT_EQ(race("atom.global.cta.add.u32 %r4, [%rd1], 1;\n", 32, 1), "nothing");
  EXPECT_THAT(race("atom.global.cta.add.u32 %r4, [%rd1], 1;\n", 1, 2), HasSubstr("global race"));
  // Bytes of one word are memory of their own.
  EXPECT_EQ(
      race("cvt.u64.u32 %rd6, %r1;\nadd.s64 %rd6, %rd6, %rd1;\nst.global.u8 [%rd6], %r1;\n", 64, 1),
      "nothing");
}

// The last of the blocks to come sums what all have written: ordered by fences and a counter.
std::string LastBlock(const std::string& fence_before, const std::string& fence_after) {
  return "cvt.u64.u32 %rd6, %r2;\nshl.b64 %rd6, %rd6, 3;\nadd.s64 %rd6, %rd6, %rd1;\n"
         "st.global.u64 [%rd6+8], 5;\n" +
         fence_before +
         "mov.u32 %r3, %nctaid.x;\nsub.s32 %r3, %r3, 1;\natom.global.add.u32 %r4, [%rd2], 1;\n"
         "setp.ne.s32 %p1, %r4, %r3;\n@%p1 bra OUT;\n" +
         fence_after +
         "mov.u64 %rd8, 0;\nmov.u32 %r5, 0;\nadd.s64 %rd9, %rd1, 8;\nAGAIN:\nld.global.u64 %rd10, "
         "[%rd9];\n"
         "add.s64 %rd8, %rd8, %rd10;\nadd.s64 %rd9, %rd9, 8;\nadd.s32 %r5, %r5, 1;\n"
         "setp.le.s32 %p2, %r5, %r3;\n@%p2 bra AGAIN;\nst.global.u64 [%rd2+8], %rd8;\nOUT:\n";
}

TEST_F(MemoryTest, FencesAndAtomicsOrder) {
  for (uint64_t seed = 0; seed < 5; ++seed) {
    Options options;
    options.seed = seed;
    const auto run = [&](const char* before, const char* after) {
      b_ = device_.Put(std::vector<uint64_t>(4));
      return Only(Run(LastBlock(before, after), 1, 20, options));
    };
    EXPECT_EQ(run("membar.gl;\n", "membar.gl;\n"), "nothing");
    EXPECT_EQ(device_.Take(b_, 2)[1], 100u);
    EXPECT_THAT(run("", "membar.gl;\n"),
                HasSubstr("global race: read not ordered after the write"));
    EXPECT_THAT(run("membar.gl;\n", ""),
                HasSubstr("global race: read not ordered after the write"));
    EXPECT_THAT(run("membar.cta;\n", "membar.gl;\n"), HasSubstr("global race"));
  }
}

// One warp writes and says so, the other waits for the word and reads.
TEST_F(MemoryTest, ReleasesAndAcquiresOrder) {
  const auto run = [&](const std::string& say, const std::string& hear, uint64_t seed) {
    a_ = device_.Put(std::vector<uint64_t>(4));
    b_ = device_.Put(std::vector<uint64_t>(4));
    Options options;
    options.seed = seed;
    return Only(
        Run("and.b32 %r3, %r1, 31;\nsetp.ne.u32 %p1, %r3, 0;\n@%p1 bra OUT;\n"
            "setp.eq.u32 %p1, %r1, 0;\n@%p1 bra WRITE;\nWAIT:\n" +
                hear +
                "setp.ne.u32 %p2, %r4, 9;\n@%p2 bra WAIT;\nld.global.u32 %r5, [%rd1];\n"
                "st.global.u32 [%rd2+8], %r5;\nbra OUT;\nWRITE:\nst.global.u32 [%rd1], 5;\n" +
                say + "OUT:\n",
            64, 1, options));
  };
  const std::string heard = "ld.acquire.gpu.global.u32 %r4, [%rd2];\n";
  const std::string said = "st.release.gpu.global.u32 [%rd2], 9;\n";
  const std::string reduced = "red.release.gpu.global.add.u32 [%rd2], 9;\n";
  const std::string added = "atom.acq_rel.gpu.global.add.u32 %r4, [%rd2], ";
  for (uint64_t seed = 0; seed < 5; ++seed) {
    for (const std::string& say : {said, added + "9;\n", reduced}) {
      for (const std::string& hear : {heard, added + "0;\n"}) {
        EXPECT_EQ(run(say, hear, seed), "nothing") << say << hear;
        EXPECT_EQ(device_.Take(b_, 2)[1], 5u) << say << hear;
      }
    }
    EXPECT_THAT(run(said, "ld.relaxed.gpu.global.u32 %r4, [%rd2];\n", seed),
                HasSubstr("global race"));
    EXPECT_THAT(run("st.relaxed.gpu.global.u32 [%rd2], 9;\n", heard, seed),
                HasSubstr("global race"));
  }
}

TEST_F(MemoryTest, CountersCountSectorsAndBankConflicts) {
  const auto count = [&](const std::string& body) { return Run(body).counters; };
  Counters c = count("ld.global.u64 %rd6, [%rd4];\n");
  EXPECT_EQ(c.global_requests, 1u);
  EXPECT_EQ(c.global_bytes, 256u);
  EXPECT_EQ(c.sectors, 8u);
  c = count("ld.global.u32 %r3, [%rd4];\n");  // every second word
  EXPECT_EQ(c.global_bytes, 128u);
  EXPECT_EQ(c.sectors, 8u);
  const auto shared = [&](int stride) {
    return count(".shared .align 4 .b8 s[8192];\nmul.lo.s32 %r3, %r1, " +
                 std::to_string(4 * stride) +
                 ";\nmov.u32 %r4, s;\nadd.s32 %r3, %r3, %r4;\nst.shared.u32 [%r3], %r1;\n")
        .bank_conflicts;
  };
  EXPECT_EQ(shared(1), 0u);
  EXPECT_EQ(shared(2), 1u);
  EXPECT_EQ(shared(32), 31u);
  EXPECT_EQ(shared(33), 0u);
}

}  // namespace
}  // namespace cusim::testing
