"""Modules: drop-ins for torch.nn's attention and Transformer classes, and the Transformer's parts.

Masks have the meaning they have in torch.nn: boolean ``True`` = hidden.
"""

from attnkit.nn.feed_forward import FeedForward
from attnkit.nn.multihead_attention import MultiheadAttention
from attnkit.nn.positional import LearnedPositionalEncoding, SinusoidalPositionalEncoding
from attnkit.nn.transformer import (
    Transformer,
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)

__all__ = [
    "FeedForward",
    "LearnedPositionalEncoding",
    "MultiheadAttention",
    "SinusoidalPositionalEncoding",
    "Transformer",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
]
