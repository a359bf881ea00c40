"""What a call costs when there is next to nothing to compute: 1 x 1 x 1 x 8, one thread.

    python bench/overhead.py [--rounds N] [--clock cpu]         # cpu: on a machine that is busy

Microseconds per call beside F.scaled_dot_product_attention, in interleaved rounds: without
gradient, and the forward with one.  Promised are under 10 and under 20.  Exit status 1 when attnkit
misses that.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial

import torch
import torch.nn.functional as F

import attnkit
from attnkit.benchmark import CLOCKS, Candidate, compare

MOST = {"no grad": 10.0, "with grad": 20.0}  # microseconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    options = parser.parse_args()
    torch.set_num_threads(1)
    failed = False
    for mode, most in MOST.items():
        q, k, v = (torch.randn(1, 1, 1, 8, requires_grad=mode == "with grad") for _ in range(3))
        functions = {
            "attnkit": attnkit.scaled_dot_product_attention,
            "torch": F.scaled_dot_product_attention,
        }
        timed = compare(
            [Candidate(name, partial(f, q, k, v)) for name, f in functions.items()],
            rounds=options.rounds,
            clock=CLOCKS[options.clock],
        )
        for name, samples in timed.samples.items():
            median, best = samples.median * 1e6, samples.best * 1e6
            line = f"{mode}, {name}: median {median:.2f} us, best {best:.2f} us"
            if name == "attnkit":
                met = median < most
                failed |= not met
                line += f"; {'met' if met else 'MISSED'}: under {most:g} us"
            print(line)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
