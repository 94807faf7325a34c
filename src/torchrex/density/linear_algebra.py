"""Factors and solutions of small matrices in the recorded loop: what a density of a covariance
needs.

Inductor calls LAPACK for them, through Python and torch's dispatcher, which takes longer than the
work. So they are written here, in C++ for the loop of `replay.py`. That is by hand because LAPACK
takes one matrix after the other: here each number of a vector register belongs to another matrix
of the batch, which is faster for small matrices. The algorithms are those of LAPACK without blocks.
A number of a matrix does not depend on the others in the batch.

The caller compares the first steps with eager ones, as it does for Inductor's kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import has_side_effect
from torch.utils._python_dispatch import TorchDispatchMode

from torchrex.cpp import NATIVE

LARGEST_MATRIX = 48  # rows: beyond, the blocks of LAPACK are faster (measured)
SMALLEST_PRODUCT = 8  # rows and columns: below, a product is fused into a kernel
FLAGS = ["-O3", *NATIVE]
NO_FACTOR = 2  # what the loop returns at the first such matrix
TYPES = {torch.float32: "float", torch.float64: "double", torch.int32: "int"}

# How a C statement is written, given how a tensor's address is.
Statement = Callable[[Callable[[Tensor], str]], str]

CODE = """
#include <cmath>
#include <utility>
#define WIDTH 32

// The same number of several matrices.
template <class T> struct Of { typedef T Lanes __attribute__((vector_size(WIDTH))); };
#define LANES typename Of<T>::Lanes
#define N_LANES ((long)(WIDTH / sizeof(T)))

// A batch of matrices in memory.
template <class T> struct Batch {
  T* start; long next, row, column;
  T& at(long which, long i, long j) const { return start[which * next + i * row + j * column]; }
};

// Lanes without a matrix keep what they have: nobody reads it.
template <class T, long m, long n>
static void load(Batch<T> from, long first, long filled, LANES* to, bool lower) {
  for (long lane = 0; lane < filled; lane++)
    for (long i = 0; i < m; i++)
      for (long j = 0; j < (lower ? i + 1 : n); j++)
        ((T*)(to + i * n + j))[lane] = from.at(first + lane, i, j);
}

template <class T, long m, long n>
static void store(const LANES* from, long first, long filled, Batch<T> to, bool lower) {
  for (long lane = 0; lane < filled; lane++)
    for (long i = 0; i < m; i++)
      for (long j = 0; j < n; j++)
        to.at(first + lane, i, j) = lower && j > i ? 0 : ((const T*)(from + i * n + j))[lane];
}

#define GROUPS(count) \\
  for (long first = 0, filled; first < count && (filled = count - first < N_LANES ? \\
       count - first : N_LANES); first += N_LANES)

// info: 0, or the first column, from 1, whose pivot is not positive.
template <class T, long n>
static void cholesky(long count, Batch<T> from, Batch<T> to, int* info) {
  static thread_local LANES a[n * n];
  GROUPS(count) {
    load<T, n, n>(from, first, filled, a, true);
    for (long lane = 0; lane < filled; lane++) info[first + lane] = 0;
    for (long k = 0; k < n; k++) {
      T* pivot = (T*)(a + k * n + k);
      for (long lane = 0; lane < filled; lane++)
        if (!(pivot[lane] > 0) && !info[first + lane]) info[first + lane] = k + 1;
      // Without a factor the numbers mean nothing, but they stay finite, as those of LAPACK do: a
      // density may pass over them by torch.where.
      for (long lane = 0; lane < filled; lane++)
        pivot[lane] = info[first + lane] ? 1 : std::sqrt(pivot[lane]);
      const LANES inverse = 1 / a[k * n + k];
      for (long i = k + 1; i < n; i++) a[i * n + k] *= inverse;
      for (long i = k + 1; i < n; i++)
        for (long j = k + 1; j <= i; j++) a[i * n + j] -= a[i * n + k] * a[j * n + k];
    }
    store<T, n, n>(a, first, filled, to, true);
  }
}

// A x = b. An upper triangle is a lower one read backwards. `to` may be `b`.
template <class T, long n, long columns, bool upper, bool unit>
static void solve_triangular(long count, Batch<T> A, Batch<T> b, Batch<T> to) {
  static thread_local LANES a[n * n], x[n * columns];
  const long some = columns % 4 ? 1 : 4;  // columns at a time, in registers
  if (upper) {
    A = {&A.at(0, n - 1, n - 1), A.next, -A.row, -A.column};
    b = {&b.at(0, n - 1, 0), b.next, -b.row, b.column};
    to = {&to.at(0, n - 1, 0), to.next, -to.row, to.column};
  }
  GROUPS(count) {
    load<T, n, n>(A, first, filled, a, true);
    load<T, n, columns>(b, first, filled, x, false);
    for (long i = 0; i < n; i++) {
      const LANES inverse = unit ? LANES{} + 1 : 1 / a[i * n + i];
      for (long begin = 0; begin < columns; begin += some) {
        LANES sum[some];
        for (long j = 0; j < some; j++) sum[j] = x[i * columns + begin + j];
        for (long k = 0; k < i; k++)
          for (long j = 0; j < some; j++) sum[j] -= a[i * n + k] * x[k * columns + begin + j];
        for (long j = 0; j < some; j++) x[i * columns + begin + j] = sum[j] * inverse;
      }
    }
    store<T, n, columns>(x, first, filled, to, false);
  }
}

// P A = L U with the pivots of LAPACK. info: 0, or a column, from 1, without a pivot.
template <class T, long n>
static void lu(long count, Batch<T> from, Batch<T> to, int* pivots, int* info) {
  static thread_local LANES a[n * n];
  GROUPS(count) {
    load<T, n, n>(from, first, filled, a, false);
    for (long lane = 0; lane < filled; lane++) info[first + lane] = 0;
    for (long k = 0; k < n; k++) {
      LANES inverse = {};
      for (long lane = 0; lane < filled; lane++) {
        T* number = (T*)a + lane;
        T pivot = number[(k * n + k) * N_LANES];
        long best = k;
        for (long i = k + 1; i < n; i++) {
          const T other = number[(i * n + k) * N_LANES];
          if (std::fabs(other) > std::fabs(pivot)) pivot = other, best = i;
        }
        pivots[(first + lane) * n + k] = best + 1;
        for (long j = 0; j < n && best != k; j++)
          std::swap(number[(best * n + j) * N_LANES], number[(k * n + j) * N_LANES]);
        if (pivot == 0 && !info[first + lane]) info[first + lane] = k + 1;
        ((T*)&inverse)[lane] = pivot == 0 ? 0 : 1 / pivot;
      }
      for (long i = k + 1; i < n; i++) {
        const LANES factor = a[i * n + k] *= inverse;
        for (long j = k + 1; j < n; j++) a[i * n + j] -= factor * a[k * n + j];
      }
    }
    store<T, n, n>(a, first, filled, to, false);
  }
}

// to = P b, or the inverse of P. `to` may be `b`.
template <class T, long n, long columns, bool inverse>
static void permute(long count, Batch<T> b, Batch<T> to, int* pivots) {
  for (long which = 0; which < count; which++) {
    long row_of[n];
    T column[n];
    for (long i = 0; i < n; i++) row_of[i] = i;
    for (long i = 0; i < n; i++) std::swap(row_of[i], row_of[pivots[which * n + i] - 1]);
    for (long j = 0; j < columns; j++) {
      for (long i = 0; i < n; i++) column[i] = b.at(which, i, j);
      for (long i = 0; i < n; i++)
        if (inverse) to.at(which, row_of[i], j) = column[i];
        else to.at(which, i, j) = column[row_of[i]];
    }
  }
}

// Here the numbers of a register are those of one row.
template <class T, long m, long inner, long n>
static void product(long count, Batch<T> a, Batch<T> b, Batch<T> to) {
  const long some = (n + N_LANES - 1) / N_LANES;
  static thread_local LANES right[inner * some];
  for (long which = 0; which < count; which++) {
    for (long k = 0; k < inner; k++)
      for (long j = 0; j < n; j++) ((T*)(right + k * some))[j] = b.at(which, k, j);
    for (long i = 0; i < m; i++) {
      LANES sum[some] = {};
      for (long k = 0; k < inner; k++)
        for (long j = 0; j < some; j++) sum[j] += a.at(which, i, k) * right[k * some + j];
      for (long j = 0; j < n; j++) to.at(which, i, j) = ((T*)sum)[j];
    }
  }
}

static bool any(long count, int* info) {
  for (long i = 0; i < count; i++)
    if (info[i]) return true;
  return false;
}
"""


class NotHereError(Exception):
    """The loop has no code for this call."""


def fits_product(a: Tensor, b: Tensor) -> bool:
    """Is a batch of products made here, and not fused into a kernel?"""
    sizes = (*a.shape[1:], b.shape[2])
    return (
        a.dtype in (torch.float32, torch.float64)
        and min(sizes) >= SMALLEST_PRODUCT
        and max(sizes) <= LARGEST_MATRIX
    )


def statement(
    name: str, sizes: Sequence[int], matrices: Sequence[Tensor], vectors: Sequence[Tensor] = ()
) -> Statement:
    """A call of one of the functions above. Matrices broadcast over the batch of the last one."""
    last = matrices[-1]
    batch, kind = last.shape[:-2], TYPES.get(last.dtype)
    if kind is None or max(sizes) > LARGEST_MATRIX or any(m.dtype != last.dtype for m in matrices):
        raise NotHereError
    if any(v.dtype not in TYPES or not v.is_contiguous() for v in vectors):
        raise NotHereError
    try:
        flat = [m.expand(*batch, *m.shape[-2:]).view(-1, *m.shape[-2:]) for m in matrices]
    except RuntimeError:  # no single stride from one matrix to the next
        raise NotHereError from None

    def write(pointer: Callable[[Tensor], str]) -> str:
        places = [f"({TYPES[each.dtype]}*)({pointer(each)})" for each in [*flat, *vectors]]
        for k, matrix in enumerate(flat):
            strides = ", ".join(f"{stride}L" for stride in matrix.stride())
            places[k] = f"Batch<{kind}>{{{places[k]}, {strides}}}"
        parameters = ", ".join([kind, *(str(int(size)) for size in sizes)])
        return f"{name}<{parameters}>({', '.join([f'{batch.numel()}L', *places])});"

    return write


# What is solved by L U becomes that of one matrix, which can then be used more than once.


def _factors(a: Tensor) -> tuple[bool, Tensor, Tensor, Tensor]:
    """L U of a matrix, or of its transpose if that is how it lies in memory."""
    turned = not a.is_contiguous() and a.mT.is_contiguous()
    return turned, *aten.linalg_lu_factor_ex.default(a.mT if turned else a)


def _solve_ex(a: Tensor, b: Tensor, *, left: bool = True, check_errors: bool = False) -> Any:
    if check_errors or not left:
        return NotImplemented
    is_vector = b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1])
    turned, lu, pivots, info = _factors(a)
    right = b.unsqueeze(-1) if is_vector else b
    x = aten.linalg_lu_solve.default(lu, pivots, right, adjoint=turned)
    return x.squeeze(-1) if is_vector else x, lu, pivots, info


def _inv_ex(a: Tensor, *, check_errors: bool = False) -> Any:
    identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device).expand(a.shape)
    solved = _solve_ex(a, identity, check_errors=check_errors)
    return solved if solved is NotImplemented else (solved[0], solved[3])


def _slogdet(a: Tensor) -> Any:
    _, lu, pivots, _ = _factors(a)
    rows = torch.arange(1, a.shape[-1] + 1, dtype=pivots.dtype, device=a.device)
    diagonal = lu.diagonal(dim1=-2, dim2=-1)
    swapped = torch.where(pivots == rows, 1.0, -1.0).to(a.dtype)
    return (diagonal.sign() * swapped).prod(-1), diagonal.abs().log().sum(-1), lu, pivots


aten = torch.ops.aten
DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten._linalg_solve_ex.default: _solve_ex,
    aten.linalg_inv_ex.default: _inv_ex,
    aten._linalg_slogdet.default: _slogdet,
}


def merge_equal_calls(graph: GraphModule) -> None:
    """A distribution factors its covariance to check it, and again to use it; once is enough."""
    from torch._functorch.compile_utils import fx_graph_cse

    def form(node: Node) -> Any:
        value = node.meta.get("val")
        return (value.shape, value.stride()) if isinstance(value, Tensor) else None

    for node in graph.graph.nodes:  # a view that is the same as what it is a view of
        source = node
        while source.target in (aten.expand.default, aten.permute.default):
            source = source.args[0]
            if form(source) == form(node):
                node.replace_all_uses_with(source)
                break
    graph.graph = fx_graph_cse(graph.graph)
    graph.recompile()


# From torch's operators, their outputs and arguments, to statements.


def _cholesky(
    outputs: Sequence[Tensor], a: Tensor, upper: bool = False, check_errors: bool = False
) -> list[Statement]:
    factor, info = outputs
    if check_errors:
        raise NotHereError
    if upper:
        a, factor = a.mT, factor.mT
    return [statement("cholesky", [a.shape[-1]], [a, factor], [info])]


def _triangular(
    x: Tensor, a: Tensor, b: Tensor, upper: bool, left: bool = True, unitriangular: bool = False
) -> list[Statement]:
    if not left:
        x, a, b, upper = x.mT, a.mT, b.mT, not upper
    return [statement("solve_triangular", [*x.shape[-2:], upper, unitriangular], [a, b, x])]


def _cholesky_solve(x: Tensor, b: Tensor, factor: Tensor, upper: bool = False) -> list[Statement]:
    factor = factor.mT if upper else factor
    return _triangular(x, factor, b, False) + _triangular(x, factor.mT, x, True)


def _lu(
    outputs: Sequence[Tensor], a: Tensor, pivot: bool = True, check_errors: bool = False
) -> list[Statement]:
    factors, pivots, info = outputs
    if check_errors or not pivot:
        raise NotHereError
    return [statement("lu", [a.shape[-1]], [a, factors], [pivots, info])]


def _lu_solve(
    x: Tensor, lu: Tensor, pivots: Tensor, b: Tensor, left: bool = True, adjoint: bool = False
) -> list[Statement]:
    if x.shape[:-2] != lu.shape[:-2]:  # the pivots are not broadcast
        raise NotHereError
    if not left:
        x, b, adjoint = x.mT, b.mT, not adjoint
    if adjoint:
        solved = _triangular(x, lu.mT, b, False) + _triangular(x, lu.mT, x, True, True, True)
        return [*solved, statement("permute", [*x.shape[-2:], True], [x, x], [pivots])]
    permuted = statement("permute", [*x.shape[-2:], False], [b, x], [pivots])
    return [permuted, *_triangular(x, lu, x, False, True, True), *_triangular(x, lu, x, True)]


def _product(c: Tensor, a: Tensor, b: Tensor, out: Tensor | None = None) -> list[Statement]:
    return [statement("product", [*a.shape[-2:], b.shape[-1]], [a, b, c])]


def _check(_: None, info: Tensor, name: str, is_matrix: bool) -> list[Statement]:
    count = info.numel()
    return [lambda pointer: f"if (any({count}L, (int*)({pointer(info)}))) return {NO_FACTOR};"]


has_side_effect(aten._linalg_check_errors.default)  # else torch 2.11 drops it
CALLS: dict[Any, Callable[..., list[Statement]]] = {
    aten.linalg_cholesky_ex.default: _cholesky,
    aten.linalg_solve_triangular.default: _triangular,
    aten.cholesky_solve.default: _cholesky_solve,
    aten.linalg_lu_factor_ex.default: _lu,
    aten.linalg_lu_solve.default: _lu_solve,
    aten.bmm.default: _product,
    aten.bmm.out: _product,
    aten._linalg_check_errors.default: _check,
}


class LibraryCalls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the calls of library functions, as statements. `complete` is false after a call that
    has none.
    """

    def __init__(self, note: Callable[[Statement], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.note, self.complete = note, True
        self.checks: list[tuple[Any, ...]] = []  # arguments of the checks of a factorisation

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        try:
            for each in CALLS[func](result, *args, **(kwargs or {})):
                self.note(each)
        except (KeyError, NotHereError):
            self.complete = False
        if func is aten._linalg_check_errors.default:
            self.checks.append((func, args, kwargs or {}))
        return result
