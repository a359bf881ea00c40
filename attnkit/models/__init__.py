"""Models made of attnkit.nn and attnkit.functional, their generation, loss and learning rates."""

from attnkit.models.causal_lm import CausalLM
from attnkit.models.classifier import Classifier
from attnkit.models.config import Seq2SeqConfig, TransformerConfig
from attnkit.models.generation import GenerationOptions, GenerationOutput, Session
from attnkit.models.loss import label_smoothed_cross_entropy
from attnkit.models.schedule import (
    cosine,
    cosine_factor,
    inverse_sqrt,
    inverse_sqrt_factor,
    peak_rate,
)
from attnkit.models.seq2seq import DecoderState, Seq2SeqTransformer

__all__ = [
    "CausalLM",
    "Classifier",
    "DecoderState",
    "GenerationOptions",
    "GenerationOutput",
    "Seq2SeqConfig",
    "Seq2SeqTransformer",
    "Session",
    "TransformerConfig",
    "cosine",
    "cosine_factor",
    "inverse_sqrt",
    "inverse_sqrt_factor",
    "label_smoothed_cross_entropy",
    "peak_rate",
]
