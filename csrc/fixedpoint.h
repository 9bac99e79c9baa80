// The number format: contributions become int64 multiples of 2^-s, integer addition is associative,
// and one final rounding leads back to the destination format. Shared by host and device.
//
// Everything here works on words and integers, or on float operations whose operands and results
// are normal numbers, so flush-to-zero and denormals-are-zero modes cannot change a bit.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__CUDACC__)
#define TRUNCDET_HD __host__ __device__ __forceinline__
#else
#define TRUNCDET_HD inline
#endif

namespace truncdet {

// Bits an int64 partial sum may use: |sum| <= 2^62 (1 + 2^-4) < 2^63 for at most 2^20 roundings
// inside one contribution.
constexpr int kSumBits = 62;
// More contributions than this would leave no bit for the sum itself.
constexpr int kMaxHeadroom = 60;

// Raw 16-bit storage: a type of its own, so that nothing converts it by accident.
struct half_t {
  uint16_t word;
};
struct bfloat16_t {
  uint16_t word;
};

// Binary formats by precision (implicit bit counted) and exponent range.
template <class T>
struct Format;
template <>
struct Format<half_t> {
  using Word = uint16_t;
  using Compute = float;
  static constexpr int kPrecision = 11, kMinExponent = -14, kMaxExponent = 15;
};
template <>
struct Format<bfloat16_t> {
  using Word = uint16_t;
  using Compute = float;
  static constexpr int kPrecision = 8, kMinExponent = -126, kMaxExponent = 127;
};
template <>
struct Format<float> {
  using Word = uint32_t;
  using Compute = float;
  static constexpr int kPrecision = 24, kMinExponent = -126, kMaxExponent = 127;
};
template <>
struct Format<double> {
  using Word = uint64_t;
  using Compute = double;
  static constexpr int kPrecision = 53, kMinExponent = -1022, kMaxExponent = 1023;
};

template <class To, class From>
TRUNCDET_HD To bit_copy(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_copy keeps the size");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

TRUNCDET_HD int bit_length(uint64_t x) {
#if defined(__CUDA_ARCH__)
  return 64 - __clzll(static_cast<long long>(x));
#else
  return x == 0 ? 0 : 64 - __builtin_clzll(x);
#endif
}
using uint128 = unsigned __int128;
using int128 = __int128;
TRUNCDET_HD int bit_length128(uint128 x) {
  const uint64_t high = static_cast<uint64_t>(x >> 64);
  return high != 0 ? 64 + bit_length(high) : bit_length(static_cast<uint64_t>(x));
}

template <class T>
constexpr int fraction_bits() {
  return Format<T>::kPrecision - 1;
}
template <class T>
constexpr int exponent_mask() {
  return 2 * Format<T>::kMaxExponent + 1;
}
template <class T>
TRUNCDET_HD typename Format<T>::Word infinity_word() {
  using Word = typename Format<T>::Word;
  return static_cast<Word>(static_cast<Word>(exponent_mask<T>()) << fraction_bits<T>());
}
template <class T>
TRUNCDET_HD typename Format<T>::Word magnitude_word(T value) {
  using Word = typename Format<T>::Word;
  const Word sign = static_cast<Word>(Word(1) << (8 * sizeof(Word) - 1));
  return static_cast<Word>(bit_copy<Word>(value) & static_cast<Word>(~sign));
}
template <class T>
TRUNCDET_HD bool is_finite(T value) {
  return magnitude_word<T>(value) < infinity_word<T>();
}
template <class T>
TRUNCDET_HD bool is_nan(T value) {
  return magnitude_word<T>(value) > infinity_word<T>();
}
template <class T>
TRUNCDET_HD bool is_negative(T value) {
  using Word = typename Format<T>::Word;
  return (bit_copy<Word>(value) >> (8 * sizeof(Word) - 1)) != 0;
}
template <class T>
TRUNCDET_HD T canonical_nan() {
  using Word = typename Format<T>::Word;
  const Word quiet = static_cast<Word>(Word(1) << (fraction_bits<T>() - 1));
  return bit_copy<T>(static_cast<Word>(infinity_word<T>() | quiet));
}

// Exact widening of a stored value to the type contributions are computed in.
TRUNCDET_HD float widen(float value) { return value; }
TRUNCDET_HD double widen(double value) { return value; }
TRUNCDET_HD float widen(bfloat16_t value) {
  return bit_copy<float>(static_cast<uint32_t>(value.word) << 16);
}
TRUNCDET_HD float widen(half_t value) {
  const uint32_t sign = static_cast<uint32_t>(value.word & 0x8000u) << 16;
  uint32_t exponent = (value.word >> 10) & 31u;
  uint32_t fraction = value.word & 0x3ffu;
  if (exponent == 31u) return bit_copy<float>(sign | 0x7f800000u | (fraction << 13));
  if (exponent == 0u) {
    if (fraction == 0u) return bit_copy<float>(sign);
    // A subnormal half is a normal float: shift its leading bit to the implicit place.
    const int shift = 11 - bit_length(fraction);
    fraction = (fraction << shift) & 0x3ffu;
    return bit_copy<float>(sign | (static_cast<uint32_t>(113 - shift) << 23) | (fraction << 13));
  }
  return bit_copy<float>(sign | ((exponent + 112u) << 23) | (fraction << 13));
}

// The smallest e with |x| < 2^e for a finite magnitude word; 0 for zero.
template <class T>
TRUNCDET_HD int exponent_above(typename Format<T>::Word magnitude) {
  if (magnitude == 0) return 0;
  const int field = static_cast<int>(magnitude >> fraction_bits<T>());
  if (field != 0) return field - Format<T>::kMaxExponent + 1;
  return bit_length(magnitude) + Format<T>::kMinExponent - fraction_bits<T>();
}

// x * 2^shift, exact; results below the smallest normal number, and non-finite x, become +0.
template <class T>
TRUNCDET_HD T scale_exponent(T value, int shift) {
  using Word = typename Format<T>::Word;
  const int bits = fraction_bits<T>();
  const Word word = bit_copy<Word>(value);
  const Word sign = word & static_cast<Word>(Word(1) << (8 * sizeof(Word) - 1));
  Word fraction = word & static_cast<Word>((Word(1) << bits) - 1);
  int field = static_cast<int>((word ^ sign) >> bits);
  if (field == exponent_mask<T>()) return T(0);
  if (field == 0) {
    if (fraction == 0) return T(0);
    const int up = bits + 1 - bit_length(fraction);
    fraction = static_cast<Word>(fraction << up) & static_cast<Word>((Word(1) << bits) - 1);
    field = 1 - up;
  }
  field += shift;
  if (field <= 0) return T(0);
  if (field >= exponent_mask<T>()) return bit_copy<T>(static_cast<Word>(sign | infinity_word<T>()));
  return bit_copy<T>(static_cast<Word>(sign | (static_cast<Word>(field) << bits) | fraction));
}

TRUNCDET_HD float power_of_two(float, int exponent) {
  return bit_copy<float>(static_cast<uint32_t>(exponent + 127) << 23);
}
TRUNCDET_HD double power_of_two(double, int exponent) {
  return bit_copy<double>(static_cast<uint64_t>(exponent + 1023) << 52);
}

// Round to nearest, ties to even; the caller guarantees |x| < 2^63.
TRUNCDET_HD int64_t round_to_int64(float x) {
#if defined(__CUDA_ARCH__)
  return __float2ll_rn(x);
#else
  return llrintf(x);
#endif
}
TRUNCDET_HD int64_t round_to_int64(double x) {
#if defined(__CUDA_ARCH__)
  return __double2ll_rn(x);
#else
  return llrint(x);
#endif
}

// ceil(log2(count)): head-room for `count` contributions of weight at most one.
TRUNCDET_HD int headroom(int64_t count) {
  return count <= 1 ? 0 : bit_length(static_cast<uint64_t>(count - 1));
}

// The scale of one segment. Values are first brought to (-1, 1) by 2^-exponent, so a contribution c
// of such values is quantised by one multiplication with 2^(62-G), which is always representable.
template <class C>
struct Scale {
  int exponent;  // e: the finite values of the segment are below 2^e in magnitude
  int headroom;  // G
  C unit;        // 2^(62-G)

  TRUNCDET_HD Scale(int e, int g)
      : exponent(e), headroom(g), unit(power_of_two(C(0), kSumBits - g)) {}
  TRUNCDET_HD C normalise(C value) const { return scale_exponent<C>(value, -exponent); }
  TRUNCDET_HD int64_t quantise(C contribution) const { return round_to_int64(contribution * unit); }
  // The second limb: what `quantise` rounded away, in units of 2^-(2 (62-G)).
  TRUNCDET_HD int64_t quantise_rest(C contribution, int64_t high) const {
    // Beyond 2^precision the scaled contribution is an integer and the rest is zero; below it both
    // operands are exact and so is their difference.
    return round_to_int64((contribution * unit - static_cast<C>(high)) * unit);
  }
  // The sum is (integer) * 2^quantum().
  TRUNCDET_HD int quantum() const { return exponent + headroom - kSumBits; }
  TRUNCDET_HD int rest_quantum() const { return exponent + 2 * (headroom - kSumBits); }
};

// (-1)^negative * magnitude * 2^exponent, rounded once to T (nearest, ties to even).
template <class T>
TRUNCDET_HD T round_scaled(bool negative, uint128 magnitude, int exponent) {
  using Word = typename Format<T>::Word;
  using F = Format<T>;
  const Word sign =
      static_cast<Word>(static_cast<Word>(negative ? 1 : 0) << (8 * sizeof(Word) - 1));
  if (magnitude == 0) return bit_copy<T>(Word(0));
  int top =
      bit_length128(magnitude) - 1 + exponent;  // magnitude * 2^exponent is in [2^top, 2^top+1)
  if (top < F::kMinExponent) top = F::kMinExponent;
  const int drop = top - fraction_bits<T>() - exponent;  // low bits that do not fit
  uint64_t kept;
  if (drop <= 0) {
    kept = static_cast<uint64_t>(magnitude << -drop);
  } else if (drop > 127) {
    kept = 0;
  } else {
    kept = static_cast<uint64_t>(magnitude >> drop);
    const uint128 rest = magnitude - (static_cast<uint128>(kept) << drop);
    const uint128 half = static_cast<uint128>(1) << (drop - 1);
    if (rest > half || (rest == half && (kept & 1u) != 0)) ++kept;
  }
  // A carry out of the significand walks into the exponent field, which is what it should do.
  const int field = top - F::kMinExponent;
  const uint64_t word = (static_cast<uint64_t>(field) << fraction_bits<T>()) + kept;
  if (word >= infinity_word<T>() || top > F::kMaxExponent) {
    return bit_copy<T>(static_cast<Word>(sign | infinity_word<T>()));
  }
  return bit_copy<T>(static_cast<Word>(sign | static_cast<Word>(word)));
}

// existing + sum * 2^quantum with one rounding. A zero sum leaves `existing` as it is, bits
// included.
template <class T>
TRUNCDET_HD T add_and_round(T existing, int128 sum, int quantum) {
  using Word = typename Format<T>::Word;
  if (sum == 0) return existing;
  const Word word = magnitude_word<T>(existing);
  if (word > infinity_word<T>()) return canonical_nan<T>();
  if (word == infinity_word<T>()) return existing;
  const bool sum_negative = sum < 0;
  uint128 addend = sum_negative ? static_cast<uint128>(-sum) : static_cast<uint128>(sum);
  if (word == 0) return round_scaled<T>(sum_negative, addend, quantum);
  const int bits = fraction_bits<T>();
  const int field = static_cast<int>(word >> bits);
  uint128 base = word & static_cast<Word>((Word(1) << bits) - 1);
  if (field != 0) base |= static_cast<uint128>(1) << bits;
  int base_exponent = (field != 0 ? field : 1) + Format<T>::kMinExponent - 1 - bits;
  // Bring both to one exponent inside 126 bits. Where that is too narrow the smaller operand is
  // shifted right and its lost bits are kept as one sticky bit: the operands are then so far apart
  // that no cancellation can bring the sticky bit near the rounding position.
  uint128* larger = base_exponent >= quantum ? &base : &addend;
  uint128* smaller = base_exponent >= quantum ? &addend : &base;
  int distance = base_exponent >= quantum ? base_exponent - quantum : quantum - base_exponent;
  int exponent = base_exponent >= quantum ? quantum : base_exponent;
  const int room = 126 - bit_length128(*larger);
  if (distance > room) {
    const int right = distance - (room > 0 ? room : 0);
    const uint128 lost =
        right > 127 ? *smaller : *smaller & ((static_cast<uint128>(1) << right) - 1);
    *smaller = (right > 127 ? 0 : *smaller >> right) | (lost != 0 ? 1u : 0u);
    exponent += right;
    distance -= right;
  }
  *larger <<= distance;
  const int128 a = is_negative(existing) ? -static_cast<int128>(base) : static_cast<int128>(base);
  const int128 b = sum_negative ? -static_cast<int128>(addend) : static_cast<int128>(addend);
  const int128 total = a + b;
  const bool negative = total < 0;
  return round_scaled<T>(negative, static_cast<uint128>(negative ? -total : total), exponent);
}

// sum * 2^quantum rounded once.
template <class T>
TRUNCDET_HD T round_sum(int64_t sum, int quantum) {
#if defined(__CUDA_ARCH__)
  if constexpr (std::is_same_v<T, float>) {
    // Down to this quantum every non-zero result is normal, so rounding the integer is the one
    // rounding and the multiplication is exact (or overflows to infinity, as it should). Above, the
    // power of two itself would overflow.
    if (quantum >= Format<float>::kMinExponent && quantum <= Format<float>::kMaxExponent) {
      return __ll2float_rn(sum) * power_of_two(0.f, quantum);
    }
  }
#endif
  const bool negative = sum < 0;
  const uint64_t magnitude =
      negative ? uint64_t(0) - static_cast<uint64_t>(sum) : static_cast<uint64_t>(sum);
  return round_scaled<T>(negative, magnitude, quantum);
}

// A finished float sum in the storage type, one rounding; NaN canonical, since processors differ in
// the NaN they produce.
template <class T>
TRUNCDET_HD T narrow(typename Format<T>::Compute value) {
  if (is_nan(value)) return canonical_nan<T>();
  if constexpr (std::is_same_v<T, typename Format<T>::Compute>) {
    return value;
  } else {
    using Word = typename Format<T>::Word;
    const bool negative = is_negative(value);
    const uint32_t word = magnitude_word<float>(value);
    if (word == 0) return bit_copy<T>(static_cast<Word>(negative ? 0x8000u : 0u));
    if (word == infinity_word<float>()) {
      return bit_copy<T>(static_cast<Word>(infinity_word<T>() | (negative ? 0x8000u : 0u)));
    }
    const int field = static_cast<int>(word >> 23);
    const uint32_t significand = (word & 0x7fffffu) | (field != 0 ? 0x800000u : 0u);
    return round_scaled<T>(negative, significand, (field != 0 ? field : 1) - 150);
  }
}

// Both limbs as one integer in units of 2^rest_quantum().
TRUNCDET_HD int128 join_limbs(int64_t high, int64_t low, int headroom_bits) {
  return static_cast<int128>(high) * (static_cast<int128>(1) << (kSumBits - headroom_bits)) + low;
}

// Non-finite contributions reach a cell as flags.
constexpr uint32_t kSawNaN = 1u, kSawPlusInf = 2u, kSawMinusInf = 4u;
template <class C>
TRUNCDET_HD uint32_t nonfinite_flag(C value) {
  if (is_finite(value)) return 0u;
  if (is_nan(value)) return kSawNaN;
  return is_negative(value) ? kSawMinusInf : kSawPlusInf;
}
// The flag of a product of which at least one factor is not finite, 0 for finite factors. From the
// words alone, so that no denormal mode plays a part.
template <class C>
TRUNCDET_HD uint32_t product_flag(C a, C b) {
  if (is_finite(a) && is_finite(b)) return 0u;
  if (is_nan(a) || is_nan(b) || magnitude_word<C>(a) == 0 || magnitude_word<C>(b) == 0) {
    return kSawNaN;
  }
  return is_negative(a) != is_negative(b) ? kSawMinusInf : kSawPlusInf;
}
// The value of a cell with flags: NaN wins, opposite infinities make NaN.
template <class T>
TRUNCDET_HD T nonfinite_value(uint32_t flags) {
  using Word = typename Format<T>::Word;
  const bool plus = (flags & kSawPlusInf) != 0, minus = (flags & kSawMinusInf) != 0;
  if ((flags & kSawNaN) != 0 || (plus && minus)) return canonical_nan<T>();
  const Word sign = static_cast<Word>(static_cast<Word>(minus ? 1 : 0) << (8 * sizeof(Word) - 1));
  return bit_copy<T>(static_cast<Word>(sign | infinity_word<T>()));
}
}  // namespace truncdet
