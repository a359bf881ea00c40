"""Penalty, filters and draws against their definitions, token by token; seeds; wrong options."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from attnkit.models.generation import GenerationOptions, GenerationOutput, generate, stream
from attnkit.models.sampling import draw, filtered, penalised, uniforms

PAD, BOS, EOS = 0, 1, 2


def random_logits(rows: int = 6, vocab: int = 9, seed: int = 0) -> torch.Tensor:
    """Logits of all sizes, with equals among them and some tokens of probability 0."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, vocab, generator=g) * torch.tensor([0.1, 1, 2, 3, 6, 20])[:, None]
    x[:, 4] = x[:, 7]
    x[0] = x[0, 0]
    x[1:3, 5] = -math.inf
    return x


def defined(row, temperature=1.0, top_k=None, top_p=None, min_p=None):
    """The distribution that is drawn from: temperature, then each filter, made to sum to 1."""
    weights = [math.exp((x - max(row)) / temperature) for x in row]

    def keep(rule):
        total = sum(weights)
        p = [w / total for w in weights]
        return [w if rule(q, p) else 0.0 for w, q in zip(weights, p, strict=True)]

    if top_k is not None:
        weights = keep(lambda q, p: sum(r > q for r in p) < top_k)
    if top_p is not None and top_p < 1:
        weights = keep(lambda q, p: math.fsum(r for r in p if r > q) < top_p)
    if min_p is not None:
        weights = keep(lambda q, p: q >= min_p * max(p))
    return [w / sum(weights) for w in weights]


FILTERS = [
    {},
    {"temperature": 0.3},
    {"temperature": 4.0},
    {"top_k": 1},
    {"top_k": 3},
    {"top_k": 9},
    {"top_k": 1000},
    {"top_p": 1e-9},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"top_p": 1.0},
    {"min_p": 0.0},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"temperature": 2.0, "top_k": 4, "top_p": 0.7, "min_p": 0.9},
    {"temperature": 0.7, "top_k": 5, "min_p": 0.05},
    {"temperature": 3.0, "top_k": 6, "top_p": 0.8},
    {"temperature": 1.5, "top_p": 0.9, "min_p": 0.1},
]


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_filters_equal_their_definitions(options):
    logits = random_logits().double()
    got = filtered(logits.log_softmax(-1), **options).softmax(-1)
    want = torch.tensor([defined(row, **options) for row in logits.tolist()], dtype=torch.float64)
    assert torch.equal(got > 0, want > 0)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=0)


def test_the_filters_of_these_tests_differ():
    kept = {str(o): (filtered(random_logits(), **o) > -math.inf).tolist() for o in FILTERS}
    assert len({str(k) for k in kept.values()}) >= 9
    three = list(FILTERS[14].items())
    assert [name for name, _ in three] == ["temperature", "top_k", "top_p", "min_p"]
    sizes = [
        int((filtered(random_logits(), **dict(three[:n])) > -math.inf).sum()) for n in range(1, 5)
    ]
    assert sizes == sorted(set(sizes), reverse=True)  # each of them takes something away


def test_equally_likely_tokens_are_kept_or_dropped_together():
    x = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    for options in ({"top_k": 2}, {"top_k": 4}, {"top_p": 0.5}, {"top_p": 0.7}):
        kept = filtered(x, **options) > -math.inf
        assert kept.tolist() == [[True, True, True, True, False]], options


@pytest.mark.parametrize("temperature", [1e-30, 1e-300, 1e30])
def test_extreme_temperatures(temperature):
    x = torch.tensor([[3.0, 1.0, 2.0], [-5.0, -1e4, -4.0]])
    p = filtered(x.log_softmax(-1), temperature).softmax(-1)
    want = [[1, 0, 0], [0, 0, 1]] if temperature < 1 else [[1 / 3] * 3] * 2
    torch.testing.assert_close(p, torch.tensor(want, dtype=torch.float64))


def test_a_penalty_makes_no_seen_token_likelier():
    logits = torch.tensor([[4.0, -4.0, 0.0, 4.0, -4.0], [1.0, -1.0, 2.0, -2.0, -math.inf]])
    seen = torch.tensor([[True, True, True, False, False], [False, True, True, False, True]])
    got = penalised(logits, seen, 2.0)
    assert got.tolist() == [[2.0, -8.0, 0.0, 4.0, -4.0], [1.0, -2.0, 1.0, -2.0, -math.inf]]


def test_a_draw_takes_the_token_whose_share_holds_u():
    log_p = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0]).double().log().expand(6, -1)
    u = torch.tensor([0.0, 0.24999, 0.25001, 0.74999, 0.75001, 1 - 2**-53], dtype=torch.float64)
    assert draw(log_p, u).tolist() == [1, 1, 3, 3, 4, 4]
    assert draw(log_p + 700, u).tolist() == [1, 1, 3, 3, 4, 4]  # normalised or not


def test_a_draw_never_takes_what_has_no_probability():
    """Over a large vocabulary the sums are rounded; the last u before 1 still finds a token."""
    log_p = torch.randn(64, 50_000)
    log_p[:, 30_000:] = -math.inf
    log_p[:, :100] = -math.inf
    u = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64).repeat(32)
    token = draw(log_p, u)
    assert set(token[::2].tolist()) == {100}
    assert set(token[1::2].tolist()) == {29_999}


def test_frequencies_are_the_probabilities():
    """Pearson's chi-square of 40 000 draws: of many seeds, of the steps of one, and of both."""
    p = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.04, 0.01], dtype=torch.float64)
    for u in (uniforms(range(40_000), 1), uniforms([7], 40_000), uniforms(range(200), 200)):
        tokens = draw(p.log().expand(40_000, -1), u.flatten())
        found = torch.bincount(tokens, minlength=6).double()
        chi2 = ((found - 40_000 * p) ** 2 / (40_000 * p)).sum()
        assert chi2 < 20.5  # 0.1 % at 5 degrees of freedom
        assert chi2 > 0.1  # nor too good


def test_uniforms_depend_on_seed_and_step_alone():
    seeds = [5, 0, 2**64 - 1, 2**32 + 5, 5 << 32, 2**63]
    all_of_them = uniforms(seeds, 50)
    assert all_of_them.dtype == torch.float64
    assert all_of_them.unique().numel() == 6 * 50  # no two streams meet
    assert all_of_them.min() >= 0
    assert all_of_them.max() < 1
    for r, seed in enumerate(seeds):
        assert torch.equal(uniforms([seed], 20)[0], all_of_them[r, :20])
    # fixed for ever: a seed written down today gives the same text tomorrow
    assert uniforms([0, 1], 2).tolist() == [
        [0.9093162594674253, 0.3135702959695794],
        [0.341363778347075, 0.653994293120525],
    ]
    assert uniforms([], 3).shape == (0, 3)


class Bigram:
    """A session whose logits are a table [V, V] of the last token: rows as they come."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table, self.steps = table, 0

    def extend(self, tokens):
        self.steps += 1
        return self.table[tokens[:, -1]]

    def reorder(self, rows):
        raise AssertionError("nothing to reorder")


TABLE = torch.randn(8, 8, generator=torch.Generator().manual_seed(5))


def run(rows=1, max_length=12, table=TABLE, prompt=None, **options) -> GenerationOutput:
    prompt = torch.full((rows, 1), BOS) if prompt is None else prompt
    given = {"eos_id": EOS, "pad_id": PAD, "sample": True, **options}
    return generate(Bigram(table), prompt, GenerationOptions(max_length, **given))


def same(a: GenerationOutput, i: int, b: GenerationOutput, j: int) -> bool:
    n = int(a.lengths[i])
    return (
        n == int(b.lengths[j])
        and torch.equal(a.tokens[i, :n], b.tokens[j, :n])
        and torch.equal(a.log_probs[i, :n], b.log_probs[j, :n])
        and bool(a.scores[i] == b.scores[j])
    )


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9, "top_k": 5}, {"repetition_penalty": 1.5}])
def test_a_row_depends_on_its_seed_and_not_on_batch_or_place(options):
    seeds = [3, 14, 15, 92, 65, 35, 14]
    out = run(7, seeds=seeds, **options)
    assert len({tuple(t) for t in out.tokens.tolist()}) >= 4
    assert len(set(out.lengths.tolist())) >= 3
    for b, seed in enumerate(seeds):
        assert same(out, b, run(1, seeds=[seed], **options), 0)
    back = run(7, seeds=seeds[::-1], **options)
    assert all(same(out, b, back, 6 - b) for b in range(7))


def test_one_seed_is_those_that_follow_it():
    assert all(same(run(4, seed=9), b, run(4, seeds=[9, 10, 11, 12]), b) for b in range(4))


def test_without_a_seed_torchs_own_rules():
    torch.manual_seed(1)
    first, second = run(3), run(3)
    torch.manual_seed(1)
    assert torch.equal(first.tokens, run(3).tokens)
    assert not torch.equal(first.tokens, second.tokens)
    state = torch.get_rng_state()
    run(3, seed=1)
    run(3, sample=False)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("options", [*FILTERS[3:5], *FILTERS[8:10], *FILTERS[12:]], ids=str)
def test_first_tokens_have_the_defined_frequencies(options):
    out = run(4000, 1, seed=100, **options)
    row = TABLE[BOS].double()
    row[PAD] = -math.inf
    want = torch.tensor(defined(row.tolist(), **options), dtype=torch.float64)
    found = torch.bincount(out.tokens[:, 0], minlength=8).double()
    assert not found[want == 0].any()
    want, found = 4000 * want[want > 0], found[want > 0]
    chi2 = ((found - want) ** 2 / want).sum()
    assert chi2 < 24.4  # 0.1 % at 7 degrees of freedom
    if want.numel() > 1:
        assert found.min() > 0


def test_whole_sequences_have_the_probabilities_of_the_chain():
    """All sequences of a tiny model, each as often as the product of its probabilities says."""
    table = TABLE[:4, :4]
    out = run(20_000, 3, table=table, seed=0)
    found = torch.bincount(out.tokens @ torch.tensor([16, 4, 1]), minlength=64).double()
    p = table.double().clone()
    p[:, PAD] = -math.inf
    p = p.softmax(-1)
    want = torch.zeros(64, dtype=torch.float64)
    for a in range(4):
        for b in range(4):
            for c in range(4):
                tokens = [a, b, c]
                if EOS in tokens:
                    end = tokens.index(EOS)
                    if any(tokens[end + 1 :]):
                        continue
                    tokens = tokens[: end + 1]
                chain = zip([BOS, *tokens], tokens, strict=False)
                want[16 * a + 4 * b + c] += math.prod(float(p[x, y]) for x, y in chain)
    assert want.sum() == pytest.approx(1)
    assert not found[want == 0].any()
    want, found = 20_000 * want[want > 0], found[want > 0]
    assert ((found - want) ** 2 / want).sum() < want.numel() + 4 * math.sqrt(2 * want.numel())


def test_scores_are_of_the_model_before_temperature_and_filters():
    out = run(5, seed=1, temperature=2.5, top_k=4, top_p=0.95, length_penalty=0.7)
    log_p = TABLE.log_softmax(-1)
    for b in range(5):
        n = int(out.lengths[b])
        tokens = [BOS, *out.tokens[b, :n].tolist()]
        want = torch.stack([log_p[x, y] for x, y in itertools.pairwise(tokens)])
        torch.testing.assert_close(out.log_probs[b, :n], want)
        torch.testing.assert_close(out.scores[b], want.sum() / n**0.7)
        assert not out.log_probs[b, n:].any()


def test_a_temperature_of_0_and_no_sampling_are_greedy():
    greedy = run(3, sample=False)
    assert torch.equal(run(3, temperature=0).tokens, greedy.tokens)
    assert torch.equal(run(3, top_k=1, seed=4).tokens, greedy.tokens)
    assert torch.equal(run(3, sample=False, temperature=2.0, top_p=0.1).tokens, greedy.tokens)
    assert not torch.equal(run(3, seed=4).tokens, greedy.tokens)


def test_the_penalty_counts_the_prompt_and_the_generated_but_no_padding():
    """Logits are the same at each step, so that only the penalty can change the choice."""
    table = torch.tensor([9.0, -1.0, -9.0, 4.0, 3.0, 2.5]).expand(6, -1)
    prompt = torch.tensor([[PAD, PAD, 3], [PAD, 4, 3], [5, 4, 3]])
    out = run(table=table, prompt=prompt, sample=False, repetition_penalty=2.0, max_length=4)
    # worth 4, 3, 2.5 unseen and 2, 1.5, 1.25 seen
    assert out.tokens.tolist() == [[4, 5, 3, 3], [5, 3, 3, 3], [3, 3, 3, 3]]
    seen = torch.tensor([9.0, -1.0, -9.0, 2.0, 3.0, 2.5])  # padding is as it was
    torch.testing.assert_close(out.log_probs[0, 0], seen.log_softmax(-1)[4])
    without = run(table=table, prompt=prompt, sample=False, max_length=4)
    assert without.tokens.tolist() == [[3] * 4] * 3


@pytest.mark.parametrize("sample", [False, True])
def test_a_stream_gives_what_generate_gives(sample):
    given = {"eos_id": EOS, "pad_id": PAD, "sample": sample, "seed": 3, "stop": [[5, 4]]}
    options = GenerationOptions(9, **given)
    prompt = torch.tensor([[3], [4], [5], [6], [7]])
    session = Bigram(TABLE)
    want = generate(session, prompt, options)
    again = Bigram(TABLE)
    columns = []
    for column in stream(again, prompt, options):
        columns.append(column.clone())
        column.fill_(-1)  # is the receiver's own
        assert again.steps == len(columns)  # as they come
        assert not torch.is_inference_mode_enabled()
        assert torch.is_grad_enabled()
    assert torch.equal(torch.stack(columns, 1), want.tokens)
    assert again.steps == session.steps
    assert len(set(want.lengths.tolist())) > 1


def test_a_stream_of_nothing_and_wrong_streams():
    assert list(stream(Bigram(TABLE), torch.tensor([[1]]), GenerationOptions(0))) == []
    none = torch.empty(0, 1, dtype=torch.int64)
    assert list(stream(Bigram(TABLE), none, GenerationOptions(4, sample=True))) == []
    ended = stream(Bigram(TABLE), torch.tensor([[1]]), GenerationOptions(9, eos_id=range(8)))
    assert len(list(ended)) == 1
    with pytest.raises(ValueError, match="num_beams is 2, expected 1"):
        stream(Bigram(TABLE), torch.tensor([[1]]), GenerationOptions(3, num_beams=2))
    with pytest.raises(ValueError, match="prompt has 0 tokens"):
        stream(Bigram(TABLE), torch.empty(1, 0, dtype=torch.int64), GenerationOptions(3))


def test_a_row_of_nan_says_so_in_its_score():
    table = TABLE.clone()
    table[3] = math.nan
    for sample in (False, True):
        out = run(prompt=torch.tensor([[3], [4]]), table=table, sample=sample, seed=0, max_length=1)
        assert out.scores.isnan().tolist() == [True, False]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"max_length": -1}, ValueError, "max_length is -1, expected 0 or more"),
        ({"max_length": 2.0}, TypeError, "max_length is float 2.0, expected an int"),
        ({"max_length": True}, TypeError, "max_length is bool True"),
        ({"min_length": 9}, ValueError, "min_length is 9, expected at most 8, max_length"),
        ({"min_length": -1}, ValueError, "min_length is -1, expected 0 or more"),
        ({"num_beams": 0}, ValueError, "num_beams is 0, expected 1 or more"),
        ({"num_return_sequences": 2}, ValueError, "num_return_sequences is 2, expected at most 1"),
        ({"num_return_sequences": 0}, ValueError, "num_return_sequences is 0, expected 1 or more"),
        ({"pad_id": -1}, ValueError, "pad_id is -1, expected 0 or more"),
        ({"eos_id": -1}, ValueError, "eos_id is -1, expected 0 or more"),
        ({"eos_id": [2, 2.5]}, TypeError, "eos_id is float 2.5, expected an int"),
        ({"eos_id": "2"}, TypeError, "eos_id has str '2', expected a sequence of ints"),
        ({"pad_id": 2, "eos_id": [1, 2]}, ValueError, "pad_id is 2, which eos_id is too"),
        ({"length_penalty": math.nan}, ValueError, "length_penalty is nan, expected finite"),
        ({"length_penalty": "1"}, TypeError, "length_penalty is str '1', expected a number"),
        ({"early_stopping": 1}, TypeError, "early_stopping is int 1, expected a bool"),
        ({"sample": None}, TypeError, "sample is None, expected a bool"),
        ({"temperature": -0.1}, ValueError, "temperature is -0.1, expected 0 or more"),
        ({"temperature": math.inf}, ValueError, "temperature is inf"),
        ({"top_k": 0}, ValueError, "top_k is 0, expected 1 or more"),
        ({"top_k": 2.0}, TypeError, "top_k is float 2.0, expected an int"),
        ({"top_p": 0}, ValueError, "top_p is 0, expected more"),
        ({"top_p": 1.1}, ValueError, "top_p is 1.1, expected 0 to 1"),
        ({"min_p": -0.5}, ValueError, "min_p is -0.5, expected 0 to 1"),
        ({"repetition_penalty": 0.9}, ValueError, "repetition_penalty is 0.9, expected 1 or more"),
        ({"stop": [3]}, TypeError, "stop has int 3, expected a sequence of ints"),
        ({"stop": 3}, TypeError, "stop is int 3, expected sequences of token ids"),
        ({"stop": [[]]}, ValueError, "stop has an empty sequence"),
        ({"stop": [[1, -1]]}, ValueError, "stop is -1, expected 0 or more"),
        ({"seed": 1, "seeds": [1]}, ValueError, "seed is 1 and seeds are given"),
        ({"seed": -(2**63) - 1}, ValueError, "seed is -9223372036854775809, expected -92"),
        ({"seed": 2**64}, ValueError, "seed is 18446744073709551616, expected at most"),
        ({"seeds": [0, 2**64]}, ValueError, "seed is 18446744073709551616, expected at most"),
        ({"seeds": 3}, TypeError, "seeds has int 3, expected a sequence of ints"),
        ({"num_beams": 2, "sample": True}, ValueError, "sample is True and num_beams 2"),
    ],
    ids=str,
)
def test_wrong_options_are_named(given, error, message):
    with pytest.raises(error, match=message):
        GenerationOptions(**{"max_length": 8, **given})


@pytest.mark.parametrize("num_beams", [1, 2])
def test_wrong_prompts_and_ids_are_named_before_a_token_is_chosen(num_beams):
    one = torch.tensor([[1]])
    for prompt, given, message in [
        (torch.ones(1, 1), {}, "prompt is a float32 tensor of shape .1, 1., expected int64"),
        (torch.ones(2, dtype=torch.int64), {}, r"prompt is .*, expected int64 \[batch, tokens\]"),
        (one[:, :0], {}, "prompt has 0 tokens, expected 1 or more"),
        (one, {"seeds": [1, 2]}, "seeds are 2, expected 1, one for each row"),
        (one, {"pad_id": 8}, "pad_id has 8, expected less than 8, the vocabulary"),
        (one, {"eos_id": [1, 9]}, "eos_id has 9, expected less than 8"),
        (one, {"stop": [[1], [3, 10, 1]]}, "stop has 10, expected less than 8"),
    ]:
        session = Bigram(TABLE)
        with pytest.raises(ValueError, match=message):
            generate(session, prompt, GenerationOptions(3, num_beams=num_beams, **given))
        assert session.steps <= 1
    for wrong in (TABLE[None], TABLE[:3], TABLE.long()):

        class Wrong(Bigram):
            def extend(self, tokens, logits=wrong):
                return logits

        with pytest.raises(ValueError, match=r"the session's logits are .*, expected \[1, V\]"):
            generate(Wrong(TABLE), one, GenerationOptions(3, num_beams=num_beams))


def test_options_are_values():
    lists = GenerationOptions(4, eos_id=[2, 3], stop=[[4, 5]], seeds=[1])
    assert lists == GenerationOptions(4, eos_id=(2, 3), stop=((4, 5),), seeds=(1,))
    assert len({lists, GenerationOptions(4, eos_id=(2, 3), stop=((4, 5),), seeds=(1,))}) == 1
