"""How functions are compiled, and what happens when one cannot be."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

logger = logging.getLogger("torchrex")

COMPILER_OPTIONS: dict[str, Any] = {
    "combo_kernels": True
}  # small kernels that do not wait for each other become one: 6 %


def compiled_form(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled for fixed shapes."""
    return torch.compile(function, dynamic=False, options=COMPILER_OPTIONS)


def compiled_or_plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """The compiled form of a function, until it fails: from then on the function itself."""
    chosen = compiled = compiled_form(function)

    def call(*arguments: Any) -> Any:
        nonlocal chosen
        if chosen is compiled:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    return compiled(*arguments)
            except Exception as error:
                name = getattr(function, "__name__", "a function")
                logger.info(
                    "running %s without the compiler, because: %s",
                    name,
                    " ".join(str(error).split())[:300],
                )
                chosen = function
        return function(*arguments)

    return call


@contextlib.contextmanager
def many_forms() -> Iterator[None]:
    """Let the compiler make a form for every kind of run: it gives up after eight unless told
    otherwise.
    """
    from torch._dynamo import config

    before = config.recompile_limit
    config.recompile_limit = max(before, 64)
    try:
        yield
    finally:
        config.recompile_limit = before
