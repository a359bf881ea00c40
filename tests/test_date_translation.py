import datetime
import random

import pytest
import torch

pytest.importorskip("babel")
pytest.importorskip("tokenizers")

from babel.dates import format_date

from attnkit.recipes.date_translation import (
    Recipe,
    Schedule,
    Score,
    Task,
    Translator,
    alignments,
    build_model,
    generation_speeds,
    train,
)
from attnkit.recipes.dates import (
    BOS_ID,
    EOS_ID,
    LANGUAGES,
    PAD_ID,
    UNK_ID,
    DateTokenizer,
    bucketed_batches,
    every_language,
    make_example,
    pad_batch,
    sample_examples,
    split_dates,
    write_date,
)

TINY = Recipe(
    d_model=16,
    num_heads=2,
    num_layers=1,
    d_ff=32,
    batch_size=16,
    warmup=4,
    good_enough=0.0,
    decay=3,
    max_steps=10,
    max_length=28,
    validate_every=5,
    validation_dates=2,
    glance=1,
    test_dates=20,
)


@pytest.fixture(scope="module")
def task():
    return Task.prepare(TINY, texts=3000)


@pytest.fixture(scope="module")
def translator(task):
    torch.manual_seed(0)
    return Translator(build_model(TINY, task.tokenizer.vocab_size).eval(), task.tokenizer)


# --- the dates ---


@pytest.mark.parametrize(
    ("language", "expected"),
    [
        ("en", "Saturday, September 4, 2021"),
        ("de", "Samstag, 4. September 2021"),
        ("fr", "samedi 4 septembre 2021"),
        ("es", "sábado, 4 de septiembre de 2021"),
        ("hu", "2021. szeptember 4., szombat"),
        ("tr", "4 Eylül 2021 Cumartesi"),
        ("fi", "lauantai 4. syyskuuta 2021"),
        ("ru", "суббота, 4 сентября 2021\u202fг."),
        ("el", "Σάββατο 4 Σεπτεμβρίου 2021"),
        ("zh", "2021年9月4日星期六"),
        ("ja", "2021年9月4日土曜日"),
        ("ko", "2021년 9월 4일 토요일"),
        ("ar", "السبت، 4 سبتمبر 2021"),
        ("hi", "शनिवार, 4 सितंबर 2021"),
        ("lt", "2021 m. rugsėjo 4 d., šeštadienis"),
    ],
)
def test_a_known_date(language, expected):
    assert write_date(datetime.date(2021, 9, 4), language) == expected


@pytest.mark.parametrize("language", ["en", *LANGUAGES])
def test_dates_are_babels(language):
    for ordinal in range(693_600, 766_600, 9_973):
        day = datetime.date.fromordinal(ordinal)
        assert write_date(day, language) == format_date(day, "full", locale=language)


def test_there_are_at_least_twelve_languages_besides_english():
    assert len(LANGUAGES) >= 12
    assert "en" not in LANGUAGES


@pytest.mark.parametrize("seed", [0, 1])
def test_held_out_dates_are_disjoint_and_all_dates_are_there(seed):
    split = split_dates(seed)
    train_days, validation, test = (
        set(part) for part in (split.train, split.validation, split.test)
    )
    assert len(test) == 1000
    assert not train_days & validation
    assert not train_days & test
    assert not validation & test
    every = train_days | validation | test
    assert len(every) == 73_049  # days from 1900 to 2099: 200 years, 49 leap days
    assert min(every) == datetime.date(1900, 1, 1)
    assert max(every) == datetime.date(2099, 12, 31)


def test_the_split_follows_the_seed():
    assert split_dates(3) == split_dates(3)
    assert set(split_dates(3).test) != set(split_dates(4).test)


@pytest.mark.parametrize(("validation", "test"), [(-1, 10), (10, -1), (73_049, 0), (0, 73_049)])
def test_a_split_that_leaves_nothing_is_refused(validation, test):
    with pytest.raises(ValueError, match=rf"validation={validation} and test={test} leave no"):
        split_dates(0, validation=validation, test=test)


def test_no_held_out_date_is_ever_trained_on(task):
    held_out = {write_date(d, "en") for d in (*task.split.validation, *task.split.test)}
    batches = bucketed_batches(
        sample_examples(task.split.train, 2000, random.Random(0)),
        task.tokenizer,
        64,
        random.Random(0),
    )
    seen = {task.tokenizer.text(row[1:]) for batch in batches for row in batch.source.tolist()}
    assert len(seen) > 1500
    assert not seen & held_out


# --- the subwords ---


def test_every_text_survives_the_round_trip(task):
    examples = every_language([*task.split.test, *task.split.validation])
    tokenizer = task.tokenizer
    for rows, texts in [
        (tokenizer.targets(examples), [e.target for e in examples]),
        (tokenizer.sources(examples), [e.source for e in examples]),
    ]:
        assert [tokenizer.text(row[1:]) for row in rows] == texts
        assert not any(UNK_ID in row for row in rows)


def test_a_source_begins_with_its_language_and_a_target_with_bos(task):
    examples = every_language(task.split.test[:1])
    sources, targets = task.tokenizer.sources(examples), task.tokenizer.targets(examples)
    assert [task.tokenizer.labels(row[:1]) for row in sources] == [[f"<{c}>"] for c in LANGUAGES]
    assert all(row[0] == BOS_ID and row[-1] == EOS_ID for row in targets)
    assert len({tuple(row[1:]) for row in sources}) == 1  # the same English for every language


@pytest.mark.parametrize(
    ("language", "expected"),
    [("zh", ["19", "87", "10", "3"]), ("hu", ["19", "87", "3"]), ("hi", ["3", "19", "87"])],
)
def test_numbers_are_cut_into_pairs_of_digits(task, language, expected):
    (row,) = task.tokenizer.targets([make_example(datetime.date(1987, 10, 3), language)])
    digits = [label for label in task.tokenizer.labels(row) if any(c.isdigit() for c in label)]
    assert digits == expected


def test_the_language_decides_the_target_alone(task):
    tokens = {tuple(row) for row in task.tokenizer.targets(every_language(task.split.test[:1]))}
    assert len(tokens) == len(LANGUAGES)


def test_a_saved_tokenizer_is_the_same(task, tmp_path):
    examples = every_language(task.split.test[:2])
    task.tokenizer.save(tmp_path / "t.json")
    loaded = DateTokenizer.load(tmp_path / "t.json")
    assert loaded.sources(examples) == task.tokenizer.sources(examples)
    assert loaded.targets(examples) == task.tokenizer.targets(examples)


def test_pad_batch():
    padded = pad_batch([[5, 6, 7], [8], []])
    assert padded.tolist() == [[5, 6, 7], [8, PAD_ID, PAD_ID], [PAD_ID] * 3]
    assert padded.dtype == torch.int64
    assert pad_batch([]).shape == (0, 0)


def test_batches_hold_every_example_once_with_little_padding(task):
    examples = sample_examples(task.split.train, 1000, random.Random(1))
    batches = list(bucketed_batches(examples, task.tokenizer, 32, random.Random(2)))
    found = [
        (tuple(task.tokenizer.trimmed(s)), tuple(task.tokenizer.trimmed(t)))
        for batch in batches
        for s, t in zip(batch.source.tolist(), batch.target.tolist(), strict=True)
    ]
    sources, targets = task.tokenizer.sources(examples), task.tokenizer.targets(examples)
    expected = [(tuple(s[:-1]), tuple(t[:-1])) for s, t in zip(sources, targets, strict=True)]
    assert sorted(found) == sorted(expected)
    total = sum(x.numel() for batch in batches for x in batch)
    padding = sum(int((x == PAD_ID).sum()) for batch in batches for x in batch)
    assert padding < 0.1 * total


# --- training and translating ---


def test_training_lowers_the_loss_and_repeats_itself(task):
    runs = [train(task, TINY) for _ in range(2)]
    losses = runs[0][1].losses
    assert len(losses) == TINY.max_steps
    assert sum(losses[-3:]) < sum(losses[:3]) - 0.5
    assert losses == runs[1][1].losses
    states = [translator.model.state_dict() for translator, _ in runs]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_training_reports_steps_rates_and_validations(task):
    steps, scores = [], []
    _, history = train(
        task,
        TINY,
        on_step=lambda history: steps.append(history.steps),
        on_validation=lambda history, score: scores.append((history.steps, score.dates)),
    )
    assert steps == list(range(1, 11))
    assert scores == [(5, 1), (10, 2)]  # the last one decides, on all validation dates
    assert [validation.step for validation in history.validations] == [5, 10]
    # warm-up over 4 steps; "good enough" at step 5; then a fall over 3 steps
    shares = [0.25, 0.5, 0.75, 1.0, 1.0, 2 / 3, 1 / 3, 0.05, 0.05, 0.05]
    assert history.learning_rates == pytest.approx([TINY.learning_rate * s for s in shares])
    assert 160 * 15 < history.tokens < 160 * 25  # pairs of steps, tokens of a pair


def a_score(dates=10, right=10, translations=100, mistakes=0):
    return Score(dates, right, translations, (None,) * mistakes)


def test_the_rate_rises_holds_and_falls_once_the_model_is_good_enough():
    schedule = Schedule(Recipe(learning_rate=1.0, warmup=4, good_enough=0.9, decay=10, goal=1.0))
    assert [schedule.rate(step) for step in (1, 2, 4, 5, 1000)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    assert not schedule.finished(3, a_score())  # still rising
    assert not schedule.finished(20, a_score(mistakes=11))
    assert schedule.rate(1000) == 1.0
    assert not schedule.finished(30, a_score(mistakes=10))  # good enough: the fall begins
    assert [schedule.rate(30 + n) for n in (1, 5, 10, 50)] == pytest.approx([0.9, 0.5, 0.05, 0.05])
    assert not schedule.finished(39, a_score())  # the rate is still falling
    assert schedule.finished(40, a_score())


def test_a_goal_that_is_missed_raises_the_rate_again():
    schedule = Schedule(Recipe(learning_rate=1.0, warmup=4, good_enough=0.9, decay=10, goal=1.0))
    schedule.finished(30, a_score())
    assert not schedule.finished(40, a_score(right=9, mistakes=1))
    assert schedule.rate(41) == 1.0
    assert not schedule.finished(50, a_score())
    assert schedule.rate(55) == pytest.approx(0.5)
    assert schedule.finished(60, a_score())


def test_the_floor_of_the_loss_is_that_of_a_perfect_model():
    from attnkit.models import label_smoothed_cross_entropy

    recipe, size = Recipe(smoothing=0.1), 50
    wanted = torch.full((size,), 0.1 / size)
    wanted[7] += 0.9
    loss = label_smoothed_cross_entropy(wanted.log()[None], torch.tensor([7]), 0.1)
    assert recipe.loss_floor(size) == pytest.approx(float(loss), rel=1e-5)
    assert Recipe(smoothing=0.0).loss_floor(size) == 0.0


class Echo(Translator):
    """Right but for one translation of one date and two of another."""

    def translate(self, examples, **_):
        bad = {(0, "de"), (1, "de"), (1, "zh")}
        days = sorted({example.day for example in examples})
        return [e.target + "!" * ((days.index(e.day), e.language) in bad) for e in examples]


def test_a_date_is_right_only_if_it_is_right_in_every_language(task, translator):
    echo = Echo(translator.model, task.tokenizer)
    score = echo.score(every_language(task.split.test[:10]))
    assert (score.dates, score.right, score.translations) == (10, 8, 140)
    assert len(score.mistakes) == 3
    assert all(m.found == m.example.target + "!" for m in score.mistakes)
    assert score.share == 0.8
    assert score.translations_share == pytest.approx(137 / 140)


def test_translations_do_not_depend_on_the_batch(task, translator):
    examples = every_language(task.split.test[:1])
    together = translator.translate(examples)
    assert translator.translate(examples, batch_size=5) == together


def test_cache_and_no_cache_generate_the_same(task, translator):
    check = generation_speeds(translator, every_language(task.split.test[:1]), rounds=1)
    assert (check.rows, check.different) == (2 * len(LANGUAGES), 0)
    assert [(s.num_beams, s.use_cache) for s in check.speeds] == [
        (1, True),
        (1, False),
        (4, True),
        (4, False),
    ]
    assert all(s.tokens_per_second > 0 for s in check.speeds)


def test_an_alignment_is_a_distribution_over_the_source(task, translator):
    examples = every_language(task.split.test[:2])
    every = alignments(translator, examples)
    sources = task.tokenizer.sources(examples)
    assert [found.example for found in every] == examples
    for found, source in zip(every, sources, strict=True):
        assert found.columns == task.tokenizer.labels(source)
        assert found.weights.shape == (len(found.rows), len(found.columns))
        torch.testing.assert_close(found.weights.sum(1), torch.ones(len(found.rows)))


def test_an_alignment_does_not_depend_on_the_batch(task, translator):
    examples = every_language(task.split.test[:1])[::4]
    for together, alone in zip(
        alignments(translator, examples),
        (alignments(translator, [example])[0] for example in examples),
        strict=True,
    ):
        assert together.rows == alone.rows
        torch.testing.assert_close(together.weights, alone.weights)


def test_a_saved_translator_translates_the_same(task, translator, tmp_path):
    translator.save_pretrained(tmp_path / "model")
    loaded = Translator.from_pretrained(tmp_path / "model")
    examples = every_language(task.split.test[:1])
    assert loaded.translate(examples) == translator.translate(examples)
