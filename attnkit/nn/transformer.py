"""Encoder and decoder as torch.nn has them, on attnkit's attention.

A layer is LN(x + f(x)) for each f (Post-Norm), or x + f(LN(x)) with ``norm_first`` (Pre-Norm).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnkit.nn.multihead_attention import MultiheadAttention, check_mask_dtype, refuse_nested


class TransformerEncoderLayer(nn.TransformerEncoderLayer):
    """Drop-in for `torch.nn.TransformerEncoderLayer`, with its constructor, parameters, state_dict.

    One path for every mode: hooks always run, padded rows are finite, any activation is taken.
    Masks are those of torch.nn: boolean ``True`` = hidden, floats are added.  Nested tensors are
    refused with NotImplementedError.
    """

    self_attn: nn.MultiheadAttention

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = F.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(
            d_model,
            nhead,
            dim_feedforward,
            dropout,
            activation,
            layer_norm_eps,
            batch_first,
            norm_first,
            bias,
            device,
            dtype,
        )
        _adopt(self.self_attn)

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Encode ``src``.

        Args:
            src: ``[S, N, E]``, with ``batch_first`` ``[N, S, E]``, or unbatched ``[S, E]``.
            src_mask: ``[S, S]`` or ``[N * nhead, S, S]``; bool, ``True`` = hidden, or float, added.
            src_key_padding_mask: ``[N, S]``, unbatched ``[S]``; bool or float.
            is_causal: the promise that ``src_mask``, which has to be given, is the causal mask.

        Returns:
            A tensor of the shape of ``src``.

        Raises:
            RuntimeError: ``is_causal`` without ``src_mask``, or a mask of the wrong shape.
            AssertionError: ranks, widths or mask dtypes that torch.nn does not take.
            NotImplementedError: a nested tensor.
        """
        refuse_nested("src", src)
        check_mask_dtype("src_key_padding_mask", src_key_padding_mask)
        check_mask_dtype("src_mask", src_mask)
        if not _reads_booleans(self):
            src_mask = _as_added(src_mask, src.dtype)
            src_key_padding_mask = _as_added(src_key_padding_mask, src.dtype)

        x = src
        if self.norm_first:
            x = x + self._sa_block(self.norm1(x), src_mask, src_key_padding_mask, is_causal)
            return x + self._ff_block(self.norm2(x))
        x = self.norm1(x + self._sa_block(x, src_mask, src_key_padding_mask, is_causal))
        return self.norm2(x + self._ff_block(x))


class TransformerEncoder(nn.TransformerEncoder):
    """Drop-in for `torch.nn.TransformerEncoder`: ``num_layers`` copies of a layer, then ``norm``.

    ``enable_nested_tensor`` and ``mask_check`` are accepted and kept as attributes, and have no
    effect: padded keys are skipped without nested tensors, and the output keeps its length.
    """

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        """Encode ``src``; shapes and errors as in `TransformerEncoderLayer.forward`.

        ``is_causal=None`` looks whether ``mask`` is the causal mask (not while compiling: the mask
        then does its own work).
        """
        refuse_nested("src", src)
        check_mask_dtype("src_key_padding_mask", src_key_padding_mask)
        check_mask_dtype("mask", mask)
        is_causal = _is_causal(mask, is_causal)
        x = src
        for layer in self.layers:
            ours = isinstance(layer, TransformerEncoderLayer)
            x = layer(
                x,
                src_mask=mask if ours else _as_added(mask, x.dtype),
                is_causal=is_causal,
                src_key_padding_mask=(
                    src_key_padding_mask if ours else _as_added(src_key_padding_mask, x.dtype)
                ),
            )
        return x if self.norm is None else self.norm(x)


class TransformerDecoderLayer(nn.TransformerDecoderLayer):
    """Drop-in for `torch.nn.TransformerDecoderLayer`, with its constructor, parameters, state_dict.

    ``forward(tgt, memory, tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask,
    tgt_is_causal, memory_is_causal)`` is torch's: self-attention over ``tgt`` ``[T, N, E]``,
    attention to ``memory`` ``[S, N, E]``, feed-forward (``batch_first`` and unbatched as in
    `TransformerEncoderLayer`).  Masks are those of torch.nn: boolean ``True`` = hidden.
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = F.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(
            d_model,
            nhead,
            dim_feedforward,
            dropout,
            activation,
            layer_norm_eps,
            batch_first,
            norm_first,
            bias,
            device,
            dtype,
        )
        _adopt(self.self_attn)
        _adopt(self.multihead_attn)


class TransformerDecoder(nn.TransformerDecoder):
    """Drop-in for `torch.nn.TransformerDecoder`: ``num_layers`` copies of a layer, then a norm."""

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """Decode ``tgt`` ``[T, N, E]`` with ``memory`` ``[S, N, E]``, or batch first, or unbatched.

        Args:
            tgt, memory: the target sequence and the encoder's output.
            tgt_mask: ``[T, T]`` or ``[N * nhead, T, T]``; bool, ``True`` = hidden, or float, added.
            memory_mask: ``[T, S]`` or ``[N * nhead, T, S]``.
            tgt_key_padding_mask, memory_key_padding_mask: ``[N, T]`` and ``[N, S]``.
            tgt_is_causal: the promise that ``tgt_mask``, which has to be given, is the causal mask.
                None looks at it (not while compiling: the mask then does its own work).
            memory_is_causal: the same promise for ``memory_mask``.
        """
        refuse_nested("tgt", tgt)
        refuse_nested("memory", memory)
        check_mask_dtype("tgt_mask", tgt_mask)
        return super().forward(
            tgt,
            memory,
            tgt_mask,
            memory_mask,
            tgt_key_padding_mask,
            memory_key_padding_mask,
            _is_causal(tgt_mask, tgt_is_causal),
            memory_is_causal,
        )


class Transformer(nn.Transformer):
    """Drop-in for `torch.nn.Transformer`, with its constructor, parameters and state_dict.

    ``forward(src, tgt, src_mask, tgt_mask, memory_mask, *_key_padding_mask, *_is_causal)`` is
    torch's: boolean masks are ``True`` = hidden, and causal masks are found by their values.
    """

    def __init__(
        self,
        d_model: int = 512,
        nhead: int = 8,
        num_encoder_layers: int = 6,
        num_decoder_layers: int = 6,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = F.relu,
        custom_encoder: Any | None = None,
        custom_decoder: Any | None = None,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        layer_args = (
            d_model,
            nhead,
            dim_feedforward,
            dropout,
            activation,
            layer_norm_eps,
            batch_first,
            norm_first,
            bias,
            device,
            dtype,
        )

        def norm() -> nn.LayerNorm:
            return nn.LayerNorm(d_model, layer_norm_eps, bias=bias, device=device, dtype=dtype)

        if custom_encoder is None:
            custom_encoder = TransformerEncoder(
                TransformerEncoderLayer(*layer_args), num_encoder_layers, norm()
            )
        if custom_decoder is None:
            custom_decoder = TransformerDecoder(
                TransformerDecoderLayer(*layer_args), num_decoder_layers, norm()
            )
        super().__init__(
            d_model,
            nhead,
            custom_encoder=custom_encoder,
            custom_decoder=custom_decoder,
            batch_first=batch_first,
        )


def _adopt(module: nn.MultiheadAttention) -> None:
    # Both classes hold the same state.  Building a second module in place of torch's would draw
    # from the generator again, and the same seed would no longer give torch's initial values.
    module.__class__ = MultiheadAttention


def _reads_booleans(layer: nn.TransformerEncoderLayer) -> bool:
    # A subclass's own block was written for torch's layer, which makes every mask additive before
    # it; a boolean there could be taken with the other polarity.
    blocks_are_torchs = type(layer)._sa_block is nn.TransformerEncoderLayer._sa_block
    return blocks_are_torchs and isinstance(layer.self_attn, nn.MultiheadAttention)


def _as_added(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A boolean mask (``True`` = hidden) as 0 and -inf; any other as it is."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))


def _is_causal(mask: Tensor | None, hint: bool | None) -> bool:
    """The hint, or without one whether the values of ``mask`` are those of the causal mask."""
    if hint is not None or mask is None:
        return bool(hint)
    if mask.dim() != 2 or mask.shape[0] != mask.shape[1] or mask.requires_grad:
        return False
    if torch.compiler.is_compiling() or mask.is_meta:  # no values to look at
        return False
    if mask.dtype == torch.bool:
        return torch.equal(mask, torch.ones_like(mask).triu(1))
    return torch.equal(mask, torch.full_like(mask, float("-inf")).triu(1))
