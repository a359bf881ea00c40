"""Masks of transformers models as masks of attnkit, without a [B, 1, Lq, Lk] tensor.

transformers describes a mask by nested functions of (batch, head, query, key) indices.  Those that
it ships are recognised by name here and read out of their closures; a mask with any other function
in it is built densely by transformers' own ``sdpa_mask``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from attnkit import masks
from attnkit.masks import Band, Mask

_SOURCE = "transformers.masking_utils"
_PACKED = "packed_sequence_mask_function.<locals>.inner_mask"


@dataclass
class _State:
    """Of a mask and its aliases: what it hides, and the bool tensor once that was asked for."""

    structure: Mask | None
    build: Callable[[], Tensor]
    dense: Tensor | None = None


class StructuredMask(Tensor):
    """Stands where a model expects a bool mask [B, 1, Lq, Lk] (True = attend), without its memory.

    Any operation on it, such as a slice, builds the bool tensor and goes on with that, so that a
    model that edits its mask gets what it asks for.
    """

    _state: _State

    @staticmethod
    def __new__(cls, state: _State, shape: Sequence[int], device: Any) -> StructuredMask:
        """``state.build()`` makes the bool tensor of ``shape`` that its structure describes."""
        made: StructuredMask = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, tuple(shape), dtype=torch.bool, device=device
        )
        made._state = state
        return made

    def __init__(self, *_: Any) -> None:
        super().__init__()

    @property
    def structure(self) -> Mask | None:
        """The same mask as `attnkit.masks` has it; None since it was edited."""
        return self._state.structure

    def dense(self) -> Tensor:
        """The bool tensor [B, 1, Lq, Lk]; the same one every time."""
        if self._state.dense is None:
            self._state.dense = self._state.build()
        return self._state.dense

    def __repr__(self) -> str:  # type: ignore[override]
        return f"StructuredMask({tuple(self.shape)}, {self.structure})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            (given,) = args
            return StructuredMask(given._state, given.shape, given.device)
        # what the operation changes, or may let others change, is no longer what was described
        shared = func._schema.is_mutable or any(r.alias_info for r in func._schema.returns)

        def bare(x: Any) -> Any:
            if not isinstance(x, StructuredMask):
                return x
            if shared and x.structure is not None:
                x._state.dense, x._state.structure = x.dense().contiguous(), None
            return x.dense()

        return func(*tree_map(bare, args), **tree_map(bare, kwargs or {}))


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Tensor | None:
    """transformers' mask interface, as its ``sdpa_mask``: a mask [B, 1, Lq, Lk], or None for none.

    A mask for several queries is a `StructuredMask` where transformers' description can be read;
    for one query it is a bool tensor of the size of a keep-vector.  None only where every key is
    seen.  In compiled and exported graphs it is a bool tensor.
    """
    from transformers import masking_utils

    if mask_function is None:
        mask_function = masking_utils.causal_mask_function
    given = (batch_size, q_length, kv_length, q_offset, kv_offset)
    call = {
        "mask_function": mask_function,
        "attention_mask": attention_mask,
        "use_vmap": use_vmap,
        "device": device,
        **options,
    }

    def build() -> Tensor:
        made: Tensor = masking_utils.sdpa_mask(
            *given, allow_is_causal_skip=False, allow_is_bidirectional_skip=False, **call
        )
        return made

    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return build()
    if q_length == 1:
        skipped: Tensor | None = masking_utils.sdpa_mask(
            *given,
            allow_is_causal_skip=allow_is_causal_skip,
            allow_is_bidirectional_skip=allow_is_bidirectional_skip,
            **call,
        )
        return skipped
    keep = None
    if attention_mask is not None:
        if attention_mask.dim() != 2:
            return build()
        keep = _keep(attention_mask, kv_length, kv_offset)
    where = _Where(batch_size, q_length, kv_length, int(q_offset), kv_offset, torch.device(device))
    structure = where.read(mask_function)
    if structure is None:
        return build()
    if keep is not None:
        structure = structure & masks.key_padding(keep)
    elif allow_is_bidirectional_skip and _is_empty(structure):
        return None
    return StructuredMask(_State(structure, build), (batch_size, 1, q_length, kv_length), device)


def _keep(attention_mask: Tensor, kv_length: int, kv_offset: int) -> Tensor | None:
    """Which keys are real, bool [B, Lk]; None if all are."""
    missing = max(0, kv_offset + kv_length - attention_mask.shape[1])
    keep = attention_mask.bool()
    if missing:
        keep = torch.nn.functional.pad(keep, (0, missing))
    if keep.shape[1] != kv_length:
        keep = keep[:, kv_offset : kv_offset + kv_length]
    return None if bool(keep.all()) else keep


def _is_empty(mask: Mask) -> bool:
    return all(getattr(mask, name) in (None, ()) for name in Mask.__slots__)


class _Where:
    """Where queries and keys of one mask stand."""

    def __init__(
        self, batch: int, lq: int, lk: int, q_offset: int, kv_offset: int, device: torch.device
    ) -> None:
        self.batch, self.lq, self.lk, self.device = batch, lq, lk, device
        self.q_offset, self.kv_offset = q_offset, kv_offset

    def read(self, function: Any, packed: bool = False, bands: bool = False) -> Mask | None:
        """The mask that a function of transformers.masking_utils describes; None: not known.

        Args:
            packed: the function is joined with one that keeps packed sequences apart.
            bands: only what depends on the distance of query and key will do.
        """
        if getattr(function, "__module__", None) != _SOURCE:
            return None
        name, held = function.__qualname__, _closure(function)
        off = self.q_offset - self.kv_offset  # query i stands at key i + off
        if name == "causal_mask_function":
            return Mask(start=Band(None, off))
        if name == "bidirectional_mask_function":
            return Mask()
        if name == "sliding_window_overlay.<locals>.inner_mask":
            return Mask(start=Band(held["sliding_window"] - 1 - off, None))
        if name == "sliding_window_bidirectional_overlay.<locals>.inner_mask":
            width = held["sliding_window"]
            return Mask(start=Band(width - off, width + off))
        if name == "and_masks.<locals>.and_mask":
            return self._join(held["mask_functions"], packed, bands)
        if bands:
            return None
        if name == _PACKED:
            ids = held["packed_sequence_mask"]
            alone = self.lq == self.lk == ids.shape[1] and off == 0 == self.kv_offset
            return masks.documents(ids) if alone else None
        if name == "remap_positions_for_packed_sequence.<locals>.inner_mask":
            # within a sequence the distances are those of the places, beyond it nothing is seen
            return self.read(held["mask_function"], bands=True) if packed else None
        if name == "chunked_overlay.<locals>.inner_mask":
            padded = held["left_padding"].to(self.device).view(-1, 1)
            q_ids, k_ids = (
                (torch.arange(n, device=self.device) + start - padded) // held["chunk_size"]
                for n, start in ((self.lq, self.q_offset), (self.lk, self.kv_offset))
            )
            return masks.documents(q_ids, k_ids)
        return None

    def _join(self, functions: Sequence[Any], packed: bool, bands: bool) -> Mask | None:
        packed = packed or any(getattr(f, "__qualname__", "") == _PACKED for f in functions)
        joined = Mask()
        for function in functions:
            part = self.read(function, packed, bands)
            if part is None:
                return None
            joined = joined & part
        return joined


def _closure(function: Any) -> dict[str, Any]:
    cells = function.__closure__ or ()
    names = function.__code__.co_freevars
    return dict(zip(names, (cell.cell_contents for cell in cells), strict=True))
