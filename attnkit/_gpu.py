"""What a GPU has to be for the kernels of attnkit."""

from __future__ import annotations

import torch


def too_old(device: torch.device) -> str | None:
    """Why a CUDA device is not served, or None.  One of AMD is not asked for its age."""
    # without a context there is no tensor but a fake one, of a GPU that may not be here
    if torch.version.hip is not None or not torch.cuda.is_initialized():
        return None
    # not get_device_capability: Dynamo takes the properties for constants, that for a node
    found = torch.cuda.get_device_properties(device)
    if found.major < 8:
        return f"{device} is sm_{found.major}{found.minor}, older than sm_80 (A100)"
    return None


def shared_memory(device: torch.device) -> int | None:
    """Bytes that a block may have on a CUDA device; None of one that is not here."""
    if not torch.cuda.is_initialized():
        return None
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]
