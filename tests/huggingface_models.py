"""Tiny random models of Hugging Face architectures, and what is compared between two of them.

    python tests/huggingface_models.py [name ...]

prints, for every architecture, how far attn_implementation="attnkit" is from "eager".
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from attnkit.integrations import huggingface
from attnkit.testing import recorded_backends

COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "moe_num_experts": 4,
    "moe_k": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
LATENT = {  # keys of 12 dimensions, values of 6
    "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8, "v_head_dim": 6, "head_dim": 4,
}  # fmt: skip
WINDOW = {"sliding_window": 4}
T5 = {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_heads": 4,
      "decoder_start_token_id": 0}  # fmt: skip
BART = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "decoder_start_token_id": 2, "forced_eos_token_id": None, "forced_bos_token_id": None,
}  # fmt: skip

DECODERS: dict[str, dict[str, Any]] = {
    "afmoe": EXPERTS | WINDOW,
    "apertus": {},
    "arcee": {},
    "bert-generation": {"is_decoder": True},
    "biogpt": {},
    "bitnet": {},
    "codegen": {"rotary_dim": 4},
    "cohere": {},
    "cohere2": WINDOW,
    "cwm": WINDOW,
    "deepseek_v2": LATENT | EXPERTS,
    "deepseek_v3": LATENT | EXPERTS,
    "diffllama": {},
    "doge": {},
    "dots1": EXPERTS | {"n_shared_experts": 1},
    "ernie4_5": {"head_dim": 8},
    "ernie4_5_moe": EXPERTS,
    "exaone4": WINDOW,
    "flex_olmo": EXPERTS,
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8, **WINDOW},
    "gemma3_text": {"head_dim": 8, **WINDOW},
    "glm": {"head_dim": 8},
    "glm4": {"head_dim": 8},
    "glm4_moe": EXPERTS | {"head_dim": 8},
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_neox": {},
    "gpt_oss": EXPERTS | WINDOW | {"head_dim": 8},
    "granite": {},
    "granitemoe": EXPERTS,
    "helium": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "jetmoe": EXPERTS | {"kv_channels": 8},
    "lfm2": {},
    "llama": {},
    "llama4_text": EXPERTS
    | {"head_dim": 8, "attention_chunk_size": 4, "intermediate_size_mlp": 48},
    "minimax": EXPERTS,
    "ministral": WINDOW | {"head_dim": 8},
    "ministral3": {"head_dim": 8},
    "mistral": WINDOW,
    "mixtral": EXPERTS,
    "modernbert-decoder": {"local_attention": 4},
    "nanochat": {},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": WINDOW,
    "olmoe": EXPERTS,
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "persimmon": {},
    "phi": {},
    "phi3": WINDOW,
    "phimoe": EXPERTS,
    "qwen2": WINDOW | {"use_sliding_window": True, "max_window_layers": 0},
    "qwen2_moe": EXPERTS,
    "qwen3": {"head_dim": 8},
    "qwen3_moe": EXPERTS | {"head_dim": 8},
    "seed_oss": {"head_dim": 8},
    "smollm3": {},
    "stablelm": {},
    "starcoder2": WINDOW,
    "vaultgemma": {"head_dim": 8, **WINDOW},
    "youtu": LATENT,
}  # fmt: skip
ENCODER_DECODERS: dict[str, dict[str, Any]] = {
    "bart": BART,
    "blenderbot": BART,
    "blenderbot-small": BART,
    "m2m_100": BART,
    "marian": BART,
    "mbart": BART,
    "mt5": T5,
    "pegasus": BART,
    "plbart": BART,
    "t5": T5,
    "umt5": T5,
}
ENCODERS: dict[str, dict[str, Any]] = {
    "albert": {"embedding_size": 16},
    "bert": {},
    "camembert": {},
    "data2vec-text": {},
    "distilbert": {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
    "electra": {"embedding_size": 16},
    "ernie": {},
    "esm": {"position_embedding_type": "rotary", "mask_token_id": 3},
    "eurobert": {},
    "modernbert": {"local_attention": 4},
    "nomic_bert": {},
    "roberta": {},
    "xlm-roberta": {},
}
ALL = DECODERS | ENCODER_DECODERS | ENCODERS


def pair(name: str, **config_options: Any) -> tuple[nn.Module, nn.Module]:
    """The same tiny model twice: with "eager" and with "attnkit"."""
    import transformers

    huggingface.register()
    config = transformers.AutoConfig.for_model(name, **(COMMON | ALL[name] | config_options))
    made = transformers.AutoModel
    if name in DECODERS:
        made = transformers.AutoModelForCausalLM
    elif name in ENCODER_DECODERS:
        made = transformers.AutoModelForSeq2SeqLM
    torch.manual_seed(0)
    eager = made.from_config(config, attn_implementation="eager").eval()
    if "relative_attention_num_buckets" not in config.to_dict():  # T5's start large
        with torch.no_grad():  # initial values of 0.02 would hide most of what attention does
            for parameter in eager.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(3)
    if hasattr(eager, "generation_config"):
        eager.generation_config.forced_eos_token_id = None
        eager.generation_config.eos_token_id = None
    ours = copy.deepcopy(eager)
    ours.set_attn_implementation("attnkit")
    return eager, ours


def tokens(left_padded: bool) -> dict[str, Tensor]:
    """Two sequences of 9 tokens; left padded by 3 and by 0."""
    ids = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(1))
    keep = torch.ones_like(ids)
    if left_padded:
        keep[0, :3] = 0
        ids[0, :3] = 0
    return {"input_ids": ids, "attention_mask": keep}


def outputs(model: nn.Module, name: str, left_padded: bool) -> Tensor:
    """Logits (or hidden states) [tokens, n] at the places that are not padding."""
    given: dict[str, Any] = tokens(left_padded)
    keep = given["attention_mask"].bool()
    if name in ENCODER_DECODERS:
        ids = torch.randint(3, 90, (2, 5), generator=torch.Generator().manual_seed(2))
        given["decoder_input_ids"] = ids
        keep = torch.ones_like(ids, dtype=torch.bool)
    out = model(**given, use_cache=False) if name in ENCODER_DECODERS else model(**given)
    found: Tensor = out.logits if hasattr(out, "logits") else out.last_hidden_state
    return found[keep]


def gradients(model: nn.Module, name: str) -> dict[str, Tensor]:
    """Gradients by name, of a fixed projection of the outputs of a left-padded batch."""
    out = outputs(model, name, left_padded=True)
    up = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    model.zero_grad(set_to_none=True)
    (out * up).mean().backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def generated(model: nn.Module, name: str, cache: str) -> Tensor:
    """Logits [new tokens, B, vocabulary] of greedy generation from a left-padded batch."""
    options: dict[str, Any] = {} if cache == "dynamic" else {"cache_implementation": "static"}
    made = model.generate(  # type: ignore[operator]
        **tokens(left_padded=name in DECODERS),
        max_new_tokens=6,
        min_new_tokens=6,
        do_sample=False,
        num_beams=1,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )
    return torch.stack(made.logits)


def distance(found: Tensor, wanted: Tensor) -> float:
    """Largest difference, as a share of the largest value."""
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))


def of_logits(eager: nn.Module, ours: nn.Module, name: str) -> float:
    with torch.no_grad():
        return distance(outputs(ours, name, False), outputs(eager, name, False))


def of_padded(eager: nn.Module, ours: nn.Module, name: str) -> float:
    with torch.no_grad():
        return distance(outputs(ours, name, True), outputs(eager, name, True))


def of_gradients(eager: nn.Module, ours: nn.Module, name: str) -> float:
    found, wanted = gradients(ours, name), gradients(eager, name)
    assert set(found) == set(wanted), set(found) ^ set(wanted)
    largest = max(float(g.abs().max()) for g in wanted.values())
    return max(float((found[n] - g).abs().max()) for n, g in wanted.items()) / largest


def of_dynamic(eager: nn.Module, ours: nn.Module, name: str) -> float:
    return distance(generated(ours, name, "dynamic"), generated(eager, name, "dynamic"))


def of_static(eager: nn.Module, ours: nn.Module, name: str) -> float:
    return distance(generated(ours, name, "static"), generated(eager, name, "static"))


CHECKS: dict[str, Callable[[nn.Module, nn.Module, str], float]] = {
    "logits": of_logits,
    "padded": of_padded,
    "gradients": of_gradients,
    "dynamic": of_dynamic,
    "static": of_static,
}


def checks_of(name: str, eager: nn.Module) -> list[str]:
    """Which of CHECKS an architecture has a meaning for."""
    if name in ENCODERS:
        return ["logits", "padded", "gradients"]
    if not eager._can_compile_fullgraph:  # no static cache
        return ["logits", "padded", "gradients", "dynamic"]
    return list(CHECKS)


def main(names: list[str]) -> int:
    import transformers

    transformers.logging.set_verbosity_error()
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, fp32")
    print(f"{'largest difference to eager':20} " + " ".join(f"{c:>10}" for c in CHECKS))
    torch.set_num_threads(1)
    worst, failed = dict.fromkeys(CHECKS, 0.0), 0
    counts = dict.fromkeys(CHECKS, 0)
    for name in names or list(ALL):
        start = time.perf_counter()
        cells, calls = [], 0
        try:
            eager, ours = pair(name)
            wanted = checks_of(name, eager)
        except Exception as error:
            print(f"{name:27} cannot be built: {type(error).__name__}: {error}"[:160])
            failed += 1
            continue
        for check, measure in CHECKS.items():
            if check not in wanted:
                cells.append(f"{'-':>10}")
                continue
            try:
                with recorded_backends() as ran:
                    far = measure(eager, ours, name)
                calls += len(ran)
            except Exception as error:
                cells.append(f"{type(error).__name__:>10}: {str(error)[:90]}")
                failed += 1
                continue
            good = far <= 1e-5 and bool(ran)
            failed += not good
            counts[check] += good
            worst[check] = max(worst[check], far)
            cells.append(f"{far:10.1e}" + ("" if good else "!"))
        took = time.perf_counter() - start
        print(f"{name:27} {' '.join(cells)} {calls:6} calls {took:6.2f} s", flush=True)
    print(f"{'architectures':27} " + " ".join(f"{counts[c]:>10}" for c in CHECKS))
    print(f"{'largest':27} " + " ".join(f"{worst[c]:>10.1e}" for c in CHECKS))
    print(f"{failed} failures")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
