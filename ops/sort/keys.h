// Elements as unsigned numbers in the same order, for kernels that only compare: the largest number
// stands for NaN, of whatever sign, and zeros of both signs are one.
#pragma once

#include <cstdint>
#include <cstring>

#include "dtensor/tensor/dtype.h"

namespace dtensor {

// How a float type is laid out: an unsigned type as wide, and what an infinity looks like in it.
template <class T>
struct FloatBits;
template <>
struct FloatBits<double> {
  using Bits = uint64_t;
  static constexpr Bits kInfinity = 0x7FF0000000000000u;
};
template <>
struct FloatBits<float> {
  using Bits = uint32_t;
  static constexpr Bits kInfinity = 0x7F800000u;
};
template <>
struct FloatBits<BFloat16> {
  using Bits = uint16_t;
  static constexpr Bits kInfinity = 0x7F80u;
};
template <>
struct FloatBits<Half> {
  using Bits = uint16_t;
  static constexpr Bits kInfinity = 0x7C00u;
};

template <class T>
struct SortKey {  // of floats
  using Key = typename FloatBits<T>::Bits;
  static constexpr bool kHasNan = true;
  static constexpr Key kNan = static_cast<Key>(~Key{0});
  static Key Of(T value) {
    constexpr Key kSign = static_cast<Key>(Key{1} << (8 * sizeof(Key) - 1));
    Key bits;
    std::memcpy(&bits, &value, sizeof(bits));
    const Key size = static_cast<Key>(bits & ~kSign);
    if (size > FloatBits<T>::kInfinity) return kNan;
    if (size == 0) return kSign;
    return static_cast<Key>((bits & kSign) != 0 ? ~bits : bits | kSign);
  }
  // The element that has the key; NaN for keys of none.
  static T At(Key key) {
    constexpr Key kSign = static_cast<Key>(Key{1} << (8 * sizeof(Key) - 1));
    const Key bits = static_cast<Key>((key & kSign) != 0 ? key ^ kSign : ~key);
    T value;
    std::memcpy(&value, &bits, sizeof(bits));
    return value;
  }
  static constexpr Key kLeast =  // of minus infinity
      static_cast<Key>(~(FloatBits<T>::kInfinity | Key{1} << (8 * sizeof(Key) - 1)));
};
template <class K, K kFlip>
struct IntegerKey {
  using Key = K;
  static constexpr bool kHasNan = false;
  static constexpr Key kNan = static_cast<Key>(~Key{0});
  template <class T>
  static Key Of(T value) {
    return static_cast<Key>(static_cast<Key>(value) ^ kFlip);
  }
  static K At(Key key) { return static_cast<Key>(key ^ kFlip); }
  static constexpr Key kLeast = 0;
};
template <>
struct SortKey<int64_t> : IntegerKey<uint64_t, uint64_t{1} << 63> {};
template <>
struct SortKey<int32_t> : IntegerKey<uint32_t, uint32_t{1} << 31> {};
template <>
struct SortKey<uint8_t> : IntegerKey<uint8_t, 0> {};
template <>
struct SortKey<Bool> : IntegerKey<uint8_t, 0> {
  static Key Of(Bool value) { return value.value != 0 ? 1 : 0; }
  static Bool At(Key key) { return {static_cast<uint8_t>(key != 0 ? 1 : 0)}; }
};

}  // namespace dtensor
