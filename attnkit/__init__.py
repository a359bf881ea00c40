"""attnkit: exact attention for PyTorch, on kernels of its own."""

from attnkit.dispatch import available_backends, use_backend
from attnkit.functional import (
    attention,
    attention_weights,
    decode_attention,
    explain,
    scaled_dot_product_attention,
    varlen_attention,
)

__version__ = "0.1.0"
__all__ = [
    "attention",
    "attention_weights",
    "available_backends",
    "decode_attention",
    "explain",
    "scaled_dot_product_attention",
    "use_backend",
    "varlen_attention",
]
