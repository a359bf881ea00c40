"""The Triton kernels in kernels/: forward, backward and decoding for GPUs.

CPU tensors are served under Triton's interpreter, where TRITON_INTERPRET=1 was set before the
import: that is how the kernels are tested on machines without a GPU.
"""

from __future__ import annotations

import importlib.util
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor

from attnkit import _flops, _gpu
from attnkit._layout import empty_like, readable
from attnkit.spec import NO_CACHE, AttentionSpec, CacheArgs, TensorArgs

INSTALLED = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"

_DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16))
_LARGEST_DIM = 512
_LONGEST = 1 << 28  # positions are 32-bit numbers, and so are sums of some of them
_MOST_PROGRAMS = 1 << 31
_tracing = torch.compiler.is_dynamo_compiling
_modes = torch._C._len_torch_dispatch_stack


def supports(q: Tensor, k: Tensor, v: Tensor, args: TensorArgs, spec: AttentionSpec) -> str | None:
    """None, or why these kernels cannot serve the call."""
    if q.is_cpu and not INTERPRETED:
        return "query is on the CPU, and these kernels are for GPUs"
    if not INSTALLED:
        return "Triton is not installed (pip install triton)"
    if not (q.is_cpu or q.is_cuda):
        return f"query is on {q.device}, not on a GPU of NVIDIA or AMD"
    if q.is_cuda and INTERPRETED:
        return "TRITON_INTERPRET=1 is set, under which only CPU tensors are served"
    if q.dtype not in _DTYPES:
        return f"dtype {q.dtype} is not float32, bfloat16 or float16"
    if q.is_cuda:
        reason = _gpu.too_old(q.device)
        if reason is not None:
            return reason
    if q.shape[3] > _LARGEST_DIM or v.shape[3] > _LARGEST_DIM:
        return f"head dim {max(q.shape[3], v.shape[3])} is above {_LARGEST_DIM}"
    if q.shape[2] > _LONGEST or k.shape[2] > _LONGEST:
        return f"length {max(q.shape[2], k.shape[2])} is above 2^28"
    # of every kernel: a program has 16 rows or more, and one more per packed sequence
    sequences = 0 if args.cu_seqlens_q is None else args.cu_seqlens_q.shape[0]
    programs = (max(q.shape[2], k.shape[2]) // 16 + 1 + sequences) * q.shape[0] * q.shape[1]
    if programs >= _MOST_PROGRAMS:
        return f"batch, heads and lengths make some {programs} programs, 2^31 or more"
    if args.cu_seqlens_q is not None and not (
        args.lengths is None and args.blocks is None and args.bias is None
    ):
        return "packed sequences go without lengths, blocks and a dense mask"
    return None


def supports_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    args: TensorArgs,
    spec: AttentionSpec,
    cache: CacheArgs = NO_CACHE,
) -> str | None:
    """None, or why these kernels cannot serve the decoding step."""
    if args.lengths is None or args.cu_seqlens_q is not None:
        return "decoding takes lengths, and no packed sequences"
    if spec.dropout_p > 0 or args.bias is not None:
        return "decoding goes without dropout and a dense mask"
    located = cache.block_table is not None or cache.batch_index is not None
    if (located or cache.k_scale is not None) and not readable(k, v):
        return "a paged or quantised cache is not contiguous in its last dimension"
    capacity = k.shape[2] * (1 if cache.block_table is None else cache.block_table.shape[1])
    if capacity > _LONGEST:
        return f"the cache has room for {capacity} keys of a sequence, more than 2^28"
    programs = q.shape[0] * q.shape[1] * q.shape[2] * (capacity // 256 + 1)
    if programs >= _MOST_PROGRAMS:
        return f"batch, heads, queries and room make some {programs} programs, 2^31 or more"
    return supports(q, k, v, args, spec)


def supports_extend(*call: Any) -> str:
    """Why appending and attending take two calls."""
    return "it has no operator that appends and attends"


def supports_append(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor) -> str | None:
    """None, or why these kernels cannot write k and v into the cache."""
    return "there is no Triton kernel that writes into a cache: PyTorch's own indexing does it"


def forward(
    q: Tensor, k: Tensor, v: Tensor, args: TensorArgs, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """out [B, Hq, Lq, Dv] and lse [B, Hq, Lq]."""
    call = torch.ops.attnkit.triton_forward.default if _watched(q) else _forward
    return call(q, k, v, *args, *spec)  # type: ignore[no-any-return]


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    args: TensorArgs,
    spec: AttentionSpec,
    needs: tuple[bool, bool, bool, bool, bool] = (True, True, True, True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of q, k, v, bias (size 1 where it was broadcast), sinks; None where not wanted."""
    needs = (*needs[:3], needs[3] and args.bias is not None, needs[4] and args.sinks is not None)
    call = torch.ops.attnkit.triton_backward.default if _watched(q) else _backward
    grads = call(dout, dlse, q, k, v, out, lse, *args, *spec, *needs)
    dq, dk, dv, dbias, dsinks = (
        g if wanted else None for g, wanted in zip(grads, needs, strict=True)
    )
    return dq, dk, dv, dbias, dsinks


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    args: TensorArgs,
    spec: AttentionSpec,
    cache: CacheArgs = NO_CACHE,
) -> tuple[Tensor, Tensor]:
    """Attention of new queries over a cache k, v [N, Hkv, S, .] of args.lengths keys.

    Raises:
        RuntimeError: lengths beyond the capacity, or rows that the cache does not have.  On a GPU
            these end the kernel by a device-side assertion: nothing is read there.
    """
    call = torch.ops.attnkit.triton_decode.default if _watched(q) else _decode
    return call(q, k, v, *args, *spec, *cache)  # type: ignore[no-any-return]


def append(*arguments: Any) -> None:
    """Refused by supports_append."""
    raise NotImplementedError(supports_append(*arguments[:4]))


# ------------------------------------------------------------- operators

_N_ARGS = len(TensorArgs._fields)
_N_SPEC = len(AttentionSpec._fields)


def _watched(q: Tensor) -> bool:
    """Whether someone has to see an operator: a tracer, a dispatch mode or a tensor's own class.

    Else a call is spared what PyTorch's dispatcher takes for an operator written in Python.
    """
    return _tracing() or _modes() > 0 or type(q) is not Tensor


def _device_of(q: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the tensors'."""
    return torch.cuda.device(q.device) if q.is_cuda else nullcontext()


def _forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    from attnkit.kernels.forward import forward as launch

    args, spec = TensorArgs(*rest[:_N_ARGS]), AttentionSpec(*rest[_N_ARGS:])
    with _device_of(q):
        return launch(q, k, v, args, spec)


def _backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *rest: Any,
) -> tuple[Tensor, ...]:
    from attnkit.kernels.backward_launch import backward as launch

    args = TensorArgs(*rest[:_N_ARGS])
    spec = AttentionSpec(*rest[_N_ARGS : _N_ARGS + _N_SPEC])
    with _device_of(q):
        return launch(dout, dlse, q, k, v, out, lse, args, spec, rest[_N_ARGS + _N_SPEC :])


def _decode(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    from attnkit.kernels.decode import decode as launch

    args = TensorArgs(*rest[:_N_ARGS])
    spec = AttentionSpec(*rest[_N_ARGS : _N_ARGS + _N_SPEC])
    cache = CacheArgs(*rest[_N_ARGS + _N_SPEC :])
    if q.is_cpu:
        _check_rows(q, k, args, spec, cache)
    with _device_of(q):
        return launch(q, k, v, args, spec, cache)


def _check_rows(
    q: Tensor, k: Tensor, args: TensorArgs, spec: AttentionSpec, cache: CacheArgs
) -> None:
    """What the kernel asserts: lengths within the capacity, and rows that there are."""
    table, index, size = cache.block_table, cache.batch_index, k.shape[2]
    lengths = cast(Tensor, args.lengths)
    capacity = size * (1 if table is None else table.shape[1])
    _refuse("lengths", lengths, (lengths < 0) | (lengths > capacity), capacity)
    # a row is looked up where one of its slots is, from the first that a query sees
    first = torch.zeros_like(lengths)
    if spec.left is not None:
        first = lengths - q.shape[2] - spec.left
    if cache.starts is not None:
        first = torch.maximum(first, cache.starts)
    if table is not None:
        ends = torch.arange(1, table.shape[1] + 1) * size
        used = (ends > first[:, None]) & (ends - size < lengths[:, None])
        _refuse("block_table", table, used & ((table < 0) | (table >= len(k))), len(k) - 1)
    elif index is not None:
        wrong = (index < 0) | (index >= len(k))
        _refuse("batch_index", index, wrong & (first < lengths), len(k) - 1)


def _refuse(name: str, found: Tensor, wrong: Tensor, most: int) -> None:
    if bool(wrong.any()):
        raise RuntimeError(f"{name} is {int(found[wrong][0])}, expected 0 to {most}")


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return empty_like(q, v.shape[-1]), q.new_empty(q.shape[:3], dtype=torch.float32)


def _fake_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Any,
    sinks: Any,
    *rest: Any,
) -> tuple[Tensor, ...]:
    want_dq, want_dk, want_dv, want_dbias, want_dsinks = rest[-5:]

    def none() -> Tensor:  # each output a tensor of its own: outputs must not alias
        return q.new_empty((0,))

    dbias = none()
    if want_dbias:
        dbias = bias.new_empty([1 if bias.stride(d) == 0 else bias.shape[d] for d in range(4)])
    return (
        empty_like(q, q.shape[-1]) if want_dq else none(),
        empty_like(k, k.shape[-1]) if want_dk else none(),
        empty_like(v, v.shape[-1]) if want_dv else none(),
        dbias,
        torch.empty_like(sinks) if want_dsinks else none(),
    )


_ARGUMENTS = (
    "Tensor? bias, Tensor? sinks, Tensor? keep, Tensor? lengths, Tensor? q_segments, "
    "Tensor? k_segments, Tensor? blocks, Tensor? alibi, Tensor? seed, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, float scale, int? left, int? right, bool bottom_right, float softcap, "
    "float dropout_p"
)
_SCHEMAS = {
    "triton_forward": f"(Tensor q, Tensor k, Tensor v, {_ARGUMENTS}) -> (Tensor out, Tensor lse)",
    "triton_backward": "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, "
    f"Tensor lse, {_ARGUMENTS}, bool want_dq, bool want_dk, bool want_dv, bool want_dbias, "
    "bool want_dsinks) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)",
    "triton_decode": f"(Tensor q, Tensor k, Tensor v, {_ARGUMENTS}, Tensor? starts=None, "
    "Tensor? block_table=None, Tensor? batch_index=None, Tensor? k_scale=None, "
    "Tensor? v_scale=None) -> (Tensor out, Tensor lse)",
}
_library = torch.library.Library("attnkit", "FRAGMENT")
for _name, _run, _fake in (
    ("triton_forward", _forward, _fake_forward),
    ("triton_backward", _backward, _fake_backward),
    ("triton_decode", _decode, _fake_forward),
):
    _library.define(_name + _SCHEMAS[_name])
    _library.impl(_name, _run, "CPU" if INTERPRETED else "CUDA")
    # gradients are recorded above, by the one autograd Function
    _library.impl(_name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"attnkit::{_name}", _fake, lib=_library)
_flops.register(
    torch.ops.attnkit.triton_forward,
    torch.ops.attnkit.triton_backward,
    torch.ops.attnkit.triton_decode,
)
