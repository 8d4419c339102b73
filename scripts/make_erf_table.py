#!/usr/bin/env python3
"""Writes ops/cpu/erf_table.h: Taylor coefficients of erf around equally spaced centres.

Needs mpmath (pip). erf is entire and its Taylor coefficients around c follow from
d/dx erf = 2/sqrt(pi) exp(-x^2), so a short polynomial per centre reaches the rounding error.
"""
import textwrap

import mpmath as mp

mp.mp.dps = 40


def rows(step, last, degree):
    count = int(round(last / step)) + 1
    return [mp.taylor(mp.erf, i * mp.mpf(step), degree) for i in range(count)]


def emit(name, step, last, degree, width):
    table = rows(step, last, degree)
    print(f"DT_NUMBERS double {name}[{len(table)}][{width}] = {{")
    for row in table:
        vals = [float(v) for v in row] + [0.0] * (width - len(row))
        text = ", ".join(v.hex() for v in vals)
        print(textwrap.fill("{" + text + "},", 100, initial_indent="    ",
                            subsequent_indent="     "))
    print("};")


print("#ifndef DT_NUMBERS  // Written by scripts/make_erf_table.py; do not edit. By powers of h:")
print("#define DT_NUMBERS static constexpr  // erf(i / 4 + h), |h| <= 1 / 8")
print("#endif                               // clang-format off")
emit("kErfF64", 0.25, 6.0, 15, 16)
print("// clang-format on")
