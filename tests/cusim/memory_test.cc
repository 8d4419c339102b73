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
