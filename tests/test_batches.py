import random

import pytest
import torch

from attnkit.recipes.batches import Examples, Position, batches_from, pad_batch, token_batches


def some_lengths(count=500, longest=40):
    rng = random.Random(0)
    return [rng.randint(1, longest) for _ in range(count)]


@pytest.mark.parametrize("rng", [None, random.Random(3)])
def test_batches_hold_every_example_once_within_their_tokens_and_with_little_padding(rng):
    lengths = some_lengths()
    batches = token_batches(lengths, 200, rng)
    assert sorted(i for batch in batches for i in batch) == list(range(500))
    sizes = [len(batch) * max(lengths[i] for i in batch) for batch in batches]
    assert max(sizes) <= 200
    assert sum(sizes) < 1.15 * sum(lengths)


def test_a_long_example_is_a_batch_of_its_own():
    assert sorted(token_batches([3, 50, 4], 10, random.Random(0))) == [[0, 2], [1]]


def test_random_batches_differ_from_pass_to_pass_and_mix_lengths():
    lengths = some_lengths(3000)
    order = batches_from(Position(), lengths, 100, seed=1)
    count = len(token_batches(lengths, 100, random.Random(0)))
    first, second = ([next(order)[1] for _ in range(count)] for _ in range(2))
    assert first != second
    longest = [max(lengths[i] for i in batch) for batch in first]
    assert longest != sorted(longest)


def test_the_order_goes_on_from_any_position():
    lengths = some_lengths(60)
    whole = batches_from(Position(), lengths, 100, seed=1)
    seen = [next(whole) for _ in range(40)]
    assert seen[-1][0].epoch > 1
    for after in (0, 7, 25):
        rest = batches_from(seen[after][0], lengths, 100, seed=1)
        assert [next(rest) for _ in range(39 - after)] == seen[after + 1 :]
    other = batches_from(Position(), lengths, 100, seed=2)
    assert next(other)[1] != seen[0][1]


def test_examples_become_padded_tensors():
    examples = Examples(([[5, 6, 7], [8]], [[1], [2, 3]], [4, 9]), pad_id=0)
    rows, others, labels = examples.batch([1, 0])
    assert rows.tolist() == [[8, 0, 0], [5, 6, 7]]
    assert others.tolist() == [[2, 3], [1, 0]]
    assert labels.tolist() == [9, 4]
    assert {column.dtype for column in (rows, others, labels)} == {torch.int64}
    assert examples.lengths == [3, 2]
    assert len(examples) == 2
    assert pad_batch([], 0).shape == (0, 0)


def test_columns_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match=r"columns have \[2, 1\] rows"):
        Examples(([[1], [2]], [3]))


def test_the_fingerprint_tells_data_apart():
    prints = [Examples((rows,)).fingerprint() for rows in ([[1, 2]], [[1, 3]], [[1], [2]])]
    assert len(set(prints)) == 3
    assert Examples(([(1, 2)],)).fingerprint() == Examples(([(1, 2)],)).fingerprint()
