"""A checkpoint is one file of safetensors with JSON in its header, replaced whole or not at all.

Weights, optimizer and random states are tensors, all other state is JSON; nothing is pickled.  The
file is written under a temporary name, synced, renamed over the old one, and the folder is synced:
whenever the process or the machine stops, the name holds the old or the new state.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

FILE = "checkpoint.safetensors"
SCHEMA, VERSION = "attnkit.checkpoint", 1


@dataclass(frozen=True)
class Checkpoint:
    """Tensors by dotted names, and everything that is not a tensor as JSON has it."""

    tensors: dict[str, Tensor]
    values: dict[str, Any]

    def part(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names begin with ``prefix`` and a dot, without these."""
        start = f"{prefix}."
        return {n.removeprefix(start): t for n, t in self.tensors.items() if n.startswith(start)}


def save(checkpoint: Checkpoint, path: str | Path) -> None:
    """Write ``checkpoint``, replacing ``path`` at once when all of it is on the disk."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"schema": SCHEMA, "version": VERSION, "values": checkpoint.values}
    # clones: safetensors refuses tensors that share memory, such as tied weights
    tensors = {name: tensor.detach().cpu().clone() for name, tensor in checkpoint.tensors.items()}
    # one name for all writers: what a killed one leaves is overwritten by the next
    temporary = path.with_name(f".{path.name}.tmp")
    save_file(tensors, temporary, {"attnkit": json.dumps(content)})
    _sync(temporary)
    os.replace(temporary, path)
    _sync(path.parent)


def load(path: str | Path) -> Checkpoint:
    """Read what :func:`save` wrote; tensors are on the CPU.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not such a checkpoint, or one of another version.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"checkpoint {path} is not a file")
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        content = json.loads(header.get("attnkit", "{}"))
    except (SafetensorError, json.JSONDecodeError) as error:
        raise ValueError(f"checkpoint {path} cannot be read: {error}") from error
    found = content.get("schema"), content.get("version")
    if found != (SCHEMA, VERSION):
        raise ValueError(f"checkpoint {path} is {found}, expected {(SCHEMA, VERSION)}")
    return Checkpoint(tensors, content["values"])


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The state of every parameter as ``number.name``; rates and the like are not part of it."""
    state = optimizer.state_dict()["state"]
    return {f"{i}.{name}": value for i, own in state.items() for name, value in own.items()}


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Put back what :func:`optimizer_tensors` took."""
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        number, _, own = name.partition(".")
        state.setdefault(int(number), {})[own] = tensor
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the model's parameters and buffers on the CPU."""
    return {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}


def random_state(device: torch.device) -> Tensor:
    """The state of torch's generator for ``device``, uint8 [n]: it decides the dropout to come."""
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.get_rng_state()


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Put back what :func:`random_state` took."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def _sync(path: Path) -> None:
    """Wait until the file, or the names in the folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
