"""Real data with a right answer: dates in full, from English into other languages, as CLDR has it.

    Saturday, September 4, 2021  ->  2021. szeptember 4., szombat

Every date from 1900 to 2099, as Babel (the Unicode CLDR's data for Python) formats it.  Dates are
held out, not pairs of texts: a validation or test date occurs in training in no language, so a
model can only get it right by having learnt how each language writes a day, a month and a year.
"""

from __future__ import annotations

import datetime
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FIRST_YEAR, LAST_YEAR = 1900, 2099
SOURCE_LANGUAGE = "en"

LANGUAGES: dict[str, str] = {
    "ar": "Arabic",
    "de": "German",
    "el": "Greek",
    "es": "Spanish",
    "fi": "Finnish",
    "fr": "French",
    "hi": "Hindi",
    "hu": "Hungarian",
    "ja": "Japanese",
    "ko": "Korean",
    "lt": "Lithuanian",
    "ru": "Russian",
    "tr": "Turkish",
    "zh": "Chinese",
}
"""Target languages: CLDR code and English name."""

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
SPECIAL = (PAD, BOS, EOS, UNK)
PAD_ID, BOS_ID, EOS_ID, UNK_ID = range(len(SPECIAL))
_SPACE = "\u2581"  # what tokenizers writes for the space before a word


class Example(NamedTuple):
    """One date, written in English (``source``) and in ``language`` (``target``)."""

    day: datetime.date
    language: str
    source: str
    target: str


@cache
def _full_format(language: str) -> tuple[Any, Any]:
    from babel import Locale
    from babel.dates import get_date_format

    locale = Locale.parse(language)
    return get_date_format("full", locale=locale), locale


def write_date(day: datetime.date, language: str) -> str:
    """``day`` in CLDR's ``full`` format, as ``babel.dates.format_date(day, "full", language)``."""
    # the pattern is looked up once per language: that is a third of format_date's time
    pattern, locale = _full_format(language)
    return str(pattern.apply(day, locale))


def make_example(day: datetime.date, language: str) -> Example:
    """``day`` in English and in ``language`` (a key of :data:`LANGUAGES`)."""
    return Example(day, language, write_date(day, SOURCE_LANGUAGE), write_date(day, language))


@dataclass(frozen=True)
class DateSplit:
    """All dates of 1900 to 2099 in three disjoint parts, each in random order."""

    train: tuple[datetime.date, ...]
    validation: tuple[datetime.date, ...]
    test: tuple[datetime.date, ...]


def split_dates(seed: int, *, validation: int = 200, test: int = 1000) -> DateSplit:
    """Shuffle the 73,049 dates by ``seed`` and hold out ``validation`` and ``test`` of them.

    Raises:
        ValueError: if nothing would be left to train on.
    """
    first = datetime.date(FIRST_YEAR, 1, 1).toordinal()
    last = datetime.date(LAST_YEAR, 12, 31).toordinal()
    total = last - first + 1
    if not 0 <= validation <= total - test - 1 or test < 0:
        raise ValueError(
            f"validation={validation} and test={test} leave no dates to train on: "
            f"there are {total} from {FIRST_YEAR} to {LAST_YEAR}"
        )
    days = [datetime.date.fromordinal(n) for n in range(first, last + 1)]
    random.Random(seed).shuffle(days)
    held_out = test + validation
    return DateSplit(
        train=tuple(days[held_out:]),
        validation=tuple(days[test:held_out]),
        test=tuple(days[:test]),
    )


def every_language(days: Iterable[datetime.date]) -> list[Example]:
    """Each of ``days`` in each of :data:`LANGUAGES`."""
    return [make_example(day, language) for day in days for language in LANGUAGES]


def sample_examples(days: Sequence[datetime.date], count: int, rng: random.Random) -> list[Example]:
    """``count`` examples of ``days`` and languages drawn at random, with replacement."""
    languages = tuple(LANGUAGES)
    return [make_example(rng.choice(days), rng.choice(languages)) for _ in range(count)]


def language_token(language: str) -> str:
    """The token that asks for a language, first in every source: ``<hu>``."""
    return f"<{language}>"


class DateTokenizer:
    """One vocabulary of subwords for all languages: byte-pair encoding learnt by ``tokenizers``.

    Numbers are cut into pairs of digits, 1987 into 19 and 87: each pair occurs often, so that a
    year need not have been seen to be copied, and a copied number seldom repeats a token.
    A source is ``<language> ... <eos>``, a target ``<bos> ... <eos>``.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        vocabulary = tokenizer.get_vocab()
        self._language_ids = {code: vocabulary[language_token(code)] for code in LANGUAGES}

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int = 1200) -> DateTokenizer:
        """Learn at most ``vocab_size`` subwords (special tokens included) from ``texts``."""
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE(unk_token=UNK))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Metaspace(),
                pre_tokenizers.Punctuation("isolated"),
                # with the space before it
                pre_tokenizers.Split(Regex(rf"{_SPACE}?\d\d?"), "isolated"),
            ]
        )
        tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[*SPECIAL, *map(language_token, LANGUAGES)],
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        return cls(tokenizer)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special ones included."""
        return int(self._tokenizer.get_vocab_size())

    def sources(self, examples: Sequence[Example]) -> list[list[int]]:
        """Token ids of the source texts: ``<language> text <eos>``."""
        encoded = self._tokenizer.encode_batch([e.source for e in examples])
        return [
            [self._language_ids[e.language], *line.ids, EOS_ID]
            for e, line in zip(examples, encoded, strict=True)
        ]

    def targets(self, examples: Sequence[Example]) -> list[list[int]]:
        """Token ids of the target texts: ``<bos> text <eos>``."""
        encoded = self._tokenizer.encode_batch([e.target for e in examples])
        return [[BOS_ID, *line.ids, EOS_ID] for line in encoded]

    @staticmethod
    def trimmed(ids: Iterable[int]) -> list[int]:
        """``ids`` up to the first ``<eos>``, without it."""
        return list(takewhile(lambda token: token != EOS_ID, ids))

    def text(self, ids: Iterable[int]) -> str:
        """The text of ``ids`` up to the first ``<eos>``; special tokens are left out."""
        return str(self._tokenizer.decode(self.trimmed(ids), skip_special_tokens=True))

    def save(self, path: str | Path) -> None:
        """Write the format of ``tokenizers``, one JSON file."""
        self._tokenizer.save(str(path))

    @classmethod
    def load(cls, path: str | Path) -> DateTokenizer:
        """Read what :meth:`save` wrote."""
        from tokenizers import Tokenizer

        return cls(Tokenizer.from_file(str(path)))

    def labels(self, ids: Iterable[int]) -> list[str]:
        """Each id's token as an axis of a plot shows it, without the space of a word's start."""
        names = (self._tokenizer.id_to_token(int(i)) or UNK for i in ids)
        return [name.replace(_SPACE, " ").strip() or "␣" for name in names]


def pad_batch(rows: Sequence[Sequence[int]]) -> Tensor:
    """``rows`` as one int64 tensor [len(rows), longest], filled up with ``<pad>`` on the right."""
    length = max(map(len, rows), default=0)
    return torch.tensor([[*row, *[PAD_ID] * (length - len(row))] for row in rows]).reshape(
        len(rows), length
    )


class Batch(NamedTuple):
    """``source`` [B, S] and ``target`` [B, T], int64, padded on the right."""

    source: Tensor
    target: Tensor


def bucketed_batches(
    examples: Sequence[Example], tokenizer: DateTokenizer, batch_size: int, rng: random.Random
) -> Iterator[Batch]:
    """``examples`` in batches of ``batch_size`` of nearly equal lengths, in random order.

    Examples are sorted by length inside pools of 16 batches only, so that a batch still mixes dates
    and languages at random.
    """
    pool = 16 * batch_size
    for start in range(0, len(examples), pool):
        some = examples[start : start + pool]
        pairs = list(zip(tokenizer.sources(some), tokenizer.targets(some), strict=True))
        rng.shuffle(pairs)
        pairs.sort(key=lambda pair: len(pair[1]))
        chunks = [pairs[i : i + batch_size] for i in range(0, len(pairs), batch_size)]
        rng.shuffle(chunks)
        for chunk in chunks:
            yield Batch(pad_batch([s for s, _ in chunk]), pad_batch([t for _, t in chunk]))
