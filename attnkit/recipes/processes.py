"""The processes that train together: one, or those that torchrun started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class Processes:
    """This process's number and place among ``count``; every method is called by all of them."""

    device: torch.device
    rank: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes and prints."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """``values`` added up over the processes, the same bits in each."""
        if self.count > 1:
            dist.all_reduce(values)
        return values

    def gather(self, values: Tensor) -> list[Tensor]:
        """``values`` of every process, of one shape, in the order of their numbers."""
        if self.count == 1:
            return [values]
        values = values.to(self.device)
        found = [torch.empty_like(values) for _ in range(self.count)]
        dist.all_gather(found, values)
        return [value.cpu() for value in found]

    def wait(self) -> None:
        """Go on when all have come here."""
        if self.count > 1:
            dist.barrier()

    def wrap(self, model: nn.Module) -> nn.Module:
        """``model``, with the gradients of a backward pass averaged over the processes."""
        return DistributedDataParallel(model) if self.count > 1 else model


@contextmanager
def joined(device: str = "") -> Iterator[Processes]:
    """Join the other processes of torchrun, if it started this one; part from them at the end.

    Args:
        device: where this process computes; empty is a GPU of its own if there is one for each
            process, and else the CPU.  gloo joins processes on CPUs, nccl those on GPUs.
    """
    rank, count = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local = int(os.environ.get("LOCAL_RANK", 0))
    beside = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if not device:
        device = f"cuda:{local}" if 0 < beside <= torch.cuda.device_count() else "cpu"
    place = torch.device(device)
    if count == 1:
        yield Processes(place)
        return
    if place.type == "cuda":
        torch.cuda.set_device(place)
    dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
    try:
        yield Processes(place, rank, count)
    finally:
        dist.destroy_process_group()
