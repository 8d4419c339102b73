// Written by scripts/make_real_table.py; do not edit.
// clang-format off
#pragma once

#include <cstdint>

#ifndef DT_NUMBERS  // as device code: tensor/cuda/math.h
#define DT_NUMBERS static constexpr
#endif

namespace dtensor {

// 2 / pi behind the binary point, 64 bits a word.
inline constexpr uint64_t kTwoOverPi[20] = {
    0xa2f9836e4e441529, 0xfc2757d1f534ddc0, 0xdb6295993c439041, 0xfe5163abdebbc561,
    0xb7246e3a424dd2e0, 0x06492eea09d1921c, 0xfe1deb1cb129a73e, 0xe88235f52ebb4484,
    0xe99c7026b45f7e41, 0x3991d639835339f4, 0x9c845f8bbdf9283b, 0x1ff897ffde05980f,
    0xef2f118b5a0a6d1f, 0x6d367ecf27cb09b7, 0x4f463f669e5fea2d, 0x7527bac7ebe5f17b,
    0x3d0739f78a5292ea, 0x6bfb5fb11f8d5d08, 0x56033046fc7b6bab, 0xf0cfbc209af4361d};
// (1 + 2x) exp(x^2) erfc(x) in powers of (x - 3) / (x + 3).
DT_NUMBERS double kErfcx[27] = {
    0x1.40c522d7e4987p+0, -0x1.15c084bb9e8f3p-3, -0x1.85a15c58aa606p-5, 0x1.098366a5b4701p-3,
    -0x1.e88b803a48aa0p-4, 0x1.17ca2877effabp-4, -0x1.8574c40c0e1f8p-6, 0x1.4b884e464a11bp-9,
    0x1.ef1bdd83c530dp-10, -0x1.98db51673633ep-11, -0x1.b91295815c4d8p-14, 0x1.065a3f813e29bp-13,
    0x1.4c30285db7294p-18, -0x1.513c76b5fc688p-16, -0x1.899a713ec7e9ap-21, 0x1.d22433a611e6cp-19,
    0x1.82f78c98d8baap-22, -0x1.4b8d0b0794184p-21, -0x1.3b519c66b707fp-23, 0x1.b96fc70953a87p-24,
    0x1.934e3940cd31cp-25, -0x1.ddcfc080be09bp-27, -0x1.93317028bf6ddp-27, 0x1.4a654198bfd96p-30,
    0x1.1b7c6c144577bp-29, -0x1.2f98d06214628p-35, -0x1.9dd79d26cbb94p-33};

}  // namespace dtensor
// clang-format on
