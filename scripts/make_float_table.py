#!/usr/bin/env python3
"""Writes ops/cpu/float_table.h: polynomials for the float32 functions of ops/cpu.

Needs mpmath (pip). Each is the one of its degree whose greatest error, relative to the function
that it is part of, is least (Remez's exchange), before its coefficients are rounded to float32.
"""
import textwrap

from mpmath import mp, mpf

mp.dps = 50
TINY = mpf(10) ** -8


def extremes(errors, n):
    """Where the greatest errors between two changes of sign are, n of them if there are so many."""
    peaks, best = [], 0
    for i in range(1, len(errors)):
        if (errors[i] > 0) != (errors[best] > 0):
            peaks.append(best)
            best = i
        elif abs(errors[i]) > abs(errors[best]):
            best = i
    peaks.append(best)
    while len(peaks) > n:
        peaks.pop(0 if abs(errors[peaks[0]]) < abs(errors[peaks[-1]]) else -1)
    return peaks


def fit(f, weight, low, high, degree):
    """Coefficients of p with the least max |weight (p - f)| on [low, high]."""
    low, high, n = mpf(low), mpf(high), degree + 2

    def nodes(count):
        return [(low + high) / 2 - (high - low) / 2 * mp.cos(mp.pi * i / (count - 1))
                for i in range(count)]

    fine, at = nodes(401), nodes(n)
    for _ in range(12):
        system, values = mp.matrix(n, n), mp.matrix(n, 1)
        for i, x in enumerate(at):
            for j in range(degree + 1):
                system[i, j] = x ** j
            system[i, degree + 1] = (-1) ** i / weight(x)
            values[i] = f(x)
        p = list(mp.lu_solve(system, values))[:degree + 1]
        errors = [weight(x) * (mp.polyval(p[::-1], x) - f(x)) for x in fine]
        peaks = extremes(errors, n)
        if len(peaks) < n:
            break
        at = [fine[i] for i in peaks]
    return p, max(abs(e) for e in errors)


def fit_quotient(f, over, under, high):
    """(1 + a z + ...) / (1 + b z + ...), of so many coefficients each, with the least relative
    error, weighed to be less beside 0, from 0 to high: a, ..., b, ... By Remez's exchange, the
    equations made linear with the denominator of the turn before."""
    high, n = mpf(high), over + under + 1
    weight = lambda z: z + mpf("0.01")

    def nodes(count):
        return [high * (1 - mp.cos(mp.pi * i / (count - 1))) / 2 for i in range(count)]

    def one_and(p, z):
        return 1 + z * mp.polyval(p[::-1], z)

    fine, at, q = nodes(801), [z + high / 1000 for z in nodes(n)], [mpf(0)] * under
    for _ in range(25):
        system, values = mp.matrix(n, n), mp.matrix(n, 1)
        for i, z in enumerate(at):
            for j in range(over):
                system[i, j] = z ** (j + 1)
            for j in range(under):
                system[i, over + j] = -f(z) * z ** (j + 1)
            system[i, n - 1] = (-1) ** i * one_and(q, z) * f(z) * weight(z)
            values[i] = f(z) - 1
        solved = list(mp.lu_solve(system, values))
        p, q = solved[:over], solved[over:over + under]
        errors = [(one_and(p, z) / one_and(q, z) / f(z) - 1) / weight(z) for z in fine]
        peaks = extremes(errors, n)
        if len(peaks) < n:
            break
        at = [fine[i] for i in peaks]
    return p + q, max(abs(e * weight(z)) for e, z in zip(errors, fine))


def emit(name, what, p, error):
    bits = float(mp.log(error, 2))
    print(f"// {what}; relative error 2^{bits:.1f}.")
    values = ", ".join(f"{mp.nstr(c, 9, min_fixed=0, max_fixed=0)}f" for c in p)
    print(textwrap.fill(f"DT_NUMBERS float {name}[{len(p)}] = {{{values}}};", 100,
                        subsequent_indent="    "))


def odd(f):
    """(f(r) / r - 1) / r^2 as a function of z = r^2."""
    def g(z):
        r = mp.sqrt(max(z, TINY))
        return (f(r) / r - 1) / (r * r)
    return g


def erfcx(t):
    x = mpf("2.5") * (1 + 2 * t) / (1 - 2 * t)
    return (x + mpf("2.5")) * mp.exp(x * x) * mp.erfc(x)


def erfinv_of(w):
    """erfinv(x) / x where w = -log(1 - x^2)."""
    if w < TINY:
        return mp.sqrt(mp.pi) / 2
    x = mp.sqrt(-mp.expm1(-w))
    left = mp.exp(-w) / (1 + x)  # 1 - x
    y = mp.sqrt(w)
    for _ in range(40):
        y += (mp.erfc(y) - left) * mp.sqrt(mp.pi) / 2 * mp.exp(y * y)
    return y / x


def main():
    print("// Written by scripts/make_float_table.py; do not edit.")
    print("// clang-format off")
    half = mp.log(2) / 2 * mpf("1.01")
    q = lambda r: (mp.expm1(r) - r) / r ** 2 if abs(r) > TINY else mpf(1) / 2 + r / 6
    emit("kExp", "(expm1(r) - r) / r^2 within ln(2) / 2",
         *fit(q, lambda r: (r * r + TINY) / mp.exp(r), -half, half, 4))
    root = mp.sqrt(2)
    log_rest = lambda f: ((mp.log1p(f) - f + f * f / 2) / f ** 3 if abs(f) > TINY
                          else mpf(1) / 3 - f / 4)
    emit("kLog", "(log1p(f) - f + f^2 / 2) / f^3 from 1 / sqrt(2) to sqrt(2)",
         *fit(log_rest, lambda f: f * f + TINY, 1 / root - 1, root - 1, 8))
    near = lambda z: (lambda x: mp.erf(x) / x - 1)(mp.sqrt(max(z, TINY)))
    emit("kErfNear", "erf(x) / x - 1 in z = x^2, x <= 0.8",
         *fit(near, lambda z: 1 / (near(z) + 1), 0, "0.6401", 5))
    emit("kErfFar", "log(erfc(x)) from 0.79 to 3.95",
         *fit(lambda x: mp.log(mp.erfc(x)), lambda x: mp.erfc(x) / mp.erf(x), "0.79", "3.95", 7))
    sigma = mp.sqrt(2)
    beyond = lambda x: (mp.log(mp.erfc(x / sigma), 2) / x if x > TINY
                        else -mp.sqrt(2 / mp.pi) / mp.log(2))
    weight = lambda x: (x + TINY) * mp.log(2) * (mp.erfc(x / sigma) + mpf(2) ** -6)
    emit("kBeyond", "log2(erfc(x / sqrt(2))) / x, x <= 5.6, weighed by erfc + 2^-6",
         *fit(beyond, weight, 0, "5.6", 9))
    exp2 = lambda r: mp.expm1(r * mp.log(2)) / r if abs(r) > TINY else mp.log(2)
    emit("kExp2", "(2^r - 1) / r within 1 / 2",
         *fit(exp2, lambda r: (abs(r) + TINY) / mp.power(2, r), "-0.501", "0.501", 5))
    emit("kErfcNear", "erf(x) / x - 1 in z = x^2, x <= 1 / 2",
         *fit(near, lambda z: 1 / (near(z) + 1), 0, "0.2501", 4))
    emit("kErfcxF32", "(x + 2.5) exp(x^2) erfc(x) in x / (x + 2.5) - 0.5 from 0.49 to 10.1",
         *fit(erfcx, lambda t: 1 / erfcx(t), "-0.3362", "0.3016", 8))
    quarter = (mp.pi / 4 * mpf("1.002")) ** 2
    emit("kSin", "(sin(r) / r - 1) / z in z = r^2 within pi / 4",
         *fit(odd(mp.sin), lambda z: z + TINY, 0, quarter, 3))
    cos_rest = lambda z: ((mp.cos(mp.sqrt(z)) - 1 + z / 2) / z ** 2 if z > mpf(10) ** -6
                          else mpf(1) / 24 - z / 720)
    emit("kCos", "(cos(r) - 1 + z / 2) / z^2 in z = r^2 within pi / 4",
         *fit(cos_rest, lambda z: z * z + mpf("0.001"), 0, quarter, 2))
    tan_over = lambda z: mp.tan(mp.sqrt(z)) / mp.sqrt(z) if z > TINY else 1 + z / 3
    emit("kTan", "tan(r) / r = (1 + [0] z) / (1 + [1] z + ...) in z = r^2 within pi / 4",
         *fit_quotient(tan_over, 1, 3, quarter))
    arc = odd(mp.atan)
    emit("kAtan", "(atan(t) / t - 1) / z in z = t^2, t <= 1",
         *fit(arc, lambda z: z / (1 + z * arc(z)) + TINY, 0, 1, 8))
    emit("kAsin", "(asin(t) / t - 1) / z in z = t^2, t <= 1 / 2",
         *fit(odd(mp.asin), lambda z: z + TINY, 0, "0.2501", 5))
    centre = lambda u: erfinv_of(u + mpf("2.5"))
    emit("kErfinvNear", "erfinv(x) / x in w - 2.5, w = -log(1 - x^2) <= 5",
         *fit(centre, lambda u: 1 / centre(u), "-2.5", "2.5", 9))
    tail = lambda u: erfinv_of((u + 3) ** 2)
    emit("kErfinvFar", "erfinv(x) / x in sqrt(w) - 3, w >= 5",
         *fit(tail, lambda u: 1 / tail(u), mp.sqrt(5) - 3, "1.1", 9))
    print("// clang-format on")


if __name__ == "__main__":
    main()
