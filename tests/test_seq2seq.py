"""The encoder-decoder against torch.nn.Transformer; padding, maps, files; loss and rates."""

from __future__ import annotations

import dataclasses
import re

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounter

from attnkit.models import (
    Seq2SeqConfig,
    Seq2SeqTransformer,
    cosine,
    inverse_sqrt,
    label_smoothed_cross_entropy,
    layers,
    peak_rate,
)

PAD, BOS, EOS = 0, 1, 2
QUIET = pytest.mark.filterwarnings("ignore:enable_nested_tensor")  # torch's word on its fast path
TINY = Seq2SeqConfig(11, 13, 16, 2, 2, 2, 24, dropout=0.0, max_length=20)


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Tiny models: a second thread has nothing to do but to wait."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def model_of(seed: int = 0, **changes) -> Seq2SeqTransformer:
    torch.manual_seed(seed)
    return Seq2SeqTransformer(dataclasses.replace(TINY, **changes)).eval()


def batch_of(seed: int = 0, batch: int = 3, s: int = 6, t: int = 5):
    """Sources and targets without padding."""
    g = torch.Generator().manual_seed(seed)
    src = torch.randint(3, TINY.src_vocab, (batch, s), generator=g)
    tgt = torch.randint(3, TINY.tgt_vocab, (batch, t), generator=g)
    tgt[:, 0] = BOS
    return src, tgt


def padded(rows: list[torch.Tensor], side: str) -> torch.Tensor:
    width = max(len(row) for row in rows)
    return torch.stack(
        [
            F.pad(
                row, (0, width - len(row)) if side == "right" else (width - len(row), 0), value=PAD
            )
            for row in rows
        ]
    )


@QUIET
def test_the_papers_base_size():
    with torch.device("meta"):
        model = Seq2SeqTransformer(Seq2SeqConfig(1000, 2000))
        torch_model = nn.Transformer(512, 8, 6, 6, 2048)
    body = (model.encoder, model.decoder, model.encoder_norm, model.decoder_norm)
    count = sum(p.numel() for module in body for p in module.parameters())
    assert count == 44_140_544 == sum(p.numel() for p in torch_model.parameters())
    assert sum(p.numel() for p in model.parameters()) == count + 512 * (1000 + 2000 + 2000)


def torch_twin(model: Seq2SeqTransformer) -> nn.Transformer:
    """torch.nn.Transformer with the same weights, in training mode: eval has no gradients."""
    c = model.config
    twin = nn.Transformer(
        c.d_model,
        c.num_heads,
        c.num_encoder_layers,
        c.num_decoder_layers,
        c.d_ff,
        c.dropout,
        c.activation,
        norm_first=c.norm_first,
        batch_first=True,
        dtype=model.encoder_norm.weight.dtype,
    )
    state = {}
    for name, value in model.state_dict().items():
        name = re.sub(r"^(encoder|decoder)\.(\d+)", r"\1.layers.\2", name)
        name = re.sub(r"^(encoder|decoder)_norm", r"\1.norm", name)
        name = name.replace("cross_attn", "multihead_attn").replace("feed_forward.", "")
        if name.startswith(("encoder.", "decoder.")):
            state[name] = value
    twin.load_state_dict(state, strict=True)
    return twin


@QUIET
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_equals_torch_with_the_same_weights_and_gradients(norm_first, activation, backend, ran):
    model = model_of(norm_first=norm_first, activation=activation, positions="learned").double()
    for parameter in model.parameters():  # biases too
        nn.init.normal_(parameter, std=0.3)
    twin = torch_twin(model)
    src, tgt = batch_of()
    src[0, 4:], tgt[1, 3:] = PAD, PAD

    def embed(table, positions, tokens):
        return table(tokens) * TINY.d_model**0.5 + positions.weight[: tokens.shape[1]]

    out = twin(
        embed(model.src_embedding, model.src_positions, src),
        embed(model.tgt_embedding, model.tgt_positions, tgt),
        tgt_mask=torch.ones(5, 5, dtype=torch.bool).triu(1),
        src_key_padding_mask=src == PAD,
        tgt_key_padding_mask=tgt == PAD,
        memory_key_padding_mask=src == PAD,
    )
    want, got = model.output(out), model(src, tgt)
    real = tgt != PAD
    torch.testing.assert_close(got[real], want[real], rtol=1e-9, atol=1e-9)
    assert ran == [f"{backend}.forward"] * (2 + 2 * 2)

    weights = [model.src_embedding.weight, model.tgt_embedding.weight, model.tgt_positions.weight]
    got_grads = torch.autograd.grad(got[real].sin().sum(), weights)
    want_grads = torch.autograd.grad(want[real].sin().sum(), weights)
    for g, w in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_r71_padding_on_either_side_changes_no_logit(side, positions):
    model = model_of(positions=positions)
    pairs = [batch_of(i, 1, s, t) for i, (s, t) in enumerate([(6, 5), (2, 1), (4, 3)])]
    src = padded([s[0] for s, _ in pairs], side)
    tgt = padded([t[0] for _, t in pairs], side)
    got = model(src, tgt)
    assert got.isfinite().all()
    for row, (one_src, one_tgt) in enumerate(pairs):
        want = model(one_src, one_tgt)[0]
        torch.testing.assert_close(got[row][tgt[row] != PAD], want, rtol=1e-5, atol=1e-5)


def test_padding_adds_nothing_to_the_gradient():
    src, tgt = batch_of()
    grads = []
    for extra in (0, 3):
        model = model_of().double()
        logits = model(F.pad(src, (extra, 0), value=PAD), F.pad(tgt, (0, extra), value=PAD))
        targets = F.pad(tgt.roll(-1, 1), (0, extra), value=PAD)
        label_smoothed_cross_entropy(logits, targets).backward()
        grads.append([p.grad for p in model.parameters()])
    for name, one, other in zip(dict(model.named_parameters()), *grads, strict=True):
        assert one.any(), name
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9, msg=name)


def test_a_source_of_padding_alone_gives_numbers(backend):
    model = model_of()
    src, tgt = batch_of()
    src[1] = PAD
    out = model(src, tgt)
    out.sum().backward()
    assert out.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    torch.testing.assert_close(out[[0, 2]], model(src[[0, 2]], tgt[[0, 2]]), rtol=1e-5, atol=1e-5)


def test_later_tokens_change_nothing():
    model = model_of()
    src, tgt = batch_of()
    changed = tgt.clone()
    changed[:, 3:] = 7
    assert not torch.equal(changed, tgt)
    got, want = model(src, changed), model(src, tgt)
    torch.testing.assert_close(got[:, :3], want[:, :3], rtol=1e-6, atol=1e-6)
    assert not torch.allclose(got[:, 3:], want[:, 3:])


def test_masks_stay_a_band_and_a_keep_vector(monkeypatch):
    seen = []
    real = layers.attention

    def spy(query, key, value, *, mask=None, **options):
        seen.append(mask)
        return real(query, key, value, mask=mask, **options)

    monkeypatch.setattr(layers, "attention", spy)
    src, tgt = batch_of()
    model_of()(src, tgt)
    assert len(seen) == 2 + 2 * 2
    for mask in seen:
        assert mask.dense is None
        assert mask.keep.shape in (src.shape, tgt.shape)


@pytest.mark.parametrize("d_model", [1, 3, 127])
@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_r84_odd_widths(d_model, positions):
    model = model_of(d_model=d_model, num_heads=1, positions=positions)
    src, tgt = batch_of()
    assert model(src, tgt).isfinite().all()
    assert model.src_positions.weight.shape == (TINY.max_length, d_model)


def test_embeddings_tied_and_shared():
    src, tgt = batch_of()
    model = model_of(src_vocab=13, tie_embeddings=True, share_embeddings=True)
    assert model.output is None
    assert model.tgt_embedding is None
    body = sum(p.numel() for p in model_of().parameters()) - 16 * (11 + 13 + 13)
    assert sum(p.numel() for p in model.parameters()) == body + 16 * 13
    logits = model(src, tgt)
    with torch.no_grad():
        model.src_embedding.weight[5] = 0.0  # output row, source and target embedding at once
    assert not model(src, tgt)[..., 5].any()
    assert logits[..., 5].any()


def test_swiglu_and_default_inner_size():
    model = model_of(activation="swiglu", d_ff=None)
    src, tgt = batch_of()
    assert model(src, tgt).isfinite().all()
    assert model.encoder[0].feed_forward.linear2.in_features == 4 * 16


def test_scaled_embeddings_have_unit_variance():
    model = model_of(d_model=64, src_vocab=500)
    x = model.src_embedding.weight * 64**0.5
    assert abs(x.std().item() - 1.0) < 0.05


@pytest.mark.parametrize("kind", ["cross", "self", "encoder"])
@pytest.mark.parametrize("layer", [0, -1])
def test_attention_maps_are_those_of_the_layer(kind, layer):
    model = model_of(dropout=0.3).train()
    model.encoder[0].eval()
    src, tgt = batch_of()
    src[0, 4:], tgt[2, 3:] = PAD, PAD
    maps = model.attention_maps(src, tgt, layer, kind)
    assert model.training
    assert not model.encoder[0].training
    assert not model.encoder[0].self_attn._forward_pre_hooks

    queries, keys = (src, src) if kind == "encoder" else (tgt, src if kind == "cross" else tgt)
    assert maps.shape == (3, 2, queries.shape[1], keys.shape[1])
    torch.testing.assert_close(maps.sum(-1), torch.ones(maps.shape[:3]))
    assert not maps.masked_select((keys == PAD)[:, None, None]).any()

    # the same from torch's module on what went in; the layer's output shows that it used them
    model.eval()
    block = (model.encoder if kind == "encoder" else model.decoder)[layer]
    attention = block.cross_attn if kind == "cross" else block.self_attn
    twin = nn.MultiheadAttention(16, 2, batch_first=True)
    twin.load_state_dict(attention.state_dict())
    caught = {}
    attention.register_forward_hook(lambda m, a, out: caught.update(x=a[0], out=out))
    model(src, tgt)
    source = model.encode(src) if kind == "cross" else caught["x"]
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1) if kind == "self" else None
    want_out, want = twin(
        caught["x"], source, source, key_padding_mask=keys == PAD, attn_mask=causal,
        average_attn_weights=False,
    )  # fmt: skip
    torch.testing.assert_close(maps, want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(caught["out"], want_out, rtol=1e-5, atol=1e-5)


def test_attention_maps_refuse_what_is_not_there():
    model = model_of()
    with pytest.raises(ValueError, match="layer is 2, expected -2 to 1"):
        model.attention_maps(*batch_of(), layer=2)
    with pytest.raises(ValueError, match="kind is 'both'"):
        model.attention_maps(*batch_of(), kind="both")


def test_compiles_to_one_graph_in_training():
    torch._dynamo.reset()
    model = model_of(num_encoder_layers=1, num_decoder_layers=1)
    src, tgt = batch_of()
    src[0, 4:] = PAD
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    compiled(src, tgt).sin().sum().backward()
    assert counter.frame_count == 1
    got = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(src, tgt).sin().sum().backward()
    for g, p in zip(got, model.parameters(), strict=True):
        torch.testing.assert_close(g, p.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"src_vocab": 13, "tie_embeddings": True, "share_embeddings": True},
        {"positions": "learned"},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_and_loaded(tmp_path, changes, dtype):
    model = model_of(**changes).to(dtype)
    model.save_pretrained(tmp_path / "new" / "folder")
    loaded = Seq2SeqTransformer.from_pretrained(tmp_path / "new" / "folder")
    assert loaded.config == model.config
    assert not loaded.training
    src, tgt = batch_of()
    out = loaded(src, tgt)
    assert out.dtype == dtype
    assert torch.equal(out, model(src, tgt))
    assert sorted(p.name for p in (tmp_path / "new" / "folder").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]


def test_a_save_that_fails_leaves_the_old_files(tmp_path, monkeypatch):
    model = model_of()
    model.save_pretrained(tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with torch.no_grad():
        model.output.weight.zero_()

    def half_a_file(state, path):
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("attnkit.models.pretrained.save_file", half_a_file)
    with pytest.raises(OSError, match="disk full"):
        model.save_pretrained(tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    assert safetensors.torch.load_file(tmp_path / "model.safetensors")["output.weight"].any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d_model": 15}, "d_model is 15, expected a multiple of num_heads, 2"),
        ({"num_heads": 0}, "num_heads is 0, expected 1 or more"),
        ({"num_decoder_layers": 0}, "num_decoder_layers is 0"),
        ({"dropout": 1.5}, "dropout is 1.5, expected 0 to 1"),
        ({"positions": "rotary"}, "positions is 'rotary', expected one of"),
        ({"share_embeddings": True}, "one vocabulary: src_vocab is 11, tgt_vocab is 13"),
        ({"bos_id": 0}, "'bos_id': 0, .* are not 3 different ids"),
        ({"eos_id": 13}, "eos_id is 13, expected 0 to 12"),
        ({"pad_id": 11}, "pad_id is 11, expected less than src_vocab, 11"),
    ],
)
def test_wrong_configs_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **changes)


def test_wrong_tokens_are_named():
    model = model_of()
    src, tgt = batch_of()
    for bad_src, bad_tgt, message in [
        (src.float(), tgt, r"src is torch.float32 \(3, 6\), expected int64 \[batch, tokens\]"),
        (src, tgt[0], r"tgt has 5 rows, src has 3"),
        (src[0], tgt[0, :6], r"tgt has 5 rows, src has 6"),
        (src, tgt[:2], "tgt has 2 rows, src has 3"),
        (src.repeat(1, 4), tgt, "src has 24 tokens, expected at most 20"),
        (src, tgt.repeat(1, 5), "tgt has 25 tokens, expected at most 20"),
    ]:
        with pytest.raises(ValueError, match=message):
            model(bad_src, bad_tgt)


@pytest.mark.parametrize("pads", [0, 1, 4, 12])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_r87_label_smoothing_ignores_padding(pads, smoothing):
    torch.manual_seed(0)
    logits = torch.randn(3, 4, 7, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(1, 7, (3, 4))
    targets.view(-1)[torch.randperm(12)[:pads]] = PAD
    loss = label_smoothed_cross_entropy(logits, targets, smoothing, PAD)
    loss.backward()

    real = targets != PAD
    log_p = torch.log_softmax(logits.detach()[real], -1)
    wanted = F.one_hot(targets[real], 7) * (1 - smoothing) + smoothing / 7
    want = -(wanted * log_p).sum() / max(int(real.sum()), 1)
    torch.testing.assert_close(loss.detach(), want)
    assert not logits.grad[~real].any()
    torch.testing.assert_close(logits.grad[real], (log_p.exp() - wanted) / max(len(log_p), 1))
    if pads < 12 and not smoothing:
        same = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PAD)
        torch.testing.assert_close(loss, same)


def test_r87_loss_of_half_precision_is_summed_in_float32():
    logits = torch.zeros(1, 5000, 4, dtype=torch.bfloat16)
    loss = label_smoothed_cross_entropy(logits, torch.ones(1, 5000, dtype=torch.int64))
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, torch.tensor(4.0).log())


def test_loss_refuses_targets_of_another_shape():
    with pytest.raises(ValueError, match=r"targets is \(2, 4\), expected \(2, 3\)"):
        label_smoothed_cross_entropy(torch.zeros(2, 3, 5), torch.zeros(2, 4, dtype=torch.int64))


def rates(make, steps: int, peak: float) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=peak)
    schedule = make(optimizer)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def test_learning_rates():
    peak = peak_rate(512, 40)
    paper = [512**-0.5 * min(step**-0.5, step * 40**-1.5) for step in range(1, 201)]
    assert rates(lambda o: inverse_sqrt(o, 40), 200, peak) == pytest.approx(paper)
    found = rates(lambda o: cosine(o, 10, 50, floor=0.1), 60, 2.0)
    assert found[0] == pytest.approx(0.2)
    assert found[9] == max(found) == pytest.approx(2.0)
    assert found[29] == pytest.approx(2.0 * 0.55)
    assert found[49:] == pytest.approx([0.2] * 11)
    with pytest.raises(ValueError, match="total is 10, expected more than warmup, 10"):
        rates(lambda o: cosine(o, 10, 10), 1, 1.0)
    with pytest.raises(ValueError, match="warmup is 0"):
        rates(lambda o: inverse_sqrt(o, 0), 1, 1.0)


OTHERS = {
    "rope": {"positions": "rope", "num_heads": 4, "num_kv_heads": 2, "norm": "rms"},
    "alibi": {"positions": "alibi", "norm_first": True, "bias": False},
    "relative": {"positions": "relative", "activation": "swiglu"},
    "window": {"positions": "rope", "window": 3, "num_kv_heads": 1},
    "alibi, window": {"positions": "alibi", "window": (None, 3)},
}


@pytest.mark.parametrize("changes", OTHERS.values(), ids=OTHERS.keys())
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_other_positions_heads_and_norms(changes, side):
    """Padding changes no logit, and a cached run is a run over everything."""
    model = model_of(**changes)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    pairs = [batch_of(i, 1, s, 7) for i, s in enumerate([6, 2, 4])]
    src = padded([s[0] for s, _ in pairs], side)
    tgt = torch.cat([t for _, t in pairs])
    want = torch.cat([model(*pair) for pair in pairs])
    torch.testing.assert_close(model(src, tgt), want, rtol=1e-4, atol=1e-4)
    for chunks in ([1] * 7, [2, 1, 4]):
        state = model.start(src, capacity=7)
        got = [model.decode(part, state) for part in tgt.split(chunks, dim=1)]
        torch.testing.assert_close(torch.cat(got, 1), want, rtol=1e-4, atol=1e-4)
    cached, plain = (model.generate(src, 6, num_beams=2, use_cache=c) for c in (True, False))
    assert torch.equal(cached.tokens, plain.tokens)


def test_a_windowed_encoder_looks_both_ways():
    model = model_of(window=2, num_encoder_layers=1)
    src, _ = batch_of(batch=1)
    changed = src.clone()
    changed[0, 3] = 3 + (src[0, 3] - 3 + 1) % 8
    moved = (model.encode(changed) != model.encode(src)).any(-1)[0]
    assert moved.tolist() == [False, False, True, True, True, False]


@pytest.mark.parametrize("changes", OTHERS.values(), ids=OTHERS.keys())
def test_attention_maps_of_other_positions(changes):
    """The weights of the layer, since with its values they give its output."""
    model, pair, caught = model_of(**changes), batch_of(), {}
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    attention = model.decoder[1].self_attn
    attention.register_forward_hook(lambda m, a, out: caught.update(x=a[0], out=out))
    maps = model.attention_maps(*pair, kind="self")
    values = attention.keys_values(caught["x"]).value
    out = maps @ values.repeat_interleave(maps.shape[1] // values.shape[1], 1)
    want = attention.out_proj(out.transpose(1, 2).flatten(2))
    torch.testing.assert_close(caught["out"], want, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_session_translates_as_generate_does():
    model = model_of()
    src, _ = batch_of()
    want = model.generate(src, 5).tokens
    for use_cache in (True, False):
        session, fed = model.session(src, capacity=5, use_cache=use_cache), torch.full((3, 1), BOS)
        for step in range(want.shape[1]):
            logits = session.extend(fed)
            logits[:, PAD] = -torch.inf
            fed = logits.argmax(-1, keepdim=True)
            alive = want[:, step] != PAD
            assert torch.equal(fed[alive, 0], want[alive, step])
    assert torch.equal(torch.stack(list(model.stream(src, 5)), 1), want)
    with pytest.raises(ValueError, match="capacity is 21, expected 1 to 20"):
        model.session(src, capacity=21)


@pytest.mark.parametrize(
    ("src", "tgt", "message"),
    [
        ([[3, 11]], [[1, 3]], "src holds ids from 3 to 11, expected 0 to 10: .* src_vocab is 11"),
        ([[3, 4]], [[1, -1]], "tgt holds ids from -1 to 1, expected 0 to 12: .* tgt_vocab is 13"),
    ],
)
def test_ids_beyond_the_vocabulary(src, tgt, message):
    with pytest.raises(IndexError, match=message):
        model_of()(torch.tensor(src), torch.tensor(tgt))
