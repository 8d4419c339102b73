// 2/pi * 2^(e - 52) modulo 4 for every exponent e of a float64, as four numbers of 53 bits each.
#pragma once

namespace dtensor {

inline constexpr int kTrigRows = 1025;  // of the exponents -1 .. 1023
struct TrigTable {
  double row[kTrigRows][4];
};
#ifndef __CUDACC__  // whose files make one in the device's memory
extern const TrigTable kTrigTable;
#endif

}  // namespace dtensor
