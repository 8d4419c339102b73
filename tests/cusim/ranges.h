// The memory that works of streams touch, to the byte.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace cusim {

inline constexpr uint64_t kPage = 512;
using PageBits = std::array<uint64_t, kPage / 64>;  // a bit for each byte of a page

struct Range {
  uint64_t low, high;
  bool write;
  // Sparse: it lies in one page, of which it has the bytes with a bit.
  bool sparse = false;
  PageBits bits{};
};
// A list of ranges as Meet and Covers take it: in order, without overlaps, joined where they touch.
void Tidy(std::vector<Range>* ranges);

// What a work of a stream did with one allocation.
struct Use {
  int stream = 0;
  uint64_t position = 0;
  std::string name;
  std::vector<Range> reads, writes;
};
// Whether two lists share a byte.
bool Meet(const std::vector<Range>& a, const std::vector<Range>& b);
// Whether two uses share a byte that one of them writes.
bool Clash(const Use& a, const Use& b);
// Whether each range of `old` is in one of `now`, so that who clashes with `old` clashes with
// `now`.
bool Covers(const Use& now, const Use& old);

}  // namespace cusim
