"""The library's own sine and cosine: within the published error, up to its limit."""

import math
from fractions import Fraction

import pytest
import torch
from exact_arithmetic import fractions_of
from roi_cases import uniform

from truncdet._sine_cosine import LARGEST_ANGLE, sine_cosine

BITS = 400  # of the fixed-point numbers below


def arctangent_of_inverse(n):
    """atan(1 / n) in units of 2^-BITS, to a few units."""
    power, total, k = (1 << BITS) // n, 0, 0
    while power:
        total += (-power if k % 2 else power) // (2 * k + 1)
        power //= n * n
        k += 1
    return total


# Machin's formula, 1706.
PI = 4 * (4 * arctangent_of_inverse(5) - arctangent_of_inverse(239))


def exact(angle):
    """Sine and cosine of a fraction as fractions, to 2^-300: Taylor's series in integers."""
    x = int(angle * (1 << BITS))
    quarters = (2 * x + PI // 2) // PI
    x -= quarters * PI // 2
    sums, term, k = [0, 0], 1 << BITS, 0
    while term:
        sums[k % 2] += -term if k % 4 > 1 else term
        k += 1
        term = (term * x >> BITS) // k
    cosine, sine = sums
    turned = [(sine, cosine), (cosine, -sine), (-sine, -cosine), (-cosine, sine)][quarters % 4]
    return [Fraction(x, 1 << BITS) for x in turned]


def angles():
    """Around the circle, to the limit, beside quarter turns, tiny, and hard to reduce."""
    quarters = torch.arange(-300, 301, dtype=torch.float64) * (math.pi / 2)
    above, below = (torch.nextafter(quarters, quarters + side) for side in (1, -1))
    far = (uniform((200,), 3, -1, 1) * 2**20).round() * (math.pi / 2)
    tiny = torch.ldexp(uniform((70,), 4, 1, 2), -torch.arange(70))
    parts = [
        uniform((1500,), 1, -math.pi, math.pi),
        uniform((700,), 2, -LARGEST_ANGLE, LARGEST_ANGLE),
        *(quarters, above, below, quarters / 2, far, tiny),
        torch.tensor([0.0, LARGEST_ANGLE, -LARGEST_ANGLE], dtype=torch.float64),
    ]
    all_of_them = torch.cat(parts)
    return all_of_them[(all_of_them == 0) | (all_of_them.abs() > 2.0**-100)]


def worst(angle, dtype, unit):
    """The largest error of results rounded to `dtype`, in its ulps."""
    largest = Fraction(0)
    results = [fractions_of(x.to(dtype)) for x in sine_cosine(angle.to(torch.float64))]
    for x, sine, cosine in zip(fractions_of(angle), *results, strict=True):
        for got, want in zip((sine, cosine), exact(x), strict=True):
            if want == 0:
                assert got == 0
                continue
            # want = m * 2^e with m in [1/2, 1): an ulp is 2^(e - precision).
            exponent = math.frexp(float(want))[1]
            largest = max(largest, abs(got - want) / Fraction(2) ** (exponent - unit))
    return float(largest)


def test_float64_is_within_its_bound():
    assert 0.5 < worst(angles(), torch.float64, 53) < 0.8


def test_float32_is_rounded_all_but_correctly():
    assert 0.49 < worst(angles().to(torch.float32), torch.float32, 24) < 0.5 + 2.0**-28


def test_the_exact_values_are():
    """The measure itself, by what is known otherwise."""
    for x in (0.1, 1.0, 3.0, 100.0, -7.0):
        for got, want in zip(exact(Fraction(x)), (math.sin(x), math.cos(x)), strict=True):
            assert abs(float(got) - want) <= 2 * math.ulp(want)
    sine, cosine = exact(Fraction(12345.678))
    assert abs(sine**2 + cosine**2 - 1) < Fraction(1, 1 << 300)


@pytest.mark.parametrize("turns", range(-5, 6))
def test_quarter_turns_are_nearly_exact(turns):
    angle = torch.tensor([turns * math.pi / 2], dtype=torch.float64)
    sine, cosine = (x.to(torch.float32).item() for x in sine_cosine(angle))
    expected = [(0, 1), (1, 0), (0, -1), (-1, 0)][turns % 4]
    assert (round(sine, 9), round(cosine, 9)) == expected


def test_the_smallest_angles_are_their_own_sines():
    x = torch.tensor([5e-324, 1e-310, 1e-300, -1e-200, 2.0**-40], dtype=torch.float64)
    sine, cosine = sine_cosine(x)
    assert torch.equal(sine, x) and (cosine == 1).all()


def test_symmetries_hold_in_every_bit():
    x = angles()
    (sine, cosine), (minus, same) = sine_cosine(x), sine_cosine(-x)
    assert torch.equal(minus, -sine) and torch.equal(same, cosine)


def test_the_gpu_gives_the_same_bits(device):
    x = angles()
    for got, want in zip(sine_cosine(x.to(device)), sine_cosine(x), strict=True):
        assert torch.equal(got.cpu().view(torch.int64), want.view(torch.int64))
