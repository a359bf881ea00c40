"""What models that write have in common: their sessions go to attnkit.models.generation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from attnkit.models import generation
from attnkit.models.generation import GenerationOptions, GenerationOutput, Session
from attnkit.models.pretrained import PretrainedModel, evaluating


class GenerativeModel(PretrainedModel):
    """A model with sessions."""

    def _options(
        self, max_length: int | None, room: int, given: dict[str, Any]
    ) -> GenerationOptions:
        """Options for at most ``room`` tokens; the special ids are the model's unless given.

        Raises:
            TypeError, ValueError: a max_length beyond the room, and as :class:`GenerationOptions`.
        """
        chosen = room if max_length is None else max_length
        if not 0 <= chosen <= room:
            raise ValueError(
                f"max_length is {chosen}, expected 0 to {room}, for which there is room below "
                f"{self.config.max_length}, the config's"
            )
        ids = {"eos_id": self.config.eos_id, "pad_id": self.config.pad_id}
        return GenerationOptions(chosen, **{**ids, **given})

    def _capacity(self, capacity: int | None) -> int:
        """Room in the caches of a session: what was asked for, or all that positions allow."""
        limit = self.config.max_length
        if capacity is None:
            return limit
        if not 1 <= capacity <= limit:
            raise ValueError(
                f"capacity is {capacity}, expected 1 to {limit}, the config's max_length"
            )
        return capacity

    def _generate(
        self, session: Session, prompt: Tensor, options: GenerationOptions
    ) -> GenerationOutput:
        with evaluating(self):
            return generation.generate(session, prompt, options)

    def _stream(
        self, session: Session, prompt: Tensor, options: GenerationOptions
    ) -> Iterator[Tensor]:
        def evaluated(tokens: Iterator[Tensor]) -> Iterator[Tensor]:
            with evaluating(self):
                yield from tokens

        # called here, so that what is wrong is said at once
        return evaluated(generation.stream(session, prompt, options))
