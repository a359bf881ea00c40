"""Does memory grow with the length, not with its square?  Forward and backward at B1 H8 D64.

    python bench/memory_slope.py [--lengths 2048 4096 8192 16384] [--dtypes fp32 bf16] [--torch]

Prints the peak memory beyond q, k, v and the output's gradient, each measured in a process of its
own, the slope of its logarithm against the logarithm of the length (1 is linear), and its size
relative to q, k, v and the output.  Promised are a slope of at most 1.1 and at most 6 times their
bytes.  Exit status 1 when attnkit misses that.
"""

from __future__ import annotations

import argparse
import sys

from attnkit.benchmark import Case, MemoryMeter, Task, loglog_slope

MOST_SLOPE, MOST_RATIO = 1.1, 6.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192, 16384])
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--masks", nargs="+", default=["full", "causal"])
    parser.add_argument("--torch", action="store_true", help="torch's SDPA too")
    parser.add_argument("--threads", type=int, help="threads of PyTorch (all cores)")
    options = parser.parse_args()
    failed = False
    with MemoryMeter(options.threads) as meter:
        for name in ["attnkit", *(["torch"] if options.torch else [])]:
            for dtype in options.dtypes:
                for mask in options.masks:
                    uses = []
                    for length in options.lengths:
                        case = Case(1, 8, length, 64, dtype=dtype, mask=mask)
                        uses.append(meter.measure(name, Task("step", "step", case)))
                        print(
                            f"{name} {case.label}: {uses[-1].extra / 2**20:.1f} MiB, "
                            f"{uses[-1].ratio:.2f} x q, k, v, out ({uses[-1].method})",
                            flush=True,
                        )
                    slope = loglog_slope(options.lengths, [max(1, use.extra) for use in uses])
                    ratio = max(use.ratio for use in uses)
                    met = slope <= MOST_SLOPE and ratio <= MOST_RATIO
                    failed |= name == "attnkit" and not met
                    print(
                        f"{name} {dtype} {mask}: slope {slope:.3f}, at most {ratio:.2f} x q, k, v, "
                        f"out; {'met' if met else 'MISSED'}: {MOST_SLOPE} and {MOST_RATIO:g} x"
                    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
