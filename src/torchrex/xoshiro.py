"""Uniform and normal numbers of xoshiro256++ (Blackman and Vigna 2021), by numpy or compiled.

A draw takes a key from a generator of torch, which is seeded, saved and restored as ever. From the
key splitmix64 makes the states of 512 lanes, which advance together: compiled, 7 times as fast as
torch in single precision and 12 times in double. Normals are those of Box and Muller. Both forms do
the same exactly rounded operations in the same order: they give the same bits on any machine whose
bytes are in little-endian order.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math
import sys
from collections.abc import Sequence
from string import Template
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrex.cpp import NATIVE, load_cpp

logger = logging.getLogger("torchrex")

VERSION = 2  # of the random numbers of densities; those of version 1 were torch's own
LANES = 512
ROWS = 64  # of all lanes, which numpy makes at once
GOLDEN, MIX = 0x9E3779B97F4A7C15, ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
# No fused multiply-add: it would change the last bit. The other flags let loops be vectorised.
FLAGS = ["-O3", *NATIVE, "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
FLAGS += ["-fno-strict-aliasing"]  # a word is read as two halves
# Numbers; numpy takes 15 ns for each, the compiler 0.3 s and loading Inductor, where no step has
# been compiled, another second.
WORTH_COMPILING, WORTH_LOADING = 2**24, 2**26

_n_made = 0  # in this process


class Form(NamedTuple):
    """How the bits of a word become a number of one dtype."""

    name: str  # in C++
    n_bits: int
    mantissa: int
    half: int  # the bits of 0.5
    # By how many bits a word is shifted in a uniform, a radius and an angle. The last two bits of
    # the word of an angle choose a quarter of the circle.
    uniform: int
    radius: int
    angle: int
    n_log: int  # terms of the series
    n_sine: int

    @property
    def units(self) -> list[float]:
        """What a shifted word is multiplied by in a uniform, a radius and an angle."""
        shifts = ((self.uniform, 1.0), (self.radius, 1.0), (self.angle, 0.5 * math.pi))
        return [unit * 2.0 ** (shift - self.n_bits) for shift, unit in shifts]

    @property
    def series(self) -> list[list[float]]:
        """Of log((1 + s) / (1 - s)) / 2s in s^2, of sin(t) / t and cos(t) in t^2."""
        powers = range(self.n_sine)
        sine = [(-1) ** k / math.factorial(2 * k + 1) for k in powers]
        cosine = [(-1) ** k / math.factorial(2 * k) for k in powers]
        return [[1 / (2 * k + 1) for k in range(self.n_log)], sine, cosine]


FORMS = {
    torch.float32: Form("float", 32, 23, 0x3F000000, 8, 1, 2, 5, 5),
    torch.float64: Form("double", 64, 52, 0x3FE0000000000000, 11, 11, 11, 11, 9),
}


def uniforms(shape: Sequence[int], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Numbers in [0, 1) of 24 bits or, in float64, of 53. On a GPU, and in other dtypes, they are
    torch's own.
    """
    return _draw("uniforms", shape, generator, dtype)


def normals(shape: Sequence[int], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Standard normal numbers up to 6.56 or, in float64, up to 8.57. On a GPU, and in other dtypes,
    they are torch's own.
    """
    return _draw("normals", shape, generator, dtype)


def _draw(
    kind: str, shape: Sequence[int], generator: torch.Generator, dtype: torch.dtype
) -> Tensor:
    global _n_made
    device = generator.device
    if device.type != "cpu" or dtype not in FORMS:
        draw = torch.rand if kind == "uniforms" else torch.randn
        return draw(tuple(shape), generator=generator, dtype=dtype, device=device)
    key = torch.empty(4, dtype=torch.int64, device="cpu")
    key.random_(-(2**63), None, generator=generator)
    key.numpy().view(np.uint64)[0] ^= np.uint64(generator.initial_seed())  # torch uses 32 bits
    numbers = torch.empty(tuple(shape), dtype=dtype, device="cpu")
    _n_made += numbers.numel()
    is_loaded = "torch._inductor.cpp_builder" in sys.modules
    library = _compiled() if _n_made > (WORTH_COMPILING if is_loaded else WORTH_LOADING) else None
    if library is None:
        _by_numpy(kind, key, numbers)
    else:
        _by(library, kind, key, numbers)
    return numbers


@functools.cache
def _compiled() -> Any:
    """The functions in C++, or None if they cannot be had."""
    try:
        library = load_cpp(CODE, FLAGS)
        for dtype in FORMS:
            for kind in MAKE:
                key = torch.arange(4, device="cpu")
                expected, found = torch.empty(2, 3 * LANES + 7, dtype=dtype, device="cpu")
                _by_numpy(kind, key, expected)
                _by(library, kind, key, found)
                if not torch.equal(expected, found):
                    raise RuntimeError(f"the compiler gives other {kind}")
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        logger.warning(
            "random numbers come from numpy, the same but slower (15 ns each), because they cannot "
            "be compiled: %s",
            reason[:300],
        )
        return None
    return library


def _by(library: Any, kind: str, key: Tensor, numbers: Tensor) -> None:
    fill = getattr(library, f"{kind}_{FORMS[numbers.dtype].name}")
    addresses = map(ctypes.c_void_p, (key.data_ptr(), numbers.data_ptr()))
    fill(ctypes.c_long(numbers.numel()), *addresses)


# By numpy


def _by_numpy(kind: str, key: Tensor, numbers: Tensor) -> None:
    form, to = FORMS[numbers.dtype], numbers.view(-1).numpy()
    states = _states(key.numpy().view(np.uint64))
    some = ROWS * LANES * 64 // form.n_bits
    for first in range(0, len(to), some):
        here = to[first : first + some]
        n_rows = -(-len(here) * form.n_bits // (64 * LANES))
        words = np.stack([_next(states) for _ in range(n_rows)]).view(f"uint{form.n_bits}")
        here[:] = MAKE[kind](words, form, to.dtype).ravel()[: len(here)]


def _states(key: NDArray[Any]) -> NDArray[Any]:
    """(4, lanes): the output function of splitmix64 at every lane's distance from the key."""
    z: NDArray[Any] = key[:, None] + np.arange(LANES, dtype=np.uint64) * np.uint64(GOLDEN)
    for shift, factor in MIX:
        z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
    z ^= z >> np.uint64(31)
    return z


def _next(states: NDArray[Any]) -> NDArray[Any]:
    """One word of every lane; the states advance in place."""
    a, b, c, d = states
    word: NDArray[Any] = _turned(a + d, 23) + a
    t = b << np.uint64(17)
    for one, other in ((c, a), (d, b), (b, c), (a, d), (c, t)):
        one ^= other
    d[:] = _turned(d, 45)
    return word


def _turned(word: NDArray[Any], by: int) -> NDArray[Any]:
    return (word << np.uint64(by)) | (word >> np.uint64(64 - by))


def _uniforms(words: NDArray[Any], form: Form, dtype: np.dtype[Any]) -> NDArray[Any]:
    return (words >> form.uniform).astype(dtype) * form.units[0]


def _normals(words: NDArray[Any], form: Form, dtype: np.dtype[Any]) -> NDArray[Any]:
    first, second = np.split(words, 2, axis=1)
    log, sine, cosine = form.series
    # The logarithm of m 2^e, with m between sqrt(1/2) and sqrt(2).
    m, e = np.frexp(((first >> form.radius).astype(dtype) + 1) * form.units[1])
    small = m < math.sqrt(0.5)
    m, e = np.where(small, m + m, m), (e - small).astype(dtype)
    s = (m - 1) / (m + 1)
    radius = np.sqrt(-2 * (e * math.log(2) + 2 * s * _polynomial(log, s * s)))
    # An angle within an eighth of a turn of 0, then one of four quarters.
    t = (second.view(f"int{form.n_bits}") >> form.angle).astype(dtype) * form.units[2]
    y, x = t * _polynomial(sine, t * t), _polynomial(cosine, t * t)
    x, turn = np.where(second & 1, -x, x), (second & 2) > 0
    pair = np.where(turn, y, x), np.where(turn, x, y)
    return np.concatenate([radius * each for each in pair], axis=1)


def _polynomial(coefficients: list[float], z: NDArray[Any]) -> NDArray[Any]:
    *others, last = coefficients
    value = np.full_like(z, last)
    for each in reversed(others):
        value = value * z + each
    return value


MAKE = {"uniforms": _uniforms, "normals": _normals}


# In C++

_BEGIN = """
#include <cmath>
#include <cstdint>
#include <cstring>
typedef uint32_t Short;
typedef uint64_t Word;
template <class To, class From> static inline To as(From x) {
  To y; memcpy(&y, &x, sizeof y); return y;
}

// Whole numbers as floating ones: of up to 31 bits, and of up to 53 in two parts, because few
// machines convert 64 bits at once.
static inline float real(Short x) { return float(int32_t(x)); }
static inline double part(Word x) { return as<double>(x | 0x4330000000000000) - 0x1p52; }
static inline double real(Word x) { return part(x >> 27) * 0x1p27 + part(x & 0x7ffffff); }
// Signed ones, shifted.
static inline float centred(Short x) { return float(int32_t(x) >> 2); }
static inline double centred(Word x) { return real((x ^ Word(1) << 63) >> 11) - 0x1p52; }

static inline Word turned(Word x, int by) { return x << by | x >> (64 - by); }

struct Lanes {
  Word a[LANES], b[LANES], c[LANES], d[LANES];
  explicit Lanes(const Word* key) {
    Word* states[] = {a, b, c, d};
    for (int k = 0; k < 4; k++)
      for (long i = 0; i < LANES; i++) {
        Word z = key[k] + i * GOLDEN;
        z = (z ^ z >> 30) * MIX0;
        z = (z ^ z >> 27) * MIX1;
        states[k][i] = z ^ z >> 31;
      }
  }
  void next(Word* words) {
    for (long i = 0; i < LANES; i++) {
      const Word t = b[i] << 17;
      words[i] = turned(a[i] + d[i], 23) + a[i];
      c[i] ^= a[i]; d[i] ^= b[i]; b[i] ^= c[i]; a[i] ^= d[i]; c[i] ^= t;
      d[i] = turned(d[i], 45);
    }
  }
};

template <class T, class Bits, void make(const Bits*, T*)>
static inline void fill(long n, const Word* key, T* to) {
  const long some = LANES * sizeof(Word) / sizeof(Bits);
  Lanes lanes(key);
  Word words[LANES];
  T last[some];
  for (; n > 0; n -= some, to += some) {
    lanes.next(words);
    make((const Bits*)words, n < some ? last : to);
    if (n < some) memcpy(to, last, n * sizeof(T));
  }
}
"""

_OF_A_FORM = Template("""
static void make_uniforms(const $bits* words, $type* to) {
  for (long i = 0; i < $numbers; i++) to[i] = real(words[i] >> $uniform) * $type($unit0);
}

static void make_normals(const $bits* words, $type* to) {
  typedef $type T;
  const long n = $numbers / 2;
  for (long i = 0; i < n; i++) {
    const T u = (real(words[i] >> $radius) + 1) * T($unit1);
    const $bits bits = as<$bits>(u), other = words[n + i];
    T e = real(bits >> $mantissa) - T($bias);
    T m = as<T>((bits & (($bits(1) << $mantissa) - 1)) | $half);
    const bool small = m < T($root);
    e = small ? e - 1 : e;
    m = small ? m + m : m;
    const T s = (m - 1) / (m + 1), ss = s * s;
    const T radius = std::sqrt(-2 * (e * T($log2) + 2 * s * ($log)));
    const T t = centred(other) * T($unit2), tt = t * t;
    const T y = t * ($sine), cosine = $cosine;
    const T x = as<T>(as<$bits>(cosine) ^ other << ($n_bits - 1));
    const bool turn = other & 2;
    to[i] = radius * (turn ? y : x);
    to[n + i] = radius * (turn ? x : y);
  }
}

extern "C" void uniforms_$type(long n, const Word* key, $type* to) {
  fill<$type, $bits, make_uniforms>(n, key, to);
}
extern "C" void normals_$type(long n, const Word* key, $type* to) {
  fill<$type, $bits, make_normals>(n, key, to);
}
""")


def _code_of(form: Form) -> str:
    def polynomial(coefficients: list[float], z: str) -> str:
        *others, value = [f"T({each.hex()})" for each in coefficients]
        for each in reversed(others):
            value = f"({value} * {z} + {each})"
        return value

    log, sine, cosine = form.series
    return _OF_A_FORM.substitute(
        form._asdict(),
        type=form.name,
        bits="Short" if form.n_bits == 32 else "Word",
        numbers=LANES * 64 // form.n_bits,
        bias=(form.half >> form.mantissa),
        root=math.sqrt(0.5).hex(),
        log2=math.log(2).hex(),
        log=polynomial(log, "ss"),
        sine=polynomial(sine, "tt"),
        cosine=polynomial(cosine, "tt"),
        **{f"unit{k}": unit.hex() for k, unit in enumerate(form.units)},
    )


CODE = "\n".join(
    [
        f"#define LANES {LANES}",
        f"#define GOLDEN {GOLDEN}u",
        *(f"#define MIX{k} {factor}u" for k, (_, factor) in enumerate(MIX)),
        _BEGIN,
        *map(_code_of, FORMS.values()),
    ]
)
