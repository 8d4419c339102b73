// What trig_table.cc computes while it is compiled; device code has a table of its own.
#pragma once

#include "dtensor/ops/cpu/real_table.h"
#include "dtensor/ops/cpu/trig_table.h"

namespace dtensor {

// `count` bits of 2/pi from the one of weight 2^-(first + 1) on; before the point there are zeros.
constexpr uint64_t BitsOfTwoOverPi(int first, int count) {
  uint64_t bits = 0;
  for (int i = first; i < first + count; ++i) {
    bits = bits << 1 | (i < 0 ? 0 : kTwoOverPi[i / 64] >> (63 - i % 64) & 1);
  }
  return bits;
}

constexpr TrigTable MakeTrigTable() {
  TrigTable table = {};
  for (int r = 0; r < kTrigRows; ++r) {
    double unit = 0x1p-51;  // of the last of 53 bits, where the first counts 2
    for (int part = 0; part < 4; ++part, unit *= 0x1p-53) {
      const int first = (r - 1) - 52 - 2 + 53 * part;
      table.row[r][part] = static_cast<double>(BitsOfTwoOverPi(first, 53)) * unit;
    }
  }
  return table;
}

}  // namespace dtensor
