// exp and log of float64 from + - * / and words alone, so that every processor gives the same bits;
// the last place is not always the nearest. Nothing in between is a subnormal number.
//
// Argument reduction as in Tang, "Table-driven implementation of the exponential function in IEEE
// floating-point arithmetic", ACM TOMS 15(2), 1989, without the table.
#pragma once

#include "fixedpoint.h"

namespace truncdet {

constexpr double kLog2E = 1.4426950408889634;
// ln 2 in two parts; 33 bits of the first, so that its product with an exponent is exact.
constexpr double kLn2High = 6.93147180369123816490e-01;
constexpr double kLn2Low = 1.90821492927058770002e-10;
// Between these no power of two overflows or is subnormal; beyond them lie infinity and zero.
constexpr double kExpMax = 709.0, kExpMin = -708.0;
constexpr double kSqrt2 = 1.4142135623730951;

// Taylor's series on [-ln(2)/2, ln(2)/2], where the first term left out is below 2^-57.
TRUNCDET_HD double exp_fixed(double x) {
  if (is_nan(x)) return canonical_nan<double>();
  if (x > kExpMax) return bit_copy<double>(infinity_word<double>());
  if (x < kExpMin) return 0.0;
  const int64_t k = round_to_int64(x * kLog2E);
  const double n = static_cast<double>(k);
  const double r = (x - n * kLn2High) - n * kLn2Low;
  double sum = 1.0 / 6227020800.0;
  sum = sum * r + 1.0 / 479001600.0;
  sum = sum * r + 1.0 / 39916800.0;
  sum = sum * r + 1.0 / 3628800.0;
  sum = sum * r + 1.0 / 362880.0;
  sum = sum * r + 1.0 / 40320.0;
  sum = sum * r + 1.0 / 5040.0;
  sum = sum * r + 1.0 / 720.0;
  sum = sum * r + 1.0 / 120.0;
  sum = sum * r + 1.0 / 24.0;
  sum = sum * r + 1.0 / 6.0;
  sum = sum * r + 0.5;
  sum = sum * r + 1.0;
  sum = sum * r + 1.0;
  return sum * power_of_two(0.0, static_cast<int>(k));
}

// Twice the series of artanh((m - 1) / (m + 1)) for m in (1/sqrt(2), sqrt(2)]; `x` is normal and
// positive.
TRUNCDET_HD double log_fixed(double x) {
  const uint64_t word = bit_copy<uint64_t>(x);
  const int bits = fraction_bits<double>();
  int k = static_cast<int>(word >> bits) - Format<double>::kMaxExponent;
  const uint64_t fraction = word & ((uint64_t(1) << bits) - 1);
  double m = bit_copy<double>(fraction | (uint64_t(Format<double>::kMaxExponent) << bits));
  if (m > kSqrt2) {
    m = m * 0.5;
    k = k + 1;
  }
  const double f = m - 1.0;
  const double s = f / (2.0 + f);
  const double z = s * s;
  double sum = 1.0 / 21.0;
  sum = sum * z + 1.0 / 19.0;
  sum = sum * z + 1.0 / 17.0;
  sum = sum * z + 1.0 / 15.0;
  sum = sum * z + 1.0 / 13.0;
  sum = sum * z + 1.0 / 11.0;
  sum = sum * z + 1.0 / 9.0;
  sum = sum * z + 1.0 / 7.0;
  sum = sum * z + 1.0 / 5.0;
  sum = sum * z + 1.0 / 3.0;
  const double n = static_cast<double>(k), twice = s + s;
  return n * kLn2High + (twice + (twice * z * sum + n * kLn2Low));
}

// log(exp(a) + exp(b) + exp(c)); minus infinity stands for a probability of zero.
TRUNCDET_HD double log_sum_fixed(double a, double b, double c) {
  double largest = b > a ? b : a;
  largest = c > largest ? c : largest;
  const double minus_infinity = -bit_copy<double>(infinity_word<double>());
  if (largest == minus_infinity) largest = 0.0;  // infinities must not be subtracted
  const double sum = (exp_fixed(a - largest) + exp_fixed(b - largest)) + exp_fixed(c - largest);
  if (sum == 0.0) return minus_infinity;
  return is_nan(sum) ? sum : log_fixed(sum) + largest;
}

// A number of any storage type as it is. Conversions of the hardware may flush subnormal numbers.
TRUNCDET_HD double to_double(double x) { return x; }
TRUNCDET_HD double to_double(float x) {
  const uint32_t word = magnitude_word<float>(x);
  if (word == 0 || word >= uint32_t(1) << fraction_bits<float>()) return static_cast<double>(x);
  const double size = static_cast<double>(word) * power_of_two(0.0, -149);
  return is_negative(x) ? -size : size;
}

// A float64 in a storage type, rounded once; zero has no sign and NaN is canonical.
template <class T>
TRUNCDET_HD T round_double(double x) {
  using Word = typename Format<T>::Word;
  if (is_nan(x)) return canonical_nan<T>();
  const bool negative = is_negative(x);
  const uint64_t word = magnitude_word<double>(x);
  if (word == infinity_word<double>()) {
    return nonfinite_value<T>(negative ? kSawMinusInf : kSawPlusInf);
  }
  const int bits = fraction_bits<double>();
  const int field = static_cast<int>(word >> bits);
  uint64_t significand = word & ((uint64_t(1) << bits) - 1);
  if (field != 0) significand |= uint64_t(1) << bits;
  if (significand == 0) return bit_copy<T>(Word(0));
  const int exponent = (field != 0 ? field : 1) + Format<double>::kMinExponent - 1 - bits;
  return round_scaled<T>(negative, significand, exponent);
}

}  // namespace truncdet
