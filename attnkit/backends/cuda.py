"""The compiled CUDA kernels in csrc/cuda: queries over a cache, attention without a gradient."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from attnkit import _flops, _gpu
from attnkit._layout import empty_like
from attnkit.spec import NO_CACHE, NO_ROTARY, AttentionSpec, CacheArgs, RotaryTables, TensorArgs

BUILT = importlib.util.find_spec("attnkit._C_cuda") is not None
DEVICE = "cuda"  # of the tensors that the operators take
OPERATORS = torch.ops.attnkit
# it links to torch's CUDA libraries, which a CPU build of torch does not have
if BUILT and torch.version.cuda is not None:
    import attnkit._C_cuda  # noqa: F401  (its import registers operators in torch.ops.attnkit)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_EIGHT_BITS = (torch.int8, torch.float8_e4m3fn)
# Those of keys and values that there are kernels for, and the most shared memory that one of these
# takes.
_HEAD_DIMS = {
    (64, 64): 73856,
    (80, 80): 47712,
    (96, 96): 59904,
    (128, 128): 76288,
    (192, 128): 117760,
    (192, 192): 134144,
    (256, 256): 150272,
}
_UNIT = 16  # bytes that are read at once
_MOST = 1 << 29  # slots of a sequence


def supports(q: Tensor, k: Tensor, v: Tensor, args: TensorArgs, spec: AttentionSpec) -> str | None:
    """None, or why these kernels cannot serve the call."""
    reason = _against(q, k, v, args, spec)
    if reason is None and torch.is_grad_enabled():
        tensors = (q, k, v, args.sinks)
        if any(t is not None and t.requires_grad for t in tensors):
            return "a gradient is wanted, and the CUDA kernels have no backward pass"
    return reason


def supports_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    args: TensorArgs,
    spec: AttentionSpec,
    cache: CacheArgs = NO_CACHE,
) -> str | None:
    """None, or why these kernels cannot serve the decoding step."""
    reason = _against(q, k, v, args, spec)
    if reason is None and not (_aligned(k) and _aligned(v)):
        return (
            "the cache's rows are not adjacent numbers that start at multiples of "
            f"{_UNIT} bytes (strides {tuple(k.stride())} and {tuple(v.stride())})"
        )
    return reason


def supports_append(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor) -> str | None:
    """None, or why these kernels cannot write k and v into the cache."""
    reason = _missing(k, "k")
    if reason is None and k.dtype not in _DTYPES:
        return f"dtype {k.dtype} is not float32, bfloat16 or float16"
    return reason


def supports_extend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    args: TensorArgs,
    spec: AttentionSpec,
    cache: CacheArgs = NO_CACHE,
) -> str | None:
    """None, or why these kernels cannot append and attend in one call."""
    reason = supports_decode(q, k_cache, v_cache, args, spec, cache)
    return supports_append(k, v, k_cache, v_cache) if reason is None else reason


def _missing(t: Tensor, name: str) -> str | None:
    if not BUILT:
        return "attnkit was installed without its CUDA extension (see `attnkit info`)"
    if DEVICE == "cuda" and torch.version.cuda is None:
        return "this PyTorch is built without CUDA"
    if t.device.type != DEVICE:
        return f"{name} is on {t.device}, not on {DEVICE}"
    return _gpu.too_old(t.device) if t.is_cuda else None


def _against(q: Tensor, k: Tensor, v: Tensor, args: TensorArgs, spec: AttentionSpec) -> str | None:
    reason = _missing(q, "query")
    if reason is not None:
        return reason
    if q.dtype not in _DTYPES:
        return f"dtype {q.dtype} is not float32, bfloat16 or float16"
    if k.dtype != q.dtype and k.dtype not in _EIGHT_BITS:
        return f"keys are {k.dtype}, queries {q.dtype}"
    dims = (q.shape[3], v.shape[3])
    if dims not in _HEAD_DIMS:
        known = ", ".join(f"{d}" if d == dv else f"{d}/{dv}" for d, dv in sorted(_HEAD_DIMS))
        return f"head dims {dims[0]} and {dims[1]} are not among those with a kernel: {known}"
    room = _gpu.shared_memory(q.device) if q.is_cuda else None
    if room is not None and _HEAD_DIMS[dims] > room:
        return (
            f"head dims {dims[0]} and {dims[1]} take up to {_HEAD_DIMS[dims]} bytes of shared "
            f"memory, {q.device} has {room}"
        )
    if args.bias is not None or args.blocks is not None:
        return "a bias, a dense mask or blocks are given"
    if args.q_segments is not None or args.cu_seqlens_q is not None:
        return "segments or packed sequences are given"
    if spec.dropout_p > 0:
        return "dropout is on"
    if k.shape[2] >= _MOST:
        return f"{k.shape[2]} slots are more than 2^29"
    return None


def _aligned(t: Tensor) -> bool:
    size = t.element_size()
    if t.shape[3] > 1 and t.stride(3) != 1:
        return False
    starts: list[Any] = [s for s, n in zip(t.stride()[:3], t.shape[:3], strict=True) if n > 1]
    # Dynamo cannot trace it; the operator looks again, and copies what it cannot read
    if not torch.compiler.is_dynamo_compiling():
        starts.append(t.storage_offset())
    return all(s * size % _UNIT == 0 for s in starts)


def forward(
    q: Tensor, k: Tensor, v: Tensor, args: TensorArgs, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """out [B, Hq, Lq, Dv] and lse [B, Hq, Lq]; without a gradient.

    Rows that do not start at multiples of 16 bytes are copied.
    """
    if args.lengths is not None:
        args = args._replace(lengths=args.lengths.clamp(0, k.shape[2]))
    return OPERATORS.cuda_forward(q, k, v, *args, *spec)  # type: ignore[no-any-return]


def backward(*_: object) -> tuple[Tensor | None, ...]:
    """There is none: `supports` refuses calls that want a gradient."""
    raise NotImplementedError("the CUDA kernels have no backward pass")


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    args: TensorArgs,
    spec: AttentionSpec,
    cache: CacheArgs = NO_CACHE,
    splits: int = 0,
) -> tuple[Tensor, Tensor]:
    """Attention of new queries over a cache k, v [N, Hkv, S, .] of args.lengths keys.

    Args:
        q, k, v, args, spec, cache: as every backend's.
        splits: how many blocks share the keys of a row.  0: a function of each sequence's own
            length, so that no bit depends on the rest of the batch; -1: as many as fill the
            machine; or their number, up to 128.

    Raises:
        RuntimeError: what does not fit together.  Lengths beyond the capacity and rows that the
            cache does not have end the kernel by a device-side assertion: nothing is read there.
    """
    return OPERATORS.cuda_decode(  # type: ignore[no-any-return]
        q, k, v, *args, *spec, *cache, splits
    )


def append(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    cache: CacheArgs = NO_CACHE,
    rotary: RotaryTables = NO_ROTARY,
) -> None:
    """Write k, v [B, Hkv, n, .] into the slots of the cache from lengths [B] on."""
    _, table, index, *scales = cache
    OPERATORS.cuda_append(k, v, k_cache, v_cache, *scales, lengths, table, index, *rotary)


def extend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    args: TensorArgs,
    spec: AttentionSpec,
    cache: CacheArgs = NO_CACHE,
    rotary: RotaryTables = NO_ROTARY,
    query_step: int | None = None,
    splits: int = 0,
) -> tuple[Tensor, Tensor]:
    """`append` k and v, and `decode` from q over what the cache holds then: one operator.

    Args:
        args: lengths are those before the new tokens, and are not changed.
        rotary, query_step: keys are rotated by their slots, and where query_step is given queries,
            too: query i of sequence b as one at position lengths[b] + i * query_step (0 or 1).
        q, k, v, k_cache, v_cache, spec, cache, splits: as of `append` and `decode`.

    Raises:
        As both; what does not fit together raises before anything is written.
    """
    return OPERATORS.cuda_extend(  # type: ignore[no-any-return]
        q, k, v, k_cache, v_cache, *args, *spec, *cache, *rotary, query_step, splits
    )


def _attention_fake(q, k, v, *rest):  # type: ignore[no-untyped-def]
    return empty_like(q, v.shape[-1]), q.new_empty(q.shape[:3], dtype=torch.float32)


def register_fakes(namespace: str) -> torch.library.Library:
    """Tell torch.compile of the operators; the registration lasts as long as what is returned."""
    library = torch.library.Library(namespace, "IMPL")
    for name in ("cuda_forward", "cuda_decode", "cuda_append", "cuda_extend"):
        # gradients are recorded, or refused, above; PyTorch's own fallback would only cost time
        library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    for name in ("cuda_forward", "cuda_decode", "cuda_extend"):
        torch.library.register_fake(f"{namespace}::{name}", _attention_fake, lib=library)
    torch.library.register_fake(f"{namespace}::cuda_append", lambda *_: None, lib=library)
    return library


if BUILT and torch.version.cuda is not None:
    _library = register_fakes("attnkit")
    _flops.register(OPERATORS.cuda_forward, None, OPERATORS.cuda_decode, OPERATORS.cuda_extend)
