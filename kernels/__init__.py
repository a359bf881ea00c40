"""Triton kernels.  Shipped, and only importable, as attnkit.kernels.

forward.py, backward.py and decode.py hold one family of kernels each, parts.py what they share on
the device, host.py what they share on the host, and launch.py which tile sizes a GPU gets.
"""

if __name__ != "attnkit.kernels":
    raise ImportError("import attnkit.kernels, not kernels")
