"""Lets vLLM run its Triton kernels on a CPU, in Triton's interpreter: it takes Triton where a driver is active.

Python imports this when it starts, in every process of an engine, where this folder is on PYTHONPATH.
"""

import types

from triton.backends import backends


class Driver:
    """Nothing is compiled in the interpreter, so that nobody asks for more."""

    @staticmethod
    def is_active() -> bool:
        return True


backends["cpu"] = types.SimpleNamespace(driver=Driver, compiler=None)
