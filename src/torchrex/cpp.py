"""Code in C++ that is written here, compiled with the compiler that torch uses, and loaded."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path

# Clang has no such option for some machines.
NATIVE = ["-march=native"] if platform.machine() in ("x86_64", "AMD64") else []


def load_cpp(code: str, flags: Sequence[str]) -> ctypes.CDLL:
    """Its functions; RuntimeError where it cannot be compiled."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    folder = Path(tempfile.mkdtemp(prefix="torchrex-"))
    source, library = folder / "code.cpp", folder / "code.so"
    try:
        source.write_text(code)
        command = [get_cpp_compiler(), *flags, "-shared", "-fPIC", str(source), "-o", str(library)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:]
            raise RuntimeError(f"the C++ compiler failed: {last}")
        loaded = ctypes.CDLL(str(library))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    # The files stay as long as the functions: an exception's backtrace looks into them.
    weakref.finalize(loaded, shutil.rmtree, folder, ignore_errors=True)
    return loaded
