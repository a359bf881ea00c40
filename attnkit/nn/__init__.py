"""Modules: drop-ins for torch.nn's attention and Transformer classes, and the Transformer's parts.

Masks of the drop-ins have the meaning they have in torch.nn: boolean ``True`` = hidden.
"""

from torch.nn import RMSNorm

from attnkit.nn.alibi import alibi_slopes
from attnkit.nn.feed_forward import FeedForward
from attnkit.nn.multihead_attention import MultiheadAttention
from attnkit.nn.positional import LearnedPositionalEncoding, SinusoidalPositionalEncoding
from attnkit.nn.relative_bias import RelativePositionBias
from attnkit.nn.replace import replace_modules
from attnkit.nn.rotary import RotaryEmbedding
from attnkit.nn.single_head import SingleHeadAttention
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
    "RMSNorm",
    "RelativePositionBias",
    "RotaryEmbedding",
    "SingleHeadAttention",
    "SinusoidalPositionalEncoding",
    "Transformer",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
    "alibi_slopes",
    "replace_modules",
]
