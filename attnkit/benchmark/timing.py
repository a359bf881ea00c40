"""Time several ways to do the same thing against each other: paired rounds in random order.

On a machine that does other work too, two timings taken a second apart differ by more than the
effect one looks for.  So every round times every candidate once, one right after the other, in an
order drawn anew; ratios are taken inside a round, where both sides saw the same machine.
"""

from __future__ import annotations

import gc
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# ``cpu`` counts the seconds in which a core worked for this process, summed over its threads.  With
# one thread it is what ``wall`` would be if the machine had nothing else to do.
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}

TICK = 50e-6  # seconds; a call longer than this is timed alone, shorter ones in a batch


@dataclass(frozen=True)
class Candidate:
    """One way to do the work.

    ``call`` takes no argument; its result is dropped.  ``finish`` waits for work that ``call`` only
    queued; it is part of the time.  ``stopwatch`` times one call in place of the clock (a GPU does,
    see ``gpu.Stopwatch``): it is given ``call`` and returns seconds.
    """

    name: str
    call: Callable[[], object]
    finish: Callable[[], object] | None = None
    stopwatch: Callable[[Callable[[], object]], float] | None = None


@dataclass(frozen=True)
class Samples:
    """Seconds per call: the median of each round, and the fastest of all."""

    seconds: tuple[float, ...]  # [rounds]
    best: float
    batch: int  # calls between two looks at the clock

    @property
    def median(self) -> float:
        """The median over the rounds, in seconds per call."""
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class Ratio:
    """How many times faster than the baseline, from pairs of the same round."""

    median: float
    low: float  # first quartile of the rounds
    high: float  # third quartile of the rounds
    best: float  # from the fastest call of either side
    rounds: tuple[float, ...]  # in order of size

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """Bounds of the true median, which lies between them with ``confidence`` at least.

        The k-th smallest and the k-th largest round, for the largest k with
        2 P(X < k) <= 1 - confidence, X ~ Binomial(rounds, 1 / 2): nothing is assumed of the
        distribution but that rounds are independent (Thompson 1936).

        Raises:
            ValueError: confidence outside 0 to 1, or more than the rounds allow: 0.95 needs 6.
        """
        if not 0.0 < confidence < 1.0:
            raise ValueError(f"confidence is {confidence}, expected more than 0 and less than 1")
        n, k = len(self.rounds), 0
        while 2 * sum(math.comb(n, x) for x in range(k + 1)) <= (1 - confidence) * 2**n:
            k += 1
        if k == 0:
            raise ValueError(f"confidence is {confidence}, expected less with {n} rounds")
        return self.rounds[k - 1], self.rounds[n - k]


@dataclass(frozen=True)
class Comparison:
    """What ``compare`` measured.  ``orders[r]`` is the order in which round r ran."""

    samples: dict[str, Samples]
    orders: tuple[tuple[str, ...], ...]
    seed: int

    def ratio(self, name: str, baseline: str) -> Ratio:
        """How many times faster ``name`` is than ``baseline`` (above 1 is faster)."""
        return paired_ratio(self.samples[name], self.samples[baseline])


def paired_ratio(ours: Samples, baseline: Samples) -> Ratio:
    """Ratios round by round; both must come from one ``compare``."""
    if len(ours.seconds) != len(baseline.seconds):
        raise ValueError(
            f"ours has {len(ours.seconds)} rounds, baseline has {len(baseline.seconds)}: "
            "only samples of one comparison are paired"
        )
    ratios = sorted(b / a for a, b in zip(ours.seconds, baseline.seconds, strict=True))
    low, middle, high = quartiles(ratios)
    return Ratio(middle, low, high, best=baseline.best / ours.best, rounds=tuple(ratios))


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median and third quartile; one value is all three."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def compare(
    candidates: Sequence[Candidate],
    *,
    rounds: int = 7,
    min_time: float = 0.05,
    seed: int = 0,
    pause: float = 0.005,
    clock: Callable[[], float] = time.perf_counter,
) -> Comparison:
    """Time the candidates against each other.

    Args:
        candidates: at least one, with names that differ.  Each is called before the clock starts.
        rounds: how often every candidate is timed.
        min_time: seconds that a candidate runs in a round, at least; a longer call runs once.
        seed: of the order in each round.
        pause: seconds of rest before each candidate, in which the last one's threads stop spinning.
        clock: seconds as a float, e.g. one of ``CLOCKS``.

    Raises:
        ValueError: no candidate, a name twice, or fewer than one round.
    """
    names = [candidate.name for candidate in candidates]
    if not names:
        raise ValueError("candidates is empty, expected at least one")
    if len(set(names)) != len(names):
        raise ValueError(f"candidates has names {names}, expected each name once")
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}, expected at least 1")

    batches = {c.name: _batch_size(c, clock) for c in candidates}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    best = dict.fromkeys(names, math.inf)
    orders: list[tuple[str, ...]] = []
    draw = random.Random(seed)
    for _ in range(rounds):
        order = draw.sample(list(candidates), len(candidates))
        orders.append(tuple(c.name for c in order))
        for candidate in order:
            time.sleep(pause)
            taken = _time_round(candidate, batches[candidate.name], min_time, clock)
            seconds[candidate.name].append(statistics.median(taken))
            best[candidate.name] = min(best[candidate.name], min(taken))
    samples = {name: Samples(tuple(seconds[name]), best[name], batches[name]) for name in names}
    return Comparison(samples, tuple(orders), seed)


def _batch_size(candidate: Candidate, clock: Callable[[], float]) -> int:
    """How many calls are long enough for the clock; also the warm-up."""
    _time_batch(candidate, 1, clock)
    calls = 1
    if candidate.stopwatch is not None:  # which times one call, however short
        return calls
    while calls < 1 << 20 and _time_batch(candidate, calls, clock) < TICK:
        calls *= 2
    return calls


def _time_round(
    candidate: Candidate, batch: int, min_time: float, clock: Callable[[], float]
) -> list[float]:
    """Seconds per call of each batch in one turn of the candidate."""
    taken: list[float] = []
    collecting = gc.isenabled()
    gc.disable()  # a collection in the middle of a sample belongs to nobody
    try:
        first = _time_batch(candidate, 1, clock)
        if first >= min_time and batch == 1:
            # so long that what the last candidate left in the caches does not matter
            return [first]
        end = clock() + min_time
        while not taken or clock() < end:
            taken.append(_time_batch(candidate, batch, clock) / batch)
    finally:
        if collecting:
            gc.enable()
    return taken


def _time_batch(candidate: Candidate, calls: int, clock: Callable[[], float]) -> float:
    call, finish = candidate.call, candidate.finish
    if candidate.stopwatch is not None:
        return candidate.stopwatch(call)
    start = clock()
    for _ in itertools.repeat(None, calls):
        call()
    if finish is not None:
        finish()
    return clock() - start
