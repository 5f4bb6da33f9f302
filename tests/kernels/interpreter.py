"""`band` in Triton's interpreter, on the CPU, with blocks so small that short sequences have some of each sort.

The interpreter of Triton 3.6 drops what functions close over, takes no numbers from arrays of one (numpy 2.4), and is
not for two threads at once, as virtual ranks are: that is mended here. It has no bfloat16 products.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import threading
from unittest.mock import patch

import numpy as np
import pytest
import torch

from attnspan.kernels import band, bands
from attnspan.packages import has_triton

INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1" and has_triton()
in_interpreter = pytest.mark.skipif(not INTERPRETS, reason="needs Triton, and TRITON_INTERPRET=1 in the environment")
compiles = pytest.mark.skipif(
    not has_triton() or INTERPRETS, reason="needs Triton, and no TRITON_INTERPRET in the environment"
)

SMALL = bands._BlockSizes(16, 16, 1, 1)
_ONE_AT_A_TIME = threading.RLock()


@contextlib.contextmanager
def interpreted():
    """Inside, kernel="band" computes on the CPU. Only where TRITON_INTERPRET=1 was set before Triton was imported."""
    from triton.runtime import interpreter

    run, set_attr = interpreter.InterpretedFunction.run, interpreter._LangPatchScope.set_attr

    def one_at_a_time(self, *args, **kwargs):
        with _ONE_AT_A_TIME:
            return run(self, *args, **kwargs)

    def with_closures(self, tree):
        names = {**vars(interpreter), **self.fn.__globals__, **inspect.getclosurevars(self.fn).nonlocals}
        exec(compile(tree, filename=self.filename, mode="exec"), names)
        return names[self.fn.__name__]

    def of_one(self, thing, name, value):
        if name == "__index__":

            def value(tensor):
                return int(np.asarray(tensor.handle.data).reshape(-1)[0])

        return set_attr(self, thing, name, value)

    with contextlib.ExitStack() as stack:
        for thing, name, value in (
            (interpreter.InterpretedFunction, "run", one_at_a_time),
            (interpreter.FunctionRewriter, "_compile_and_exec", with_closures),
            (interpreter._LangPatchScope, "set_attr", of_one),
            (torch.cuda, "device", lambda device: contextlib.nullcontext()),
            (band, "supports", lambda *_: None),
            (bands, "_shared_memory", lambda device: 1 << 30),
            (bands, "_WIDE", SMALL),
            *((bands, name, bands._LoopBlocks({256: SMALL}, "q")) for name in ("_FORWARD", "_BY_ROWS", "_BY_KEYS")),
        ):
            stack.enter_context(patch.object(thing, name, value))
        yield
