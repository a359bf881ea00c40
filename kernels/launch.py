"""Tile sizes, warps and stages by architecture, kernel, head dim and width of the dtype.

The entries come from reading the machine code (bench/machine_code.py): no spills in the main loops,
and two thread blocks per multiprocessor where the registers allow it, since one block's softmax can
only overlap with another's matrix products.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

# Triton reads it once, when it is imported; so does this module
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


class Config(NamedTuple):
    """How one kernel runs."""

    block_m: int
    block_n: int
    warps: int = 4
    stages: int = 2
    tma: bool = False  # what the loop reads comes through TMA descriptors, if the strides allow it
    resident: int = 1  # blocks that fit a multiprocessor; bench/compile_matrix.py holds it to that

    def options(self) -> dict[str, Any]:
        """The launch options that Triton takes."""
        return {"num_warps": self.warps, "num_stages": self.stages}


# Under the interpreter a step costs the same whatever its tile; small ones meet more boundaries.
_INTERPRETED = Config(32, 32)

# (kernel, dtype bytes): [(largest padded head dim, configuration)].  "80" also serves sm_86 and
# sm_89, whose shared memory is smaller, with the entries marked so.
_HOPPER = {
    ("forward", 2): [
        (64, Config(128, 64, 4, 3, resident=2)),
        (128, Config(128, 64, 4, 2, True, 2)),
        (256, Config(128, 64, 8, 2, True)),
        (512, Config(64, 32, 8, 2)),
    ],
    ("forward", 4): [
        (64, Config(64, 64, 4, 2)),
        (128, Config(64, 32, 4, 2)),
        (256, Config(32, 32, 4, 2)),
        (512, Config(16, 16, 4, 1)),
    ],
    ("forward bias", 2): [  # with wider tiles the bias is read in whole lines, and nothing spills
        (64, Config(128, 64, 4, 3)),
        (128, Config(128, 128, 8, 2, True)),
        (256, Config(128, 64, 8, 2, True)),
        (512, Config(64, 32, 8, 2)),
    ],
    ("dkdv", 2): [
        (64, Config(64, 64, 4, 2, True, 2)),
        (128, Config(64, 64, 4, 2, True, 2)),
        (256, Config(32, 64, 8, 1)),
        (512, Config(16, 32, 8, 1)),
    ],
    ("dkdv", 4): [
        (64, Config(32, 64, 4, 1)),
        (128, Config(32, 32, 4, 1)),
        (256, Config(16, 32, 4, 1)),
        (512, Config(16, 16, 4, 1)),
    ],
    ("dq", 2): [
        (64, Config(128, 64, 4, 2, resident=2)),
        (128, Config(64, 64, 4, 2, resident=2)),
        (256, Config(64, 32, 4, 2)),
        (512, Config(32, 16, 8, 1)),
    ],
    ("dq", 4): [
        (64, Config(64, 32, 4, 1)),
        (128, Config(32, 32, 4, 1)),
        (256, Config(32, 16, 4, 1)),
        (512, Config(16, 16, 4, 1)),
    ],
}
_AMPERE = {
    **_HOPPER,
    ("forward", 2): [
        (64, Config(128, 64, 4, 2)),
        (128, Config(128, 32, 4, 2)),
        (256, Config(64, 32, 4, 2)),
        (512, Config(32, 16, 4, 1)),
    ],
    ("forward bias", 2): [
        (64, Config(128, 64, 4, 2)),
        (128, Config(128, 32, 4, 2)),
        (256, Config(64, 32, 4, 2)),
        (512, Config(32, 16, 4, 1)),
    ],
    ("dkdv", 2): [
        (64, Config(32, 64, 4, 2)),
        (128, Config(32, 64, 4, 1)),
        (256, Config(16, 32, 4, 1)),
        (512, Config(16, 16, 4, 1)),
    ],
    ("dq", 2): [
        (64, Config(64, 64, 4, 1)),
        (128, Config(64, 32, 4, 1)),
        (256, Config(32, 32, 4, 1)),
        (512, Config(16, 16, 4, 1)),
    ],
}
# Hopper's tiles; how many fit beside accumulators in tensor memory is not promised.
_BLACKWELL = {
    key: [(most, config._replace(resident=1)) for most, config in rows]
    for key, rows in _HOPPER.items()
}
TABLE = {"hopper": _HOPPER, "ampere": _AMPERE, "blackwell": _BLACKWELL, "amd": _AMPERE}


def family(capability: tuple[int, int] | None) -> str:
    """The rows of TABLE for a GPU: capability of an NVIDIA one, None for AMD's."""
    if capability is None:
        return "amd"
    return {9: "hopper", 10: "blackwell"}.get(capability[0], "ampere")


def choose(kernel: str, family: str, block_d: int, width: int) -> Config:
    """The configuration for a padded head dim and a dtype of `width` bytes."""
    if INTERPRETED:
        return _INTERPRETED
    rows = TABLE[family]
    for most, config in rows.get((kernel, width)) or rows[kernel.split()[0], width]:
        if block_d <= most:
            return config
    raise ValueError(f"head dim {block_d} is above 512")


def decode_block(block_d: int, width: int) -> int:
    """Keys of one step of decoding, for a padded head dim and a dtype of `width` bytes."""
    return max(16, min(64, 16384 // (block_d * width)))
