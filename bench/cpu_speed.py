"""Are the CPU kernels as fast as promised?  B1 H8 L1024 D64 beside torch's SDPA.

    python bench/cpu_speed.py [--threads N] [--rounds N] [--json FILE]
    python bench/cpu_speed.py --threads 1 --clock cpu          # on a machine that is busy

Prints, for forward and backward, fp32 and bf16, causal and full: the speed, its ratio to
F.scaled_dot_product_attention of the same rounds, and its share of the multiply-add peak probed in
the same rounds.  Promised are 1.5 times torch in fp32 and 2.5 times in bf16 where the processor has
AVX-512 with its bf16 instructions, elsewhere 60% of the peak.  Exit status 1 when a row misses it.
"""

from __future__ import annotations

import argparse
import sys

from attnkit.benchmark import CLOCKS, Case, Preset, Results, Row, Settings, markdown, run

TIMES_TORCH = {"fp32": 1.5, "bf16": 2.5}
SHARE_OF_PEAK = 0.6
FULL_SPEED = {"avx512f", "avx512_bf16"}  # where the ratio to torch is what counts


def verdict(results: Results, row: Row) -> tuple[bool, str]:
    """Whether a row is as fast as promised, and the sentence that says so."""
    ratio = results.ratio(row)
    if ratio is None or row.share_of_peak is None or row.peak is None:
        raise ValueError(f"{row.group} has no torch row or no peak")
    if set(results.machine.flags) >= FULL_SPEED:
        goal = TIMES_TORCH[row.dtype]
        met, wanted = ratio.median >= goal, f"{goal} x torch"
    else:
        met, wanted = row.share_of_peak >= SHARE_OF_PEAK, f"{SHARE_OF_PEAK:.0%} of the peak"
    found = (
        f"{row.gflops:.0f} GF/s, {ratio.median:.2f} x torch ({ratio.low:.2f} to {ratio.high:.2f}, "
        f"best {ratio.best:.2f}), {row.share_of_peak:.0%} of {row.peak.best / 1e9:.0f} GF/s "
        f"({row.peak.kind})"
    )
    return met, f"{row.group} on {row.backend}: {found}; {'met' if met else 'MISSED'}: {wanted}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, help="threads of PyTorch (all cores)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    parser.add_argument("--json", help="also write the results here")
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], choices=list(TIMES_TORCH))
    options = parser.parse_args()
    cases = tuple(
        Case(1, 8, 1024, 64, dtype=dtype, mask=mask)
        for dtype in options.dtypes
        for mask in ("full", "causal")
    )
    settings = Settings(
        rounds=options.rounds, implementations=("attnkit", "torch"), clock=options.clock
    )
    results = run(
        Preset.of(cases, settings=settings), memory=False, threads=options.threads, progress=print
    )
    print("\n" + markdown(results))
    if options.json:
        results.save(options.json)
    verdicts = [verdict(results, r) for r in results.rows if r.implementation == "attnkit"]
    print("\n".join(line for _, line in verdicts))
    return 0 if all(met for met, _ in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
