// Written by scripts/make_float_table.py; do not edit.
// clang-format off
// (expm1(r) - r) / r^2 within ln(2) / 2; relative error 2^-28.2.
DT_NUMBERS float kExp[5] = {4.99999931e-1f, 1.66665148e-1f, 4.16684565e-2f, 8.36941872e-3f,
    1.38131605e-3f};
// (log1p(f) - f + f^2 / 2) / f^3 from 1 / sqrt(2) to sqrt(2); relative error 2^-30.4.
DT_NUMBERS float kLog[9] = {3.33333104e-1f, -2.49999866e-1f, 2.00022264e-1f, -1.66692508e-1f,
    1.42186613e-1f, -1.23843507e-1f, 1.18729567e-1f, -1.17897912e-1f, 6.91539281e-2f};
// erf(x) / x - 1 in z = x^2, x <= 0.8; relative error 2^-28.3.
DT_NUMBERS float kErfNear[6] = {1.28379164e-1f, -3.76126014e-1f, 1.12831123e-1f, -2.68207832e-2f,
    5.08508504e-3f, -6.53492947e-4f};
// log(erfc(x)) from 0.79 to 3.95; relative error 2^-32.1.
DT_NUMBERS float kErfFar[8] = {1.35336932e-4f, -1.12931707f, -6.33764184e-1f, -1.07802123e-1f,
    2.47985651e-2f, -4.04491943e-3f, 4.07587309e-4f, -1.87023647e-5f};
// log2(erfc(x / sqrt(2))) / x, x <= 5.6, weighed by erfc + 2^-6; relative error 2^-26.2.
DT_NUMBERS float kBeyond[10] = {-1.15110491f, -4.59213697e-1f, -5.2464789e-2f, 6.98326313e-3f,
    -3.03785878e-5f, -2.64992755e-4f, 7.22560209e-5f, -1.02660835e-5f, 7.96022364e-7f,
    -2.65085513e-8f};
// (2^r - 1) / r within 1 / 2; relative error 2^-28.9.
DT_NUMBERS float kExp2[6] = {6.93147203e-1f, 2.40226479e-1f, 5.55033185e-2f, 9.61843987e-3f,
    1.33991333e-3f, 1.53531483e-4f};
// erf(x) / x - 1 in z = x^2, x <= 1 / 2; relative error 2^-29.2.
DT_NUMBERS float kErfcNear[5] = {1.28379165e-1f, -3.76126031e-1f, 1.12826961e-1f, -2.67479783e-2f,
    4.69748571e-3f};
// (x + 2.5) exp(x^2) erfc(x) in x / (x + 2.5) - 0.5 from 0.49 to 10.1; relative error 2^-27.8.
DT_NUMBERS float kErfcxF32[9] = {1.05403182f, -1.60930379f, 1.81565798f, -1.36999749f,
    4.53672327e-1f, 2.68162057e-1f, -3.05529023e-1f, -5.05207243e-2f, 1.49983914e-1f};
// (sin(r) / r - 1) / z in z = r^2 within pi / 4; relative error 2^-37.5.
DT_NUMBERS float kSin[4] = {-1.66666666e-1f, 8.33332934e-3f, -1.98393194e-4f, 2.71816255e-6f};
// (cos(r) - 1 + z / 2) / z^2 in z = r^2 within pi / 4; relative error 2^-33.2.
DT_NUMBERS float kCos[3] = {4.16666469e-2f, -1.38873658e-3f, 2.44380351e-5f};
// tan(r) / r = (1 + [0] z) / (1 + [1] z + ...) in z = r^2 within pi / 4; relative error 2^-32.6.
DT_NUMBERS float kTan[4] = {-1.00130682e-1f, -4.33464015e-1f, 1.11546531e-2f, 1.08847052e-4f};
// (atan(t) / t - 1) / z in z = t^2, t <= 1; relative error 2^-28.5.
DT_NUMBERS float kAtan[9] = {-3.33332991e-1f, 1.99985484e-1f, -1.42642431e-1f, 1.09521924e-1f,
    -8.40346749e-2f, 5.79578559e-2f, -3.11780817e-2f, 1.09147212e-2f, -1.79364544e-3f};
// (asin(t) / t - 1) / z in z = t^2, t <= 1 / 2; relative error 2^-31.7.
DT_NUMBERS float kAsin[6] = {1.66666599e-1f, 7.50051213e-2f, 4.45154708e-2f, 3.18198272e-2f,
    1.43937628e-2f, 3.75782284e-2f};
// erfinv(x) / x in w - 2.5, w = -log(1 - x^2) <= 5; relative error 2^-27.4.
DT_NUMBERS float kErfinvNear[10] = {1.50140936f, 2.46640286e-1f, -4.17738678e-3f, -1.25274189e-3f,
    2.18344442e-4f, -4.96334271e-6f, -3.4627056e-6f, 4.66169464e-7f, 2.32327162e-8f,
    -8.79096592e-9f};
// erfinv(x) / x in sqrt(w) - 3, w >= 5; relative error 2^-26.5.
DT_NUMBERS float kErfinvFar[10] = {2.8329768f, 1.00167495f, 9.44519255e-3f, -7.6369553e-3f,
    5.68780742e-3f, -3.59898824e-3f, 1.48285683e-3f, -5.37631354e-5f, -3.0774924e-4f,
    1.13640441e-4f};
// clang-format on
