"""Triton kernels.  Shipped, and only importable, as attnkit.kernels; none has landed yet."""

if __name__ != "attnkit.kernels":
    raise ImportError("import attnkit.kernels, not kernels")
