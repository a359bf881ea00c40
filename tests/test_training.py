import random
from dataclasses import replace

import pytest
import torch
from torch import nn

from attnkit.models import Seq2SeqConfig, Seq2SeqTransformer, label_smoothed_cross_entropy
from attnkit.recipes import checkpoint
from attnkit.recipes.batches import Examples
from attnkit.recipes.options import TrainingOptions, UsageError
from attnkit.recipes.training import History, Task, Validation, rate, train

OPTIONS = TrainingOptions(
    steps=12,
    batch_tokens=64,
    warmup=3,
    learning_rate=3e-3,
    smoothing=0.1,
    validate_every=4,
    checkpoint_every=5,
)


def copying(count=40, seed=0):
    """Rows to copy, as an encoder-decoder sees them."""
    rng = random.Random(seed)
    rows = [[rng.randrange(4, 20) for _ in range(rng.randrange(1, 9))] for _ in range(count)]
    return Examples(([[*row, 2] for row in rows], [[1, *row, 2] for row in rows]))


TASK = Task(
    copying(),
    copying(10, seed=1),
    logits=lambda model, batch: model(batch[0], batch[1][:, :-1]),
    targets=lambda batch: batch[1][:, 1:],
    ignore_index=0,
)


def a_model(dropout=0.0):
    torch.manual_seed(1)
    return Seq2SeqTransformer(
        Seq2SeqConfig(20, 20, 16, 2, 1, 1, 32, dropout=dropout, max_length=16, norm_first=True)
    )


def same(one, other):
    other = other.state_dict()
    return all(torch.equal(value, other[name]) for name, value in one.state_dict().items())


def test_training_learns_and_repeats_itself_to_the_bit():
    models = [a_model(0.1), a_model(0.1)]
    histories = [train(model, TASK, replace(OPTIONS, steps=40)) for model in models]
    losses = histories[0].losses
    assert len(losses) == 40
    assert sum(losses[-5:]) < sum(losses[:5]) - 1
    assert losses == histories[1].losses
    assert same(*models)
    other = train(a_model(0.1), TASK, replace(OPTIONS, seed=1))
    assert other.losses[:12] != losses[:12]


@pytest.mark.parametrize("stop", [1, 5, 7, 11])
def test_a_resumed_run_has_the_bits_of_an_undisturbed_one(tmp_path, stop):
    class Stop(Exception):
        pass

    def stopping(history):
        if history.steps == stop:
            raise Stop

    whole, model = a_model(0.2), a_model(0.2)
    wanted = train(whole, TASK, OPTIONS)
    with pytest.raises(Stop):
        train(model, TASK, OPTIONS, folder=tmp_path, on_step=stopping)
    assert (tmp_path / checkpoint.FILE).exists() == (stop > 5)
    model = a_model(0.2)
    torch.manual_seed(99)  # what was drawn in between does not matter
    steps = []
    found = train(
        model,
        TASK,
        replace(OPTIONS, resume=True),
        folder=tmp_path,
        on_step=lambda history: steps.append(history.steps),
    )
    assert steps[0] == 1 + 5 * ((stop - 1) // 5)
    assert found.losses == wanted.losses
    assert found.learning_rates == wanted.learning_rates
    assert found.validations == wanted.validations
    assert same(whole, model)


def test_a_finished_run_that_is_resumed_does_nothing_more(tmp_path):
    model, again = a_model(), a_model()
    train(model, TASK, OPTIONS, folder=tmp_path)
    history = train(
        again, TASK, replace(OPTIONS, resume=True), folder=tmp_path, on_step=pytest.fail
    )
    assert history.steps == 12
    assert same(model, again)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 5}, "seed is 5, but .* was written with 0"),
        ({"learning_rate": 1.0}, r"learning_rate is 1\.0, but .* was written with 0\.003"),
        ({"task": replace(TASK, training=copying(41))}, "the training examples are not those"),
    ],
)
def test_a_run_is_not_resumed_as_another(tmp_path, change, message):
    train(a_model(), TASK, OPTIONS, folder=tmp_path)
    change = dict(change)
    task = change.pop("task", TASK)
    with pytest.raises(UsageError, match=message):
        train(a_model(), task, replace(OPTIONS, resume=True, **change), folder=tmp_path)


@pytest.mark.parametrize("parts", [2, 3, 50])
def test_accumulation_equals_one_big_batch(parts):
    # 50 parts are more than a batch has examples: some are empty
    models = [a_model().double(), a_model().double()]
    whole = train(models[0], TASK, OPTIONS)
    split = train(models[1], TASK, replace(OPTIONS, accumulate=parts))
    assert split.losses == pytest.approx(whole.losses, rel=1e-9)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-8)


class Scripted(nn.Module):
    """Logits of two classes whose quality follows a plan: each forward in eval mode is a line."""

    def __init__(self, plan):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, 2))
        self.register_buffer("validations", torch.zeros(1))
        self.plan = plan

    def forward(self, tokens):
        logits = self.weight.expand(tokens.shape[0], 2)
        if self.training:
            return logits
        quality = self.plan[int(self.validations)]
        self.validations += 1
        return logits.detach() * 0 + torch.tensor([quality, 0.0])


def scripted(plan, **changes):
    examples = Examples(([[1]] * 4, [0] * 4))
    task = Task(examples, examples, lambda m, b: m(b[0]), lambda b: b[1], ignore_index=-100)
    model = Scripted(plan)
    options = replace(OPTIONS, steps=20, validate_every=2, **changes)
    return model, train(model, task, options)


def test_training_stops_when_patience_ends_with_the_best_weights():
    model, history = scripted([0.0, 1.0, 0.5, 0.7, 9.0], patience=2)
    assert [v.step for v in history.validations] == [2, 4, 6, 8]
    assert history.steps == 8
    assert history.best.step == 4
    assert int(model.validations) == 2  # the state after the second validation
    assert not model.training


def test_without_patience_training_goes_on():
    _, history = scripted([1.0] + [0.0] * 9)
    assert history.steps == 20
    assert history.stale == 9
    assert [v.accuracy for v in history.validations] == [1.0] * 10


def test_a_validation_is_the_mean_over_all_targets():
    history = train(a_model(), TASK, replace(OPTIONS, steps=1, batch_tokens=7))
    model = a_model()
    options = replace(OPTIONS, steps=1, batch_tokens=7)
    train(model, TASK, options)
    source, target = TASK.validation.batch(range(10))
    with torch.no_grad():
        log_p = model(source, target[:, :-1]).log_softmax(-1)
    real = target[:, 1:] != 0
    loss = -log_p.gather(-1, target[:, 1:, None])[..., 0][real].mean()
    right = (log_p.argmax(-1) == target[:, 1:])[real].float().mean()
    (found,) = history.validations
    assert found.loss == pytest.approx(float(loss), rel=1e-5)
    assert found.accuracy == pytest.approx(float(right))


def test_bf16_is_autocast_and_weights_stay_fp32():
    model = a_model()
    dtypes = []
    linear = next(m for m in model.modules() if isinstance(m, nn.Linear))
    linear.register_forward_hook(lambda _module, _inputs, output: dtypes.append(output.dtype))
    full = train(a_model(), TASK, OPTIONS)
    half = train(model, TASK, replace(OPTIONS, precision="bf16"))
    assert torch.bfloat16 in dtypes
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert half.losses != full.losses
    assert half.losses == pytest.approx(full.losses, rel=0.02)


def test_gradients_are_clipped():
    def moved(clip):
        torch.manual_seed(0)
        model = nn.Sequential(nn.EmbeddingBag(20, 8), nn.Linear(8, 3))
        examples = Examples(([[i] for i in range(20)], [i % 3 for i in range(20)]))
        task = Task(examples, examples, lambda m, b: m(b[0]) * 100, lambda b: b[1], -100)
        norms = []
        step = torch.optim.AdamW.step

        def measuring(optimizer, *args, **kwargs):
            grads = [p.grad.norm() for g in optimizer.param_groups for p in g["params"]]
            norms.append(float(torch.stack(grads).norm()))
            return step(optimizer, *args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.optim.AdamW, "step", measuring)
            train(model, task, replace(OPTIONS, steps=3, clip=clip))
        return norms

    assert all(norm <= 1.0 + 1e-4 for norm in moved(1.0))
    assert max(moved(0.0)) > 2.0


@pytest.mark.parametrize("schedule", ["cosine", "inverse-sqrt"])
def test_the_rate_rises_and_falls(schedule):
    options = replace(OPTIONS, schedule=schedule, warmup=4, steps=20, learning_rate=1.0)
    rates = [rate(options, step) for step in range(1, 21)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert rates[-1] == pytest.approx(0.0 if schedule == "cosine" else (4 / 20) ** 0.5)
    history = train(a_model(), TASK, options)
    assert history.learning_rates == rates


def test_a_warm_up_longer_than_the_run_only_rises():
    options = replace(OPTIONS, warmup=100, steps=10, learning_rate=1.0)
    assert [rate(options, step) for step in (1, 10)] == [0.01, 0.1]


def test_a_loss_that_is_not_finite_stops_the_run_without_a_checkpoint(tmp_path):
    model = a_model()
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    with pytest.raises(FloatingPointError, match=r"loss of step 1 is nan: .* than 0\.003"):
        train(model, TASK, replace(OPTIONS, checkpoint_every=1), folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["training", "validation"])
def test_nothing_to_learn_from_is_refused(name):
    with pytest.raises(UsageError, match=f"there are no {name} examples"):
        train(a_model(), replace(TASK, **{name: Examples(([], []))}), OPTIONS)


def test_the_best_validation_is_the_earliest_of_the_lowest():
    history = History(
        validations=[Validation(n, x, 0.0) for n, x in ((1, 3.0), (2, 2.0), (3, 2.0))]
    )
    assert history.best.step == 2
    assert history.stale == 1
    assert History().best is None
    assert History().stale == 0


def test_the_sum_of_losses_is_their_mean_times_the_targets():
    logits, targets = torch.randn(4, 5, 7), torch.randint(0, 7, (4, 5))
    targets[0, :3] = 0
    count = int((targets != 0).sum())
    mean, total = (
        label_smoothed_cross_entropy(logits, targets, 0.1, 0, reduction=reduction)
        for reduction in ("mean", "sum")
    )
    torch.testing.assert_close(total, mean * count)
    with pytest.raises(ValueError, match="reduction is 'max', expected 'mean' or 'sum'"):
        label_smoothed_cross_entropy(logits, targets, reduction="max")
