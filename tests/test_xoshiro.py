"""Random numbers of densities: published answers, the same bits compiled and by numpy, their law,
and independence of everything that is told apart. Each test names a mutant that it catches.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

import torchrex as tr
from assertions import assert_mean_is, assert_mean_is_not
from densities import assert_same_draws
from torchrex import xoshiro
from torchrex.exchange import draw_exchange_inputs
from torchrex.exchange.algorithm import Rules
from torchrex.rng import Streams
from torchrex.xoshiro import FORMS, LANES, normals, uniforms

N = 10**7
MASK = 2**64 - 1
DTYPES = list(FORMS)
DRAWS = [uniforms, normals]
FALSE_ALARM = 5.7e-7  # two-sided, as that of 5 sigma
LARGEST_DISTANCE = math.sqrt(math.log(2 / FALSE_ALARM) / 2)  # Kolmogorov's, times sqrt(n)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def compile_at_once(monkeypatch, after=-1):
    for name in ("WORTH_COMPILING", "WORTH_LOADING"):
        monkeypatch.setattr(xoshiro, name, after)


def by_numpy(monkeypatch):
    """Whatever is changed from here on, the compiled functions would not know of it."""
    monkeypatch.setattr(xoshiro, "_compiled", lambda: None)


# Bits


def test_known_answers_of_xoshiro():
    """Of the authors' program, from the state 1, 2, 3, 4, in every lane."""
    states = np.repeat(np.array([[1], [2], [3], [4]], dtype=np.uint64), LANES, axis=1)
    words = np.stack([xoshiro._next(states) for _ in range(5)])
    expected = [41943041, 58720359, 3588806011781223, 3591011842654386, 9228616714210784205]
    assert (words == np.array(expected, dtype=np.uint64)[:, None]).all()


def test_known_answers_of_splitmix():
    """Of the authors' program, which begins one step from the key, from the key 0."""
    states = xoshiro._states(np.zeros(4, dtype=np.uint64))
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert states[2, 1:4].tolist() == expected


def test_each_lane_is_a_generator_of_its_own():
    """As plain numbers of Python, word by word."""
    state = np.frombuffer(np.random.default_rng(0).bytes(32 * LANES), dtype=np.uint64)
    states = state.reshape(4, LANES).copy()
    lanes = [[int(word) for word in lane] for lane in states.T[:3]]
    found = [xoshiro._next(states)[:3].tolist() for _ in range(50)]

    def turned(word, by):
        return (word << by | word >> (64 - by)) & MASK

    for row in found:
        for lane, word in zip(lanes, row, strict=True):
            s0, s1, s2, s3 = lane
            assert word == (turned((s0 + s3) & MASK, 23) + s0) & MASK
            s2, s3 = s2 ^ s0, s3 ^ s1
            lane[:] = s0 ^ s3, s1 ^ s2, s2 ^ (s1 << 17 & MASK), turned(s3, 45)


@pytest.fixture(scope="module")
def library():
    found = xoshiro._compiled()
    if found is None:
        pytest.skip("there is no C++ compiler")
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("size", [0, 1, 2, LANES - 1, 2 * LANES, 2 * LANES + 1, 3 * 10**5 + 7])
def test_compiled_numbers_are_those_of_numpy(library, draw, dtype, size, monkeypatch):
    compile_at_once(monkeypatch)
    compiled = draw((size,), seeded(), dtype)
    by_numpy(monkeypatch)
    assert torch.equal(compiled, draw((size,), seeded(), dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_words_of_zeros_and_of_ones_give_finite_numbers(dtype):
    """A uniform below 1 and no logarithm of 0; the largest normal is that of one unit."""
    edges = np.array([0, 1, 2, 3, 2**32 - 1, 2**63, MASK - 1, MASK], dtype=np.uint64)
    words = np.random.default_rng(0).choice(edges, (8, LANES))
    form, kind = FORMS[dtype], np.dtype(str(dtype).removeprefix("torch."))
    words = words.view(f"uint{form.n_bits}")
    uniform, normal = (xoshiro.MAKE[name](words, form, kind) for name in ("uniforms", "normals"))
    assert uniform.min() == 0.0
    assert 0.999 < uniform.max() < 1.0
    assert np.isfinite(normal).all()
    largest = math.sqrt(-2 * math.log(form.units[1]))
    assert np.abs(normal).max() == pytest.approx(largest, rel=1e-6)


def test_what_the_compiler_changes_is_not_used(library, monkeypatch, caplog):
    """The mutant: another last digit of log 2."""
    changed = xoshiro.CODE.replace(math.log(2).hex(), math.nextafter(math.log(2), 1).hex())
    assert changed != xoshiro.CODE
    monkeypatch.setattr(xoshiro, "CODE", changed)
    assert xoshiro._compiled.__wrapped__() is None
    assert "the compiler gives other normals" in caplog.text


def sampled(**options):
    target = tr.Noisy(tr.GaussianMixture([1.0], [0.0], [1.0]), tr.StudentT(5.0))
    sizes = {"n_steps": 300, "n_runs": 5, "thin": 1, "compiled": False}
    return tr.sample(target, temperatures=(1.0, 2.0), lr=0.05, **sizes, **options)


def test_without_a_compiler_the_numbers_are_the_same(library, monkeypatch, caplog):
    def fails(*_):
        raise RuntimeError("no compiler")

    compile_at_once(monkeypatch)
    expected = sampled()
    xoshiro._compiled.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(xoshiro, "load_cpp", fails)
        try:
            assert_same_draws(sampled(), expected)
        finally:
            xoshiro._compiled.cache_clear()
    (message,) = [record.getMessage() for record in caplog.records if "numpy" in record.message]
    assert "no compiler" in message
    compile_at_once(monkeypatch, math.inf)
    assert_same_draws(sampled(), expected)


def test_the_default_device_of_torch_is_no_matter(library, monkeypatch):
    """Keys and numbers are made where the generator is: on the CPU."""
    compile_at_once(monkeypatch)
    expected = normals((7,), seeded(), torch.float32)
    xoshiro._compiled.cache_clear()
    rules = Rules(tr.Ladder((1.0, 2.0), 0.1), tr.KnownVariance(0.0))
    with torch.device("meta"):
        found = [draw((7,), seeded(), dtype) for draw in DRAWS for dtype in DTYPES]
        block = draw_exchange_inputs(
            Streams(0), rules, 0, 4, runs=3, device=torch.device("cpu"), dtype=torch.float32
        )
        assert torch.equal(normals((7,), seeded(), torch.float32), expected)
    assert {each.device.type for each in (*found, block.uniform)} == {"cpu"}


def test_all_bits_of_a_seed_count(monkeypatch):
    """Torch's generator takes 32 of them. The mutant forgets the others."""
    numbers = [normals((100,), seeded(2**40 * k + 5), torch.float32) for k in range(3)]
    assert len(torch.stack(numbers).unique(dim=0)) == 3
    restored = torch.Generator()
    restored.set_state(seeded(2**40 + 5).get_state())
    assert torch.equal(normals((100,), restored, torch.float32), numbers[1])


# Law


def distance(x, cdf):
    """Kolmogorov's, times sqrt(n)."""
    at, n = cdf(x.double().sort().values), len(x)
    rank = torch.arange(n + 1, dtype=torch.float64) / n
    return float(torch.maximum(rank[1:] - at, at - rank[:-1]).max()) * math.sqrt(n)


@pytest.mark.parametrize("dtype", DTYPES)
def test_law_of_the_uniforms(dtype):
    x = uniforms((N,), seeded(1), dtype)
    assert x.dtype == dtype
    assert float(x.min()) >= 0.0
    assert float(x.max()) < 1.0
    for power in range(1, 5):
        assert_mean_is(x.double() ** power, 1 / (power + 1))
    assert distance(x, lambda at: at) < LARGEST_DISTANCE
    # The mutants: 0.3 % of [0, 1) is missing, or numbers have 9 bits.
    assert_mean_is_not(0.997 * x.double(), 0.5)
    assert distance((x * 512).floor() / 512, lambda at: at) > 2 * LARGEST_DISTANCE


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_of_a_uniform_is_random(dtype):
    """24 bits or, in float64, 53, and none goes with its neighbour."""
    x, n_bits = uniforms((10**6,), seeded(2), dtype), 24 if dtype == torch.float32 else 53

    def bits(numbers):
        whole = (numbers.double() * 2.0**n_bits).long()
        return [((whole >> k) & 1).double() for k in range(n_bits)]

    found = bits(x)
    for here, above in zip(found, [*found[1:], found[0]], strict=True):
        assert_mean_is(here, 0.5)
        assert_mean_is((here - above).abs(), 0.5)
    # The mutant has fewer bits: those of the next smaller type.
    fewer = x.bfloat16() if dtype == torch.float32 else x.float()
    assert_mean_is_not(bits(fewer)[0], 0.5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_law_of_the_normals(dtype):
    x = normals((N,), seeded(3), dtype)
    assert x.dtype == dtype
    for power, moment in enumerate((0.0, 1.0, 0.0, 3.0), start=1):
        assert_mean_is(x.double() ** power, moment)
    assert distance(x, torch.special.ndtr) < LARGEST_DISTANCE
    # The mutants: a spread that is 0.3 % too large, and a sum of six uniforms.
    assert_mean_is_not((1.003 * x.double()).square(), 1.0)
    sums = math.sqrt(2.0) * (uniforms((6, N // 4), seeded(4), dtype).sum(0) - 3.0)
    assert_mean_is_not(sums.double() ** 4, 3.0)
    assert distance(sums, torch.special.ndtr) > 2 * LARGEST_DISTANCE


@pytest.mark.parametrize("dtype", DTYPES)
def test_tails_of_the_normals(dtype):
    """On both sides, up to 5 sigma: there lie about 29 of 10^8 numbers."""
    limits, generator = (1.0, 2.0, 3.0, 4.0, 5.0), seeded(5)
    outside = torch.zeros(len(limits), 2, dtype=torch.int64)
    for _ in range(10):
        x = normals((N,), generator, dtype)
        for k, limit in enumerate(limits):
            outside[k] += torch.stack([(x > limit).sum(), (x < -limit).sum()])

    def p_value(count, n, limit, sides=1):
        return stats.binomtest(int(count), n, sides * stats.norm.sf(limit)).pvalue

    for limit, counts in zip(limits, outside, strict=True):
        for count in counts:
            assert p_value(count, 10 * N, limit) > FALSE_ALARM
    # The mutant: a radius of 16 bits, which ends at 4.7.
    u, angle = (uniforms((N,), generator, torch.float64) for _ in range(2))
    u = ((65536 * u).floor() + 1) / 65536
    x = (-2.0 * u.log()).sqrt() * (2.0 * math.pi * angle).cos()
    assert p_value((x.abs() > 4.75).sum(), N, 4.75, sides=2) < FALSE_ALARM


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_normals_of_a_pair(dtype, monkeypatch):
    """Box and Muller make two numbers of two words: each has the law, and they are independent."""
    row = LANES * 64 // FORMS[dtype].n_bits

    def pairs():
        return normals((2000 * row,), seeded(6), dtype).double().view(-1, 2, row // 2).unbind(1)

    first, second = pairs()
    for x in (first, second):
        assert_mean_is(x, 0.0)
        assert_mean_is(x.square(), 1.0)
    assert_mean_is(first * second, 0.0)
    assert_mean_is((first.square() - 1.0) * (second.square() - 1.0), 0.0)
    # The mutants lose a bit of the angle: which of the two is the larger, and a sign.
    by_numpy(monkeypatch)
    make = xoshiro.MAKE["normals"]
    monkeypatch.setitem(xoshiro.MAKE, "normals", lambda words, *more: make(words | 2, *more))
    assert_mean_is_not(pairs()[0].square(), 1.0)
    monkeypatch.setitem(xoshiro.MAKE, "normals", lambda words, *more: make(words | 1, *more))
    assert_mean_is_not(pairs()[0], 0.0)


# Independence


def assert_independent(x, y):
    """Neither the numbers nor their sizes go together."""
    assert_mean_is(x * y, 0.0)
    assert_mean_is((x.square() - 1.0) * (y.square() - 1.0), 0.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_of_a_draw_are_independent(dtype, monkeypatch):
    """Between neighbours, lanes, pairs and rows."""
    distances = (1, 2, 3, LANES // 2 - 1, LANES // 2, LANES // 2 + 1, LANES, 2 * LANES, 3 * LANES)
    x = normals((2 * 10**6,), seeded(7), dtype).double()
    for distance in distances:
        assert_independent(x[distance:], x[:-distance])
    # The mutant: all lanes begin at the same state.
    by_numpy(monkeypatch)
    monkeypatch.setattr(xoshiro, "GOLDEN", 0)
    x = normals((10**5,), seeded(7), dtype).double()
    assert_mean_is_not(x[1:] * x[:-1], 0.0)


def test_streams_seeds_and_draws_are_independent(monkeypatch):
    def draws():
        named = [Streams(0)["move"], Streams(0)["target"], Streams(1)["move"]]
        later = Streams(0)["move"]
        normals((1,), later, torch.float32)
        return [normals((10**6,), each, torch.float32).double() for each in (*named, later)]

    found = draws()
    for k, x in enumerate(found):
        for y in found[:k]:
            assert_independent(x, y)
    # The mutant: the key is forgotten.
    states = xoshiro._states
    by_numpy(monkeypatch)
    monkeypatch.setattr(xoshiro, "_states", lambda key: states(np.zeros_like(key)))
    x, *others = draws()
    for y in others:
        assert_mean_is_not(x * y, 0.0)


def test_keys_that_differ_in_one_bit_are_independent(monkeypatch):
    """From the first word of every lane on, which depends on two of the four words of the key."""

    def products():
        generator, found = np.random.default_rng(8), []
        for k in range(1000):
            pair = []
            key = np.frombuffer(generator.bytes(32), dtype=np.int64)
            for flipped in (0, 1):
                here = torch.from_numpy(key.copy())
                here[3 * (k % 2)] ^= flipped << (k % 63)
                numbers = torch.empty(2 * LANES)
                xoshiro._by_numpy("uniforms", here, numbers)
                pair.append(numbers.double() - 0.5)
            found.append(pair[0] * pair[1])
        return torch.cat(found)

    assert_mean_is(products(), 0.0)
    monkeypatch.setattr(xoshiro, "MIX", ())  # the mutant: lanes begin near the key
    assert_mean_is_not(products(), 0.0)
