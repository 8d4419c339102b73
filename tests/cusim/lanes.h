// Runs single instructions, written as PTX text, on many operands.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "tests/cusim/exec.h"
#include "tests/cusim/number.h"

namespace cusim::testing {

inline std::string ModuleText(const std::string& entry) {
  return ".version 9.0\n.target sm_80\n.address_size 64\n" + entry;
}

// Device memory with kernels of a text.
class Device {
 public:
  Device() : memory_(1ull << 30, 1ull << 30) {}
  uint64_t Put(const std::vector<uint64_t>& values) {
    const uint64_t at = memory_.Allocate(values.size() * 8 + 8);
    std::memcpy(memory_.Host(at), values.data(), values.size() * 8);
    memory_.MarkWritten(at, values.size() * 8);
    return at;
  }
  std::vector<uint64_t> Take(uint64_t at, size_t n) const {
    std::vector<uint64_t> values(n);
    std::memcpy(values.data(), memory_.Host(at), n * 8);
    return values;
  }
  Outcome Run(const std::string& entry, Dim grid, Dim block, const std::vector<uint64_t>& params,
              const Options& options = {}, uint64_t shared = 0) {
    const std::string text = ModuleText(entry);
    cusim::Module module(text, [&](const Variable& v) {
      const uint64_t at = memory_.Allocate(v.bytes);
      std::vector<uint8_t> bytes = v.init;
      bytes.resize(v.bytes);
      std::memcpy(memory_.Host(at), bytes.data(), v.bytes);
      memory_.MarkWritten(at, v.bytes);
      return at;
    });
    return Launch(memory_, *module.Read(module.kernels().at(0)), grid, block, shared, params.data(),
                  options);
  }
  DeviceMemory& memory() { return memory_; }

 private:
  DeviceMemory memory_;
};

struct OneOp {
  std::string text;         // "add.s32": the operands are added; as it is where it names %d itself
  int d_bits = 32;          // of the result's register
  std::vector<int> s_bits;  // of the operands' registers
  std::string tail;         // further operands: ", 0x1234"
};

inline std::string Entry(const OneOp& op) {
  std::string text =
      ".visible .entry k(.param .u64 o, .param .u64 i0, .param .u64 i1, .param .u64 i2,"
      " .param .u64 i3, .param .u32 n)\n{\n.reg .pred %p<4>;\n.reg .b32 %r<9>;\n.reg .b16 %h<4>;\n"
      ".reg .b64 %rd<9>;\n";
  for (size_t i = 0; i < op.s_bits.size(); ++i) {
    text += ".reg .b" + std::to_string(op.s_bits[i]) + " %s" + std::to_string(i) + ";\n";
  }
  text += ".reg .b" + std::to_string(op.d_bits) + " %d;\n";
  text +=
      "mov.u32 %r0, %tid.x;\nmov.u32 %r1, %ctaid.x;\nmov.u32 %r2, %ntid.x;\n"
      "mad.lo.s32 %r3, %r1, %r2, %r0;\nld.param.u32 %r4, [n];\nsetp.ge.u32 %p0, %r3, %r4;\n"
      "@%p0 bra DONE;\nmul.wide.u32 %rd0, %r3, 8;\n";
  const bool whole = op.text.find("%d") != std::string::npos;
  std::string call = op.text + (whole ? "" : " %d");
  for (size_t i = 0; i < op.s_bits.size(); ++i) {
    const std::string n = std::to_string(i);
    text += "ld.param.u64 %rd1, [i" + n + "];\nadd.s64 %rd1, %rd1, %rd0;\nld.global.b" +
            std::to_string(op.s_bits[i]) + " %s" + n + ", [%rd1];\n";
    if (!whole) call += ", %s" + n;
  }
  return text + call + op.tail +
         ";\nld.param.u64 %rd2, [o];\nadd.s64 %rd2, %rd2, %rd0;\nst.global.b" +
         std::to_string(op.d_bits) + " [%rd2], %d;\nDONE:\nret;\n}\n";
}

// The instruction's result for each row of operands.
inline std::vector<uint64_t> RunOp(const OneOp& op, const std::vector<std::vector<uint64_t>>& s) {
  Device device;
  const size_t n = s.at(0).size();
  const uint64_t out = device.Put(std::vector<uint64_t>(n));
  std::vector<uint64_t> params = {out, 0, 0, 0, 0, n};
  for (size_t i = 0; i < s.size(); ++i) params[1 + i] = device.Put(s[i]);
  const Outcome ran = device.Run(Entry(op), {static_cast<uint32_t>((n + 63) / 64)}, {64}, params);
  for (const Report& r : ran.reports) ADD_FAILURE() << r.kind << ": " << r.text;
  return device.Take(out, n);
}

// Random bits among the operands that go wrong: zeros, ones, extremes, infinities, NaNs, ties.
inline std::vector<uint64_t> Operands(int bits, size_t n, uint64_t seed, bool real = false) {
  std::mt19937_64 random(seed);
  std::vector<uint64_t> edges = {0, 1, 2, 31, 32, 33, 63, 64, 127, 128, 255, ~0ull, ~1ull};
  edges.push_back(1ull << (bits - 1));
  edges.push_back((1ull << (bits - 1)) - 1);
  edges.push_back((1ull << (bits - 1)) + 1);
  if (real) {
    const int mantissa = bits == 64 ? 52 : bits == 32 ? 23 : 10;
    const uint64_t infinity = ((1ull << (bits - 1 - mantissa)) - 1) << mantissa;
    const uint64_t one = infinity >> 1 & ~((1ull << mantissa) - 1);
    for (const uint64_t v : std::initializer_list<uint64_t>{
             infinity, infinity + 1, infinity | 1ull << (mantissa - 1), infinity - 1, one, one + 1,
             one - 1, 1ull << mantissa, (1ull << mantissa) - 1}) {
      edges.push_back(v);
      edges.push_back(v | 1ull << (bits - 1));
    }
  }
  std::vector<uint64_t> values(n);
  for (uint64_t& v : values) v = random() % 3 == 0 ? edges[random() % edges.size()] : random();
  if (real) {  // more of what is near one: sums that round
    for (uint64_t& v : values) {
      if (random() % 2 == 0) continue;
      const double x = std::ldexp(static_cast<double>(random() >> 11), -53 + int(random() % 5));
      v = bits == 64 ? cusim::Put(x) : bits == 32 ? cusim::Put(static_cast<float>(x)) : v;
    }
  }
  if (bits < 64) {
    for (uint64_t& v : values) v &= (1ull << bits) - 1;
  }
  return values;
}

}  // namespace cusim::testing
