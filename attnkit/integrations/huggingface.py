"""attnkit as an attention implementation of Hugging Face transformers.

    from attnkit.integrations import huggingface
    huggingface.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="attnkit")

or ``model.set_attn_implementation("attnkit")`` for a model that exists.  Models that keep tables of
attention classes of their own (Falcon, GPT-Neo) do not know the name: use "sdpa" there, inside
``attnkit.integrations.torch.override_sdpa()``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from attnkit import masks
from attnkit._checks import seed_tensor
from attnkit.functional import attention, attention_weights
from attnkit.integrations._hf_masks import StructuredMask, attention_mask
from attnkit.masks import Mask

NAME = "attnkit"
Watcher = Callable[[nn.Module, dict[str, Any]], None]

_names = {NAME}
_collector: Any = None  # transformers' own context variable, once there is a `register`
_watchers: ContextVar[tuple[Watcher, ...]] = ContextVar("attnkit_hf_watchers", default=())
_tracing = torch.compiler.is_dynamo_compiling


def register(name: str = NAME) -> None:
    """Make ``attn_implementation=name`` valid: attention and masks.  Twice does no harm.

    Raises:
        ImportError: transformers is missing, or older than its mask interface (4.53).
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    global _collector
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:  # before 5.0 the request comes as an argument
        _active_collector = None
    _collector = _active_collector
    _names.add(name)
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    output_attentions: bool | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention as transformers calls it.

    Args:
        module: the model's attention; its ``is_causal`` counts where no mask is given.
        query: [B, H, L, D].
        key, value: [B, Hkv, S, D] and [B, Hkv, S, Dv]; not repeated.
        attention_mask: a `StructuredMask`; or a bool (True = attend) or float tensor that
            broadcasts to [B, H, L, S].  It holds causality and window, so ``sliding_window`` is not
            looked at.  None: causal, aligned top-left, if ``is_causal`` and L > 1.
        scaling: 1 / sqrt(D) if None.
        dropout: probability with which a weight is dropped.
        is_causal: in place of the module's.
        softcap: scores become softcap * tanh(scores / softcap).
        s_aux: [H], one more logit per head (sinks).
        position_bias: added to the scores, broadcasts to [B, H, L, S]; has a gradient.
        output_attentions: also return the weights; likewise when transformers collects them.
        others: ``indices`` [B, L, n] of the keys that each query sees, besides the mask; what else
            transformers passes along does not concern attention.

    Returns:
        (out [B, L, H, Dv], contiguous; weights [B, H, L, S] after dropout, or None).

    Raises:
        NotImplementedError: an argument that changes the result and is not served.
    """
    if query.shape[0] != key.shape[0]:  # learned queries of batch 1
        batch = max(query.shape[0], key.shape[0])
        query, key, value = (t.expand(batch, -1, -1, -1) for t in (query, key, value))
    mask = _as_mask(module, query, attention_mask, is_causal)
    if others:
        mask = _with_others(mask, query, key, others)
    options: dict[str, Any] = {"mask": mask, "scale": scaling}
    if position_bias is not None:
        options["bias"] = position_bias
    if softcap:
        options["softcap"] = softcap
    if s_aux is not None:
        options["sinks"] = s_aux.reshape(-1)
    drop: dict[str, Any] = {"dropout_p": dropout} if dropout else {}
    wanted = output_attentions or _collected()
    if wanted and dropout:  # the weights are to be those of the output
        drop["seed"] = seed_tensor(None, query)
    out = attention(query, key, value, **options, **drop)
    weights = attention_weights(query, key, **options, **drop) if wanted else None
    if not _tracing():
        for watcher in _watchers.get():
            watcher(module, {"query": query, "key": key, **options})
    return out.transpose(1, 2).contiguous(), weights


def serves(model: nn.Module) -> bool:
    """Whether a part of the model has ``attn_implementation="attnkit"``."""
    return any(
        getattr(getattr(module, "config", None), "_attn_implementation", None) in _names
        for module in model.modules()
    )


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Call ``watcher(module, inputs)`` with every attention call of this context in the block.

    ``inputs`` are the arguments of :func:`attnkit.attention_weights`, without dropout.
    """
    token = _watchers.set((*_watchers.get(), watcher))
    try:
        yield
    finally:
        _watchers.reset(token)


def _as_mask(
    module: nn.Module, query: Tensor, given: Tensor | None, is_causal: bool | None
) -> Mask | None:
    if given is None:
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        return masks.causal() if is_causal and query.shape[2] > 1 else None
    if isinstance(given, StructuredMask):
        if given.structure is not None:
            return given.structure
        given = given.dense()
    return masks.from_dense(given)


def _with_others(
    mask: Mask | None, query: Tensor, key: Tensor, others: dict[str, Any]
) -> Mask | None:
    """The mask with what else hides keys; raises for what would change the result unnoticed."""
    for name in ("sinks", "block_indices"):
        if others.get(name) is not None:
            raise NotImplementedError(
                f"{name} is given, which attn_implementation='attnkit' does not serve: load this "
                "model with attn_implementation='eager'"
            )
    indices = others.get("indices")
    if indices is None:
        return mask
    chosen = torch.zeros(
        query.shape[0], query.shape[2], key.shape[2], dtype=torch.bool, device=query.device
    )
    seen = masks.from_dense(chosen.scatter(-1, indices.long(), True)[:, None])
    return seen if mask is None else mask & seen


def _collected() -> bool:
    """Whether transformers collects the weights of this forward pass."""
    if _collector is None:
        return False
    collected = _collector.get()
    return collected is not None and any("attentions" in name for name in collected)
