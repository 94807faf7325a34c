"""Run a traced step many times from C: record Inductor's kernels once, then replay them in a loop.

Inductor turns a step into one or a few C++ kernels that take raw pointers; calling them from Python
costs fifty times what they do. So the step is compiled, run once while its kernel calls are
recorded, and a C loop of a few lines, made for it, calls the same kernels with pointers that
advance along the stacked inputs and outputs. That is a CUDA graph, for the CPU. Torch's `scan` with
the C++ wrapper does the same job, but allocates its buffers anew in every iteration: 50 times
slower at one run, 9 times at 64 (benchmarks/README.md).

Factors and solutions of small matrices are recorded too (`linear_algebra.py`). A step that calls
other library functions (FFT, eigenvalues, large products) has no recording: its compiled code is
called from Python, once a step.

This leans on internals of Inductor, so nothing is taken on trust: the caller compares the first
steps with eager ones, and falls back to the eager loop with a logged reason.
"""

from __future__ import annotations

import ast
import ctypes
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrex.cpp import load_cpp
from torchrex.density import linear_algebra
from torchrex.density.linear_algebra import LibraryCalls, Statement, fits_product
from torchrex.errors import TargetError
from torchrex.rng import DEFAULT_GENERATORS

# What Inductor's code may call besides its kernels, its checks and torch's operators: allocation.
ALLOWED = ["empty_strided_cpu", "reinterpret_tensor", "clear"]
# Numbers in a tensor up to which scalar code is faster than masked vectors (0.07 against 0.13 us).
LARGEST_SCALAR = 8
LARGEST_PRODUCT = 2**20  # multiplications of a matrix product that is unrolled into the kernels


class CannotReplayError(RuntimeError):
    """The step cannot be compiled; the text is the reason to log."""


@dataclass
class Recording:
    """Calls of one execution: addresses of kernels and the tensors they touched (kept alive), or
    statements; then its outputs, and what raises the error of a matrix without a factor.
    """

    calls: list[tuple[int, tuple[Tensor, ...]] | Statement]
    outputs: list[Tensor]
    checks: list[tuple[Any, ...]]

    @property
    def has_statements(self) -> bool:
        return not all(isinstance(call, tuple) for call in self.calls)


def compiled_by_inductor(function: Callable[..., Sequence[Tensor]], args: Sequence[Tensor]) -> Any:
    """Compile a pure function of CPU tensors."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    if any(tensor.device.type != "cpu" for tensor in args):
        raise CannotReplayError("the compiled loop runs on the CPU")
    # Fake tensors: a branch on a value raises instead of being burnt in.
    table = {**select_decomp_table(), **_small_products(), **linear_algebra.DECOMPOSITIONS}
    # Functionalised: Inductor would miss what the target writes in place.
    pure = torch.func.functionalize(function, remove="mutations")
    trace = make_fx(
        pure, decomposition_table=table, tracing_mode="fake", _allow_non_fake_inputs=True
    )
    try:
        with torch.no_grad():
            graph = trace(*args)
    except GuardOnDataDependentSymNode:
        raise CannotReplayError(
            "the target branches on the values of its tensors; use torch.where"
        ) from None
    sizes = [0]
    for node in graph.graph.nodes:
        tags = node.target.tags if isinstance(node.target, torch._ops.OpOverload) else ()
        if torch.Tag.nondeterministic_seeded in tags:
            raise CannotReplayError(f"the target draws random numbers of its own ({node.target})")
        if isinstance(value := node.meta.get("val"), Tensor):
            sizes.append(value.numel())
    # One thread: a step is too short to share out.
    settings: dict[str, Any] = {"cpp_wrapper": False, "graph_partition": False}
    settings |= {"compile_threads": 1, "cpp.threads": 1}
    if any(node.target in linear_algebra.CALLS for node in graph.graph.nodes):
        linear_algebra.merge_equal_calls(graph)
        # Rows of matrices are short: masked vectors take longer than scalar code for their ends.
        settings["cpp.enable_loop_tail_vec"] = False
    if max(sizes) <= LARGEST_SCALAR:
        settings["cpp.simdlen"] = 1
    with torch.no_grad(), config.patch(settings), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Inductor's own, about its code
        return compile_fx_inner(graph, list(args))


def record(compiled: Any, args: Sequence[Tensor]) -> Recording | None:
    """Run it once on `args` and record its kernel calls; None if it calls anything else."""
    call = compiled.current_callable
    names = call.__globals__
    kernels = {name: value for name, value in names.items() if name.startswith("cpp_fused")}
    if not _calls_only_kernels(compiled.source_code, set(kernels)):
        return None
    calls: list[tuple[int, tuple[Tensor, ...]] | Statement] = []

    def recorder(kernel: Any) -> Callable[..., None]:
        address = ctypes.cast(ctypes.CDLL(kernel.__self__.__file__).kernel, ctypes.c_void_p).value
        assert address is not None

        def run(*tensors: Any) -> None:
            if not all(isinstance(tensor, Tensor) for tensor in tensors):
                raise CannotReplayError("a kernel takes arguments other than tensors")
            calls.append((address, tensors))
            kernel(*tensors)

        return run

    library = LibraryCalls(calls.append)
    try:
        names.update({name: recorder(kernel) for name, kernel in kernels.items()})
        with library:
            outputs = list(call(list(args)))
    finally:
        names.update(kernels)
    return Recording(calls, outputs, library.checks) if library.complete else None


def _small_products() -> dict[Any, Callable[..., Any]]:
    """Matrix products as multiply and sum, which Inductor fuses into the step. Library calls could
    not be recorded.
    """
    aten = torch.ops.aten

    def mm(a: Tensor, b: Tensor) -> Any:
        small = a.shape[0] * a.shape[1] * b.shape[1] <= LARGEST_PRODUCT
        return (a.unsqueeze(2) * b.unsqueeze(0)).sum(1) if small else NotImplemented

    def bmm(a: Tensor, b: Tensor) -> Any:
        small = a.numel() * b.shape[2] <= LARGEST_PRODUCT and not fits_product(a, b)
        return (a.unsqueeze(3) * b.unsqueeze(1)).sum(2) if small else NotImplemented

    def addmm(c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
        product = mm(a, b)
        return NotImplemented if product is NotImplemented else beta * c + alpha * product

    def mv(a: Tensor, v: Tensor) -> Any:
        return (a * v).sum(1) if a.numel() <= LARGEST_PRODUCT else NotImplemented

    products = ((aten.mm, mm), (aten.bmm, bmm), (aten.addmm, addmm), (aten.mv, mv))
    return {operator.default: function for operator, function in products}


def _calls_only_kernels(source: str, kernels: set[str]) -> bool:
    """Does the code call nothing else? What torch's operators do is seen when they are called."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    body = next((function for function in functions if function.name == "call"), None)
    if body is None:
        raise CannotReplayError("Inductor's code has an unknown form")
    called = [ast.unparse(node.func) for node in ast.walk(body) if isinstance(node, ast.Call)]
    known = kernels.union(ALLOWED)
    checked = ("assert_", "torch.ops.aten.", "extern_kernels.")
    return all(name.startswith(checked) or name.split(".")[-1] in known for name in called)


class Occasions(NamedTuple):
    """The steps of a call at which something else is done: from `first` on, counted from the
    beginning of the call, every so many.
    """

    inputs: Sequence[Tensor] = ()  # one row for each
    first: int = -1
    every: int = 0

    def rows(self, t: int) -> list[Tensor] | None:
        """What step `t` takes of it, if it is one of them."""
        since = t - self.first
        if self.first < 0 or since < 0 or since % self.every:
            return None
        return [tensor[since // self.every] for tensor in self.inputs]


NEVER = Occasions()


class Replay:
    """A C loop over a recorded step, with two optional programs: `measure` runs before a step,
    `swap_step` in its place.

    `carry` are the tensors that persist: all programs take them first and return their new values
    first, in the same order. `swap_step` takes what the step takes, and inputs of its own.
    """

    def __init__(
        self,
        step: Callable[..., Sequence[Tensor]],
        carry: Sequence[Tensor],
        inputs: Sequence[Tensor],
        measure: Callable[..., Sequence[Tensor]] | None = None,
        measure_inputs: Sequence[Tensor] = (),
        swap_step: Callable[..., Sequence[Tensor]] | None = None,
        swap_inputs: Sequence[Tensor] = (),
    ) -> None:
        """All inputs are examples for one step, without the stacking axis."""
        # Clones: a tensor is known by its storage, so no two may share one.
        self.carry = [_own(tensor) for tensor in carry]
        self._examples = [_own(example) for example in inputs]
        self._measure_examples = [_own(example) for example in measure_inputs]
        self._swap_examples = [_own(example) for example in swap_inputs]
        given = (
            [*self.carry, *self._examples],
            [*self.carry, *self._measure_examples],
            [*self.carry, *self._examples, *self._swap_examples],
        )
        # Tracing and compiling save and restore what all threads share: Inductor's settings, and
        # torch's default generators.
        with DEFAULT_GENERATORS:
            compiled = [
                compiled_by_inductor(function, args) if function else None
                for function, args in zip((step, measure, swap_step), given, strict=True)
            ]
            recordings = [
                record(each, args) if each else None
                for each, args in zip(compiled, given, strict=True)
            ]
        self._step, self._measure, self._swap_step = recordings
        self._recordings = [recording for recording in recordings if recording]
        self._calls: list[Any] = [each and each.current_callable for each in compiled]
        self._pointers: list[tuple[str, int]] = []
        self._function: Any = None
        if self._step and all(r or not each for r, each in zip(recordings, compiled, strict=True)):
            outputs = self._step.outputs
            self._function = self._build(self._step)
        else:
            with torch.no_grad():
                outputs = self._calls[0](list(given[0]))
        self._output_like = outputs[len(self.carry) :]

    @property
    def is_recorded(self) -> bool:
        """Does it run in C? Else it is called from Python, step by step."""
        return self._function is not None

    def _build(self, recorded: Recording) -> Any:
        """Write, compile and load the C loop."""
        matrices = any(recording.has_statements for recording in self._recordings)
        measure, other = ["    if (0) {"], ["    if (0) {"]
        step = {"input": ("t", self._examples)}
        if self._measure is not None:
            examples = {"measure": ("j", self._measure_examples)}
            program = self._program(self._measure, examples, [])
            measure = ["    if (t == at) {", *program, "      at += every; j++;"]
        if self._swap_step is not None:
            examples = {**step, "swap": ("k", self._swap_examples)}
            outputs = self._swap_step.outputs[len(self.carry) :]
            program = self._program(self._swap_step, examples, outputs)
            other = ["    if (t == swap) {", *program, "      swap += swap_every; k++;"]
        numbers = "long n, long at, long every, long swap, long swap_every"
        lines = [
            "#include <string.h>",
            *([linear_algebra.CODE] if matrices else []),
            f'extern "C" int replay({numbers}, char** p) {{',
            "  try {",
            "  for (long t = 0, j = 0, k = 0; t < n; t++) {",
            *measure,
            "    }",
            *other,
            "    } else {",
            *self._program(recorded, step, recorded.outputs[len(self.carry) :]),
            "    }",
            "  }",
            # Its text is not asked for: that walks the stack, which has crashed (torch 2.11).
            "  } catch (...) { return 1; }",
            "  return 0;",
            "}",
        ]
        flags = linear_algebra.FLAGS if matrices else ["-O2"]
        return load_cpp("\n".join(lines), flags).replay

    def _program(
        self,
        recording: Recording,
        examples: Mapping[str, tuple[str, list[Tensor]]],
        outputs: list[Tensor],
    ) -> list[str]:
        """C statements of one program. A pointer is a row of `p`, plus a stride if stacked.
        `examples` are its inputs: kind -> the variable that counts their rows, and one row.
        """
        role: dict[int, tuple[str, int]] = {}  # storage address -> (what counts its rows, slot)
        for tensor in self.carry:
            role[_storage(tensor)] = ("", self._slot("address", tensor.data_ptr()))
        for kind, (index, rows) in examples.items():
            for which, tensor in enumerate(rows):
                role[_storage(tensor)] = (index, self._slot(kind, which))
        # An output that a kernel writes alone goes straight to its place; others are copied there.
        kernels = [call for call in recording.calls if isinstance(call, tuple)]
        written = {_storage(tensor) for _, tensors in kernels for tensor in tensors}
        shared = {_storage(tensor) for tensor in recording.outputs[: len(self.carry)]}
        copies = []
        for which, tensor in enumerate(outputs):
            if not tensor.is_contiguous():
                raise CannotReplayError("an output is not contiguous")
            slot, address = self._slot("output", which), _storage(tensor)
            alone = tensor.untyped_storage().nbytes() == tensor.nbytes
            if alone and address in written and address not in role and address not in shared:
                role[address] = ("t", slot)
            else:
                copies.append((slot, tensor))

        def pointer(tensor: Tensor) -> str:
            if _storage(tensor) not in role:
                role[_storage(tensor)] = ("", self._slot("address", _storage(tensor)))
            index, slot = role[_storage(tensor)]
            start = f"p[{slot}] + {tensor.data_ptr() - _storage(tensor)}L"
            return f"{start} + {index} * (long)p[{slot + 1}]" if index else start

        lines = []
        for call in recording.calls:
            if not isinstance(call, tuple):
                lines.append(call(pointer))
                continue
            address, tensors = call
            slot, types = self._slot("address", address), ", ".join(["char*"] * len(tensors))
            values = ", ".join(pointer(tensor) for tensor in tensors)
            lines.append(f"((void (*)({types}))p[{slot}])({values});")
        for slot, tensor in copies:
            place = f"p[{slot}] + t * (long)p[{slot + 1}]"
            lines.append(f"memcpy({place}, {pointer(tensor)}, {tensor.nbytes});")
        for old, new in zip(self.carry, recording.outputs, strict=False):
            if new.data_ptr() == old.data_ptr():
                continue
            carried = {_storage(tensor) for tensor in self.carry}
            if _storage(new) in carried or not new.is_contiguous():
                raise CannotReplayError("the step permutes its own state")
            if (new.shape, new.dtype) != (old.shape, old.dtype):
                raise CannotReplayError(
                    f"the step changes its state from {old.dtype} to {new.dtype}"
                )
            lines.append(f"memcpy({pointer(old)}, {pointer(new)}, {old.nbytes});")
        return ["      " + line for line in lines]

    def _slot(self, kind: str, which: int) -> int:
        """A row of the pointer table; stacked tensors have a second row, their stride in bytes."""
        self._pointers.append((kind, which))
        if kind != "address":
            self._pointers.append((kind + " stride", which))
        return len(self._pointers) - (1 if kind == "address" else 2)

    def outputs(self, n: int) -> list[Tensor]:
        """Buffers for the outputs of `n` steps."""
        return [tensor.new_empty((n, *tensor.shape)) for tensor in self._output_like]

    def run(
        self,
        n: int,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        measured: Occasions = NEVER,
        swapped: Occasions = NEVER,
    ) -> None:
        """`n` steps over stacked inputs, with measurements and swap batches at some of them."""
        if not self.is_recorded:
            self._call_each(n, inputs, outputs, measured, swapped)
            return
        stacked: dict[str, Sequence[Tensor]] = {"input": inputs, "output": outputs}
        stacked |= {"measure": measured.inputs, "swap": swapped.inputs}
        table = (ctypes.c_void_p * len(self._pointers))()
        for row, (kind, which) in enumerate(self._pointers):
            tensors = stacked.get(kind.removesuffix(" stride"))
            if kind == "address":
                table[row] = which
            elif tensors:
                tensor, is_stride = tensors[which], kind.endswith("stride")
                stride = tensor.stride(0) * tensor.element_size()
                table[row] = stride if is_stride else tensor.data_ptr()
        numbers = map(ctypes.c_long, (n, *measured[1:], *swapped[1:]))
        if failure := self._function(*numbers, table):
            if failure == linear_algebra.NO_FACTOR:
                for function, args, names in (c for r in self._recordings for c in r.checks):
                    function(*args, **names)
            raise TargetError(
                "the target failed inside the compiled loop, whose kernels refuse an index out of "
                "bounds; compiled=False shows where"
            )

    def _call_each(
        self,
        n: int,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        measured: Occasions,
        swapped: Occasions,
    ) -> None:
        """The same from Python: a library function of a step has no recording."""
        step, measure, swap_step = self._calls
        size, carry = len(self.carry), list(self.carry)
        with torch.no_grad():
            for t in range(n):
                program, rows = step, [tensor[t] for tensor in inputs]
                if (more := measured.rows(t)) is not None:
                    carry = list(measure([*carry, *more]))
                if (more := swapped.rows(t)) is not None:
                    program, rows = swap_step, [*rows, *more]
                results = program([*carry, *rows])
                carry = list(results[:size])
                for place, result in zip(outputs, results[size:], strict=True):
                    place[t] = result
        for mine, last in zip(self.carry, [tensor.clone() for tensor in carry], strict=True):
            mine.copy_(last)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _own(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)
