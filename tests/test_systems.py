"""A walk through a Transformer, from the formula to models that have learnt something.

Each part is held against plain PyTorch or numbers known from elsewhere.  What a part does at its
edges is in the file of its own: test_masks.py, test_cache.py, test_seq2seq.py and so on.
"""

import math
import mmap

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import attnkit
from attnkit import masks
from attnkit.benchmark import peak_growth
from attnkit.cache import KVCache
from attnkit.models import (
    Classifier,
    Seq2SeqConfig,
    Seq2SeqTransformer,
    TransformerConfig,
    inverse_sqrt,
    label_smoothed_cross_entropy,
    peak_rate,
)
from attnkit.recording import record

MIB = 1 << 20


@pytest.fixture
def kernels():
    """The CPU kernels, forced."""
    if "cpu" not in attnkit.available_backends():
        pytest.skip("the CPU kernels are not there")
    with attnkit.use_backend("cpu"):
        yield


def grown(call) -> int:
    """Bytes by which the process grew at the peak of call."""
    growth, method = peak_growth(call)
    if method != "hwm":
        pytest.skip("this system does not tell the peak of a single call")
    return growth


# ------------------------------------------------------------- attention


@pytest.mark.parametrize(
    ("scale", "expected"), [(1.0, [6.4661, 7.7284, 7.0]), (None, [6.5933, 7.5105, 7.0])]
)
def test_scaled_dot_product_attention_of_the_worked_example(backend, scale, expected):
    q = torch.tensor([[1.0, 0], [0, 1], [1, 1]])[None, None]
    k = torch.tensor([[1.0, 0], [1, 0], [0, 1]])[None, None]
    v = torch.tensor([[5.0], [7], [9]])[None, None]  # narrower than the keys
    out = attnkit.scaled_dot_product_attention(q, k, v, scale=scale)
    torch.testing.assert_close(out.flatten(), torch.tensor(expected), atol=5e-5, rtol=0)
    weights = attnkit.attention_weights(q, k, scale=scale)
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 1, 3))
    torch.testing.assert_close(weights @ v, out)


def test_softmax_of_huge_scores_and_of_no_keys(backend):
    """exp of these scores overflows in every dtype, and the last row sees nothing."""
    q, k, v = (torch.randn(1, 2, 5, 8).half().requires_grad_() for _ in range(3))
    visible = torch.ones(5, 5, dtype=torch.bool).tril()
    visible[4] = False
    out = attnkit.attention(q, k, v, mask=visible, scale=1e3)
    scores = (q.double() @ k.double().mT * 1e3).masked_fill(~visible, -math.inf)
    expected = scores[:, :, :4].softmax(-1) @ v.double()
    torch.testing.assert_close(out[:, :, :4].double(), expected, atol=2e-3, rtol=2e-3)
    assert not out[:, :, 4].any()
    assert not attnkit.attention_weights(q, k, mask=visible, scale=1e3)[..., ~visible].any()
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert not gradients[0][:, :, 4].any()


def test_causality_padding_and_heads_in_one_mask(backend):
    q, k, v = (torch.randn(2, 4, 9, 8) for _ in range(3))
    keep = torch.arange(9) < torch.tensor([[9], [4]])
    per_head = torch.randn(1, 4, 1, 9) > -0.5
    mask = masks.causal() & masks.key_padding(keep) & masks.from_dense(per_head)
    visible = torch.ones(9, 9).tril().bool() & keep[:, None, None] & per_head
    scores = (q @ k.mT / 8**0.5).masked_fill(~visible, -math.inf)
    expected = scores.softmax(-1).nan_to_num() @ v
    torch.testing.assert_close(attnkit.attention(q, k, v, mask=mask), expected)


def test_true_shows_in_functions_and_hides_in_modules():
    x, lower = torch.randn(1, 6, 8), torch.ones(6, 6).tril().bool()
    ours, theirs = attnkit.nn.MultiheadAttention(8, 1, batch_first=True), None
    theirs = nn.MultiheadAttention(8, 1, batch_first=True)
    theirs.load_state_dict(ours.state_dict())
    found = ours(x, x, x, attn_mask=~lower)[0]
    torch.testing.assert_close(found, theirs(x, x, x, attn_mask=~lower)[0])
    q, k, v = F.linear(x, ours.in_proj_weight, ours.in_proj_bias)[:, None].chunk(3, -1)
    out = attnkit.scaled_dot_product_attention(q, k, v, attn_mask=lower)[:, 0]
    torch.testing.assert_close(ours.out_proj(out), found)


# ------------------------------------------------------------- what is not computed


MASKS = {
    "full": lambda n: None,
    "causal and padded": lambda n: masks.causal() & masks.padding(torch.tensor([n - 100])),
    "window": lambda n: masks.sliding_window(128, 128),
}


@pytest.mark.parametrize("mask", MASKS)
def test_memory_of_a_training_step_is_linear_in_the_length(kernels, mask):
    """The scores alone would take 64 MiB; what is left is output, gradients and a few tiles."""
    n = 4096
    q, k, v = (torch.randn(1, 1, n, 16, requires_grad=True) for _ in range(3))

    def step():
        attnkit.attention(q, k, v, mask=MASKS[mask](n)).sum().backward()

    assert grown(step) < 8 * MIB


def far_keys(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v [1, 1, n, 64] of zeros, in pages that take memory once they are looked at."""
    return tuple(
        torch.frombuffer(mmap.mmap(-1, n * 64 * 4), dtype=torch.float32).view(1, 1, n, 64)
        for _ in range(2)
    )


@pytest.mark.parametrize("window", [100, None])
@pytest.mark.parametrize("cached", [False, True])
def test_keys_outside_of_a_window_are_not_even_read(kernels, window, cached):
    n = 64 * 1024
    k, v = far_keys(n)  # 16 MiB each
    q = torch.randn(1, 1, 1 if cached else 40, 64)
    if cached:
        cache = KVCache(k, v, torch.tensor([n], dtype=torch.int32))
        read = grown(lambda: cache.attend(q, left=window))
    else:
        mask = None if window is None else masks.sliding_window(window, 0, bottom_right=True)
        read = grown(lambda: attnkit.attention(q, k, v, mask=mask))
    assert read > 32 * MIB if window is None else read < 8 * MIB


def test_a_cached_step_neither_recomputes_nor_copies(kernels):
    n = 32 * 1024
    k, v = torch.randn(2, 1, 2, n, 64)  # 16 MiB each
    cache = KVCache.allocate(1, 2, n, 64)
    cache.append(k[:, :, :-1], v[:, :, :-1])
    places = cache.k.data_ptr(), cache.v.data_ptr()
    q, outs = torch.randn(1, 2, 1, 64), []
    growth = grown(lambda: outs.append(cache.extend(q, k[:, :, -1:], v[:, :, -1:])))
    assert growth < 4 * MIB
    assert places == (cache.k.data_ptr(), cache.v.data_ptr())
    torch.testing.assert_close(outs[0], F.scaled_dot_product_attention(q, k, v))


# ------------------------------------------------------------- whole models


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
def test_parameters_of_the_papers_base_model():
    with torch.device("meta"):
        ours, theirs = (m.Transformer(512, 8, 6, 6, 2048) for m in (attnkit.nn, nn))
        model = Seq2SeqTransformer(Seq2SeqConfig(1000, 1000))
    for module in (ours, theirs):
        assert sum(p.numel() for p in module.parameters()) == 44_140_544
    tables = sum(
        p.numel() for n, p in model.named_parameters() if "embedding" in n or "output" in n
    )
    assert sum(p.numel() for p in model.parameters()) - tables == 44_140_544


def test_heat_maps_of_an_untouched_torch_transformer(tmp_path):
    pytest.importorskip("matplotlib")
    from attnkit import viz

    model = nn.Transformer(16, 2, 2, 2, 32, batch_first=True)
    src, tgt = torch.randn(1, 5, 16), torch.randn(1, 3, 16)
    with record(model.eval()) as layers:
        model(src, tgt, tgt_mask=torch.ones(3, 3).triu(1).bool())
    found = {layer.name: layer for layer in layers}
    assert {name: (layer.kind, layer.shape[2:]) for name, layer in found.items()} == {
        "encoder.layers.0.self_attn": ("self", (5, 5)),
        "encoder.layers.1.self_attn": ("self", (5, 5)),
        "decoder.layers.0.self_attn": ("self", (3, 3)),
        "decoder.layers.0.multihead_attn": ("cross", (3, 5)),
        "decoder.layers.1.self_attn": ("self", (3, 3)),
        "decoder.layers.1.multihead_attn": ("cross", (3, 5)),
    }
    later = torch.ones(3, 3).triu(1).bool()
    assert not found["decoder.layers.1.self_attn"].weights()[..., later].any()

    first = model.encoder.layers[0].self_attn
    expected = first(src, src, src, average_attn_weights=False)[1]
    torch.testing.assert_close(found["encoder.layers.0.self_attn"].weights(), expected)
    maps = [
        viz.HeatMap(f"head {head}", weights, list("abc"), list("uvwxy"))
        for head, weights in enumerate(found["decoder.layers.1.multihead_attn"].weights()[0])
    ]
    path = viz.heat_maps(maps, tmp_path / "heads.png")
    assert path.read_bytes().startswith(b"\x89PNG")


# ------------------------------------------------------------- training


def test_the_papers_learning_rate():
    """Up to 7.0e-4 at step 4000, half of it at step 16000."""
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(1))], lr=peak_rate(512, 4000))
    rate = inverse_sqrt(optimizer, 4000).lr_lambdas[0]
    found = [optimizer.defaults["lr"] * rate(step - 1) for step in (1, 4000, 16000)]
    expected = [512**-0.5 * min(s**-0.5, s * 4000**-1.5) for s in (1, 4000, 16000)]
    assert found == pytest.approx(expected)
    assert found[1] == max(found) == pytest.approx(6.9877e-4, rel=1e-4)


def trained(model: nn.Module, steps: int, peak: float, loss_of) -> None:
    """Adam with warm-up and cosine decay, gradients clipped at norm 1."""
    optimizer = torch.optim.Adam(model.parameters(), lr=peak, betas=(0.9, 0.98))
    schedule = attnkit.models.cosine(optimizer, steps // 10, steps)
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()


def both_tokens(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """8 tokens out of 19, and whether 3 and 7 are both among them: half of the rows."""
    tokens = torch.randint(19, (12 * count, 8), generator=generator)
    both = (tokens == 3).any(1) & (tokens == 7).any(1)
    chosen = torch.cat([rows.nonzero()[: count // 2, 0] for rows in (both, ~both)])
    return tokens[chosen], both[chosen].long()


def test_a_classifier_learns_whether_two_tokens_both_occur():
    draw = torch.Generator().manual_seed(1)
    config = TransformerConfig(
        19, 32, 4, 2, 64, num_classes=2, dropout=0.0, pad_id=None, bos_id=None, eos_id=None
    )
    model = Classifier(config)

    def loss_of(model):
        tokens, labels = both_tokens(64, draw)
        return F.cross_entropy(model(tokens), labels)

    trained(model, 220, 3e-3, loss_of)
    tokens, labels = both_tokens(2000, draw)
    assert len(labels) == 2000
    with torch.no_grad():
        assert (model(tokens).argmax(-1) == labels).double().mean() >= 0.99


def test_an_encoder_decoder_learns_to_write_backwards():
    """Sources of 3 to 6 letters, padded; teacher forcing, then beams until eos."""
    draw = torch.Generator().manual_seed(1)

    def batch(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        letters = torch.randint(3, 13, (count, 6), generator=draw)
        lengths = torch.randint(3, 7, (count, 1), generator=draw)
        places = torch.arange(6)
        src = letters.masked_fill(places >= lengths, 0)
        backwards = src.gather(1, (lengths - 1 - places).clamp(min=0)).masked_fill(src == 0, 0)
        return src, F.pad(backwards, (0, 1)).scatter(1, lengths, 2)  # eos is 2

    def loss_of(model):
        src, tgt = batch(48)
        logits = model(src, F.pad(tgt[:, :-1], (1, 0), value=1))  # bos is 1
        return label_smoothed_cross_entropy(logits, tgt, 0.1)

    config = Seq2SeqConfig(13, 13, 48, 4, 1, 1, 96, dropout=0.0, norm_first=True, max_length=8)
    model = Seq2SeqTransformer(config)
    trained(model, 340, 5e-3, loss_of)
    src, tgt = batch(200)
    found = model.generate(src, 7, num_beams=3).tokens
    exact = (F.pad(found, (0, 7 - found.shape[1])) == tgt).all(1).double().mean()
    assert exact >= 0.95
