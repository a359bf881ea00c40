"""attnkit: exact attention for PyTorch, on kernels of its own."""

from __future__ import annotations

import importlib
from types import ModuleType

from attnkit.dispatch import available_backends, use_backend
from attnkit.functional import (
    attention,
    attention_weights,
    decode_attention,
    explain,
    extend_attention,
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
    "extend_attention",
    "scaled_dot_product_attention",
    "use_backend",
    "varlen_attention",
]

_PARTS = frozenset(
    (
        *("backends", "benchmark", "cache", "flash_attn", "masks", "models", "nn", "recording"),
        *("testing", "viz"),
    )
)


def __getattr__(name: str) -> ModuleType:
    """attnkit.nn and the like, imported when first asked for: `import attnkit` stays light."""
    if name in _PARTS:
        return importlib.import_module(f"attnkit.{name}")
    raise AttributeError(f"module 'attnkit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_PARTS})
