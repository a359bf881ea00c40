"""p(w | h) = max(c(hw) - D, 0) / c(h) + D N(h.) / c(h) * p(w | h'), h' being h without its first.

Interpolated Kneser-Ney smoothing (Kneser and Ney 1995; Chen and Goodman 1999, section 3): below the
highest order c counts the different words seen before, in place of occurrences.  N(h.) is the
number of different words seen after h, and D = n1 / (n1 + 2 n2) with the numbers of n-grams seen
once and twice.  The yardstick of a language model: what counting alone can do.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

Gram = tuple[int, ...]


class NGram:
    """An interpolated Kneser-Ney model of token ids.

    Args:
        documents: what it counts; nothing is counted across their ends.
        vocab_size: number of token ids; below the first order all are equally likely.
        order: words looked at, the predicted one included.
    """

    def __init__(self, documents: Iterable[Sequence[int]], vocab_size: int, order: int = 5) -> None:
        if order < 1:
            raise ValueError(f"order is {order}, expected 1 or more")
        self.order, self.vocab_size = order, vocab_size
        counts: list[Counter[Gram]] = [Counter() for _ in range(order)]  # by length less one
        for document in documents:
            tokens = tuple(document)
            for end in range(1, len(tokens) + 1):
                # near the start there is no longer history: what there is counts as highest
                length = min(order, end)
                counts[length - 1][tokens[end - length : end]] += 1
        for length in range(order, 1, -1):
            for gram in counts[length - 1]:
                counts[length - 2][gram[1:]] += 1
        self._counts = counts
        self._discounts = [_discount(own.values()) for own in counts]
        self._totals: dict[Gram, int] = defaultdict(int)  # c(h)
        self._followers: dict[Gram, int] = defaultdict(int)  # N(h.)
        for own in counts:
            for gram, count in own.items():
                self._totals[gram[:-1]] += count
                self._followers[gram[:-1]] += 1

    def probability(self, history: Sequence[int], token: int) -> float:
        """p(token | the last ``order - 1`` of history)."""
        context = tuple(history)[max(0, len(history) - self.order + 1) :]
        p = 1.0 / self.vocab_size
        for length in range(len(context) + 1):  # from the empty history to the longest
            h = context[len(context) - length :]
            total = self._totals.get(h, 0)
            if total == 0:
                break
            discount, gram = self._discounts[length], (*h, token)
            seen = max(self._counts[length][gram] - discount, 0.0)
            p = (seen + discount * self._followers[h] * p) / total
        return p

    def perplexity(self, documents: Iterable[Sequence[int]]) -> float:
        """exp of the mean of -log p over all tokens but each document's first."""
        total, count = 0.0, 0
        for document in documents:
            for i in range(1, len(document)):
                history = document[max(0, i - self.order + 1) : i]
                total -= math.log(self.probability(history, document[i]))
                count += 1
        return math.exp(total / count) if count else math.nan


def _discount(counts: Iterable[int]) -> float:
    found = Counter(counts)
    once, twice = found[1], found[2]
    # too little text to tell: half of a count, the middle of what is possible
    return once / (once + 2 * twice) if once and twice else 0.5
