"""Models made of attnkit.nn and attnkit.functional, their generation, loss and learning rates."""

from attnkit.models.generation import GenerationOutput
from attnkit.models.loss import label_smoothed_cross_entropy
from attnkit.models.schedule import (
    cosine,
    cosine_factor,
    inverse_sqrt,
    inverse_sqrt_factor,
    peak_rate,
)
from attnkit.models.seq2seq import DecoderState, Seq2SeqConfig, Seq2SeqTransformer

__all__ = [
    "DecoderState",
    "GenerationOutput",
    "Seq2SeqConfig",
    "Seq2SeqTransformer",
    "cosine",
    "cosine_factor",
    "inverse_sqrt",
    "inverse_sqrt_factor",
    "label_smoothed_cross_entropy",
    "peak_rate",
]
