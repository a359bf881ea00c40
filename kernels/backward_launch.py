"""The host's side of backward.py: which kernels a backward pass needs, and their tensors."""

from __future__ import annotations

import torch
import triton
from attnkit.kernels import host
from attnkit.kernels.backward import (
    dbias_kernel,
    dkdv_again_kernel,
    dkdv_kernel,
    dq_again_kernel,
    dq_kernel,
    rows_kernel,
)
from attnkit.kernels.parts import Dense, Rows


def backward(dout, dlse, q, k, v, out, lse, args, spec, needs):
    """(dq, dk, dv, dbias, dsinks): gradients in the dtype of their tensors, empty if not needed.

    dbias has size 1 where the bias was broadcast (stride 0); dsinks is float32 [Hq].
    """
    want_dq, want_dk, want_dv, want_dbias, want_dsinks = needs
    call = host.Call(q, k, v, args, spec)
    none = [q.new_empty(0) for _ in range(5)]
    if not any(needs):
        return tuple(none)
    dq = host.empty_like(q, q.shape[3]) if want_dq else None
    dk = host.empty_like(k, k.shape[3]) if want_dk else None
    dv = host.empty_like(v, v.shape[3]) if want_dv else None
    if args.cu_seqlens_q is not None:  # rows may belong to no sequence
        for t in (dq, dk, dv):
            if t is not None:
                t.zero_()
    dout = host.laid_out(dout)
    delta, pivot, low = _rows(call, dout, dlse, out, lse)
    common = {
        "q": call.q,
        "k": call.k,
        "v": call.v,
        "dout": host.array(dout),
        "delta": _wrapped(delta),
        "pivot": _wrapped(pivot),
        "low": None if low is None else _wrapped(low),
        "mask": call.mask,
        "how": call.score,
        "dropout": call.dropout,
        "FOLD": call.fold,
    }
    if dk is not None or dv is not None:
        _dkdv(call, common, dout, dk, dv)
    if dq is not None and dq.numel():
        _dq(call, common, dq)
    dbias = _dbias(call, common) if want_dbias else None
    dsinks = _dsinks(args.sinks, lse, delta, pivot) if want_dsinks else None
    found = (dq, dk, dv, dbias, dsinks)
    return tuple(n if t is None else t for t, n in zip(found, none, strict=True))


def _wrapped(t: torch.Tensor) -> Rows:
    return Rows(t, t.shape[1], t.shape[2])


def _rows(call, dout, dlse, out, lse):
    """delta, pivot and low (None without a float bias) of each query."""
    delta, pivot = torch.zeros_like(lse), torch.full_like(lse, float("inf"))
    low = torch.zeros_like(lse) if call.float_bias else None
    if lse.numel() == 0:
        return delta, pivot, low
    config = call.config("dq")
    tiles, grid = call.query_grid(config.block_m)
    rows_kernel[grid](
        q=call.q, k=call.k, out=host.array(host.laid_out(out)),
        dout=host.array(dout), lse=_wrapped(lse.contiguous()),
        dlse=None if dlse is None else _wrapped(dlse.contiguous()), delta=_wrapped(delta),
        pivot=_wrapped(pivot), low=None if low is None else _wrapped(low), sinks=call.sinks,
        mask=call.mask, how=call.score, sizes=call.sizes(tiles), FOLD=call.fold,
        **call.constants(config), **config.options(),
    )  # fmt: skip
    return delta, pivot, low


def _dkdv(call, common, dout, dk, dv) -> None:
    if not any(t is not None and t.numel() for t in (dk, dv)):
        return
    queries = (call.tensors[0], dout)
    config = call.config("dkdv", described=queries)
    desc = call.descriptors(config, *queries, config.block_m)
    tiles, grid = call.key_grid(config.block_n)
    arguments = common | {
        "dk_out": None if dk is None else host.array(dk),
        "dv_out": None if dv is None else host.array(dv),
        "spoilt": call.marks(grid),
        "sizes": call.sizes(tiles),
        "kv_heads": call.kv_heads,
        **call.constants(config),
    }
    dkdv_kernel[grid](**arguments, desc=desc, **config.options())
    if arguments["spoilt"] is not None:
        dkdv_again_kernel[grid](**arguments, num_warps=config.warps, num_stages=1)


def _dq(call, common, dq) -> None:
    config = call.config("dq")
    tiles, grid = call.query_grid(config.block_m)
    arguments = common | {
        "dq_out": host.array(dq),
        "spoilt": call.marks(grid),
        "sizes": call.sizes(tiles),
        **call.constants(config),
    }
    dq_kernel[grid](**arguments, **config.options())
    if arguments["spoilt"] is not None:
        dq_again_kernel[grid](**arguments, num_warps=config.warps, num_stages=1)


def _dbias(call, common) -> torch.Tensor:
    bias = call.args.bias
    one = [bias.stride(d) == 0 or bias.shape[d] == 1 for d in range(4)]
    final = [1 if bias.stride(d) == 0 else bias.shape[d] for d in range(4)]
    if 0 in bias.shape:
        return bias.new_zeros(final)
    config = call.config("dq")
    tiles_m = triton.cdiv(call.lq, config.block_m)
    tiles_n = triton.cdiv(call.lk, config.block_n)
    batches, heads = (1 if one[d] else bias.shape[d] for d in range(2))
    rows, columns = tiles_m if one[2] else call.lq, tiles_n if one[3] else call.lk
    part = bias.new_empty((batches, heads, rows, columns), dtype=torch.float32)
    constants = call.constants(config)
    del constants["MOST"]
    dbias_kernel[(tiles_m * tiles_n * heads * batches,)](
        **common, part=Dense(part, *part.stride()), sizes=call.sizes(tiles_m), batches=batches,
        heads=heads, steps_b=call.batch if one[0] else 1, steps_h=call.q_heads if one[1] else 1,
        tiles_n=tiles_n, SUM_Q=one[2], SUM_K=one[3], **constants, **config.options(),
    )  # fmt: skip
    return part.sum_to_size(final).to(bias.dtype)


def _dsinks(sinks, lse, delta, pivot) -> torch.Tensor:
    """Minus the sum of p_sink * delta: a sink has a weight but no value."""
    weight = torch.exp(sinks[:, None] - pivot)
    return -(weight * delta).sum((0, 2))
