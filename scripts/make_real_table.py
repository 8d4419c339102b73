#!/usr/bin/env python3
"""Writes ops/cpu/real_table.h: the bits of 2/pi, and a polynomial for erfcx.

Needs mpmath (pip). (1 + 2x) exp(x^2) erfc(x) is smooth in t = (x - 3) / (x + 3), which takes
0 <= x < inf to [-1, 1) (Shepherd and Laframboise, Math. Comp. 36, 1981): its Chebyshev series is
cut where the terms are below the rounding error, and written out in powers of t.
"""
import textwrap

import mpmath as mp

mp.mp.dps = 500  # for the bits of 2/pi
CENTRE = 3
DEGREE = 26


def scaled_erfcx(x):
    if x < 40:
        return (1 + 2 * x) * mp.exp(x * x) * mp.erfc(x)
    term = total = mp.mpf(1)  # the asymptotic series
    for k in range(1, 40):
        term *= -(2 * k - 1) / (2 * x * x)
        total += term
    return (2 + 1 / x) * total / mp.sqrt(mp.pi)


def powers_of_t():
    mp.mp.dps = 60
    n = 48
    angles = [mp.pi * (j + mp.mpf(1) / 2) / n for j in range(n)]
    values = [scaled_erfcx(CENTRE * (1 + mp.cos(a)) / (1 - mp.cos(a))) for a in angles]
    series = [2 * sum(v * mp.cos(k * a) for v, a in zip(values, angles)) / n
              for k in range(DEGREE + 1)]
    series[0] /= 2
    before, chebyshev = [mp.mpf(1)], [mp.mpf(0), mp.mpf(1)]  # T_k and T_(k + 1) in powers of t
    powers = [mp.mpf(0)] * (DEGREE + 1)
    for c in series:
        for i, factor in enumerate(before):
            powers[i] += c * factor
        following = [mp.mpf(0)] + [2 * f for f in chebyshev]
        for i, factor in enumerate(before):
            following[i] -= factor
        before, chebyshev = chebyshev, following
    return powers


def emit(declaration, values):
    print(declaration + " = {")
    print(textwrap.fill(", ".join(values) + "};", 100, initial_indent="    ",
                        subsequent_indent="    "))


words = int(mp.floor(mp.mpf(2) ** (64 * 20) * 2 / mp.pi))
print("// Written by scripts/make_real_table.py; do not edit.")
print("// clang-format off")
print("#pragma once")
print()
print("#include <cstdint>")
print()
print("#ifndef DT_NUMBERS  // as device code: tensor/cuda/math.h")
print("#define DT_NUMBERS static constexpr")
print("#endif")
print()
print("namespace dtensor {")
print()
print("// 2 / pi behind the binary point, 64 bits a word.")
emit("inline constexpr uint64_t kTwoOverPi[20]",
     [f"0x{(words >> (64 * (19 - i))) & (2**64 - 1):016x}" for i in range(20)])
print("// (1 + 2x) exp(x^2) erfc(x) in powers of (x - 3) / (x + 3).")
emit(f"DT_NUMBERS double kErfcx[{DEGREE + 1}]", [float(p).hex() for p in powers_of_t()])
print()
print("}  // namespace dtensor")
print("// clang-format on")
