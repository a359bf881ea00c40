"""What can be known of the CUDA extension without a GPU: it loads, registers, refuses, and traces.

Run by `make check-cuda` on a build against a CUDA build of torch.
"""

from __future__ import annotations

import importlib
import re
import subprocess
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import attnkit
from attnkit.backends import cpu, cuda
from attnkit.spec import AttentionSpec, CacheArgs, TensorArgs

# What a launch needs of CUDA's runtime.  Anything that allocates, copies to the host or waits for
# the device would be seen here, and would keep a call from being captured in a CUDA graph.
CALLED = {
    "cudaDeviceGetAttribute",
    "cudaFuncSetAttribute",
    "cudaGetDevice",
    "cudaGetErrorString",
    "cudaLaunchKernelExC",
}


def check_what_it_calls(library: Path) -> None:
    """The functions of CUDA's runtime that the library asks the loader for."""
    listed = subprocess.run(
        ["nm", "--dynamic", "--undefined-only", library], capture_output=True, text=True, check=True
    )
    called = set(re.findall(r"\b(cu[a-z]*[A-Z]\w*)", listed.stdout))
    assert "cudaLaunchKernelExC" in called, called
    assert called <= CALLED, (
        f"{sorted(called - CALLED)} are called, expected {sorted(CALLED)} alone"
    )
    print(f"of CUDA's runtime it calls {', '.join(sorted(called))}")


def main() -> None:
    library = Path(importlib.import_module("attnkit._C_cuda").__file__ or "")
    print(f"loaded {library.name} ({library.stat().st_size / 2**20:.1f} MiB)")
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, GPU {torch.cuda.is_available()}")
    assert cpu.BUILT
    assert cuda.BUILT
    check_what_it_calls(library)
    for name in ("cuda_forward", "cuda_decode", "cuda_append", "cuda_extend"):
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
        new = torch.empty(3, 2, 2, 128, device="cuda", dtype=torch.bfloat16)
        assert cuda.supports_extend(q, new, new, k, k, args, spec, where) is None
        out, lse = cuda.extend(q, new, new, k, k, args, spec, where)
        assert (out.shape, lse.shape) == (q.shape, q.shape[:3])
        with attnkit.use_backend("cuda"):
            out = attnkit.attention(q, q, q)
            assert out.shape == q.shape
    print("traced with fake CUDA tensors")
    if torch.cuda.is_available():
        print("there is a GPU: pytest tests/test_cuda_decode.py runs the kernels on it")


if __name__ == "__main__":
    main()
