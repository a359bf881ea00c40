"""attnkit: exact attention for PyTorch, on kernels of its own."""

from attnkit.dispatch import available_backends, use_backend
from attnkit.functional import attention, scaled_dot_product_attention

__version__ = "0.1.0"
__all__ = ["attention", "available_backends", "scaled_dot_product_attention", "use_backend"]
