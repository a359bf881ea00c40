"""Rules of ends, limits and scores over toy sessions; beams against brute force."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from attnkit.models import generation
from attnkit.models.generation import GenerationOptions, generate

PAD, BOS, EOS = 0, 1, 2
BEAMS = [1, 2, 3]


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Tiny models: a second thread has nothing to do but to wait."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def row(out, b):
    return out.tokens[b, : int(out.lengths[b])].tolist()


def table_model(script: list[list[int]], then: int = EOS, vocab: int = 8):
    """``next_logits`` that leads row r through ``script[r]``, and to ``then`` ever after."""
    calls = []

    def next_logits(tokens):
        calls.append(tokens.clone())
        t = tokens.shape[1] - 1
        wanted = torch.tensor([s[t] if t < len(s) else then for s in script])
        wanted = wanted.repeat_interleave(tokens.shape[0] // len(script))
        return 5.0 * F.one_hot(wanted, vocab).float()

    return next_logits, calls


class Toy:
    """A session of tables: its state is the tokens, and ``next_logits`` maps them to logits."""

    def __init__(self, next_logits):
        self.next_logits, self.tokens = next_logits, None

    def extend(self, tokens):
        self.tokens = tokens if self.tokens is None else torch.cat([self.tokens, tokens], 1)
        return self.next_logits(self.tokens)

    def reorder(self, rows):
        self.tokens = self.tokens[rows]


class Hashed:
    """Logits [R, V] that depend on all of a row but its padding, at random."""

    def __init__(self, vocab, seed=0, scale=1.5):
        self.vocab, self.seed, self.scale, self.calls = vocab, seed, scale, []

    def __call__(self, tokens):
        self.calls.append(tokens.clone())
        return torch.stack([self.row(tuple(t for t in r if t != PAD)) for r in tokens.tolist()])

    def row(self, prefix):
        g = torch.Generator().manual_seed(hash((self.seed, prefix)) & 0xFFFFFFFF)
        return self.scale * torch.randn(self.vocab, generator=g)


def options(max_length: int, **changes) -> GenerationOptions:
    return GenerationOptions(max_length, **{"eos_id": EOS, "pad_id": PAD, **changes})


def search(next_logits, batch, opts):
    return generate(Toy(next_logits), torch.full((batch, 1), BOS), opts)


def test_r78_finished_rows_are_padded_and_frozen_until_the_last_ends():
    next_logits, calls = table_model([[4, EOS, 5, 6, 7, 5], [EOS], [4, 5, 6, EOS]])
    out = search(next_logits, 3, options(40))
    assert out.tokens.tolist() == [[4, EOS, PAD, PAD], [EOS, PAD, PAD, PAD], [4, 5, 6, EOS]]
    assert out.lengths.tolist() == [2, 1, 4]
    each = torch.log_softmax(5.0 * F.one_hot(torch.tensor(0), 8).float(), -1)[0]
    torch.testing.assert_close(out.scores, each.expand(3))
    assert len(calls) == 4
    assert calls[-1].tolist() == [[BOS, 4, EOS, PAD], [BOS, EOS, PAD, PAD], [BOS, 4, 5, 6]]


@pytest.mark.parametrize("early_stopping", [False, True])
def test_r78_beams_end_with_the_last_row(early_stopping):
    script = [[4, EOS, 5, 6, 7, 5], [EOS], [4, 5, 6, EOS]]
    next_logits, calls = table_model(script)
    opts = options(40, num_beams=3, early_stopping=early_stopping)
    out = search(next_logits, 3, opts)
    assert [row(out, b) for b in range(3)] == [[4, EOS], [EOS], [4, 5, 6, EOS]]
    assert out.tokens.shape == (3, 4)
    assert len(calls) < 40
    for b in range(3):
        alone = search(table_model([script[b]])[0], 1, opts)
        assert row(alone, 0) == row(out, b)
        torch.testing.assert_close(alone.scores[0], out.scores[b])


def hasty(tokens):
    """Two ends are found at once, and a better one, per token, much later."""
    p = [0.0, 0.0, 0.5, 0.4, 0.1] if tokens.shape[1] < 3 else [0.0, 0.0, 0.02, 0.97, 0.01]
    return torch.tensor(p).log().clamp(min=-30).expand(tokens.shape[0], -1)


def test_early_stopping_stops_sooner_and_may_miss_the_best():
    soon = search(hasty, 1, options(12, num_beams=2, early_stopping=True))
    late = search(hasty, 1, options(12, num_beams=2, early_stopping=False))
    assert int(soon.lengths[0]) <= 2
    assert int(late.lengths[0]) == 12
    assert late.scores[0] > soon.scores[0]


def test_only_ends_that_are_among_the_best_count_for_early_stopping():
    def next_logits(tokens):
        later = {1: [0, 0, 0.1, 0.5, 0.4], 2: [0, 0, 0.45, 0.55, 0]}
        p = torch.tensor(later.get(tokens.shape[1], [0, 0, 0.97, 0.03, 0]))
        return p.log().clamp(min=-30).expand(tokens.shape[0], -1)

    # after two tokens 3 3 goes on, 3 eos has ended; 4 eos would not have stayed in the beam
    out = search(next_logits, 1, options(12, num_beams=2, early_stopping=True))
    assert row(out, 0) == [3, 3, EOS]


def test_ends_do_not_crowd_out_what_goes_on():
    """The likeliest tokens all end the row, and the best hypothesis begins with the last of all."""

    def next_logits(tokens):
        first = [1e-9, 0.15, 0.3, 0.25, 0.2, 0.1]
        flat, sure = [1e-9, 0.2, 0.2, 0.2, 0.2, 0.2], [1e-9, 0.01, 0.96, 0.01, 0.01, 0.01]
        after = {BOS: first if tokens.shape[1] == 1 else flat, 5: sure}
        return torch.tensor([after.get(t, flat) for t in tokens[:, -1].tolist()]).log()

    given = {"num_beams": 2, "length_penalty": 4.0, "eos_id": [EOS, 3, 4]}
    assert row(search(next_logits, 1, options(2, **given)), 0) == [5, EOS]


def test_r78_a_row_that_stopped_early_is_frozen_while_others_go_on():
    def next_logits(tokens):
        logits = hasty(tokens).clone()
        logits[2:, EOS] = -30.0  # the second row never ends
        return logits

    opts = options(12, num_beams=2, early_stopping=True)
    alone, both = search(hasty, 1, opts), search(next_logits, 2, opts)
    assert both.lengths.tolist() == [int(alone.lengths[0]), 12]
    assert row(both, 0) == row(alone, 0)
    assert both.scores[0] == alone.scores[0]
    assert not both.tokens[0, int(alone.lengths[0]) :].any()


@pytest.mark.parametrize("max_length", [0, 1, 2, 7])
@pytest.mark.parametrize("beams", BEAMS)
def test_r81_a_row_that_never_ends_has_exactly_max_length_tokens(beams, max_length):
    next_logits, calls = table_model([[3], [4]], then=3)
    out = search(next_logits, 2, options(max_length, num_beams=beams))
    assert out.tokens.shape == (2, max_length)
    assert out.lengths.tolist() == [max_length] * 2
    assert out.scores.isfinite().all()
    assert len(calls) == max_length
    if max_length == 0:
        assert out.scores.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("beams", BEAMS)
def test_padding_is_never_generated(beams):
    def next_logits(tokens):
        return torch.tensor([9.0, 0.0, 0.0, 1.0, 0.5]).expand(tokens.shape[0], -1)

    out = search(next_logits, 2, options(4, num_beams=beams))
    assert PAD not in out.tokens[:, : int(out.lengths.min())]
    # its probability is not shared out: the scores are those of the model
    assert out.scores.max() < -7.0


class Recurrent:
    """A session with a state: what it has seen of each row is a running sum, never its tokens."""

    def __init__(self, vocab=7, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.embedding, self.output = torch.randn(2, vocab, vocab, dtype=torch.float64, generator=g)
        self.state, self.calls = None, 0

    def extend(self, tokens):
        self.calls += 1
        if self.state is None:
            self.state = torch.zeros(tokens.shape[0], 7, dtype=torch.float64)
        for column in tokens.T:
            self.state = torch.where(
                (column == PAD)[:, None], self.state, 0.7 * self.state + self.embedding[column]
            )
        return self.state.tanh() @ self.output * 2

    def reorder(self, rows):
        self.state = self.state[rows]


class Recomputed(Recurrent):
    """The same from the whole tokens, each time."""

    def __init__(self, vocab=7, seed=0):
        super().__init__(vocab, seed)
        self.tokens = None

    def extend(self, tokens):
        self.tokens = tokens if self.tokens is None else torch.cat([self.tokens, tokens], 1)
        self.state = None
        return super().extend(self.tokens)

    def reorder(self, rows):
        self.tokens = self.tokens[rows]


PROMPTS = torch.tensor([[PAD, PAD, BOS, 3], [BOS, 4, 5, 3], [PAD, 6, 4, 4], [BOS, 3, 3, 4]])
KINDS = [
    {},
    {"num_beams": 3},
    {"num_beams": 4, "num_return_sequences": 4, "early_stopping": True},
    {"sample": True, "seeds": [1, 2, 3, 4], "top_p": 0.9},
    {"num_beams": 3, "stop": [[3, 4], [5]], "min_length": 2, "repetition_penalty": 1.3},
    {"sample": True, "seeds": [4, 3, 2, 1], "stop": [[3, 4], [5]], "repetition_penalty": 1.3},
    {"num_beams": 2, "eos_id": [EOS, 6]},
    {"num_beams": 2, "eos_id": None},
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_state_gives_what_recomputing_gives(kind):
    got = generate(Recurrent(), PROMPTS, options(8, **kind))
    want = generate(Recomputed(), PROMPTS, options(8, **kind))
    assert torch.equal(got.tokens, want.tokens)
    assert torch.equal(got.lengths, want.lengths)
    torch.testing.assert_close(got.scores, want.scores)
    torch.testing.assert_close(got.log_probs, want.log_probs)
    assert got.scores.dtype == torch.float64


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_each_row_is_what_it_is_alone_with_every_option(kind):
    out = generate(Recurrent(), PROMPTS, options(8, **kind))
    for b in range(4):
        mine = {**kind, "seeds": [kind["seeds"][b]]} if "seeds" in kind else kind
        alone = generate(Recurrent(), PROMPTS[b : b + 1], options(8, **mine))
        width = alone.tokens.shape[-1]
        assert torch.equal(out.tokens[b, ..., :width], alone.tokens[0])
        assert not out.tokens[b, ..., width:].any()
        assert torch.equal(out.lengths[b], alone.lengths[0])
        torch.testing.assert_close(out.scores[b], alone.scores[0])


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_scores_are_the_sums_of_the_log_probabilities(kind):
    model = Hashed(7, seed=3)
    out = generate(Toy(model), PROMPTS, options(8, length_penalty=0.8, **kind))
    n = kind.get("num_return_sequences", 1)
    tokens, scores, lengths, log_probs = (
        x.reshape(4, n, *x.shape[x.dim() - k :]) for x, k in zip(out, (1, 0, 0, 1), strict=True)
    )
    torch.testing.assert_close(scores, log_probs.sum(-1) / lengths**0.8)
    assert torch.equal(scores, scores.sort(dim=1, descending=True).values)
    penalty = kind.get("repetition_penalty", 1.0)
    for b in range(4):
        for i in range(n):
            prefix = [t for t in PROMPTS[b].tolist() if t != PAD]
            for t in range(int(lengths[b, i])):
                logits = model.row(tuple(prefix)).tolist()
                for seen in set(prefix):
                    logits[seen] *= penalty if logits[seen] < 0 else 1 / penalty
                prefix.append(int(tokens[b, i, t]))
                want = torch.tensor(logits).log_softmax(-1)[prefix[-1]]
                assert log_probs[b, i, t].item() == pytest.approx(want.item(), abs=1e-5)
            assert not log_probs[b, i, int(lengths[b, i]) :].any()
            assert not tokens[b, i, int(lengths[b, i]) :].any()


def all_hypotheses(model, max_length, alpha, ends, min_length=0, prompt=(BOS,)):
    """Every hypothesis that there is, with its score, best first."""
    found, prefixes = [], [((), 0.0)]
    for length in range(1, max_length + 1):
        longer = []
        for said, total in prefixes:
            log = model.row((*prompt, *said)).log_softmax(-1).tolist()
            for token in range(model.vocab):
                new = ((*said, token), total + log[token])
                if token == PAD or ((token,) in ends and length < min_length):
                    continue
                if length >= min_length and any(new[0][-len(e) :] == e for e in ends):
                    found.append((new[0], new[1] / length**alpha))
                else:
                    longer.append(new)
        prefixes = longer
    found += [(said, total / max_length**alpha) for said, total in prefixes]
    return sorted(found, key=lambda hypothesis: -hypothesis[1])


@pytest.mark.parametrize("alpha", [0.0, 1.0, 2.0, -0.5])
@pytest.mark.parametrize(
    ("ends", "given"),
    [
        ([(EOS,)], {}),
        ([(EOS,), (3,)], {"eos_id": [EOS, 3]}),
        ([(EOS,), (3, 1), (4, 4, 1), (1,)], {"stop": [[3, 1], [4, 4, 1], [1]]}),
        ([(3, 4), (4, 3)], {"eos_id": None, "stop": [[3, 4], [4, 3]]}),
        ([(EOS,)], {"min_length": 3}),
        ([], {"eos_id": None}),
    ],
    ids=str,
)
def test_the_best_n_of_beams_wide_enough_are_those_of_brute_force(ends, given, alpha):
    model = Hashed(5, seed=1)
    prompt = torch.tensor([[BOS], [3], [4]])
    out = generate(
        Toy(model),
        prompt,
        options(4, num_beams=256, num_return_sequences=9, length_penalty=alpha, **given),
    )
    for b in range(3):
        start = tuple(prompt[b].tolist())
        want = all_hypotheses(model, 4, alpha, ends, given.get("min_length", 0), start)
        assert len(want) > 20
        for i, (said, score) in enumerate(want[:9]):
            assert out.tokens[b, i, : int(out.lengths[b, i])].tolist() == list(said)
            assert out.scores[b, i].item() == pytest.approx(score, abs=1e-5)


def endless_search(model, max_length, beams, alpha, eos):
    """The scores of all that a beam of one row finds, in lists, best first; it never stops."""
    live, found = [((), 0.0)], []
    for length in range(1, max_length + 1):
        candidates = []
        for said, total in live:
            log = model.row((BOS, *said)).log_softmax(-1).tolist()
            candidates += [((*said, t), total + log[t]) for t in range(model.vocab) if t != PAD]
        candidates = sorted(candidates, key=lambda c: -c[1])[: (1 + len(eos)) * beams]
        found += [
            (total / length**alpha, list(said))
            for said, total in candidates
            if said[-1] in eos or length == max_length
        ]
        live = [c for c in candidates if c[0][-1] not in eos][:beams]
    return sorted(found, reverse=True)


@pytest.mark.parametrize("eos", [(EOS,), (EOS, 3, 4)], ids=str)
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, -0.5])
def test_beams_stop_when_nothing_can_change_any_more(alpha, eos):
    stopped, late = 0, 0
    for seed in range(12):
        model = Hashed(6, seed=seed, scale=2.5)
        given = {"num_beams": 3, "num_return_sequences": 2, "length_penalty": alpha, "eos_id": eos}
        out = search(model, 1, options(8, **given))
        stopped += len(model.calls) < 8
        late += int(out.lengths.max()) > 2
        for i, (score, said) in enumerate(endless_search(model, 8, 3, alpha, eos)[:2]):
            assert out.tokens[0, i, : int(out.lengths[0, i])].tolist() == said
            assert out.scores[0, i].item() == pytest.approx(score, abs=1e-5)
    assert late > 2 or len(eos) > 1
    assert stopped > 2 or alpha > 0.5


def test_hypotheses_that_do_not_exist_are_empty_and_worth_nothing():
    given = {"num_beams": 6, "num_return_sequences": 6, "pad_id": 3}
    out = generate(Toy(Hashed(4)), torch.tensor([[BOS], [EOS]]), options(1, **given))
    assert out.tokens.shape == out.log_probs.shape == (2, 6, 1)
    assert out.lengths.tolist() == [[1, 1, 1, 0, 0, 0]] * 2
    assert (out.scores == -torch.inf).tolist() == [[False] * 3 + [True] * 3] * 2
    assert sorted(out.tokens[0, :3, 0].tolist()) == [0, 1, 2]
    assert out.tokens[0, 3:, 0].tolist() == [3, 3, 3]
    assert not out.log_probs[:, 3:].any()


def test_the_prompt_is_run_once_for_each_row_and_the_last_token_not_at_all():
    for kind, rows in (({}, 4), ({"num_beams": 3, "eos_id": None}, 12)):
        model = Hashed(7)
        generate(Toy(model), PROMPTS, options(3, **{"eos_id": None, **kind}))
        assert [tuple(c.shape) for c in model.calls] == [(4, 4), (rows, 5), (rows, 6)]
        assert torch.equal(model.calls[0], PROMPTS)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_a_row_stops_at_a_stop_sequence_which_is_kept(num_beams):
    script = [[3, 4, 5, 6], [4, 3, 4, 3, 5], [5, 5, 5, EOS], [6, 3, 5]]
    next_logits, calls = table_model(script)
    out = search(next_logits, 4, options(9, num_beams=num_beams, stop=[[3, 4, 5], [3, 5], [6, 6]]))
    assert [row(out, b) for b in range(4)] == [
        [3, 4, 5],
        [4, 3, 4, 3, 5],
        [5, 5, 5, EOS],
        [6, 3, 5],
    ]
    assert len(calls) == 5 or num_beams > 1


@pytest.mark.parametrize("num_beams", [1, 3])
def test_a_stop_sequence_is_not_begun_by_the_prompt(num_beams):
    def chain(tokens):  # 3, 4, 5, 6, 3, ...
        return 8.0 * F.one_hot((tokens[:, -1] - 2) % 4 + 3, 7).float()

    prompt = torch.tensor([[3, 4, 5], [5, 3, 4], [4, 5, 3]])
    given = {"num_beams": num_beams, "stop": [[4, 5, 6], [3, 4, 5]]}
    out = generate(Toy(chain), prompt, options(12, **given))
    # 3, 4, 5 was in the first prompt, and only its rest comes after the others
    assert [row(out, b) for b in range(3)] == [[6, 3, 4, 5], [5, 6, 3, 4, 5], [4, 5, 6]]


@pytest.mark.parametrize("num_beams", [1, 2])
def test_no_row_ends_before_min_length(num_beams):
    def eager(tokens):
        return torch.tensor([0.0, 0.0, 9.0, 5.0, 1.0]).expand(tokens.shape[0], -1)

    for min_length, want in ((0, 1), (1, 1), (4, 4), (6, 6)):
        given = {"num_beams": num_beams, "length_penalty": 0.0}
        out = search(eager, 2, options(6, min_length=min_length, **given))
        assert row(out, 0) == [3] * (want - 1) + [EOS]
        stop = {"stop": [[3], [3, 3, 3]], "eos_id": 1}
        out = search(eager, 2, options(6, min_length=min_length, **stop, pad_id=EOS))
        assert row(out, 0) == [3] * want


def test_a_model_without_padding_withholds_nothing():
    def zeros(tokens):
        return torch.tensor([9.0, 1.0, 2.0]).expand(tokens.shape[0], -1)

    out = search(zeros, 1, options(3, pad_id=None))
    assert out.tokens.tolist() == [[0, 0, 0]]
    next_logits, _ = table_model([[3, EOS], [3, 4, 5, EOS]])
    out = search(next_logits, 2, options(9, pad_id=None))
    assert out.tokens.tolist() == [[3, EOS, EOS, EOS], [3, 4, 5, EOS]]
    assert out.lengths.tolist() == [2, 4]
    assert not out.log_probs[0, 2:].any()


@pytest.mark.parametrize("num_beams", [1, 2])
def test_without_an_end_rows_run_to_the_limit(num_beams):
    next_logits, calls = table_model([[EOS, EOS]])
    out = search(next_logits, 1, options(5, eos_id=None, num_beams=num_beams))
    assert row(out, 0) == [EOS] * 5
    assert len(calls) == 5


@pytest.mark.parametrize("n", [None, 1, 2])
@pytest.mark.parametrize(("rows", "max_length"), [(2, 0), (0, 3), (0, 0)])
def test_nothing_to_generate(rows, max_length, n):
    next_logits, calls = table_model([[3]])
    out = search(next_logits, rows, options(max_length, num_beams=2, num_return_sequences=n))
    lead = (rows,) if n is None else (rows, n)
    assert out.tokens.shape == out.log_probs.shape == (*lead, 0)
    assert out.scores.shape == out.lengths.shape == lead
    assert not calls


def test_one_returned_sequence_of_no_beams_has_the_same_dimensions():
    plain = generate(Recurrent(), PROMPTS, options(6))
    one = generate(Recurrent(), PROMPTS, options(6, num_return_sequences=1))
    assert all(torch.equal(a[:, None], b) for a, b in zip(plain, one, strict=True))


@pytest.mark.parametrize("num_beams", [1, 3])
def test_asking_rarely_whether_rows_live_changes_nothing(num_beams, monkeypatch):
    """What an accelerator does: the steps after the last end leave no trace."""
    kind = {"num_beams": num_beams, "eos_id": [EOS, 3, 6], "length_penalty": 0.0}
    want = generate(Recurrent(seed=2), PROMPTS, options(30, **kind))
    assert 1 < int(want.lengths.max()) < 8
    name = "beam_search" if num_beams > 1 else "_steps"
    real = getattr(generation, name)
    monkeypatch.setattr(generation, name, lambda session, p, o, every: real(session, p, o, 8))
    session = Recurrent(seed=2)
    got = generate(session, PROMPTS, options(30, **kind))
    assert session.state.shape[0] == 4 * num_beams
    assert session.calls == 8
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
