"""CausalLM: one answer for a sequence, however it is padded, cached, batched or compiled."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter

from attnkit.cache import KVCache, RingKVCache
from attnkit.models import CausalLM, TransformerConfig

PAD, BOS, EOS = 0, 1, 2
TINY = TransformerConfig(13, 16, 4, 2, 24, dropout=0.0, max_length=24, norm_first=True)
KINDS = {
    "sinusoidal": {},
    "learned": {"positions": "learned"},
    "rope": {"positions": "rope"},
    "rope, parts": {"positions": "rope", "rope_dim": 2, "rope_interleaved": True},
    "alibi": {"positions": "alibi"},
    "relative": {"positions": "relative"},
    "none": {"positions": "none"},
    "grouped": {"positions": "rope", "num_kv_heads": 2, "norm": "rms", "bias": False},
    "multi-query": {"positions": "alibi", "num_kv_heads": 1, "activation": "swiglu"},
    "window": {"positions": "rope", "window": 3},
    "windows": {"positions": "learned", "window": (4, None), "num_kv_heads": 2},
    "alibi, window": {"positions": "alibi", "window": 3},
    "relative, window": {"positions": "relative", "window": (None, 3), "norm_first": False},
}
every_kind = pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS.keys())


def model_of(changes=None, **more) -> CausalLM:
    torch.manual_seed(0)
    model = CausalLM(dataclasses.replace(TINY, **{**(changes or {}), **more})).eval()
    for parameter in model.parameters():  # biases and the table of distances, too
        torch.nn.init.normal_(parameter, std=0.4)
    return model


def rows_of(*lengths: int, seed: int = 1) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(3, TINY.vocab_size, (n,), generator=g) for n in lengths]


def padded(rows, side: str, width: int | None = None) -> torch.Tensor:
    width = width or max(map(len, rows))
    return torch.stack(
        [
            F.pad(r, (0, width - len(r)) if side == "right" else (width - len(r), 0), value=PAD)
            for r in rows
        ]
    )


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@every_kind
@torch.no_grad()
def test_padding_on_either_side_and_the_batch_change_nothing(changes):
    model, rows = model_of(changes), rows_of(7, 2, 5)
    alone = [model(row[None])[0] for row in rows]
    for side in ("left", "right"):
        tokens = padded(rows, side, 9)
        got = model(tokens)
        assert got.isfinite().all()
        for b, want in enumerate(alone):
            close(got[b][tokens[b] != PAD], want)


@every_kind
@pytest.mark.parametrize("chunks", [[1] * 10, [1, 5, 1, 3], [10]], ids=str)
@torch.no_grad()
def test_cached_logits_are_those_of_a_run_over_everything(changes, chunks, backend, ran):
    model = model_of(changes)
    tokens = torch.stack(rows_of(10, 10))
    want = model(tokens)
    caches = model.start(2, 12)
    got = [model.decode(part, caches) for part in tokens.split(chunks, dim=1)]
    close(torch.cat(got, 1), want)
    if changes.get("positions") != "relative" and 1 in chunks:
        assert {f"{backend}.decode", f"{backend}.extend"} & set(ran)


@every_kind
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_a_session_gives_each_row_what_it_gets_alone(changes, side):
    """Cached and not, at every step; one row's prompt ends where its window fills."""
    model = model_of(changes)
    rows, more = rows_of(2, 6, 3), torch.stack(rows_of(5, 5, 5, seed=2))
    cached, plain = model.session(capacity=12), model.session(use_cache=False)
    fed = padded(rows, side, 7)
    for step in range(6):
        want = torch.stack([model(row[None])[0, -1] for row in rows])
        close(cached.extend(fed), want)
        close(plain.extend(fed), want)
        if step == 2:
            swap = torch.tensor([2, 0, 0, 1])  # one row more
            rows, more = [rows[r] for r in swap.tolist()], more[swap]
            cached.reorder(swap)
            plain.reorder(swap)
        if step < 5:
            fed = more[:, step : step + 1]
            rows = [torch.cat((row, token)) for row, token in zip(rows, fed, strict=True)]


def test_windows_have_rings_unless_a_bias_needs_the_order():
    def kinds(**changes):
        return [(type(c), c.capacity) for c in model_of(**changes).start(2, 8)]

    assert kinds(window=(3, None)) == [(RingKVCache, 3), (KVCache, 8)]
    assert kinds(window=(8, 9)) == [(KVCache, 8), (KVCache, 8)]
    for positions in ("alibi", "relative"):
        assert kinds(window=3, positions=positions) == [(KVCache, 8)] * 2
    cache = model_of(num_kv_heads=2, positions="rope").start(3, 8)[0]
    assert cache.k.shape == (3, 2, 8, 4)


@every_kind
def test_trains_on_one_path_with_a_gradient_for_every_parameter(changes):
    model = model_of(changes).double().train()
    rows = rows_of(6, 4)
    grads = []
    for side, width in (("right", 6), ("left", 9)):
        tokens = padded(rows, side, width)
        logits = model(tokens)
        real = tokens != PAD
        loss = F.cross_entropy(logits[real], tokens[real].roll(-1))
        grads.append(torch.autograd.grad(loss, list(model.parameters())))
    for (name, parameter), right, left in zip(model.named_parameters(), *grads, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-7, atol=1e-9, msg=name)
        assert right.any() or name == "positions.weight", name
        assert parameter.requires_grad


def naive(model: CausalLM, tokens: torch.Tensor) -> torch.Tensor:
    """The same model in a few lines of plain PyTorch, for one row of tokens [T] without padding."""
    c, length = model.config, tokens.shape[0]
    x = model.embedding(tokens) * c.d_model**0.5
    if c.positions in ("sinusoidal", "learned"):
        x = x + model.positions.weight[:length]
    i = torch.arange(length)
    for n, block in enumerate(model.layers):
        y = block.norm1(x)
        kv = c.num_kv_heads or c.num_heads
        projected = F.linear(y, block.self_attn.in_proj_weight, block.self_attn.in_proj_bias)
        q, k, v = projected.split([c.d_model, kv * c.head_dim, kv * c.head_dim], dim=-1)
        q, k, v = (t.unflatten(-1, (-1, c.head_dim)).transpose(0, 1) for t in (q, k, v))
        if c.positions == "rope":
            q, k = model.positions(q[None])[0], model.positions(k[None])[0]
        k, v = (t.repeat_interleave(c.num_heads // kv, 0) for t in (k, v))
        scores = q @ k.mT / c.head_dim**0.5
        if c.positions == "alibi":
            slopes = 2.0 ** (-8 * torch.arange(1, c.num_heads + 1) / c.num_heads)
            scores = scores - slopes[:, None, None] * (i[:, None] - i)
        if c.positions == "relative":
            assert not model.positions.bidirectional
            scores = scores + model.positions(i, i)[0]
        window = c.windows(c.num_layers)[n] or length
        hidden = (i > i[:, None]) | (i <= i[:, None] - window)
        out = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
        x = x + block.self_attn.out_proj(out.transpose(0, 1).flatten(1))
        x = x + block.feed_forward(block.norm2(x))
    return F.linear(model.norm(x), (model.output or model.embedding).weight)


@every_kind
def test_is_what_its_configuration_says(changes):
    """Logits and gradients against a naive model; the relative bias's through autograd alone."""
    model = model_of(changes, norm_first=True, tie_embeddings="grouped" in str(changes)).double()
    (row,) = rows_of(9)
    got, want = model(row[None])[0], naive(model, row)
    torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-8)
    parameters = list(model.parameters())
    for g, w in zip(
        torch.autograd.grad(got.sin().sum(), parameters),
        torch.autograd.grad(want.sin().sum(), parameters),
        strict=True,
    ):
        torch.testing.assert_close(g, w, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    "changes",
    [{}, {"positions": "rope", "window": (3, None), "num_kv_heads": 2}, {"positions": "relative"}],
    ids=str,
)
@torch.no_grad()
def test_a_decode_step_compiles_to_one_graph(changes):
    torch._dynamo.reset()
    model, counter = model_of(changes), CompileCounter()
    step = torch.compile(model.decode, backend=counter, fullgraph=True)
    caches, plain = model.start(2, 12), model.start(2, 12)
    tokens = torch.stack(rows_of(3, 3))
    for c in (caches, plain):
        model.decode(tokens, c)
    tokens = tokens[:, -1:].clone()
    for _ in range(5):
        logits = step(tokens, caches)
        close(logits, model.decode(tokens, plain))
        tokens = logits[:, -1].argmax(-1, keepdim=True)
    assert counter.frame_count == 1


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"sample": True, "seed": 7}], ids=str)
@pytest.mark.parametrize("changes", [{}, {"positions": "rope", "window": 3}], ids=str)
def test_generates_the_same_with_and_without_caches_alone_and_in_a_batch(changes, options):
    model = model_of(changes).train()
    rows = rows_of(4, 1, 6)
    prompt = padded(rows, "left")
    cached = model.generate(prompt, 8, **options)
    assert model.training
    plain = model.generate(padded(rows, "right"), 8, use_cache=False, **options)
    assert torch.equal(cached.tokens, plain.tokens)
    torch.testing.assert_close(cached.scores, plain.scores, rtol=1e-4, atol=1e-4)
    for b, row in enumerate(rows):
        given = {**options, "seed": 7 + b} if "seed" in options else options
        one = model.generate(row[None], 8, **given)
        n = int(cached.lengths[b])
        assert cached.tokens[b, :n].tolist() == one.tokens[0, :n].tolist()
    if "num_beams" not in options:
        streamed = torch.stack(list(model.stream(prompt, 8, **options)), 1)
        assert torch.equal(streamed, cached.tokens)
        assert model.training


def test_generates_up_to_the_longest_sequence():
    model = model_of(eos_id=None)
    prompt = torch.stack(rows_of(20))
    out = model.generate(prompt)
    assert out.tokens.shape == (1, TINY.max_length - 20 + 1)
    with pytest.raises(ValueError, match="max_length is 6, expected 0 to 5"):
        model.generate(prompt, 6)
    assert model.generate(prompt, 0).tokens.shape == (1, 0)


def test_without_padding_every_token_is_read():
    model = model_of(pad_id=None)
    tokens = torch.stack(rows_of(4, 4))
    tokens[:, 1] = PAD
    changed = tokens.clone()
    changed[:, 1] = 5
    assert not torch.allclose(model(tokens)[:, -1], model(changed)[:, -1])
    with torch.no_grad():
        close(model.session().extend(tokens), model(tokens)[:, -1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_caches_have_the_dtype_of_the_keys(dtype):
    model = model_of(positions="rope").to(dtype)
    assert {c.k.dtype for c in model.start(1, 4)} == {dtype}
    assert model.generate(torch.stack(rows_of(3)), 4).tokens.shape[1] <= 4
    if dtype == torch.bfloat16:
        model = model.float()
        with torch.autocast("cpu", torch.bfloat16):
            assert {c.k.dtype for c in model.start(1, 4)} == {torch.bfloat16}
            model.generate(torch.stack(rows_of(3)), 4)


def test_names_of_parameters_are_stable():
    names = list(
        CausalLM(dataclasses.replace(TINY, num_layers=1, positions="learned")).state_dict()
    )
    assert names == [
        "embedding.weight",
        "positions.weight",
        "layers.0.self_attn.in_proj_weight",
        "layers.0.self_attn.in_proj_bias",
        "layers.0.self_attn.out_proj.weight",
        "layers.0.self_attn.out_proj.bias",
        "layers.0.feed_forward.linear1.weight",
        "layers.0.feed_forward.linear1.bias",
        "layers.0.feed_forward.linear2.weight",
        "layers.0.feed_forward.linear2.bias",
        "layers.0.norm1.weight",
        "layers.0.norm1.bias",
        "layers.0.norm2.weight",
        "layers.0.norm2.bias",
        "norm.weight",
        "norm.bias",
        "output.weight",
    ]
    slim = CausalLM(
        dataclasses.replace(TINY, bias=False, norm="rms", tie_embeddings=True, positions="relative")
    )
    assert not [name for name in slim.state_dict() if "bias" in name or "output." in name]
    assert slim.positions.weight.shape == (32, 4)


def test_what_is_wrong_is_named():
    model = model_of()
    for tokens, message in [
        (torch.zeros(2, 3), r"tokens is torch.float32 \(2, 3\), expected int64 \[batch, tokens\]"),
        (torch.ones(25, dtype=torch.int64), r"tokens is torch.int64 \(25,\)"),
        (torch.ones(1, 25, dtype=torch.int64), "tokens has 25 tokens, expected at most 24"),
    ]:
        with pytest.raises(ValueError, match=message):
            model(tokens)
    for capacity in (0, 25):
        with pytest.raises(ValueError, match=f"capacity is {capacity}, expected 1 to 24"):
            model.session(capacity=capacity)
    nothing = padded(rows_of(2, 0), "left")
    for use_cache in (True, False):
        with pytest.raises(
            ValueError, match=r"prompt has no token in rows \[1\], expected 1 or mo"
        ):
            model.session(use_cache=use_cache).extend(nothing)
    with pytest.raises(ValueError, match="num_classes is 3, expected None for a CausalLM"):
        CausalLM(dataclasses.replace(TINY, num_classes=3))
    with pytest.raises(TypeError, match="config is a dict, expected a TransformerConfig"):
        CausalLM({"vocab_size": 3})
