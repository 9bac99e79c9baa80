// Sine and cosine from + - * and conversions alone, so that host and device agree in every bit.
//
// Angles are reduced by quarter turns and Taylor's polynomials evaluated, all in double: the error
// is below 0.8 ulp of double, so that a result rounded to float32 has at most 0.5 ulp and 2^-28
// more (measured; the tests hold both). The reduction is that of Cody and Waite, "Software Manual
// for the Elementary Functions", 1980, with pi/2 in four parts.
#pragma once

#include "fixedpoint.h"

namespace truncdet {

// 2^20 quarter turns in radians, rounded down. Up to here a number of quarter turns times a part of
// pi/2 with 33 bits is exact.
constexpr double kLargestAngle = 1647099.0;

struct SineCosine {
  double sine, cosine;
};

// a + b = sum + error exactly (Knuth, The Art of Computer Programming vol. 2, 4.2.2, theorem B).
TRUNCDET_HD double exact_sum(double a, double b, double* error) {
  const double sum = a + b;
  const double back = sum - a;
  *error = (a - (sum - back)) + (b - back);
  return sum;
}

// `angle`: finite, in radians, at most kLargestAngle in magnitude.
TRUNCDET_HD SineCosine sine_cosine(double angle) {
  // pi/2 in three parts of 33 bits and what is left.
  constexpr double kFirst = 0x1.921fb544p+0, kSecond = 0x1.0b4611a6p-34;
  constexpr double kThird = 0x1.3198a2ep-69, kFourth = 0x1.b839a252049c1p-104;
  constexpr double kQuartersPerRadian = 0x1.45f306dc9c883p-1;
  const int64_t quarters = round_to_int64(angle * kQuartersPerRadian);
  const double turns = static_cast<double>(quarters);
  double error, more;
  // The first difference is exact, since its operands are close.
  double x = exact_sum(angle - turns * kFirst, -(turns * kSecond), &error);
  x = exact_sum(x, -(turns * kThird), &more);
  const double low = (error + more) - turns * kFourth;
  const double whole = x + low;
  const double rest = (x - whole) + low;  // x + low = whole + rest
  const double z = whole * whole;
  double s = 1.0 / 355687428096000;
  s = s * z - 1.0 / 1307674368000;
  s = s * z + 1.0 / 6227020800;
  s = s * z - 1.0 / 39916800;
  s = s * z + 1.0 / 362880;
  s = s * z - 1.0 / 5040;
  s = s * z + 1.0 / 120;
  s = s * z - 1.0 / 6;
  double c = 1.0 / 20922789888000;
  c = c * z - 1.0 / 87178291200;
  c = c * z + 1.0 / 479001600;
  c = c * z - 1.0 / 3628800;
  c = c * z + 1.0 / 40320;
  c = c * z - 1.0 / 720;
  c = c * z + 1.0 / 24;
  const double half = 0.5 * z, one_less = 1.0 - half;
  const double sine = whole + (whole * (z * s) + rest * one_less);
  // (1 - one_less) - half is what rounding 1 - half lost.
  const double cosine = one_less + (((1.0 - one_less) - half) + (z * (z * c) - whole * rest));
  switch (quarters & 3) {
    case 0:
      return {sine, cosine};
    case 1:
      return {cosine, -sine};
    case 2:
      return {-sine, -cosine};
    default:
      return {-cosine, sine};
  }
}

}  // namespace truncdet
