"""Writing tokens with a cache: attnkit.models beside torch.nn, and Hugging Face's three ways."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from attnkit.benchmark.cases import DTYPES, Case
from attnkit.benchmark.numeric import TOLERANCE, WrongResult
from attnkit.benchmark.tasks import Suite, Work
from attnkit.benchmark.torch_models import TorchLM
from attnkit.models import CausalLM, TransformerConfig

LAYERS, VOCABULARY, WIDER = 4, 8192, 4
WRITING, HF_WRITING = "writing", "writing in a Llama"
NAMES = {WRITING: ("attnkit", "torch"), HF_WRITING: ("attnkit", "hf:eager", "hf:sdpa")}
MOST_STEPS = 16.0  # of the tolerance, of the largest logit: each layer rounds several times


@dataclass
class WritingSubject:
    """A language model, and the same weights in other hands.

    A case's queries are the prompt's tokens, and its keys those of the text when it is written.
    """

    case: Case
    seed: int

    @classmethod
    def of(cls, case: Case, seed: int = 0) -> WritingSubject:
        """Nothing is drawn before it is needed."""
        return cls(case, seed)

    @cached_property
    def prompt(self) -> Tensor:
        """[B, prompt] of token numbers."""
        draw = torch.Generator().manual_seed(self.seed)
        shape = self.case.batch, self.case.queries
        return torch.randint(3, VOCABULARY, shape, generator=draw).to(self.case.device)

    @cached_property
    def ours(self) -> CausalLM:
        """attnkit's model."""
        width = self.case.heads * self.case.head_dim
        config = TransformerConfig(
            VOCABULARY, width, self.case.heads, LAYERS, WIDER * width, dropout=0.0,
            activation="gelu", norm_first=True, max_length=self.case.keys,
            pad_id=None, bos_id=None, eos_id=None,
        )  # fmt: skip
        return self._drawn(lambda: CausalLM(config))

    @cached_property
    def torchs(self) -> TorchLM:
        """The same of torch.nn's modules."""
        twin = TorchLM(self.ours).eval()
        return twin.to(self.case.device, DTYPES[self.case.dtype])

    def llama(self, name: str) -> Any:
        """A Llama of random weights, the same for every ``attn_implementation``."""
        from transformers import LlamaConfig, LlamaForCausalLM

        from attnkit.integrations import huggingface

        huggingface.register()
        width = self.case.heads * self.case.head_dim
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=width, intermediate_size=WIDER * width,
            num_hidden_layers=LAYERS, num_attention_heads=self.case.heads,
            num_key_value_heads=self.case.kv_heads, max_position_embeddings=self.case.keys,
            bos_token_id=None, eos_token_id=None, pad_token_id=0,
            attn_implementation=name.removeprefix("hf:"),
        )  # fmt: skip
        return self._drawn(lambda: LlamaForCausalLM(config))

    def prepare(self, name: str, operation: str) -> Work:
        """See ``Contest``."""
        count = self.case.keys - self.case.queries
        write: Callable[[], Tensor]
        if operation == HF_WRITING:
            model = self.llama(name)
            keep = torch.ones_like(self.prompt)
            options = {"attention_mask": keep, "do_sample": False, "pad_token_id": 0}
            limits = {"max_new_tokens": count, "min_new_tokens": count}

            def write() -> Tensor:
                text: Tensor = model.generate(self.prompt, **options, **limits)
                return text[:, self.case.queries :]

        elif name == "attnkit":
            write = lambda: self.ours.generate(self.prompt, count).tokens  # noqa: E731
        else:
            write = lambda: self.torchs.generate(self.prompt, count)  # noqa: E731
        return Work(write, lambda: (write(),), extra={"tokens": self.case.batch * count})

    @torch.no_grad()
    def check(self, name: str, operation: str, results: Sequence[Tensor]) -> dict[str, float]:
        """Each token is the likeliest after those before it, by a run of a peer without a cache."""
        (written,) = results
        text = torch.cat((self.prompt, written[:, :-1]), 1)
        if operation == HF_WRITING:
            logits = self.llama("hf:eager")(text, use_cache=False).logits
        else:
            logits = self.torchs(text)
        logits = logits[:, self.case.queries - 1 :].double()
        chosen = logits.gather(-1, written[..., None])[..., 0]
        error = float((logits.amax(-1) - chosen).max() / logits.abs().max())
        most = MOST_STEPS * TOLERANCE[self.case.dtype]
        if not error <= most:
            raise WrongResult(
                f"{name} {operation} on {self.case.label}: a token's logit is {error:.3g} below "
                f"the largest, expected at most {most:.3g}; it is not timed"
            )
        return {"logit": error}

    def ran(self, name: str) -> str:
        """See ``Contest``."""
        from attnkit.benchmark.cases import make_inputs
        from attnkit.benchmark.suites.decode import decode_backend

        if name != "attnkit":
            return name.removeprefix("hf:") if name.startswith("hf:") else "torch.nn"
        return decode_backend(make_inputs(self._one_query()))

    def _one_query(self) -> Case:
        case = self.case
        return Case(case.batch, case.heads, 1, case.head_dim, case.dtype, keys=case.keys,
                    kv_heads=case.kv_heads, device=case.device)  # fmt: skip

    def _drawn(self, make: Callable[[], Any]) -> Any:
        """What ``make`` draws, from the seed, ready to write."""
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(self.seed)
            model: nn.Module = make()
        return model.eval().to(self.case.device, DTYPES[self.case.dtype])


def _refusal(name: str, case: Case, operation: str) -> str | None:
    known = NAMES[operation]
    if name not in known:
        raise ValueError(f"implementation is {name!r}, expected one of {', '.join(known)}")
    if case.mask != "causal" or case.keys <= case.queries:
        return "a text is causal, and longer (keys) than its prompt (queries)"
    if operation == HF_WRITING and importlib.util.find_spec("transformers") is None:
        return "transformers is not installed"
    if operation == WRITING and case.kv_heads != case.heads:
        return "torch.nn has no grouped heads"
    return None


SUITES = {
    "generation": Suite(
        "tokens written after a prompt, with a cache",
        (WRITING, HF_WRITING),
        lambda operation: NAMES[operation],
        _refusal,
        WritingSubject.of,
        lambda case, operation: 0.0,
        "none",
    ),
}
