"""What can be known of the CUDA extension without a GPU: it loads, registers, refuses, and traces.

Run by `make check-cuda` on a build against a CUDA build of torch.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import attnkit
from attnkit.backends import cpu, cuda
from attnkit.spec import AttentionSpec, CacheArgs, TensorArgs


def main() -> None:
    library = Path(importlib.import_module("attnkit._C_cuda").__file__ or "")
    print(f"loaded {library.name} ({library.stat().st_size / 2**20:.1f} MiB)")
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, GPU {torch.cuda.is_available()}")
    assert cpu.BUILT
    assert cuda.BUILT
    for name in ("cuda_forward", "cuda_decode", "cuda_append"):
        operator = getattr(torch.ops.attnkit, name).default
        has = torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CUDA")
        assert has, f"{name} has no CUDA kernel"
        print(f"registered attnkit::{name} for CUDA")

    q = torch.randn(1, 2, 1, 64)
    print("on CPU tensors:", cuda.supports(q, q, q, TensorArgs(), AttentionSpec(1.0)))
    assert attnkit.attention(q, q, q).isfinite().all()

    with FakeTensorMode():
        q = torch.empty(3, 8, 2, 128, device="cuda", dtype=torch.bfloat16)
        k = torch.empty(9, 2, 16, 128, device="cuda", dtype=torch.bfloat16)
        lengths = torch.empty(3, device="cuda", dtype=torch.int32)
        table = torch.empty(3, 4, device="cuda", dtype=torch.int32)
        args, spec = TensorArgs(lengths=lengths), AttentionSpec(1.0, None, 0, True)
        where = CacheArgs(block_table=table)
        assert cuda.supports_decode(q, k, k, args, spec, where) is None
        out, lse = cuda.decode(q, k, k, args, spec, where)
        assert (out.shape, out.dtype, out.device.type) == (q.shape, q.dtype, "cuda")
        assert (lse.shape, lse.dtype) == (q.shape[:3], torch.float32)
        with attnkit.use_backend("cuda"):
            out = attnkit.attention(q, q, q)
            assert out.shape == q.shape
    print("traced with fake CUDA tensors")
    if torch.cuda.is_available():
        print("there is a GPU: pytest tests/test_cuda_decode.py runs the kernels on it")


if __name__ == "__main__":
    main()
