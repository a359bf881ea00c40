"""The training loop of all recipes: any module, any task with a cross entropy.

gradient of a step = d/dw [ sum over the batch's targets of loss ] / number of targets, clipped

The batch of a step is a function of the seed and the step alone.  It is cut into ``accumulate``
parts for each process, and sums are divided by the number of targets in all of them, so that
neither number changes what is learnt, rounding and dropout's draws aside.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from attnkit.models import cosine_factor, inverse_sqrt_factor, label_smoothed_cross_entropy
from attnkit.recipes import checkpoint
from attnkit.recipes.batches import Examples, Position, batches_from, token_batches
from attnkit.recipes.checkpoint import Checkpoint
from attnkit.recipes.options import TrainingOptions, UsageError
from attnkit.recipes.processes import Processes

Batch: TypeAlias = tuple[Tensor, ...]
# what may differ between a run and its continuation
_FREE = {
    *("output", "steps", "patience", "accumulate", "checkpoint_every"),
    *("device", "resume", "overwrite"),
}


@dataclass(frozen=True)
class Task:
    """What is learnt.

    Args:
        training, validation: the examples.
        logits: of a model and a batch of examples (`Examples.batch`): [..., V].
        targets: of such a batch: int64 [...].
        ignore_index: the target that does not count, padding.
    """

    training: Examples
    validation: Examples
    logits: Callable[[nn.Module, Batch], Tensor]
    targets: Callable[[Batch], Tensor]
    ignore_index: int


class Validation(NamedTuple):
    """After a step: nats per target of the validation examples, and the share of targets right."""

    step: int
    loss: float
    accuracy: float


@dataclass
class History:
    """What happened in training, step by step."""

    losses: list[float] = field(default_factory=list)  # of each step, nats per target
    learning_rates: list[float] = field(default_factory=list)  # of each step
    validations: list[Validation] = field(default_factory=list)
    seconds: float = 0.0  # of training, validations included, over all continuations

    @property
    def steps(self) -> int:
        """Steps done."""
        return len(self.losses)

    @property
    def best(self) -> Validation | None:
        """The validation with the lowest loss, the earliest if there are several."""
        return min(self.validations, key=lambda validation: validation.loss, default=None)

    @property
    def stale(self) -> int:
        """Validations since the best one."""
        best = self.best
        return sum(best is not None and v.step > best.step for v in self.validations)


def train(
    model: nn.Module,
    task: Task,
    options: TrainingOptions,
    *,
    processes: Processes | None = None,
    folder: Path | None = None,
    on_step: Callable[[History], object] | None = None,
    on_validation: Callable[[History], object] | None = None,
) -> History:
    """Train ``model`` in place until ``options.steps``, or until no validation gets better.

    The model ends with the weights of its best validation, in eval mode.  Called with the same
    arguments it gives the same bits, also when it was stopped and resumed in between.

    Args:
        model: on any device; it is moved to that of ``processes``.
        task: data and loss.
        options: rates, sizes and limits.
        processes: those that train together; None is this one alone.
        folder: for the checkpoint; None keeps none.
        on_step: called after each step, in the first process.
        on_validation: called after each validation, likewise.

    Raises:
        UsageError: no training or validation examples, or a checkpoint of another run.
        FloatingPointError: a loss that is not finite; no checkpoint of it is written.
    """
    for name, examples in (("training", task.training), ("validation", task.validation)):
        if not len(examples):
            raise UsageError(f"there are no {name} examples")
    processes = processes or Processes(torch.device("cpu"))
    trainer = _Trainer(model, task, options, processes)
    path = None if folder is None else folder / checkpoint.FILE
    if path is not None and options.resume and path.is_file():
        trainer.restore(checkpoint.load(path), path)
    return trainer.run(path, on_step, on_validation)


def rate(options: TrainingOptions, step: int) -> float:
    """The learning rate of a step, counted from 1."""
    if options.schedule == "inverse-sqrt":
        return options.learning_rate * inverse_sqrt_factor(step, options.warmup)
    total = max(options.steps, options.warmup + 1)
    return options.learning_rate * cosine_factor(step, options.warmup, total)


class _Trainer:
    """A run at some step: all that changes while it goes on."""

    def __init__(
        self, model: nn.Module, task: Task, options: TrainingOptions, processes: Processes
    ) -> None:
        self.task, self.options, self.processes = task, options, processes
        self.model = model.to(processes.device)
        self.parallel = processes.wrap(self.model)
        groups: list[dict[str, Any]] = [
            {"params": [p for p in model.parameters() if p.dim() > 1]},
            # biases and gains: zero is no better a guess for them than any number
            {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups,
            betas=(0.9, 0.98),
            weight_decay=options.weight_decay,
            fused=True,  # one pass over all parameters: a tenth of a step's time on a CPU
        )
        self.history = History()
        self.position = Position()
        self.best: dict[str, Tensor] = {}  # weights of the best validation
        self.lengths = task.training.lengths
        self.checks = token_batches(task.validation.lengths, options.batch_tokens)
        torch.manual_seed(options.seed + processes.rank)  # each process drops its own weights

    def run(
        self,
        path: Path | None,
        on_step: Callable[[History], object] | None,
        on_validation: Callable[[History], object] | None,
    ) -> History:
        """Go on until the end."""
        options, history = self.options, self.history
        order = batches_from(self.position, self.lengths, options.batch_tokens, options.seed)
        start = time.perf_counter() - history.seconds
        self.model.train()
        while not self.finished():
            self.position, indices = next(order)
            self.step(self.task.training.batch(indices))
            history.seconds = time.perf_counter() - start
            if self.processes.first and on_step is not None:
                on_step(history)
            if history.steps % options.validate_every == 0 or history.steps == options.steps:
                self.validate()
                history.seconds = time.perf_counter() - start
                if self.processes.first and on_validation is not None:
                    on_validation(history)
            due = history.steps % options.checkpoint_every == 0 or self.finished()
            if path is not None and due:
                self.save(path)
        self.model.load_state_dict(self.best)
        self.model.eval()
        return history

    def finished(self) -> bool:
        """Whether there is nothing left to do."""
        options = self.options
        return self.history.steps >= options.steps or 0 < options.patience <= self.history.stale

    def step(self, batch: Batch) -> None:
        """One update of the weights from this process's share of ``batch``."""
        options, processes = self.options, self.processes
        for group in self.optimizer.param_groups:
            group["lr"] = rate(options, self.history.steps + 1)
        targets = int((self.task.targets(batch) != self.task.ignore_index).sum())
        parts = options.accumulate * processes.count
        total = torch.zeros((), dtype=torch.float64, device=processes.device)
        self.optimizer.zero_grad()
        for i in range(options.accumulate):
            mine = processes.rank * options.accumulate + i
            part = tuple(column[mine::parts].to(processes.device) for column in batch)
            with self.synchronised(i == options.accumulate - 1):
                loss = self.loss(self.parallel, part, options.smoothing) / max(1, targets)
                # the wrapper takes the mean over the processes, and here the sum is meant
                (loss * processes.count).backward()
            total += loss.detach()
        value = float(processes.sum(total))
        if not math.isfinite(value):
            raise FloatingPointError(
                f"the loss of step {self.history.steps + 1} is {value}: "
                f"try a lower learning_rate than {options.learning_rate:g}"
            )
        if options.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), options.clip)
        self.optimizer.step()
        self.history.losses.append(value)
        self.history.learning_rates.append(self.optimizer.param_groups[0]["lr"])

    def synchronised(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """The processes exchange gradients in the last part of a step only."""
        if last or self.parallel is self.model:
            return contextlib.nullcontext()
        return self.parallel.no_sync()  # type: ignore[operator, no-any-return]

    def loss(self, model: nn.Module, batch: Batch, smoothing: float) -> Tensor:
        """The sum over the targets of ``batch``."""
        logits = self.logits(model, batch)
        return label_smoothed_cross_entropy(
            logits, self.task.targets(batch), smoothing, self.task.ignore_index, reduction="sum"
        )

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """In the precision that the options ask for."""
        enabled = self.options.precision == "bf16"
        with torch.autocast(self.processes.device.type, torch.bfloat16, enabled=enabled):
            return self.task.logits(model, batch)

    @torch.no_grad()
    def validate(self) -> None:
        """Measure the model, and keep its weights if it was never better."""
        device = self.processes.device
        self.model.eval()
        sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, right, targets
        for indices in self.checks[self.processes.rank :: self.processes.count]:
            batch = tuple(column.to(device) for column in self.task.validation.batch(indices))
            logits, targets = self.logits(self.model, batch), self.task.targets(batch)
            real = targets != self.task.ignore_index
            sums[0] += label_smoothed_cross_entropy(
                logits, targets, 0.0, self.task.ignore_index, reduction="sum"
            )
            sums[1] += ((logits.argmax(-1) == targets) & real).sum()
            sums[2] += real.sum()
        loss, right, count = self.processes.sum(sums).tolist()
        self.model.train()
        self.history.validations.append(
            Validation(self.history.steps, loss / max(1, count), right / max(1, count))
        )
        if self.history.stale == 0:
            self.best = checkpoint.weights(self.model)

    # --- checkpoints ---

    @functools.cached_property
    def fingerprint(self) -> int:
        """Of the training examples, which may be many."""
        return self.task.training.fingerprint()

    def save(self, path: Path) -> None:
        """Write everything that this object is, from the first process."""
        draws = self.processes.gather(checkpoint.random_state(self.processes.device))
        if self.processes.first:
            history = self.history
            curve = torch.tensor([history.losses, history.learning_rates], dtype=torch.float64)
            parts = {
                "model": self.model.state_dict(),
                "optimizer": checkpoint.optimizer_tensors(self.optimizer),
                "best": self.best,
                "random": {str(rank): state for rank, state in enumerate(draws)},
                "curve": {"loss_and_rate": curve},
            }
            tensors = {f"{part}.{n}": t for part, own in parts.items() for n, t in own.items()}
            values = {
                "step": history.steps,
                "position": self.position._asdict(),
                "validations": [validation._asdict() for validation in history.validations],
                "seconds": history.seconds,
                "options": self.options.to_json(),
                "data": self.fingerprint,
            }
            checkpoint.save(Checkpoint(tensors, values), path)
        self.processes.wait()

    def restore(self, saved: Checkpoint, path: Path) -> None:
        """Become what :meth:`save` wrote."""
        self.check(saved, path)
        self.model.load_state_dict(saved.part("model"))
        checkpoint.load_optimizer(self.optimizer, saved.part("optimizer"))
        self.best = saved.part("best")
        draws = saved.part("random")
        checkpoint.set_random_state(self.processes.device, draws[str(self.processes.rank)])
        losses, rates = saved.part("curve")["loss_and_rate"].tolist()
        validations = [Validation(**one) for one in saved.values["validations"]]
        self.history = History(losses, rates, validations, saved.values["seconds"])
        self.position = Position(**saved.values["position"])

    def check(self, saved: Checkpoint, path: Path) -> None:
        """Refuse to go on with what was another run."""
        then, now = saved.values["options"], self.options.to_json()
        for name in now.keys() - _FREE:
            if then.get(name) != now[name]:
                raise UsageError(
                    f"{name} is {now[name]!r}, but {path} was written with {then.get(name)!r}: "
                    "a run is resumed with the options that it began with"
                )
        if saved.values["data"] != self.fingerprint:
            raise UsageError(f"the training examples are not those that {path} was written with")
        count = len(saved.part("random"))
        if count != self.processes.count:
            raise UsageError(
                f"there are {self.processes.count} processes, but {path} was written by {count}"
            )
