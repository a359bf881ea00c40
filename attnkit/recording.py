"""Attention weights out of a model that was not written for it: hooks take the inputs of every
attention module, and the weights are computed from them on request, a few rows at a time.

    with attnkit.recording.record(model) as layers:
        model(tokens)
    layers[-1].weights(rows=[5])        # [B, H, 1, S]
    layers[-1].pooled(128)              # [B, H, 128, 128] of a sequence of any length
    layers[-1].summary().entropy        # [B, H]
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from attnkit.functional import attention_weights
from attnkit.integrations import huggingface
from attnkit.nn import MultiheadAttention

_CROSS = ("cross", "encoder_attn", "encdec")  # in the names of modules that look at an encoder
_TILE = 1 << 22  # weights that are held at once


class HeadSummary(NamedTuple):
    """What the heads of a layer do, each [B, H]: means over the queries that see a key.

    ======== =======================================================================
    entropy  of the weights of a row, in nats: 0 looks at one key, log(S) at all alike
    distance between a query and the keys it looks at, in positions (of one sequence)
    first    share of the weight on the first key that a query sees
    ======== =======================================================================
    """

    entropy: Tensor
    distance: Tensor
    first: Tensor


@dataclass(frozen=True, eq=False)
class RecordedAttention:
    """One call of one attention module.

    Args:
        name: of the module in its model, such as ``decoder.0.cross_attn``.
        kind: "self", or "cross" where keys come from elsewhere.
        inputs: arguments of :func:`attnkit.attention_weights`, without dropout; the query is
            [B, H, L, D], the key [B, Hkv, S, D].
    """

    name: str
    kind: str
    inputs: dict[str, Any]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, L, S)."""
        batch, heads, length, _ = self.inputs["query"].shape
        return batch, heads, length, self.inputs["key"].shape[2]

    @torch.no_grad()
    def weights(
        self,
        rows: int | Sequence[int] | Tensor | None = None,
        heads: int | Sequence[int] | Tensor | None = None,
    ) -> Tensor:
        """The weights [B, heads, rows, S]; None: of all heads, of all queries."""
        return attention_weights(**self.inputs, rows=rows, heads=heads)

    def pooled(self, size: int = 256) -> Tensor:
        """The weights [B, H, R, C] of at most ``size`` bins of queries and of keys.

        A bin of queries holds their mean, a bin of keys the sum over them, so that rows still sum
        to 1.  Queries that see no key (padding) do not count.  Memory grows with L and S, not with
        their product.
        """
        if size < 1:
            raise ValueError(f"size is {size}, expected 1 or more")
        batch, heads, length, keys = self.shape
        down, across = min(size, length), min(size, keys)
        query = self.inputs["query"]
        column = _bins(keys, across, query.device)
        pooled = torch.zeros(batch, heads, down, across, device=query.device)
        seen = torch.zeros(batch, heads, down, 1, device=query.device)
        row = _bins(length, down, query.device)
        for rows, weights in self._tiles():
            across_bins = weights.new_zeros(*weights.shape[:3], across)
            across_bins.index_add_(3, column, weights)
            pooled.index_add_(2, row[rows], across_bins)
            seen.index_add_(2, row[rows], (weights.sum(-1, keepdim=True) > 0).float())
        return pooled / seen.clamp(min=1)

    def summary(self) -> HeadSummary:
        """Entropy, distance and share of the first key of each head."""
        batch, heads, _, keys = self.shape
        device = self.inputs["query"].device
        total = torch.zeros(4, batch, heads, device=device)
        places = torch.arange(keys, device=device, dtype=torch.float32)
        for rows, weights in self._tiles():
            visible = weights > 0
            logs = weights.clamp(min=torch.finfo(weights.dtype).tiny).log()
            distance = (rows[:, None] - places).abs()
            first = visible.byte().argmax(dim=-1, keepdim=True)
            total += torch.stack(
                [
                    -(weights * logs).sum((2, 3)),
                    (weights * distance).sum((2, 3)),
                    weights.gather(3, first).sum((2, 3)),
                    visible.any(dim=-1).float().sum(2),
                ]
            )
        return HeadSummary(*total[:3] / total[3].clamp(min=1))

    def _tiles(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Indices of some rows and their weights in float32, until all rows were there."""
        batch, heads, length, keys = self.shape
        step = max(1, _TILE // max(1, batch * heads * keys))
        for start in range(0, length, step):
            rows = torch.arange(
                start, min(start + step, length), device=self.inputs["query"].device
            )
            yield rows, self.weights(rows).float()


@contextmanager
def record(
    model: nn.Module, names: Callable[[str], bool] | None = None
) -> Iterator[list[RecordedAttention]]:
    """Take down the attention of every forward pass in the block, in the order of the calls.

    The model runs as it is: its output, its mode and its gradients are not touched.  What is kept
    are the projected queries and keys, without a graph.  Served are torch.nn.MultiheadAttention
    (and so torch.nn.Transformer and its layers), attnkit.nn's, the attention of attnkit.models, and
    Hugging Face models with ``attn_implementation="attnkit"``; in general every module with a
    method ``attention_inputs`` that maps the arguments of ``forward`` to those of
    :func:`attnkit.attention_weights`.

    Args:
        model: any module.
        names: which attention modules, by name; None: all.

    Raises:
        ValueError: the model has no such module; a pass with a cache.
    """
    recorded: list[RecordedAttention] = []
    found = {
        name: module
        for name, module in model.named_modules()
        if _serves(module) and (names is None or names(name))
    }
    guest = huggingface.serves(model)
    if not found and not guest:
        raise ValueError(
            f"model is a {type(model).__name__} without attention modules that can be recorded"
            f"{'' if names is None else ' and that names accepts'}"
        )

    def hook_of(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            with torch.no_grad():
                inputs = _inputs_of(module)(*args, **kwargs)
            kind = inputs.pop("kind")
            recorded.append(RecordedAttention(name, kind, inputs))

        return hook

    places = {id(module): name for name, module in model.named_modules()} if guest else {}

    def watcher(module: nn.Module, inputs: dict[str, Any]) -> None:
        name = places.get(id(module))
        if name is not None and (names is None or names(name)):
            kind = "cross" if any(part in name.lower() for part in _CROSS) else "self"
            recorded.append(RecordedAttention(name, kind, _without_graph(inputs)))

    handles = [
        module.register_forward_pre_hook(hook_of(name), with_kwargs=True)
        for name, module in found.items()
    ]
    try:
        with huggingface.watching(watcher):
            yield recorded
    finally:
        for handle in handles:
            handle.remove()


def _without_graph(inputs: dict[str, Any]) -> dict[str, Any]:
    return {n: x.detach() if isinstance(x, Tensor) else x for n, x in inputs.items()}


def _serves(module: nn.Module) -> bool:
    return isinstance(module, nn.MultiheadAttention) or hasattr(module, "attention_inputs")


def _inputs_of(module: nn.Module) -> Callable[..., dict[str, Any]]:
    if hasattr(module, "attention_inputs"):
        return cast(Callable[..., dict[str, Any]], module.attention_inputs)
    twin = copy.copy(module)  # torch's: attnkit's has the same attributes
    object.__setattr__(twin, "__class__", MultiheadAttention)

    def inputs(
        query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any
    ) -> dict[str, Any]:
        if query.is_nested:  # torch's encoder takes padding out by itself
            lengths = query._nested_tensor_size()[:, 0].to(query.device)
            query = key = value = torch.nested.to_padded_tensor(query, 0.0)
            places = torch.arange(query.shape[1], device=query.device)
            rest, options = (), {"key_padding_mask": places >= lengths[:, None]}
        return cast(MultiheadAttention, twin).attention_inputs(query, key, value, *rest, **options)

    return inputs


def _bins(count: int, bins: int, device: torch.device) -> Tensor:
    """The bin of each of ``count`` places: as even as can be, in order."""
    return torch.arange(count, device=device) * bins // max(count, 1)
