"""What the recipes train on: texts, their parts, and what is counted in them."""

import math
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch

pytest.importorskip("babel")
pytest.importorskip("tokenizers")

from attnkit.recipes import classify, language_model, texts, translate
from attnkit.recipes.ngram import NGram
from attnkit.recipes.options import UsageError
from attnkit.recipes.subwords import BOS_ID, EOS_ID, PAD_ID, Subwords

# --- subwords ---


@pytest.fixture(scope="module")
def subwords():
    return Subwords.train(["the cat sat on the mat in 1987, and the dog too"] * 3, 300)


@pytest.mark.parametrize(
    "text", ["the cat", "  two  spaces\n\tand a tab ", "日本語 शनिवार 🙂", "", "<eos>"]
)
def test_every_text_survives_the_round_trip(subwords, text):
    (row,) = subwords.encode([text])
    if text != "<eos>":  # the name of a special token is that token
        assert subwords.decode(row) == text
    assert subwords.decode([BOS_ID, *row, EOS_ID, PAD_ID]) == subwords.decode(row)


def test_words_are_learnt_and_numbers_cut_into_pairs(subwords):
    assert len(subwords.encode([" the"])[0]) == 1
    (year,), (pair,) = subwords.encode([" 1987"]), subwords.encode([" 19"])
    assert year[: len(pair)] == pair
    assert len(year) <= 4


def test_saved_subwords_are_the_same(subwords, tmp_path):
    subwords.save(tmp_path / "new")
    loaded = Subwords.load(tmp_path / "new")
    assert loaded.vocab_size == subwords.vocab_size <= 300
    assert loaded.encode(["the mat"]) == subwords.encode(["the mat"])


def test_a_vocabulary_without_room_for_the_bytes_is_refused():
    with pytest.raises(ValueError, match="vocab_size is 258, expected 259 or more"):
        Subwords.train(["a"], 258)


# --- reading and parting texts ---


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"--text .*a\.txt is not a file"),
        (b" \n", r"--text .*a\.txt is empty"),
        (b"\xff", "is not UTF-8"),
    ],
)
def test_a_text_that_cannot_be_read_is_refused_by_name(tmp_path, content, message):
    path = tmp_path / "a.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        texts.read_lines(path, "--text")


def test_lines_end_at_newlines_only(tmp_path):
    (tmp_path / "a").write_text("one\u2028still \r\ntwo\n\nfour\n", encoding="utf-8", newline="")
    assert texts.read_lines(tmp_path / "a", "a") == ["one\u2028still", "two", "", "four"]


def test_parts_are_disjoint_and_keep_equal_keys_together():
    keys = [i // 3 for i in range(300)]
    parts = texts.parted(keys, [1] * 300, seed=1, share=0.1)
    assert sorted(i for part in parts for i in part) == list(range(300))
    seen = [{keys[i] for i in part} for part in parts]
    assert sum(map(len, seen)) == len(set.union(*seen))
    assert [len(part) for part in parts] == [240, 30, 30]
    assert texts.parted(keys, [1] * 300, seed=1, share=0.1) == parts
    assert texts.parted(keys, [1] * 300, seed=2, share=0.1) != parts


def test_no_part_is_ever_empty():
    assert [len(p) for p in texts.parted("abc", [1, 100, 1], 0, 0.4)] == [1, 1, 1]
    assert all(texts.parted(range(10), [1] * 10, 0, 0.0))
    with pytest.raises(UsageError, match="there are 2 different examples, expected at least 3"):
        texts.parted("aab", [1, 1, 1], 0, 0.1)


# --- the n-gram model ---


def test_probabilities_sum_to_one_after_any_history():
    rng = random.Random(0)
    documents = [[rng.randrange(12) for _ in range(30)] for _ in range(5)]
    model = NGram(documents, 13, order=4)  # token 12 never occurs
    for history in ([], [3], documents[0][:3], documents[1][4:12], [12, 12, 12], [0, 12]):
        assert sum(model.probability(history, w) for w in range(13)) == pytest.approx(1.0)
        assert model.probability(history, 12) > 0


def test_a_bigram_model_by_hand():
    # a b a b a c: bigrams ab 2, ba 2, ac 1; the start a counts as it is
    model = NGram([[0, 1, 0, 1, 0, 2]], 3, order=2)
    # D of the bigrams: n1 = 1 (ac), n2 = 2 (ab, ba): 1 / 5.  Unigram counts are the different words
    # before: a 1 (b) + 1 (the start), b 1 (a), c 1 (a): n1 = 2, n2 = 1, D = 2 / 4
    unigram = [(n - 0.5 + 0.5 * 3 / 3) / 4 for n in (2, 1, 1)]
    assert [model.probability([], w) for w in range(3)] == pytest.approx(unigram)
    after_a = [(max(n - 0.2, 0) + 0.2 * 2 * u) / 3 for n, u in zip((0, 2, 1), unigram, strict=True)]
    assert [model.probability([0], w) for w in range(3)] == pytest.approx(after_a)


def test_perplexity_is_that_of_the_tokens_after_the_first():
    model = NGram([[0, 1, 0, 1, 0, 2]], 3, order=2)
    p = model.probability([0], 2), model.probability([0, 2], 1)
    assert model.perplexity([[0, 2, 1]]) == pytest.approx(math.exp(-sum(map(math.log, p)) / 2))
    rng = random.Random(0)
    noise = [[rng.randrange(8) for _ in range(2000)]]
    assert NGram(noise, 8).perplexity([[rng.randrange(8) for _ in range(500)]]) > 7.9
    cycle = [[i % 8 for i in range(200)]]
    assert NGram(cycle, 8).perplexity(cycle) < 1.1
    with pytest.raises(ValueError, match="order is 0"):
        NGram(cycle, 8, order=0)


# --- language models ---


@pytest.mark.parametrize(("context", "stride"), [(4, 4), (4, 2), (5, 2), (50, 25)])
@pytest.mark.parametrize("length", [2, 3, 5, 9, 20, 21])
def test_every_token_but_the_first_is_a_target_once(context, stride, length):
    document = list(range(100, 100 + length))
    found = language_model.windows([document], context, stride)
    counted = []
    for row, targets in zip(*found.columns, strict=True):
        assert len(row) == len(targets) <= context
        for token, target in zip(row, targets, strict=True):
            if target != PAD_ID:
                assert target == token + 1
                counted.append(target)
        assert row == list(range(row[0], row[0] + len(row)))
    assert counted == document[1:]


def test_overlapping_windows_count_twice_where_asked():
    document = list(range(100, 111))
    found = language_model.windows([document], 4, 2, overlap_counts=True)
    counts = Counter(t for targets in found.columns[1] for t in targets)
    assert set(counts) == set(document[1:])
    assert counts[105] == 2
    assert PAD_ID not in counts


def test_no_paragraph_occurs_twice():
    documents = ["a b\n\nc", "c\n\na  b\n\nd", "d"]
    assert language_model.without_repeats(documents) == ["a b\n\nc\n", "d\n"]
    default = language_model.read_documents(language_model.Options())
    assert len(default) > 50
    paragraphs = [" ".join(p.split()) for text in default for p in text.split("\n\n")]
    assert len(paragraphs) == len(set(paragraphs)) > 1000


def test_a_file_is_cut_into_documents_and_a_folder_into_its_files(tmp_path):
    lines = [f"line {i}\n" for i in range(500)]
    (tmp_path / "a.txt").write_text("".join(lines))
    options = language_model.Options(text=tmp_path / "a.txt")
    documents = language_model.read_documents(options)
    assert "".join(documents) == "".join(lines)
    assert 50 < len(documents) <= 100
    (tmp_path / "b.txt").write_text("other\n")
    assert language_model.read_documents(replace(options, text=tmp_path)) == [
        "".join(lines),
        "other\n",
    ]


def test_perplexity_is_exp_of_the_mean_loss():
    class Fixed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.logits = torch.nn.Parameter(torch.tensor([0.0, 1.0, 2.0, 3.0]))

        def forward(self, tokens):
            return self.logits.expand(*tokens.shape, 4)

    examples = language_model.windows([[1, 3, 2, 3], [1, 1]], 2, 1)
    log_p = torch.tensor([0.0, 1.0, 2.0, 3.0]).log_softmax(0)
    wanted = math.exp(-float(2 * log_p[3] + log_p[2] + log_p[1]) / 4)
    for batch_tokens in (2, 100):
        found = language_model.perplexity(Fixed(), examples, batch_tokens)
        assert found == pytest.approx(wanted)


# --- translation ---


def test_default_pairs_are_dates_that_occur_once():
    pairs = translate.date_pairs(50, seed=3)
    assert len({source.partition(": ")[2] for source, _ in pairs}) == 50
    assert len({source.partition(": ")[0] for source, _ in pairs}) > 8
    assert pairs == translate.date_pairs(50, seed=3)


def test_pairs_of_files(tmp_path):
    (tmp_path / "a").write_text("one\ntwo\n\nfour\n")
    (tmp_path / "b").write_text("eins\nzwei\ndrei\nvier\n")
    options = translate.Options(source=tmp_path / "a", target=tmp_path / "b")
    assert translate.read_pairs(options) == [("one", "eins"), ("two", "zwei"), ("four", "vier")]
    (tmp_path / "b").write_text("eins\n")
    with pytest.raises(UsageError, match=r"a has 4 lines, --target .*b has 1: expected the same"):
        translate.read_pairs(options)
    with pytest.raises(UsageError, match="source is given without target"):
        translate.Options(source=tmp_path / "a")
    with pytest.raises(UsageError, match="target is given without source"):
        translate.Options(target=tmp_path / "a")


def test_pairs_that_are_too_long_are_left_out(subwords):
    pairs = [("the", "cat"), ("x" * 30, "cat"), ("the", "y" * 30)]
    examples = translate.encoded(pairs, subwords, 10)
    assert len(examples) == 1
    (source,), (target,) = examples.columns
    assert source[-1] == EOS_ID
    assert (target[0], target[-1]) == (BOS_ID, EOS_ID)
    with pytest.raises(UsageError, match="max_length is 2, and every sentence pair is longer"):
        translate.encoded(pairs[1:], subwords, 2)


def test_translations_do_not_depend_on_the_batch(subwords):
    torch.manual_seed(0)
    options = translate.Options(d_model=16, num_heads=2, num_layers=1, d_ff=32, max_length=12)
    model = translate.build(options, subwords.vocab_size).eval()
    sources = ["the cat", "a dog too", "", "mat " * 20, "1987"]
    together = translate.translate(model, subwords, sources, num_beams=2)
    alone = [translate.translate(model, subwords, [s], num_beams=2)[0] for s in sources]
    assert together == alone


# --- classification ---


def test_no_name_belongs_to_two_languages():
    data = classify.language_names()
    names = [text.casefold() for text in data.texts]
    assert len(names) == len(set(names)) > 10_000
    counts = Counter(data.labels)
    assert len(counts) >= 20
    assert min(counts.values()) > 100
    named = dict(zip(data.texts, zip(data.labels, data.keys, strict=True), strict=True))
    assert named["Vengrija"] == ("Lithuanian", "territory HU")
    assert "Angola" not in named


def test_both_tokens_are_balanced_and_right():
    data = classify.both_tokens(0, count=2000)
    assert Counter(data.labels) == {"yes": 1000, "no": 1000}
    assert len(set(data.texts)) == 2000
    for label, text in zip(data.labels, data.texts, strict=True):
        tokens = text.split()
        assert len(tokens) == 8
        assert all(0 <= int(token) < 19 for token in tokens)
        assert (label == "yes") == ("3" in tokens and "7" in tokens)
    one = [text for label, text in zip(data.labels, data.texts, strict=True) if label == "no"]
    assert sum("3" in text.split() for text in one) > 200  # one of the two is not enough
    assert classify.both_tokens(0, 2000) == data != classify.both_tokens(1, 2000)


def test_labelled_lines(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text("good\tlike it\nbad\tno \n\ngood\ttabs\tstay\n")
    data = classify.read_data(classify.Options(data=path))
    assert data.labels == ["good", "bad", "good"]
    assert data.texts == ["like it", "no", "tabs\tstay"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("good\tyes\nno tab\n", r"line 2: 'no tab', expected a label, a tab and a text"),
        ("good\t\n", "line 1"),
        ("good\tyes\ngood\tyes, too\n", "has the label 'good' only, expected two"),
    ],
)
def test_wrong_labelled_lines_are_refused(tmp_path, content, message):
    path = tmp_path / "a.tsv"
    path.write_text(content)
    with pytest.raises(UsageError, match=message):
        classify.read_data(classify.Options(data=path))
