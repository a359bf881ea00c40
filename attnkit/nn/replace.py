"""A model that was built with torch.nn, turned into one of attnkit.nn where it stands."""

from __future__ import annotations

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from attnkit.masks import describe
from attnkit.nn import transformer
from attnkit.nn.multihead_attention import MultiheadAttention

_OURS: dict[type[nn.Module], type[nn.Module]] = {
    nn.MultiheadAttention: MultiheadAttention,
    nn.TransformerEncoderLayer: transformer.TransformerEncoderLayer,
    nn.TransformerEncoder: transformer.TransformerEncoder,
    nn.TransformerDecoderLayer: transformer.TransformerDecoderLayer,
    nn.TransformerDecoder: transformer.TransformerDecoder,
    nn.Transformer: transformer.Transformer,
}


def replace_modules(model: nn.Module) -> list[str]:
    """Make attnkit.nn's of every torch.nn attention and Transformer module in `model`, in place.

    Nothing is copied: modules and parameters stay the objects that they are, with their values,
    hooks, parametrizations and modes, so that optimizers and references from elsewhere go on.
    Subclasses that others wrote are left alone (what stands inside them is replaced).

    Args:
        model: any module; may itself be one of those.

    Returns:
        Names of the modules that were replaced, in the order of ``model.named_modules()``; "" is
        the model itself.

    Raises:
        TypeError: model is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {describe(model)}, expected a torch.nn.Module")
    replaced = []
    for name, module in model.named_modules():
        found = type(module)
        # torch's parametrizations put a class of their own before that of the module
        own = found.__bases__[0] if is_parametrized(module) else found
        ours = _OURS.get(own)
        if ours is None:
            continue
        if own is not found:
            kept = {k: v for k, v in vars(found).items() if k not in ("__dict__", "__weakref__")}
            ours = type(found.__name__, (ours,), kept)
        module.__class__ = ours
        replaced.append(name)
    return replaced
