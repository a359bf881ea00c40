"""Choice of the backend for a call: the first, in order, with nothing against it."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType

import torch
from torch import Tensor

from attnkit.spec import AttentionSpec, TensorArgs


def _load() -> dict[str, ModuleType]:
    found = {}
    for name in ("cpu", "reference"):
        try:
            found[name] = importlib.import_module(f"attnkit.backends.{name}")
        except ModuleNotFoundError:
            pass
    return found


BACKENDS = _load()

_forced: ContextVar[str | None] = ContextVar("attnkit_backend", default=None)


class _Traced(threading.local):
    """What Dynamo reads in place of the ContextVar, which it cannot trace; its guards see this."""

    name: str | None = None


_traced = _Traced()


def forced_backend() -> str | None:
    """Name of the backend that `use_backend` asked for in this context, or None."""
    if torch.compiler.is_dynamo_compiling():
        return _traced.name
    return _forced.get()


def select(q: Tensor, k: Tensor, v: Tensor, args: TensorArgs, spec: AttentionSpec) -> ModuleType:
    """The backend module for this call.

    Raises:
        NotImplementedError: the forced backend, or every backend, has something against the call.
    """
    name = forced_backend()
    if name is not None:
        reason = BACKENDS[name].supports(q, k, v, args, spec)
        if reason is not None:
            raise NotImplementedError(f"backend {name!r}: {reason}")
        return BACKENDS[name]
    for backend in BACKENDS.values():
        if backend.supports(q, k, v, args, spec) is None:
            return backend
    raise NotImplementedError("no backend can serve this call")


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Within the block every attention call of this thread and context runs on backend `name`."""
    if name not in BACKENDS:
        raise ValueError(f"name is {name!r}, expected one of {list(BACKENDS)}")
    token, saved = _forced.set(name), _traced.name
    _traced.name = name
    try:
        yield
    finally:
        _forced.reset(token)
        _traced.name = saved


def available_backends() -> list[str]:
    """Names of the backends that can be used on this machine."""
    return list(BACKENDS)
