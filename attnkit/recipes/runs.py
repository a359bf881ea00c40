"""A run of a recipe: its folder, its processes, and what it shows while it goes on.

The folder holds checkpoint.safetensors (to resume), model/ (weights, config and tokenizer, as
``attnkit generate`` reads them), curve.csv and curve.png.
"""

from __future__ import annotations

import contextlib
import csv
import io
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from attnkit import viz
from attnkit.models.pretrained import PretrainedModel
from attnkit.recipes import checkpoint, processes, subwords
from attnkit.recipes.options import TrainingOptions, UsageError
from attnkit.recipes.processes import Processes
from attnkit.recipes.subwords import Subwords
from attnkit.recipes.training import History, Task, train

if TYPE_CHECKING:
    from rich.console import Console

MODEL = "model"

Model = TypeVar("Model", bound=PretrainedModel)


@dataclass(frozen=True)
class Run:
    """One run: the options that it was asked for with, the processes that share it, a console."""

    options: TrainingOptions
    processes: Processes
    console: Console

    @property
    def model_folder(self) -> Path:
        """Where the trained model is."""
        return self.options.output / MODEL

    def say(self, text: str, **style: Any) -> None:
        """Print ``text``, from the first process."""
        if self.processes.first:
            self.console.print(text, markup=False, **style)

    def subwords(self, texts: Iterable[str], vocab_size: int) -> Subwords:
        """Subwords learnt from ``texts`` by the first process, or those of the resumed run."""
        known = self.options.resume and (self.model_folder / subwords.FILE).is_file()
        if self.processes.first and not known:
            Subwords.train(texts, vocab_size).save(self.model_folder)
        self.processes.wait()
        return Subwords.load(self.model_folder)

    def build(self, make: Callable[[], Model]) -> Model:
        """A new model, the same in every process and for every call with the same seed."""
        torch.manual_seed(self.options.seed)
        return make()

    def train(self, model: PretrainedModel, task: Task) -> History:
        """Train ``model``, write it and its curve, and say how it went."""
        count = sum(parameter.numel() for parameter in model.parameters())
        self.say(
            f"{len(task.training)} examples to train on, {len(task.validation)} to validate with; "
            f"{count / 1e6:.2f} million parameters; {self.processes.device}"
        )
        with self._showing() as show:

            def on_validation(history: History) -> None:
                latest = history.validations[-1]
                self.say(
                    f"step {latest.step:>6}  validation loss {latest.loss:.4f}  "
                    f"right {100 * latest.accuracy:5.1f}%  {history.seconds:6.0f} s"
                )
                write_curve(history, self.options.output / "curve.csv")

            history = train(
                model,
                task,
                self.options,
                processes=self.processes,
                folder=self.options.output,
                on_step=show,
                on_validation=on_validation,
            )
        if self.processes.first:
            model.save_pretrained(self.model_folder)
            self._write_pictures(history)
        self.processes.wait()
        best = history.best
        assert best is not None  # the last step is always validated
        self.say(f"{history.steps} steps in {history.seconds:.0f} s; the best was step {best.step}")
        return history

    def _write_pictures(self, history: History) -> None:
        write_curve(history, self.options.output / "curve.csv")
        viz.training_curves(
            history.losses,
            history.learning_rates,
            {"validation": [(v.step, v.accuracy) for v in history.validations]},
            self.options.output / "curve.png",
            validation_losses=[(v.step, v.loss) for v in history.validations],
            share_label="targets right (%)",
        )

    @contextmanager
    def _showing(self) -> Iterator[Callable[[History], object] | None]:
        """What to call after each step: a bar on a terminal, nothing elsewhere."""
        if not (self.processes.first and self.console.is_terminal):
            yield None
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeRemainingColumn as Remaining

        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), Remaining())
        with Progress(*columns, console=self.console, transient=True) as progress:
            bar = progress.add_task("", total=self.options.steps)
            yield lambda history: progress.update(
                bar, completed=history.steps, description=f"loss {history.losses[-1]:.3f}"
            )


@contextmanager
def started(options: TrainingOptions, console: Console) -> Iterator[Run]:
    """Claim the folder and join the processes, for as long as the run goes on.

    Raises:
        UsageError: the folder holds a run, and the options neither resume nor overwrite it.
    """
    with processes.joined(options.device) as together:
        if together.first:
            claim(options)
        together.wait()
        yield Run(options, together, console)


def claim(options: TrainingOptions) -> None:
    """Make the folder ready for the run; see :func:`started`."""
    path = options.output / checkpoint.FILE
    if options.output.exists() and not options.output.is_dir():
        raise UsageError(f"output {options.output} is a file, expected a folder")
    if path.exists() and not options.resume:
        if not options.overwrite:
            raise UsageError(
                f"output {options.output} holds a run already: --resume goes on with it, "
                "--overwrite replaces it, and --output names another folder"
            )
        path.unlink()
    if not options.resume:
        with contextlib.suppress(FileNotFoundError):
            (options.output / MODEL / subwords.FILE).unlink()
    options.output.mkdir(parents=True, exist_ok=True)


def write_curve(history: History, path: Path) -> None:
    """A row for each step, as comma-separated values; the file is replaced whole."""
    validations = {v.step: v for v in history.validations}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["step", "learning_rate", "loss", "validation_loss", "validation_accuracy"])
    pairs = zip(history.learning_rates, history.losses, strict=True)
    for step, (rate, loss) in enumerate(pairs, start=1):
        found = validations.get(step)
        writer.writerow([step, rate, loss, *(("", "") if found is None else found[1:])])
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text.getvalue(), encoding="utf-8")
    temporary.replace(path)
