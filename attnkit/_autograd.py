"""From checked arguments to a backend, with the gradient recorded where one is wanted.

First derivatives are the backend's own kernels.  Second derivatives recompute the call out of
differentiable PyTorch operations, a few rows at a time; transforms (torch.func, forward-mode AD)
run those operations in place of any backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from attnkit import dispatch
from attnkit.backends import reference
from attnkit.spec import AttentionSpec, CacheArgs, RotaryTables, TensorArgs

NO_ARGS = TensorArgs()

_TILE = 1 << 20  # scores that a recomputation holds at once

_alive = torch._C._functorch.unwrap_if_dead
_transformed = torch._C._are_functorch_transforms_active  # the one question that Dynamo can answer
_tracing = torch.compiler.is_dynamo_compiling


def in_transform() -> bool:
    """Whether a functorch transform or a forward-mode AD level is active."""
    return _transformed() or forward_ad._current_level >= 0


def run(
    q: Tensor, k: Tensor, v: Tensor, args: TensorArgs, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """(out, lse) of a call whose arguments have been checked; `args.bias` is 4-D, not expanded.

    Raises:
        NotImplementedError: the backend that `use_backend` asks for cannot serve the call.
    """
    bias, sinks = args.bias, args.sinks
    full = args if bias is None else expanded(args, q, k)
    if _transformed() or forward_ad._current_level >= 0:
        return reference.attend(q, k, v, full, spec)
    impl = dispatch.select(q, k, v, full, spec)
    if torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (bias is not None and bias.requires_grad)
        or (sinks is not None and sinks.requires_grad)
    ):
        if _tracing():
            if impl is reference:  # its backward is autograd's, which the graph has anyway
                return reference.attend(q, k, v, full, spec)
            k, v = k.view_as(k), v.view_as(v)  # Dynamo refuses one tensor in two places
            return _Attention.apply(q, k, v, bias, sinks, spec, impl, *args[2:])
        if args is NO_ARGS:
            return _apply(_alive(q), _alive(k), _alive(v), None, None, spec, impl)
        live = [t if t is None else _alive(t) for t in (q, k, v, *args)]
        return _apply(*live[:5], spec, impl, *live[5:])
    return impl.forward(q, k, v, full, spec)  # type: ignore[no-any-return]


def expanded(args: TensorArgs, q: Tensor, k: Tensor) -> TensorArgs:
    """`args` with the bias expanded to [B, Hq, Lq, Lk], as backends take it."""
    if args.bias is None:
        return args
    return args._replace(bias=args.bias.expand(*q.shape[:3], k.shape[2]))


class _Attention(torch.autograd.Function):
    """apply(q, k, v, bias, sinks, spec, impl, *others) -> (out, lse), both differentiable.

    `others` are the rest of TensorArgs, or nothing: a call without options should not pay for them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sinks: Tensor | None,
        spec: AttentionSpec,
        impl: Any,
        *others: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        args = TensorArgs(bias, sinks, *others) if others else NO_ARGS
        out, lse = impl.forward(q, k, v, expanded(args, q, k), spec)
        ctx.save_for_backward(out, lse, q, k, v, bias, sinks, *others)
        ctx.spec, ctx.impl = spec, impl
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        out, lse, *tensors = ctx.saved_tensors
        if dout is None:
            if dlse is None:
                return (None,) * (2 + len(tensors))
            dout = torch.zeros_like(out)
        needs = tuple(ctx.needs_input_grad[:5])
        grads: Any
        create = torch.is_grad_enabled() and not _tracing()
        if in_transform() or (create and _is_batched(dout, dlse)):
            grads = _recompute(dout, dlse, tensors, ctx.spec, needs)
        elif create:
            grads = _Gradient.apply(
                dout, dlse, *tensors, out.detach(), lse.detach(), ctx.spec, ctx.impl, needs
            )
        else:
            grads = _backward(dout, dlse, tensors, out, lse, ctx.spec, ctx.impl, needs)
        return (*grads, *(None,) * (len(tensors) - 3))


# Function.apply looks through its arguments for what transforms left behind in Python, for a tenth
# of the time of a small call; `run` has made sure that no transform is active, and asks itself.
_apply = super(torch.autograd.Function, _Attention).apply


class _Gradient(torch.autograd.Function):
    """The backward pass as a function that has derivatives itself.

    apply(dout, dlse, q, k, v, bias, sinks, *others, out, lse, spec, impl, needs) -> (dq, dk, dv,
    dbias, dsinks).  out and lse are what the forward pass made of the others, not variables.
    """

    @staticmethod
    def forward(ctx: Any, dout: Tensor, dlse: Tensor | None, *inputs: Any) -> Any:
        *tensors, out, lse, spec, impl, needs = inputs
        ctx.save_for_backward(dout, dlse, *tensors)
        ctx.spec, ctx.needs = spec, needs
        ctx.set_materialize_grads(False)
        return _backward(dout, dlse, tensors, out, lse, spec, impl, needs)

    @staticmethod
    def backward(ctx: Any, *seconds: Tensor | None) -> Any:
        """Gradient of sum(second * first derivative), added up over tiles of rows."""
        dout, dlse, *tensors = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:7]
        total: list[Tensor | None] = [None] * 7
        if any(t is not None for t in seconds):
            for rows in _tiles(tensors[0], tensors[1]):
                part = _second(dout, dlse, tensors, seconds, ctx.spec, ctx.needs, wanted, rows)
                total = [
                    old if new is None else new if old is None else old + new
                    for old, new in zip(total, part, strict=True)
                ]
        return (*total, *(None,) * len(tensors))


def _is_batched(*tensors: Tensor | None) -> bool:
    """Whether torch.autograd's own vmap (is_grads_batched) is at work, which functorch ignores."""
    legacy = torch._C._functorch.is_legacy_batchedtensor
    return any(t is not None and legacy(t) for t in tensors)


def _backward(
    dout: Tensor,
    dlse: Tensor | None,
    tensors: list[Tensor],
    out: Tensor,
    lse: Tensor,
    spec: AttentionSpec,
    impl: Any,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    q, k, v, *rest = tensors
    full = expanded(TensorArgs(*rest), q, k)
    return impl.backward(dout, dlse, q, k, v, out, lse, full, spec, needs)  # type: ignore[no-any-return]


def _recompute(
    dout: Tensor,
    dlse: Tensor | None,
    tensors: list[Tensor],
    spec: AttentionSpec,
    needs: tuple[bool, ...],
) -> list[Tensor | None]:
    """The first derivatives out of differentiable operations, for gradients under a transform."""
    create = torch.is_grad_enabled()
    with torch.enable_grad():
        # views, because one tensor may be both query and key
        inputs = [t if t is None else t.view_as(t) for t in tensors[:5]]
        out, lse = _attend(inputs, tensors[5:], spec, None)
        return _grad((out, lse), inputs, (dout, dlse), needs, create)


def _second(
    dout: Tensor,
    dlse: Tensor | None,
    tensors: list[Tensor],
    seconds: tuple[Tensor | None, ...],
    spec: AttentionSpec,
    needs: tuple[bool, ...],
    wanted: tuple[bool, ...],
    rows: Tensor,
) -> list[Tensor | None]:
    """The share of some rows in the gradients by (dout, dlse, q, k, v, bias, sinks)."""
    create = torch.is_grad_enabled()  # for a third derivative the graph stays
    with torch.enable_grad():
        variables = [
            t
            if t is None or t.dtype == torch.bool  # a mask in the place of the bias
            else t.view_as(t)
            if create
            else t.detach().requires_grad_()
            for t in (dout, dlse, *tensors[:5])
        ]
        d_out, d_lse, *inputs = variables
        out, lse = _attend(inputs, tensors[5:], spec, rows)
        assert d_out is not None
        upstream = (
            d_out.index_select(2, rows),
            None if d_lse is None else d_lse.index_select(2, rows),
        )
        first = _grad((out, lse), inputs, upstream, needs, True)
        return _grad(first, variables, seconds, wanted, create)


def _attend(
    inputs: list[Any], others: list[Tensor], spec: AttentionSpec, rows: Tensor | None
) -> tuple[Tensor, Tensor]:
    q, k, v, bias, sinks = inputs
    args = expanded(TensorArgs(bias, sinks, *others), q, k)
    return reference.attend(q, k, v, args, spec, rows)


def _grad(
    outputs: Any, inputs: Any, upstream: Any, wanted: tuple[bool, ...], create: bool
) -> list[Tensor | None]:
    """Vector-Jacobian product; None for outputs without one, and for inputs that are not wanted."""
    pairs = [
        (y, g)
        for y, g in zip(outputs, upstream, strict=True)
        if y is not None and g is not None and y.requires_grad
    ]
    leaves = [x for x, want in zip(inputs, wanted, strict=True) if want]
    if not pairs or not leaves:
        return [None] * len(inputs)
    ys, gs = zip(*pairs, strict=True)
    with reference.without_autocast(ys[0]):
        found = iter(
            torch.autograd.grad(
                ys, leaves, gs, create_graph=create, allow_unused=True, materialize_grads=False
            )
        )
    return [next(found) if want else None for want in wanted]


def _tiles(q: Tensor, k: Tensor) -> Iterator[Tensor]:
    """Row indices, a few at a time, so that their scores stay within _TILE."""
    batch, heads, lq, _ = q.shape
    step = max(1, _TILE // max(1, batch * heads * k.shape[2]))
    for start in range(0, lq, step):
        yield torch.arange(start, min(start + step, lq), device=q.device)


def run_decode(
    q: Tensor, k: Tensor, v: Tensor, args: TensorArgs, spec: AttentionSpec, cache: CacheArgs
) -> tuple[Tensor, Tensor]:
    """(out, lse) of queries on a cache of args.lengths keys; has no gradient."""
    impl = dispatch.select_decode(q, k, v, args, spec, cache)
    return impl.decode(q, k, v, args, spec, cache)  # type: ignore[no-any-return]


def run_extend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    args: TensorArgs,
    spec: AttentionSpec,
    cache: CacheArgs,
    rotary: RotaryTables,
    query_step: int | None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of queries on a cache of args.lengths keys and k, which is written to it first."""
    fused = dispatch.select_extend(q, k, v, k_cache, v_cache, args, spec, cache)
    if fused is not None:
        return fused.extend(  # type: ignore[no-any-return]
            q, k, v, k_cache, v_cache, args, spec, cache, rotary, query_step
        )
    assert args.lengths is not None
    impl = dispatch.select_decode(q, k_cache, v_cache, args, spec, cache)
    writer = dispatch.select_append(k, v, k_cache, v_cache)
    if query_step is not None:
        q = reference.rotated_queries(q, args.lengths, query_step, rotary)
    writer.append(k, v, k_cache, v_cache, args.lengths, cache, rotary)
    args = args._replace(lengths=args.lengths + k.shape[2])
    return impl.decode(q, k_cache, v_cache, args, spec, cache)  # type: ignore[no-any-return]
