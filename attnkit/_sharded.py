"""Attention of DTensors that are sharded over batch or heads: each rank computes its own share.

No rank needs another one's numbers for that, so nothing is sent.  A sequence that is sharded is
refused: attention would miss the keys of the other ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from attnkit.masks import Mask, describe

_BATCH, _HEADS = 0, 1
# which dimension of a mask's parts is the batch, and which the heads
_PARTS = {
    "keep": (0, None),
    "lengths": (0, None),
    "q_segments": (0, None),
    "k_segments": (0, None),
    "blocks": (0, 1),
    "dense": (0, 1),
}


def attend(
    function: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
) -> Any:
    """``function(query, key, value, **options)`` on the shards, as DTensors of the query's kind.

    Args:
        function: `attnkit.attention`, or one with its layout: [B, H, L, D].
        query, key, value: DTensors of one mesh and one placement: Replicate, Shard(0) or Shard(1).
        options: tensors among them are whole on every rank (and cut to its share), or DTensors
            that are placed as the query, or replicated where they have size 1.

    Raises:
        RuntimeError: other placements; tensors that do not fit them.
        NotImplementedError: dropout, whose mask is a function of the place in the whole tensor.
    """
    if options.get("dropout_p"):
        raise NotImplementedError(
            "dropout_p is given with DTensors, expected 0: shards would all drop the same weights"
        )
    layout = _Layout(query, key, value)
    local = {name: layout.share(name, option) for name, option in options.items()}
    out = function(query.to_local(), key.to_local(), value.to_local(), **local)  # type: ignore[attr-defined]
    whole = (*query.shape[:3], value.shape[3])
    if isinstance(out, tuple):
        return layout.gather(out[0], whole), layout.gather(out[1], whole[:3])
    return layout.gather(out, whole)


class _Layout:
    """How query, key and value lie on their mesh."""

    def __init__(self, query: Any, key: Any, value: Any) -> None:
        for name, t in (("query", query), ("key", key), ("value", value)):
            if not isinstance(t, DTensor):
                raise RuntimeError(
                    f"{name} is {describe(t)}, expected a DTensor as the others of query, key and "
                    "value are"
                )
            if t.dim() != 4:
                raise RuntimeError(
                    f"{name} is a DTensor of shape {tuple(t.shape)}, expected 4 dimensions: "
                    "(batch, heads, length, head dim)"
                )
            for placement in t.placements:
                where = placement.dim if isinstance(placement, Shard) else None
                if where not in (_BATCH, _HEADS) and not isinstance(placement, Replicate):
                    raise RuntimeError(
                        f"{name} is a DTensor with {placement}, expected Replicate, Shard(0) "
                        "(batch) or Shard(1) (heads): attention over shards of a sequence would "
                        "miss the keys of the other ranks"
                    )
            if t.device_mesh != query.device_mesh or t.placements != query.placements:
                raise RuntimeError(
                    f"{name} is placed as {t.placements} on {t.device_mesh}, query as "
                    f"{query.placements} on {query.device_mesh}: expected the same"
                )
        self.mesh, self.placements = query.device_mesh, query.placements
        self.heads = query.shape[1]
        ranks = 1
        for size, placement in zip(self.mesh.shape, self.placements, strict=True):
            ranks *= size if placement == Shard(_HEADS) else 1
        for name, t in (("query", query), ("key", key)):
            if query.shape[1] != key.shape[1] and t.shape[1] % ranks:
                raise RuntimeError(
                    f"{name} has {t.shape[1]} heads over {ranks} ranks, expected a multiple: "
                    "grouped heads have to stay together"
                )

    def share(self, name: str, option: Any) -> Any:
        """An option of the call, cut to what this rank's share of the query needs of it."""
        if isinstance(option, Mask):
            parts: dict[str, Any] = {
                part: self._cut(f"mask's {part}", held, dims)
                for part, dims in _PARTS.items()
                if (held := getattr(option, part)) is not None
            }
            return replace(option, **parts)
        if not isinstance(option, Tensor):
            return option
        if name in ("sinks", "alibi"):
            per_batch = option.dim() == 2
            return self._cut(name, option, (0, 1) if per_batch else (None, 0))
        ahead = 4 - option.dim()  # broadcast from the right
        dims = tuple(d - ahead if d >= ahead else None for d in (_BATCH, _HEADS))
        return self._cut(name, option, dims)

    def _cut(self, name: str, t: Tensor, dims: tuple[int | None, ...]) -> Tensor:
        """dims: the dimensions of t that are the batch and the heads, None where it has none."""
        wanted: list[Any] = []
        for placement in self.placements:
            own = dims[placement.dim] if isinstance(placement, Shard) else None
            cut = own is not None and t.shape[own] != 1
            wanted.append(Shard(own) if cut and own is not None else Replicate())
        if isinstance(t, DTensor):
            if t.device_mesh != self.mesh or list(t.placements) != wanted:
                raise RuntimeError(
                    f"{name} is placed as {t.placements}, expected {tuple(wanted)} beside a query "
                    f"with {self.placements}"
                )
            grads = [  # of what every share uses, each rank finds a part
                Partial() if isinstance(p, Shard) and w == Replicate() else w
                for p, w in zip(self.placements, wanted, strict=True)
            ]
            local: Tensor = t.to_local(grad_placements=grads)
            return local
        if t.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"{name} is a plain tensor that requires a gradient, expected a DTensor: each rank "
                "would find a share of the gradient only"
            )
        shape, offset = compute_local_shape_and_global_offset(t.shape, self.mesh, wanted)
        for dim, (start, length) in enumerate(zip(offset, shape, strict=True)):
            t = t.narrow(dim, start, length)
        return t

    def gather(self, local: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The DTensor whose share on this rank is `local`."""
        strides, step = [0] * local.dim(), 1
        for dim in sorted(range(local.dim()), key=local.stride):  # the layout of the shares
            strides[dim] = step
            step *= max(shape[dim], 1)
        made: Tensor = DTensor.from_local(
            local,
            self.mesh,
            self.placements,
            run_check=False,
            shape=torch.Size(shape),
            stride=tuple(strides),
        )
        return made
