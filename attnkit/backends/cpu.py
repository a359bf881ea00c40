"""The compiled C++ kernels in csrc/cpu: forward, backward and decoding, for every CPU."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from attnkit import _flops
from attnkit._layout import empty_like, readable
from attnkit.spec import NO_CACHE, NO_ROTARY, AttentionSpec, CacheArgs, RotaryTables, TensorArgs

BUILT = importlib.util.find_spec("attnkit._C") is not None
if BUILT:
    import attnkit._C  # noqa: F401  (its import registers torch.ops.attnkit)

    OPERATORS = ("cpu_forward", "cpu_backward", "cpu_decode", "cpu_append", "cpu_extend")
    _forward, _backward, _decode, _append, _extend = (
        getattr(torch.ops.attnkit, name).default for name in OPERATORS
    )
    # the same without what OpOverload's own call costs; Dynamo knows only the former
    _forward_now, _backward_now = _forward._op, _backward._op
    _decode_now, _append_now, _extend_now = _decode._op, _append._op, _extend._op

_tracing = torch.compiler.is_dynamo_compiling
_DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64))


def instruction_set() -> str:
    """Name of the kernels in use: the widest that this processor runs, or ATTNKIT_CPU_ISA's."""
    return torch.ops.attnkit.cpu_instruction_sets().split(",")[0]


def available_isas() -> list[str]:
    """Names that ATTNKIT_CPU_ISA may take on this machine, widest first ("wide" is for tests)."""
    return torch.ops.attnkit.cpu_instruction_sets().split(",")[1:]


def supports(q: Tensor, k: Tensor, v: Tensor, args: TensorArgs, spec: AttentionSpec) -> str | None:
    """None, or why these kernels cannot serve the call."""
    if not BUILT:
        return "attnkit was installed without its C++ extension (see `attnkit info`)"
    if not q.is_cpu:
        return f"query is on {q.device}, not on the CPU"
    if q.dtype not in _DTYPES:
        return f"dtype {q.dtype} is not float32, bfloat16, float16 or float64"
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
    located = cache.block_table is not None or cache.batch_index is not None
    if (located or cache.k_scale is not None) and not readable(k, v):
        return "a paged or quantised cache is not contiguous in its last dimension"
    return supports(q, k, v, args, spec)


def supports_append(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor) -> str | None:
    """None, or why these kernels cannot write k and v into the cache."""
    return supports(k, k, v, TensorArgs(), AttentionSpec(1.0))


def forward(
    q: Tensor, k: Tensor, v: Tensor, args: TensorArgs, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """out [B, Hq, Lq, Dv] and lse [B, Hq, Lq]."""
    call = _forward if _tracing() else _forward_now
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
    call = _backward if _tracing() else _backward_now
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
    """Attention of new queries over a cache k, v [N, Hkv, S, .] of args.lengths keys."""
    call = _decode if _tracing() else _decode_now
    return call(q, k, v, *args, *spec, *cache)  # type: ignore[no-any-return]


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
    call = _append if _tracing() else _append_now
    call(k, v, k_cache, v_cache, *scales, lengths, table, index, *rotary)


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
    return supports_decode(q, k_cache, v_cache, args, spec, cache)


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
) -> tuple[Tensor, Tensor]:
    """`append` k and v, and `decode` from q over what the cache holds then: one operator.

    args.lengths are those before the new tokens, and are not changed.  Where query_step is given
    queries are rotated, too: query i of sequence b as one at position lengths[b] + i * query_step.
    """
    call = _extend if _tracing() else _extend_now
    return call(q, k, v, k_cache, v_cache, *args, *spec, *cache, *rotary, query_step)  # type: ignore[no-any-return]


def _lse(q: Tensor) -> Tensor:
    return q.new_empty(
        q.shape[:3], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32
    )


if BUILT:
    # Gradients are recorded above, by the one autograd Function; PyTorch's own fallback for
    # autograd at the operators would only cost time.
    _library = torch.library.Library("attnkit", "IMPL")
    for _name in OPERATORS:
        _library.impl(_name, torch.library.fallthrough_kernel, "Autograd")

    _flops.register(
        torch.ops.attnkit.cpu_forward,
        torch.ops.attnkit.cpu_backward,
        torch.ops.attnkit.cpu_decode,
        torch.ops.attnkit.cpu_extend,
    )

    @torch.library.register_fake("attnkit::cpu_forward")
    def _(q, k, v, *rest):
        return empty_like(q, v.shape[-1]), _lse(q)

    @torch.library.register_fake("attnkit::cpu_decode")
    @torch.library.register_fake("attnkit::cpu_extend")
    def _(q, k, v, *rest):
        return empty_like(q, v.shape[-1]), _lse(q)

    @torch.library.register_fake("attnkit::cpu_append")
    def _(k, v, k_cache, v_cache, *rest):
        return None

    @torch.library.register_fake("attnkit::cpu_backward")
    def _(dout, dlse, q, k, v, out, lse, bias, sinks, *rest):
        want_dq, want_dk, want_dv, want_dbias, want_dsinks = rest[-5:]

        def none():  # each output a tensor of its own: outputs must not alias
            return q.new_empty((0,))

        dbias = none()
        if want_dbias:
            shape = [1 if bias.stride(d) == 0 else bias.shape[d] for d in range(4)]
            dbias = bias.new_empty(shape)
        return (
            empty_like(q, q.shape[-1]) if want_dq else none(),
            empty_like(k, k.shape[-1]) if want_dk else none(),
            empty_like(v, v.shape[-1]) if want_dv else none(),
            dbias,
            torch.empty_like(sinks) if want_dsinks else none(),
        )
