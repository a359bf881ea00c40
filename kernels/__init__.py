"""Triton kernels.  Shipped, and only importable, as attnkit.kernels.

forward.py, backward.py and decode.py hold one family of kernels each, parts.py what they share on
the device, host.py what they share on the host, and launch.py which tile sizes a GPU gets.
"""

from typing import Any

if __name__ != "attnkit.kernels":
    # Reached from a checkout as `kernels`, which is the name of another project.  Who only looks
    # whether that one is there (transformers does) may go on; who wants something of it is told.
    del __path__

    def __getattr__(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        raise ImportError("import attnkit.kernels, not kernels")
