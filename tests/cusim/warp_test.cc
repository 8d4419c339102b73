// What lanes and warps do together: shuffles, votes, barriers, matrices.
#include <gmock/gmock.h>

#include <functional>

#include "tests/cusim/lanes.h"

namespace cusim::testing {
namespace {

using ::testing::HasSubstr;

// Runs a body whose result is %r9; %r1 is the thread, %r2 its value from `in`.
std::vector<uint64_t> Lanes(const std::string& body, const std::vector<uint64_t>& in,
                            uint64_t seed = 0, Outcome* out = nullptr) {
  const std::string entry =
      ".visible .entry k(.param .u64 a, .param .u64 b)\n{\n.reg .pred %p<9>;\n.reg .b32 %r<19>;\n"
      ".reg .b64 %rd<19>;\nld.param.u64 %rd1, [a];\nld.param.u64 %rd2, [b];\nmov.u32 %r1, %tid.x;\n"
      "mul.wide.u32 %rd3, %r1, 8;\nadd.s64 %rd4, %rd1, %rd3;\nadd.s64 %rd5, %rd2, %rd3;\n"
      "ld.global.u32 %r2, [%rd4];\nmov.u32 %r9, 0;\n" +
      body + "st.global.u32 [%rd5], %r9;\nEND:\nret;\n}\n";
  Device device;
  const uint64_t a = device.Put(in), b = device.Put(std::vector<uint64_t>(in.size()));
  Options options;
  options.seed = seed;
  const Outcome ran = device.Run(entry, {1}, {static_cast<uint32_t>(in.size())}, {a, b}, options);
  if (out != nullptr) {
    *out = ran;
  } else {
    for (const Report& r : ran.reports) ADD_FAILURE() << r.kind << ": " << r.text;
  }
  return device.Take(b, in.size());
}

std::vector<uint64_t> Numbers(size_t n) {
  std::vector<uint64_t> v(n);
  for (size_t i = 0; i < n; ++i) v[i] = 100 + i * i;
  return v;
}

// What the manual says of shfl, lane by lane.
uint64_t Shuffled(const std::string& mode, const std::vector<uint64_t>& v, int lane, int b, int c) {
  const int segment = c >> 8 & 31, clamp = c & 31;
  const int most = (lane & segment) | (clamp & ~segment), least = lane & segment;
  int j = lane;
  bool p = false;
  if (mode == "up") j = lane - b, p = j >= most;
  if (mode == "down") j = lane + b, p = j <= most;
  if (mode == "bfly") j = lane ^ b, p = j <= most;
  if (mode == "idx") j = least | (b & ~segment), p = j <= most;
  return v[p ? j : lane] + (p ? 1000000 : 0);
}

TEST(WarpTest, Shuffles) {
  const auto v = Numbers(32);
  for (const std::string mode : {"up", "down", "bfly", "idx"}) {
    for (const int width : {32, 16, 8, 4}) {
      for (const int by : {0, 1, 3, 7, 16, 31}) {
        const int c = (32 - width) << 8 | (mode == "up" ? 0 : 31);
        const auto got =
            Lanes("shfl.sync." + mode + ".b32 %r9|%p1, %r2, " + std::to_string(by) + ", " +
                      std::to_string(c) + ", -1;\n@%p1 add.s32 %r9, %r9, 1000000;\n",
                  v);
        for (int lane = 0; lane < 32; ++lane) {
          ASSERT_EQ(got[lane], Shuffled(mode, v, lane, by, c)) << mode << width << " " << by;
        }
      }
    }
  }
}

TEST(WarpTest, VotesMatchesAndReductions) {
  const auto v = Numbers(32);
  EXPECT_EQ(Lanes("setp.lt.u32 %p1, %r1, 5;\nvote.sync.ballot.b32 %r9, %p1, -1;\n", v)[7], 31u);
  EXPECT_EQ(
      Lanes(
          "setp.lt.u32 %p1, %r1, 5;\nvote.sync.any.pred %p2, %p1, -1;\nselp.b32 %r9, 1, 0, %p2;\n",
          v)[7],
      1u);
  EXPECT_EQ(
      Lanes(
          "setp.lt.u32 %p1, %r1, 5;\nvote.sync.all.pred %p2, !%p1, -1;\nselp.b32 %r9, 1, 0, %p2;\n",
          v)[7],
      0u);
  EXPECT_EQ(Lanes("shr.u32 %r3, %r1, 2;\nmatch.any.sync.b32 %r9, %r3, -1;\n", v)[9], 0xf00u);
  EXPECT_EQ(Lanes("match.all.sync.b32 %r9|%p1, 5, -1;\n@!%p1 mov.u32 %r9, 1;\n", v)[3], ~0u);
  EXPECT_EQ(Lanes("match.all.sync.b32 %r9|%p1, %r1, -1;\n@!%p1 add.s32 %r9, %r9, 7;\n", v)[3], 7u);
  EXPECT_EQ(Lanes("redux.sync.add.s32 %r9, %r1, -1;\n", v)[3], 496u);
  EXPECT_EQ(Lanes("sub.s32 %r3, %r1, 9;\nredux.sync.min.s32 %r9, %r3, -1;\n", v)[3], uint32_t(-9));
  EXPECT_EQ(Lanes("sub.s32 %r3, %r1, 9;\nredux.sync.max.u32 %r9, %r3, -1;\n", v)[3], uint32_t(-1));
  EXPECT_EQ(Lanes("redux.sync.xor.b32 %r9, %r1, -1;\n", v)[3], 0u);
}

// Of lanes with random values, some of them often the same, by the lanes of a mask.
TEST(WarpTest, VotesMatchesAndReductionsOnRandomValues) {
  std::mt19937 random(11);
  for (int round = 0; round < 12; ++round) {
    const uint32_t mask = round % 3 == 0 ? ~0u : random() | 1u << (random() % 32);
    std::vector<uint64_t> v(32);
    for (uint64_t& x : v) x = round < 6 ? random() % 4 - (random() % 2) * 3u : random();
    for (uint64_t& x : v) x &= 0xffffffff;
    if (round % 4 == 1) v.assign(32, v[0]);
    const std::string m = std::to_string(mask);
    // Lanes that the mask does not name go past it.
    const auto run = [&](const std::string& body) {
      return Lanes("shr.u32 %r3, " + m +
                       ", %r1;\nand.b32 %r3, %r3, 1;\nsetp.eq.s32 %p8, %r3, 0;\n"
                       "@%p8 bra PAST;\nand.b32 %r4, %r2, 2;\nsetp.ne.s32 %p1, %r4, 0;\n" +
                       body + "PAST:\n",
                   v);
    };
    const auto check = [&](const std::string& body, auto want) {
      const auto got = run(body);
      for (int l = 0; l < 32; ++l) {
        if (mask >> l & 1) {
          ASSERT_EQ(got[static_cast<size_t>(l)], static_cast<uint32_t>(want(l))) << body << l;
        }
      }
    };
    uint32_t yes = 0, same[32] = {}, sum = 0, all_and = ~0u, all_or = 0, all_xor = 0;
    uint32_t least = ~0u, most = 0;
    int32_t low = INT32_MAX, high = INT32_MIN;
    for (int l = 0; l < 32; ++l) {
      if (!(mask >> l & 1)) continue;
      const auto x = static_cast<uint32_t>(v[static_cast<size_t>(l)]);
      yes |= (x & 2u) != 0 ? 1u << l : 0;
      for (int k = 0; k < 32; ++k) {
        if ((mask >> k & 1) && v[static_cast<size_t>(k)] == x) same[l] |= 1u << k;
      }
      sum += x, all_and &= x, all_or |= x, all_xor ^= x;
      least = std::min(least, x), most = std::max(most, x);
      low = std::min(low, static_cast<int32_t>(x)), high = std::max(high, static_cast<int32_t>(x));
    }
    const std::string told = "selp.b32 %r9, 1, 0, %p2;\n";
    check("vote.sync.ballot.b32 %r9, %p1, " + m + ";\n", [&](int) { return yes; });
    check("vote.sync.ballot.b32 %r9, !%p1, " + m + ";\n", [&](int) { return mask & ~yes; });
    check("vote.sync.any.pred %p2, %p1, " + m + ";\n" + told, [&](int) { return yes != 0; });
    check("vote.sync.all.pred %p2, %p1, " + m + ";\n" + told, [&](int) { return yes == mask; });
    check("vote.sync.uni.pred %p2, %p1, " + m + ";\n" + told,
          [&](int) { return yes == mask || yes == 0; });
    check("match.any.sync.b32 %r9, %r2, " + m + ";\n", [&](int l) { return same[l]; });
    check("cvt.u64.u32 %rd6, %r2;\nshl.b64 %rd6, %rd6, 32;\nmatch.any.sync.b64 %r9, %rd6, " + m +
              ";\n",
          [&](int l) { return same[l]; });
    check("match.all.sync.b32 %r9|%p2, %r2, " + m + ";\n@!%p2 mov.u32 %r9, 5;\n",
          [&](int l) { return same[l] == mask ? mask : 5; });
    const auto redux = [&](const std::string& op, uint32_t want) {
      check("redux.sync." + op + " %r9, %r2, " + m + ";\n", [&](int) { return want; });
    };
    redux("add.u32", sum), redux("add.s32", sum), redux("min.u32", least), redux("max.u32", most);
    redux("min.s32", static_cast<uint32_t>(low)), redux("max.s32", static_cast<uint32_t>(high));
    redux("and.b32", all_and), redux("or.b32", all_or), redux("xor.b32", all_xor);
    check("activemask.b32 %r9;\n", [&](int) { return mask; });
  }
}

TEST(WarpTest, SpecialRegisters) {
  const auto v = Numbers(40);
  const auto check = [&](const std::string& name, std::function<uint32_t(uint32_t)> want) {
    const auto got = Lanes("mov.u32 %r9, " + name + ";\n", v);
    for (uint32_t t = 0; t < 40; ++t) ASSERT_EQ(got[t], want(t)) << name << t;
  };
  check("%laneid", [](uint32_t t) { return t % 32; });
  check("%warpid", [](uint32_t t) { return t / 32; });
  check("%nwarpid", [](uint32_t) { return 2; });
  check("%lanemask_eq", [](uint32_t t) { return 1u << t % 32; });
  check("%lanemask_lt", [](uint32_t t) { return (1u << t % 32) - 1; });
  check("%lanemask_le", [](uint32_t t) { return (1u << t % 32) | ((1u << t % 32) - 1); });
  check("%lanemask_gt", [](uint32_t t) { return ~((1u << t % 32) | ((1u << t % 32) - 1)); });
  check("%lanemask_ge", [](uint32_t t) { return ~((1u << t % 32) - 1); });
  check("WARP_SZ", [](uint32_t) { return 32; });
  // A clock goes on.
  const auto later = Lanes(
      "mov.u32 %r3, %clock;\nadd.s32 %r2, %r2, 1;\nmov.u32 %r4, %clock;\n"
      "setp.lt.u32 %p1, %r3, %r4;\nselp.b32 %r9, 1, 0, %p1;\n",
      v);
  EXPECT_EQ(later, std::vector<uint64_t>(40, 1));
  // Of a block and a grid with three sides.
  Device device;
  const uint64_t o = device.Put(std::vector<uint64_t>(2 * 3 * 4 * 3 * 2 * 2));
  std::string text = ".visible .entry k(.param .u64 o)\n{\n.reg .b32 %r<20>;\n.reg .b64 %rd<9>;\n";
  int r = 0;
  for (const std::string of : {"tid", "ctaid", "ntid", "nctaid"}) {
    for (const std::string side : {"x", "y", "z"}) {
      text += "mov.u32 %r" + std::to_string(r++) + ", %" + of + "." + side + ";\n";
    }
  }
  // Which thread, as C++ has it, and its bits: sides in base 8.
  text +=
      "mad.lo.s32 %r12, %r5, %r10, %r4;\nmad.lo.s32 %r12, %r12, %r9, %r3;\n"
      "mul.lo.s32 %r13, %r6, %r7;\nmul.lo.s32 %r13, %r13, %r8;\nmul.lo.s32 %r12, %r12, %r13;\n"
      "mad.lo.s32 %r13, %r2, %r7, %r1;\nmad.lo.s32 %r13, %r13, %r6, %r0;\n"
      "add.s32 %r12, %r12, %r13;\nmov.u32 %r14, 0;\n";
  for (int i = 11; i >= 0; --i) {
    text += "mad.lo.s32 %r14, %r14, 6, %r" + std::to_string(i) + ";\n";
  }
  text +=
      "ld.param.u64 %rd1, [o];\nmul.wide.u32 %rd2, %r12, 8;\nadd.s64 %rd1, %rd1, %rd2;\n"
      "cvt.u64.u32 %rd3, %r14;\nst.global.u64 [%rd1], %rd3;\nret;\n}\n";
  const Outcome ran = device.Run(text, {3, 2, 2}, {2, 3, 4}, {o});
  EXPECT_TRUE(ran.reports.empty());
  const auto got = device.Take(o, 2 * 3 * 4 * 3 * 2 * 2);
  for (uint32_t i = 0; i < got.size(); ++i) {
    const uint32_t t = i % 24, c = i / 24;
    const uint32_t sides[] = {t % 2, t / 2 % 3, t / 6, c % 3, c / 3 % 2, c / 6, 2, 3, 4, 3, 2, 2};
    uint32_t want = 0;
    for (int k = 11; k >= 0; --k) want = want * 6 + sides[k];
    ASSERT_EQ(got[i], want) << i;
  }
}

TEST(WarpTest, ActiveLanesAreThoseThatCame) {
  for (uint64_t seed = 0; seed < 5; ++seed) {
    const auto got = Lanes(
        "activemask.b32 %r4;\nand.b32 %r3, %r1, 3;\nsetp.eq.s32 %p1, %r3, 0;\n@!%p1 bra MEET;\n"
        "activemask.b32 %r4;\nMEET:\nbar.warp.sync -1;\nmov.u32 %r9, %r4;\n",
        Numbers(32), seed);
    // Lanes that a branch has parted from the others are not among them; in which groups those that
    // took it come is open, but a lane is always with itself.
    for (uint32_t l = 0; l < 32; ++l) {
      ASSERT_TRUE(got[l] >> l & 1);
      if (l % 4 == 0) {
        ASSERT_EQ(got[l] & ~0x11111111ull, 0u) << seed;
      }
      if (seed == 0) {
        ASSERT_EQ(got[l], l % 4 == 0 ? 0x11111111u : ~0u);
      }
    }
  }
  EXPECT_EQ(Lanes("activemask.b32 %r9;\n", Numbers(40))[39], 255u);  // of the ragged warp
}

TEST(WarpTest, LanesThatPartedMeetAgain) {
  const auto v = Numbers(64);
  for (uint64_t seed = 0; seed < 6; ++seed) {
    const auto got = Lanes(
        "and.b32 %r3, %r1, 1;\nsetp.eq.s32 %p1, %r3, 0;\n@%p1 bra EVEN;\nadd.s32 %r2, %r2, 1;\nbra "
        "MEET;\n"
        "EVEN:\nadd.s32 %r2, %r2, 2;\nmul.lo.s32 %r2, %r2, 3;\nMEET:\nshfl.sync.bfly.b32 %r9, %r2, "
        "1, 31, -1;\n",
        v, seed);
    for (size_t i = 0; i < 64; ++i) {
      const uint64_t other = v[i ^ 1];
      EXPECT_EQ(got[i], i % 2 ? (other + 2) * 3 : other + 1);
    }
  }
}

TEST(WarpTest, OneShuffleWithSeveralMasks) {
  const auto v = Numbers(32);
  const auto got = Lanes(
      "and.b32 %r3, %r1, 16;\nshl.b32 %r4, 0xffff, %r3;\n"
      "setp.lt.u32 %p1, %r1, 16;\n@%p1 bra ON;\nadd.s32 %r2, %r2, 1;\nON:\n"
      "shfl.sync.bfly.b32 %r9, %r2, 1, 31, %r4;\n",
      v);
  for (size_t i = 0; i < 32; ++i) EXPECT_EQ(got[i], v[i ^ 1] + (i >= 16));
}

TEST(WarpTest, RaggedWarps) {
  const auto v = Numbers(40);
  const auto got = Lanes("redux.sync.add.s32 %r9, %r1, -1;\nbar.sync 0;\n", v);
  EXPECT_EQ(got[39], 32u + 33 + 34 + 35 + 36 + 37 + 38 + 39);
}

TEST(WarpTest, WrongMasksAreNamed) {
  Outcome out;
  Lanes("setp.gt.u32 %p1, %r1, 15;\n@%p1 bra END;\nshfl.sync.bfly.b32 %r9, %r2, 1, 31, -1;\n",
        Numbers(32), 0, &out);
  ASSERT_EQ(out.reports.size(), 1u);
  EXPECT_EQ(out.reports[0].kind, "wrong mask");
  // A lane that the mask does not name is asked for its value.
  Lanes(
      "setp.gt.u32 %p1, %r1, 15;\n@%p1 bra WAIT;\nshfl.sync.bfly.b32 %r9, %r2, 16, 31, 0xffff;\n"
      "WAIT:\nbar.warp.sync -1;\n",
      Numbers(32), 0, &out);
  ASSERT_GE(out.reports.size(), 1u);
  EXPECT_THAT(out.reports[0].text, HasSubstr("a shuffle reads lane 16, which takes no part"));
  Lanes("shfl.sync.bfly.b32 %r9, %r2, 16, 31, 0xffff;\n", Numbers(16), 0, &out);
  EXPECT_TRUE(out.reports.empty());  // lanes that never were: as in the last warp of a block
  Lanes("setp.lt.u32 %p1, %r1, 16;\n@%p1 bra ON;\nbar.warp.sync 0x0000ffff;\nON:\n", Numbers(32), 0,
        &out);
  ASSERT_GE(out.reports.size(), 1u);
  EXPECT_EQ(out.reports.back().kind, "wrong mask");
  // Half a warp waits for the block, the other half for the warp.
  Lanes("setp.lt.u32 %p1, %r1, 16;\n@%p1 bra ON;\nbar.warp.sync -1;\nON:\nbar.sync 0;\n",
        Numbers(32), 0, &out);
  ASSERT_EQ(out.reports.size(), 1u);
  EXPECT_EQ(out.reports[0].kind, "deadlock");
}

TEST(WarpTest, BarriersCountAndReduce) {
  const auto v = Numbers(96);
  EXPECT_EQ(Lanes("setp.lt.u32 %p1, %r1, 50;\nbar.red.popc.u32 %r9, 0, %p1;\n", v)[80], 50u);
  EXPECT_EQ(
      Lanes("setp.lt.u32 %p1, %r1, 50;\nbar.red.and.pred %p2, 0, !%p1;\nselp.b32 %r9, 1, 2, %p2;\n",
            v)[80],
      2u);
  EXPECT_EQ(
      Lanes("setp.lt.u32 %p1, %r1, 1;\nbar.red.or.pred %p2, 0, %p1;\nselp.b32 %r9, 1, 2, %p2;\n",
            v)[80],
      1u);
  // Two warps of three use a barrier of their own; the first only arrives.
  for (uint64_t seed = 0; seed < 6; ++seed) {
    const auto got = Lanes(
        ".shared .align 4 .b8 s[4];\nsetp.ge.u32 %p1, %r1, 64;\n@%p1 bra OUT;\nsetp.ge.u32 %p2, "
        "%r1, 32;\n"
        "@%p2 bra TAKE;\nsetp.eq.s32 %p3, %r1, 0;\n@%p3 st.shared.u32 [s], 77;\nbar.arrive 1, "
        "64;\nbra OUT;\n"
        "TAKE:\nbar.sync 1, 64;\nld.shared.u32 %r9, [s];\nOUT:\n",
        v, seed);
    EXPECT_EQ(got[33], 77u);
    EXPECT_EQ(got[3], 0u);
  }
}

TEST(WarpTest, DivergentBarriersAreNamed) {
  for (uint64_t seed = 0; seed < 4; ++seed) {
    Outcome out;
    Lanes(
        "setp.lt.u32 %p1, %r1, 32;\n@%p1 bra ONE;\nbar.sync 0;\nbra GO;\nONE:\nbar.sync 0;\nGO:\n",
        Numbers(64), seed, &out);
    ASSERT_EQ(out.reports.size(), 1u);
    EXPECT_EQ(out.reports[0].kind, "divergent barrier");
    EXPECT_THAT(out.reports[0].text, HasSubstr("bar.sync 0;"));
  }
}

TEST(WarpTest, HangsEnd) {
  const std::string spin =
      "SPIN:\nld.volatile.global.u32 %r3, [%rd4];\nsetp.ne.s32 %p1, %r3, 1;\n"
      "@%p1 bra SPIN;\n";
  Device device;
  const uint64_t a = device.Put({0});
  Options options;
  options.limit = 100000;
  const Outcome out = device.Run(
      ".visible .entry k(.param .u64 a)\n{\n.reg .pred %p<2>;\n.reg .b32 %r<4>;\n"
      ".reg .b64 %rd<5>;\nld.param.u64 %rd4, [a];\n" +
          spin + "ret;\n}\n",
      {1}, {1}, {a}, options);
  EXPECT_EQ(out.kind, Outcome::kTimeout);
  EXPECT_EQ(out.reports.at(0).kind, "hang");
}

// Fragments by the manual's formulas, from whole matrices.
struct Mma {
  std::string op;
  int m, n, k, a_registers, b_registers, bits;  // bits of an element of a and b
  bool integer = false;
  bool near_the_end = false;  // sums go beyond what an integer holds
  bool halves() const {
    return op.find("row.col.f16.") != std::string::npos;
  }  // two sums to a register
};

TEST(WarpTest, Matrices) {
  const Mma cases[] = {
      {"m16n8k16.row.col.f32.bf16.bf16.f32", 16, 8, 16, 4, 2, 16},
      {"m16n8k16.row.col.f32.f16.f16.f32", 16, 8, 16, 4, 2, 16},
      {"m16n8k8.row.col.f32.bf16.bf16.f32", 16, 8, 8, 2, 1, 16},
      {"m16n8k8.row.col.f32.tf32.tf32.f32", 16, 8, 8, 4, 2, 32},
      {"m16n8k32.row.col.s32.s8.s8.s32", 16, 8, 32, 4, 2, 8, true},
      {"m16n8k16.row.col.s32.s8.s8.s32", 16, 8, 16, 2, 1, 8, true},
      {"m16n8k16.row.col.f16.f16.f16.f16", 16, 8, 16, 4, 2, 16},
      {"m16n8k8.row.col.f16.f16.f16.f16", 16, 8, 8, 2, 1, 16},
      {"m16n8k4.row.col.f32.tf32.tf32.f32", 16, 8, 4, 2, 1, 32},
      {"m8n8k4.row.col.f64.f64.f64.f64", 8, 8, 4, 1, 1, 64},
      {"m16n8k32.row.col.s32.u8.u8.s32", 16, 8, 32, 4, 2, 8, true},
      {"m16n8k32.row.col.s32.u8.u8.s32", 16, 8, 32, 4, 2, 8, true, true},
      {"m16n8k32.row.col.satfinite.s32.u8.u8.s32", 16, 8, 32, 4, 2, 8, true, true},
  };
  for (const Mma& c : cases) {
    std::mt19937 random(3);
    const bool u8 = c.op.find("u8") != std::string::npos;
    std::vector<int64_t> a(c.m * c.k), b(c.k * c.n), add(c.m * c.n);
    for (int64_t& v : a) v = u8 ? random() % 256 : static_cast<int>(random() % 15) - 7;
    for (int64_t& v : b) v = u8 ? random() % 256 : static_cast<int>(random() % 15) - 7;
    for (int64_t& v : add) v = static_cast<int>(random() % 100) - 50;
    if (c.near_the_end) std::fill(add.begin(), add.end(), INT32_MAX - 100000);
    const bool bf16 = c.op.find("bf16") != std::string::npos;
    const auto bits = [&](int64_t v) -> uint64_t {
      if (c.bits == 8) return static_cast<uint8_t>(v);
      if (c.bits == 32) return Put(static_cast<float>(v));
      if (c.bits == 64) return Put(static_cast<double>(v));
      return bf16 ? Narrow<7, 127>(static_cast<double>(v)) : Narrow<10, 15>(static_cast<double>(v));
    };
    // A lane's registers of a, b and c, 64 bits each in memory.
    const int per = std::max(1, 32 / c.bits), sums = c.m * c.n / 32;
    const int per_sum = c.halves() ? 2 : 1, sum_registers = sums / per_sum;
    const int registers = c.a_registers + c.b_registers + sum_registers;
    const std::string kind = c.bits == 64 ? "rd" : "r", width = c.bits == 64 ? "u64" : "u32";
    std::string text =
        ".visible .entry k(.param .u64 i, .param .u64 o)\n{\n.reg .b32 %r<40>;\n"
        ".reg .b64 %rd<40>;\nld.param.u64 %rd37, [i];\nld.param.u64 %rd38, [o];\n"
        "mov.u32 %r0, %tid.x;\nmul.wide.u32 %rd39, %r0, 128;\nadd.s64 %rd37, %rd37, %rd39;\n"
        "add.s64 %rd38, %rd38, %rd39;\n";
    const auto name = [&](int i) { return "%" + kind + std::to_string(i); };
    for (int i = 0; i < registers; ++i) {
      text +=
          "ld.global." + width + " " + name(i + 1) + ", [%rd37+" + std::to_string(8 * i) + "];\n";
    }
    const auto list = [&](int from, int n) {
      std::string s = "{";
      for (int i = 0; i < n; ++i) s += (i ? ", " : "") + name(from + i);
      return s + "}";
    };
    text += "mma.sync.aligned." + c.op + " " + list(30, sum_registers) + ", " +
            list(1, c.a_registers) + ", " + list(1 + c.a_registers, c.b_registers) + ", " +
            list(1 + c.a_registers + c.b_registers, sum_registers) + ";\n";
    for (int i = 0; i < sum_registers; ++i) {
      text +=
          "st.global." + width + " [%rd38+" + std::to_string(8 * i) + "], " + name(30 + i) + ";\n";
    }
    text += "ret;\n}\n";
    const auto sum_row = [](int l, int e) { return l / 4 + e / 2 * 8; };
    const auto sum_column = [](int l, int e) { return l % 4 * 2 + e % 2; };
    std::vector<uint64_t> in(32 * 16);
    for (int l = 0; l < 32; ++l) {
      const int group = l / 4, t = l % 4;
      uint64_t* const lane = &in[l * 16];
      for (int r = 0; r < c.a_registers; ++r) {
        for (int j = 0; j < per; ++j) {
          const int row = group + (r % 2) * 8, column = t * per + j + (r / 2) * 4 * per;
          lane[r] |= bits(a[row * c.k + column]) << (c.bits * j);
        }
      }
      for (int r = 0; r < c.b_registers; ++r) {
        for (int j = 0; j < per; ++j) {
          lane[c.a_registers + r] |= bits(b[(t * per + j + r * 4 * per) * c.n + group])
                                     << (c.bits * j);
        }
      }
      for (int i = 0; i < sums; ++i) {
        const int64_t v = add[sum_row(l, i) * c.n + sum_column(l, i)];
        lane[c.a_registers + c.b_registers + i / per_sum] |=
            c.integer      ? static_cast<uint32_t>(v)
            : c.halves()   ? uint64_t{Narrow<10, 15>(static_cast<double>(v))} << (16 * (i % 2))
            : c.bits == 64 ? Put(static_cast<double>(v))
                           : Put(static_cast<float>(v));
      }
    }
    Device device;
    const uint64_t i = device.Put(in), o = device.Put(std::vector<uint64_t>(32 * 16));
    const Outcome ran = device.Run(text, {1}, {32}, {i, o});
    for (const Report& r : ran.reports) ADD_FAILURE() << r.text;
    const auto got = device.Take(o, 32 * 16);
    const bool saturates = c.op.find("satfinite") != std::string::npos;
    for (int l = 0; l < 32; ++l) {
      for (int e = 0; e < sums; ++e) {
        const int row = sum_row(l, e), column = sum_column(l, e);
        int64_t want = add[row * c.n + column];
        for (int x = 0; x < c.k; ++x) want += a[row * c.k + x] * b[x * c.n + column];
        if (c.integer) {
          want = saturates ? std::clamp<int64_t>(want, INT32_MIN, INT32_MAX)
                           : static_cast<int32_t>(static_cast<uint32_t>(want));
        }
        const uint64_t have = got[l * 16 + e / per_sum];
        const double value = c.integer ? static_cast<int32_t>(have)
                             : c.halves()
                                 ? Widen<10, 15>(static_cast<uint16_t>(have >> (16 * (e % 2))))
                             : c.bits == 64 ? Get<double>(have)
                                            : Get<float>(have);
        ASSERT_EQ(value, static_cast<double>(want)) << c.op;
      }
    }
  }
}

TEST(WarpTest, LdmatrixDealsRows) {
  for (const bool trans : {false, true}) {
    const auto got = Lanes(
        ".shared .align 16 .b8 s[512];\nmov.u32 %r3, s;\nshl.b32 %r4, %r1, 4;\nadd.s32 %r3, %r3, "
        "%r4;\n"
        "mul.lo.s32 %r5, %r1, 0x80008;\nadd.s32 %r5, %r5, 0x10000;\nst.shared.u32 [%r3], %r5;\n"
        "add.s32 %r5, %r5, 0x20002;\nst.shared.u32 [%r3+4], %r5;\nadd.s32 %r5, %r5, 0x20002;\n"
        "st.shared.u32 [%r3+8], %r5;\nadd.s32 %r5, %r5, 0x20002;\nst.shared.u32 [%r3+12], %r5;\n"
        "bar.sync 0;\nldmatrix.sync.aligned.m8n8.x4" +
            std::string(trans ? ".trans" : "") + ".shared.b16 {%r6, %r7, %r8, %r9}, [%r3];\n",
        Numbers(32));
    for (uint64_t l = 0; l < 32; ++l) {  // element (row, column) of the fourth matrix is this
      const auto element = [](uint64_t row, uint64_t column) { return (24 + row) * 8 + column; };
      const uint64_t row = l / 4, column = l % 4 * 2;
      const uint64_t low = trans ? element(column, row) : element(row, column);
      const uint64_t high = trans ? element(column + 1, row) : element(row, column + 1);
      EXPECT_EQ(got[l], high << 16 | low);
    }
  }
}

// One matrix and two, whose last one is asked for: rows lie where lanes 0 to 15 say.
TEST(WarpTest, LdmatrixDealsOneMatrixOrTwo) {
  for (const int n : {1, 2}) {
    for (const bool trans : {false, true}) {
      const auto got = Lanes(
          ".shared .align 16 .b8 s[512];\nmov.u32 %r3, s;\nxor.b32 %r4, %r1, 5;\nshl.b32 %r4, %r4, "
          "4;\nadd.s32 %r3, %r3, %r4;\n"
          "mul.lo.s32 %r5, %r1, 0x80008;\nadd.s32 %r5, %r5, 0x10000;\nst.shared.u32 [%r3], %r5;\n"
          "add.s32 %r5, %r5, 0x20002;\nst.shared.u32 [%r3+4], %r5;\nadd.s32 %r5, %r5, 0x20002;\n"
          "st.shared.u32 [%r3+8], %r5;\nadd.s32 %r5, %r5, 0x20002;\nst.shared.u32 [%r3+12], %r5;\n"
          "bar.sync 0;\nldmatrix.sync.aligned.m8n8.x" +
              std::to_string(n) + (trans ? ".trans" : "") + ".shared.b16 " +
              (n == 1 ? "{%r9}" : "{%r8, %r9}") + ", [%r3];\n",
          Numbers(32));
      const uint64_t first = n == 1 ? 0 : 8;
      for (uint64_t l = 0; l < 32; ++l) {
        const auto element = [&](uint64_t row, uint64_t column) {
          return (first + row) * 8 + column;
        };
        const uint64_t row = l / 4, column = l % 4 * 2;
        const uint64_t low = trans ? element(column, row) : element(row, column);
        const uint64_t high = trans ? element(column + 1, row) : element(row, column + 1);
        ASSERT_EQ(got[l], high << 16 | low) << n << trans;
      }
    }
  }
}

}  // namespace
}  // namespace cusim::testing
