"""The encoder-decoder generates: against brute force, cached and not, its limits."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounter

from attnkit.models import Seq2SeqConfig, Seq2SeqTransformer
from attnkit.models.layers import Attention

PAD, BOS, EOS = 0, 1, 2
TINY = Seq2SeqConfig(11, 13, 16, 2, 2, 2, 24, dropout=0.0, max_length=20)
BEAMS = [1, 2, 3]


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Tiny models: a second thread has nothing to do but to wait."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def model_of(seed: int = 31, never_ends: bool = False, **changes) -> Seq2SeqTransformer:
    """A random model whose choices depend on source, position and prefix; some rows end."""
    torch.manual_seed(seed)
    model = Seq2SeqTransformer(dataclasses.replace(TINY, positions="learned", **changes))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "positions" in name:
                p.normal_(std=2.0)
            elif p.dim() > 1:
                p.copy_(torch.randn_like(p) * p.shape[1] ** -0.5)
            else:
                p.add_(0.1 * torch.randn_like(p))
        if never_ends:
            model.decoder_norm.bias[0] = 50.0
            model.output.weight[:, 0] = -F.one_hot(torch.tensor(EOS), model.config.tgt_vocab)
    return model


def sources(lengths: list[int], side: str = "right", seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    rows = [torch.randint(3, TINY.src_vocab, (n,), generator=g) for n in lengths]
    width = max(lengths)
    pads = [(0, width - n) if side == "right" else (width - n, 0) for n in lengths]
    return torch.stack([F.pad(row, pad, value=PAD) for row, pad in zip(rows, pads, strict=True)])


LENGTHS = [5, 1, 7, 3, 6, 2]


def log_p(model, src, tokens):
    """Log-probabilities [1 + T, V] of the token after bos and each of ``tokens``."""
    tgt = torch.tensor([[BOS, *tokens]])
    with torch.no_grad():
        return model.eval()(src[None], tgt)[0].log_softmax(-1)


def rescore(model, src, hypotheses, alpha):
    """The score of each hypothesis, all in one teacher-forced run."""
    tgt = nn.utils.rnn.pad_sequence(
        [torch.tensor([BOS, *tokens]) for tokens in hypotheses], batch_first=True, padding_value=PAD
    )
    with torch.no_grad():
        log = model.eval()(src.expand(len(hypotheses), -1), tgt).double().log_softmax(-1)
    return [
        sum(log[h, t, token].item() for t, token in enumerate(tokens)) / len(tokens) ** alpha
        for h, tokens in enumerate(hypotheses)
    ]


def row(out, b):
    return out.tokens[b, : int(out.lengths[b])].tolist()


def naive_beam(model, src, max_length, beams, alpha):
    """The same search in lists, for one source, never stopping before ``max_length``."""
    live, best = [((), 0.0)], ((), -float("inf"))
    for t in range(1, max_length + 1):
        candidates = []
        for prefix, total in live:
            log = log_p(model, src, prefix)[-1]
            candidates += [
                ((*prefix, token), total + log[token].item())
                for token in range(TINY.tgt_vocab)
                if token != PAD
            ]
        candidates = sorted(candidates, key=lambda c: -c[1])[: 2 * beams]
        for prefix, total in candidates:
            if (prefix[-1] == EOS or t == max_length) and total / t**alpha > best[1]:
                best = (prefix, total / t**alpha)
        live = [c for c in candidates if c[0][-1] != EOS][:beams]
    return list(best[0]), best[1]


def test_the_random_models_are_worth_testing():
    out = model_of().generate(sources(LENGTHS), 12)
    assert len(set(out.lengths.tolist())) >= 3  # rows end at different steps
    assert len({tuple(t.tolist()) for t in out.tokens}) == len(LENGTHS)
    assert (out.tokens.unique() != EOS).sum() > 4
    assert 12 in out.lengths
    assert EOS not in out.tokens[out.lengths.argmax()]


def test_greedy_takes_the_likeliest_token_each_time():
    model, src = model_of(), sources(LENGTHS)
    out = model.generate(src, 12)
    for b in range(len(LENGTHS)):
        tokens = []
        while len(tokens) < 12 and EOS not in tokens:
            log = log_p(model, src[b], tokens)[-1]
            log[PAD] = -torch.inf
            tokens.append(int(log.argmax()))
        assert row(out, b) == tokens


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0, -0.5])
@pytest.mark.parametrize("beams", [2, 4])
def test_beams_equal_the_search_in_lists(beams, alpha):
    model, src = model_of(2), sources([4, 2])
    out = model.generate(src, 5, num_beams=beams, length_penalty=alpha)
    for b in range(2):
        tokens, score = naive_beam(model, src[b], 5, beams, alpha)
        assert row(out, b) == tokens
        assert out.scores[b].item() == pytest.approx(score, abs=1e-5)


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0, 2.0, -0.5])
def test_wide_beams_equal_brute_force(alpha):
    model = model_of(3, tgt_vocab=5)
    src = sources([4, 2, 5])
    out = model.generate(src, 4, num_beams=32, length_penalty=alpha)
    for b in range(3):
        hypotheses = [
            [*body, EOS] for n in range(4) for body in itertools.product([BOS, 3, 4], repeat=n)
        ] + [list(body) for body in itertools.product([BOS, 3, 4], repeat=4)]
        assert len(hypotheses) == 1 + 3 + 9 + 27 + 81
        scores = rescore(model, src[b], hypotheses, alpha)
        best = max(range(len(scores)), key=scores.__getitem__)
        assert row(out, b) == hypotheses[best]
        assert out.scores[b].item() == pytest.approx(scores[best], abs=1e-5)


@pytest.mark.parametrize("beams", BEAMS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_r71_each_row_generates_what_it_generates_alone(beams, side):
    model = model_of()
    out = model.generate(sources(LENGTHS, side), 12, num_beams=beams)
    src = sources(LENGTHS)
    for b, length in enumerate(LENGTHS):
        alone = model.generate(src[b : b + 1, :length], 12, num_beams=beams)
        assert row(out, b) == row(alone, 0)
        assert out.scores[b].item() == pytest.approx(alone.scores[0].item(), abs=1e-5)


@pytest.mark.parametrize("beams", BEAMS)
@pytest.mark.parametrize("norm_first", [False, True])
def test_r72_cached_and_uncached_generate_the_same(beams, norm_first):
    model, src = model_of(norm_first=norm_first), sources(LENGTHS, "left")
    cached = model.generate(src, 12, num_beams=beams)
    plain = model.generate(src, 12, num_beams=beams, use_cache=False)
    assert torch.equal(cached.tokens, plain.tokens)
    assert torch.equal(cached.lengths, plain.lengths)
    torch.testing.assert_close(cached.scores, plain.scores, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_r72_cached_logits_equal_teacher_forcing_at_every_step(backend, ran):
    model, src = model_of().eval(), sources(LENGTHS)
    tgt = torch.randint(3, TINY.tgt_vocab, (len(LENGTHS), 9))
    tgt[:, 0] = BOS
    want = model(src, tgt)
    for chunks in ([1] * 9, [4, 1, 1, 3], [9]):
        state = model.start(src, capacity=9)
        got = [model.decode(part, state) for part in tgt.split(chunks, dim=1)]
        torch.testing.assert_close(torch.cat(got, 1), want, rtol=1e-5, atol=1e-5)
    step = "extend" if backend == "cpu" else "decode"  # where one call appends and attends
    assert ran.count(f"{backend}.{step}") == (9 + 4 + 1) * TINY.num_decoder_layers
    state = model.start(src, capacity=9, beams=1)
    torch.testing.assert_close(
        model.decode(tgt, state, last=True), want[:, -1:], rtol=1e-5, atol=1e-5
    )


def test_r72_cross_attention_is_projected_once_per_sequence(monkeypatch):
    rows = []
    real = Attention.keys_values

    def counted(self, source):
        rows.append(source.shape[0])
        return real(self, source)

    monkeypatch.setattr(Attention, "keys_values", counted)
    for use_cache in (True, False):
        rows.clear()
        out = model_of().generate(sources(LENGTHS), 6, num_beams=3, use_cache=use_cache)
        assert out.tokens.shape[1] > 2
        assert rows == [len(LENGTHS)] * TINY.num_decoder_layers


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize("beams", BEAMS)
def test_r76_rescoring_the_tokens_gives_the_score(beams, alpha):
    model, src = model_of(), sources(LENGTHS)
    out = model.generate(src, 12, num_beams=beams, length_penalty=alpha)
    ends = [EOS in row(out, b) for b in range(len(LENGTHS))]
    if beams == 1:
        assert any(ends)
        assert not all(ends)  # finished and unfinished rows have one rule
    for b in range(len(LENGTHS)):
        want = rescore(model, src[b], [row(out, b)], alpha)[0]
        assert out.scores[b].item() == pytest.approx(want, abs=1e-5)


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("beams", BEAMS)
@pytest.mark.parametrize("max_length", [0, 1, TINY.max_length])
def test_r81_limits_of_the_model(beams, max_length, use_cache):
    model, src = model_of(never_ends=True), sources(LENGTHS)
    out = model.generate(src, max_length, num_beams=beams, use_cache=use_cache)
    assert out.tokens.shape == (6, max_length)
    assert (out.lengths == max_length).all()
    assert out.scores.isfinite().all()


def test_r81_limits_out_of_range_are_named():
    model, src = model_of(), sources([2])
    for arguments, message in [
        ({"max_length": 21}, "max_length is 21, expected 0 to 20"),
        ({"max_length": -1}, "max_length is -1"),
        ({"num_beams": 0}, "num_beams is 0, expected 1 or more"),
    ]:
        with pytest.raises(ValueError, match=message):
            model.generate(src, **arguments)


@pytest.mark.parametrize("beams", BEAMS)
def test_an_empty_batch_and_an_empty_source(beams):
    model = model_of()
    out = model.generate(torch.empty(0, 4, dtype=torch.int64), 5, num_beams=beams)
    assert out.tokens.shape[0] == out.scores.shape[0] == out.lengths.shape[0] == 0
    out = model.generate(torch.full((2, 3), PAD), 5, num_beams=beams)
    none = model.generate(torch.empty(2, 0, dtype=torch.int64), 5, num_beams=beams)
    assert torch.equal(out.tokens, none.tokens)
    assert out.scores.isfinite().all()


def test_generation_is_without_dropout_and_leaves_the_modes():
    model, src = model_of(dropout=0.5), sources(LENGTHS)
    model.train()
    model.encoder[1].eval()
    one, other = model.generate(src, 12), model.generate(src, 12, use_cache=False)
    assert torch.equal(one.tokens, other.tokens)
    assert not one.scores.requires_grad
    assert model.training
    assert model.decoder[0].self_attn.training
    assert not model.encoder[1].training


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_r89_other_dtypes_generate(beams, dtype, backend):
    model, src = model_of().to(dtype), sources(LENGTHS)
    state = model.start(src, capacity=3)
    assert {cache.k.dtype for cache in state.caches} == {dtype}
    out = model.generate(src, 8, num_beams=beams)
    assert out.scores.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for b in range(len(LENGTHS)):
        want = rescore(model, src[b], [row(out, b)], 1.0)[0]
        assert out.scores[b].item() == pytest.approx(
            want, abs=1e-6 if dtype == torch.float64 else 0.1
        )


@pytest.mark.parametrize("beams", [1, 3])
def test_r89_autocast_generates(beams):
    model, src = model_of(), sources(LENGTHS)
    with torch.autocast("cpu", torch.bfloat16):
        state = model.start(src, capacity=3)
        assert {cache.k.dtype for cache in state.caches} == {torch.bfloat16}
        out = model.generate(src, 8, num_beams=beams)
    for b in range(len(LENGTHS)):
        assert out.scores[b].item() == pytest.approx(
            rescore(model, src[b], [row(out, b)], 1.0)[0], abs=0.2
        )
    # a state from outside autocast has float32 caches: refused by name
    state = model.start(src, capacity=3)
    with (
        torch.no_grad(),
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(TypeError, match=r"k is torch.bfloat16, the cache holds torch.float32"),
    ):
        model.decode(torch.full((6, 1), BOS), state)


@torch.no_grad()
def test_r91_more_tokens_than_the_caches_hold():
    model, src = model_of().eval(), sources([3, 2])
    state = model.start(src, capacity=4)
    step = torch.full((2, 1), 3)
    for _ in range(4):
        model.decode(step, state)
    with pytest.raises(ValueError, match="full: it holds 4 of 4 tokens, and 1 more"):
        model.decode(step, state)
    for cache in state.caches:
        cache.crop(3)
    want = model(src, torch.full((2, 4), 3))
    torch.testing.assert_close(model.decode(step, state), want[:, -1:], rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("beams", [1, 3])
def test_decode_steps_compile_to_one_graph(beams):
    torch._dynamo.reset()
    model, src = model_of(num_decoder_layers=1).eval(), sources([5, 3])
    counter = CompileCounter()
    step = torch.compile(model.decode, backend=counter, fullgraph=True)
    state, plain = (model.start(src, capacity=6, beams=beams) for _ in range(2))
    tokens = torch.full((2 * beams, 1), BOS)
    for _ in range(5):
        logits = step(tokens, state)
        torch.testing.assert_close(logits, model.decode(tokens, plain), rtol=1e-5, atol=1e-5)
        tokens = logits[:, -1].argmax(-1, keepdim=True)
    assert counter.frame_count == 1


def test_beams_share_their_sources_memory():
    model, src = model_of().eval(), sources([5, 3])
    state = model.start(src, capacity=4, beams=3)
    assert state.memory[0].key.shape[0] == 2
    assert state.caches[0].k.shape[0] == 6
    assert isinstance(model.decoder[0].cross_attn.out_proj, nn.Linear)
