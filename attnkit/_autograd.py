"""From checked arguments to a backend, with the gradient recorded where one is wanted."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from attnkit import dispatch
from attnkit.backends import reference
from attnkit.spec import AttentionSpec, TensorArgs

_interpreter = torch._C._functorch.peek_interpreter_stack


def in_transform() -> bool:
    """Whether a functorch transform or a forward-mode AD level is active."""
    return _interpreter() is not None or forward_ad._current_level >= 0


def expanded(args: TensorArgs, q: Tensor, k: Tensor) -> TensorArgs:
    """`args` with the bias expanded to [B, Hq, Lq, Lk], as backends take it."""
    bias = args.bias
    if bias is None:
        return args
    return args._replace(bias=bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2]))


def run(
    q: Tensor, k: Tensor, v: Tensor, args: TensorArgs, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """(out, lse) of a call whose arguments have been checked; `args.bias` is not yet expanded."""
    if in_transform():
        return reference.attend(q, k, v, expanded(args, q, k), spec)
    full = expanded(args, q, k)
    impl = dispatch.select(q, k, v, full, spec)
    bias, sinks = args.bias, args.sinks
    if torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (bias is not None and bias.requires_grad)
        or (sinks is not None and sinks.requires_grad)
    ):
        if torch.compiler.is_dynamo_compiling():
            # Dynamo refuses one tensor in two places
            k, v = k.view_as(k), v.view_as(v)
        return _Attention.apply(q, k, v, *args, spec, impl)
    return impl.forward(q, k, v, full, spec)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        *tensors, spec, impl = rest
        args = TensorArgs(*tensors)
        out, lse = impl.forward(q, k, v, expanded(args, q, k), spec)
        ctx.save_for_backward(q, k, v, out, lse, *args)
        ctx.spec, ctx.impl = spec, impl
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        q, k, v, out, lse, *tensors = ctx.saved_tensors
        args = TensorArgs(*tensors)
        needs = (*ctx.needs_input_grad[:5],)
        if dout is None:
            dout = torch.zeros_like(out)
        impl: ModuleType = ctx.impl
        grads = impl.backward(
            dout, dlse, q, k, v, out, lse, expanded(args, q, k), ctx.spec, needs
        )
        return (*grads, *(None,) * 11)
