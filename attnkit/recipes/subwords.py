"""Byte-level byte-pair encoding, learnt by ``tokenizers``: any text survives the round trip."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FILE = "tokenizer.json"
SPECIAL = ("<pad>", "<bos>", "<eos>")
PAD_ID, BOS_ID, EOS_ID = range(len(SPECIAL))
_BYTES = 256


class Subwords:
    """A vocabulary of subwords: text to token ids and back.

    A subword never joins two words, and numbers are cut into pairs of digits, 1987 into 19 and 87:
    each pair is seen often.  Texts are not changed, not even in their white space.
    """

    LEAST = len(SPECIAL) + _BYTES
    """The smallest vocabulary: the special tokens and the 256 bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> Subwords:
        """Learn at most ``vocab_size`` tokens, special ones and single bytes included.

        Raises:
            ValueError: a vocabulary too small for these.
        """
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

        if vocab_size < cls.LEAST:
            raise ValueError(f"vocab_size is {vocab_size}, expected {cls.LEAST} or more")
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(r" ?\d\d?"), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(SPECIAL),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        return cls(tokenizer)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special ones included."""
        return int(self._tokenizer.get_vocab_size())

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, without special tokens."""
        encoded = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [line.ids for line in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ``ids``; special tokens are left out, bytes of no character become U+FFFD."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def save(self, directory: str | Path) -> None:
        """Write ``tokenizer.json``, the format of ``tokenizers``."""
        path = Path(directory)
        path.mkdir(parents=True, exist_ok=True)
        self._tokenizer.save(str(path / FILE))

    @classmethod
    def load(cls, directory: str | Path) -> Subwords:
        """Read what :meth:`save` wrote."""
        from tokenizers import Tokenizer

        return cls(Tokenizer.from_file(str(Path(directory) / FILE)))
