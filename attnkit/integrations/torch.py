"""Every F.scaled_dot_product_attention of any model, through attnkit:

from attnkit.integrations.torch import override_sdpa
with override_sdpa() as calls:
    model(x).sum().backward()
print(calls)                     # 12 served by attnkit
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnkit import _checks, functional

_LOG = logging.getLogger(__name__)
_tracing = torch.compiler.is_dynamo_compiling


@dataclass
class Calls:
    """What happened to the calls in a block of `override_sdpa`.

    Calls in a compiled graph count once, when it is traced, if at all.
    """

    served: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)  # by reason, those that torch served

    def __str__(self) -> str:
        lines = [f"{self.served} served by attnkit"]
        lines += [f"{count} by torch: {reason}" for reason, count in self.fallbacks.items()]
        return "\n".join(lines)


class _State:
    """What is in the place of torch's function, how often, and who wants to know."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.blocks: list[Calls] = []
        self.original: Any = None
        self.fast_path = True


_state = _State()


@contextmanager
def override_sdpa() -> Iterator[Calls]:
    """Route every ``F.scaled_dot_product_attention`` call in the block (or decorated function).

    Gradients included.  What attnkit cannot serve goes to the function that was there before; the
    reason is logged as a warning of the logger "attnkit.integrations.torch", once for each block.
    PyTorch's fused path of nn.MultiheadAttention and nn.TransformerEncoderLayer, which does without
    the function, is switched off.  All threads are affected.  Code that took the function by
    ``from torch.nn.functional import scaled_dot_product_attention`` before the block keeps
    PyTorch's.

    Yields:
        A record, which counts the calls.

    Raises:
        RuntimeError: inside PyTorch's context_parallel, where queries and keys are shards.
    """
    calls = Calls()
    with _state.lock:
        _checks.refuse_context_parallel()
        if not _state.blocks:
            _state.original = F.scaled_dot_product_attention
            _state.fast_path = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)
            F.scaled_dot_product_attention = scaled_dot_product_attention  # type: ignore[assignment]
            _checks.SDPA = scaled_dot_product_attention
        _state.blocks.append(calls)
    try:
        yield calls
    finally:
        with _state.lock:
            _state.blocks = [each for each in _state.blocks if each is not calls]
            if not _state.blocks:
                if F.scaled_dot_product_attention is scaled_dot_product_attention:
                    F.scaled_dot_product_attention = _state.original
                _checks.SDPA = torch._C._nn.scaled_dot_product_attention
                torch.backends.mha.set_fastpath_enabled(_state.fast_path)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`attnkit.scaled_dot_product_attention`, or the function that `override_sdpa` replaced."""
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    reason = _obstacle(query, key, value, attn_mask, is_causal)
    if reason is None:
        try:
            out = functional.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, **options
            )
        except NotImplementedError as error:
            reason = str(error)
        else:
            _count(None)
            return out
    _count(reason)
    original = _state.original or torch._C._nn.scaled_dot_product_attention
    result: Tensor = original(query, key, value, attn_mask, dropout_p, is_causal, **options)
    return result


def _obstacle(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool
) -> str | None:
    """Why a call is none of attnkit's, as far as that can be seen before it is made."""
    _checks.refuse_context_parallel()
    for name, t in (("query", query), ("key", key), ("value", value), ("attn_mask", attn_mask)):
        kind: Any = type(t)
        if kind is Tensor or not isinstance(t, Tensor) or _checks.is_causal_bias(t):
            continue
        if kind.__torch_function__ is not torch._C._disabled_torch_function_impl:
            return f"{name} is a {kind.__name__}, which has a function of its own"
    if attn_mask is not None and is_causal and not _checks.is_causal_bias(attn_mask):
        return "attn_mask and is_causal=True are given together"
    return None


def _count(reason: str | None) -> None:
    if _tracing():
        return
    for calls in _state.blocks:
        if reason is None:
            calls.served += 1
            continue
        if reason not in calls.fallbacks:
            _LOG.warning("scaled_dot_product_attention is left to torch: %s", reason)
        calls.fallbacks[reason] = calls.fallbacks.get(reason, 0) + 1
