"""Kill a small training with SIGKILL, at random times and inside the writing of a checkpoint.

    python tests/killed_training.py FOLDER POINTS

After each kill the checkpoint that is there is loaded and the run goes on until it is killed again
or ends; the final weights must have the bits of a run that nobody disturbed.  One process imports
torch and forks all others.  Prints a line of JSON; the status is 1 if bits differed, or if no run
was killed at one of the places, which would show nothing of it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from attnkit.recipes import checkpoint
from attnkit.recipes.batches import Examples
from attnkit.recipes.options import TrainingOptions
from attnkit.recipes.training import Task, train

STEPS = 24
PLACES = ("save_file", "half", "sync", "replace", "replaced")
"""Inside a write: before it, with half of the file there, before the sync, the rename, after it."""


def train_once(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a tiny model with dropout, after a run that goes on from what is there."""
    rng = random.Random(0)
    rows = [[rng.randrange(1, 12) for _ in range(rng.randrange(2, 9))] for _ in range(50)]
    examples = Examples((rows, [sum(row) % 3 for row in rows]))
    torch.manual_seed(1)
    model = nn.Sequential(nn.EmbeddingBag(12, 16), nn.Dropout(0.2), nn.Linear(16, 3))
    task = Task(examples, examples, lambda m, b: m(b[0]), lambda b: b[1], ignore_index=-100)
    options = TrainingOptions(
        steps=STEPS,
        batch_tokens=40,
        warmup=3,
        learning_rate=1e-2,
        validate_every=4,
        checkpoint_every=2,
        resume=True,
    )
    train(model, task, options, folder=folder)
    return model.state_dict()


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(place: str, write: int) -> None:
    """Make this process kill itself at ``place`` of its write number ``write``."""
    save_file, replace = checkpoint.save_file, os.replace
    writes = 0

    def saving(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
        nonlocal writes
        writes += 1
        if writes == write and place == "save_file":
            die()
        save_file(tensors, path, metadata)
        if writes == write and place == "half":
            os.truncate(path, path.stat().st_size // 2)
            die()
        if writes == write and place == "sync":
            os.fsync = die  # type: ignore[assignment]

    def replacing(source: Path, target: Path) -> None:
        if writes == write and place == "replace":
            die()
        replace(source, target)
        if writes == write and place == "replaced":
            die()

    checkpoint.save_file, os.replace = saving, replacing  # type: ignore[assignment]


def forked(work: Callable[[], object], delay: float | None = None) -> int:
    """Do ``work`` in a child, kill it after ``delay``; the signal that ended it, or 0."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
    if delay is not None:
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == 0, "a run failed"
        return 0
    return os.WTERMSIG(status)


def main(folder: Path, points: int) -> int:
    torch.set_num_threads(1)
    began = time.perf_counter()
    wanted = train_once(folder / "undisturbed")
    whole = time.perf_counter() - began
    rng = random.Random(points)
    kills = {"time": 0, **dict.fromkeys(PLACES, 0)}
    resumed = wrong = 0
    for point in range(points):
        own = folder / f"run{point}"
        path = own / checkpoint.FILE
        for attempt in range(2):  # killed once, and again while it goes on
            place = (*PLACES, "time")[(point + attempt) % (len(PLACES) + 1)]
            if place == "time":
                ended = forked(lambda own=own: train_once(own), rng.uniform(0.0, whole))
            else:
                arming = (place, rng.randint(1, 5))
                ended = forked(lambda own=own, arming=arming: (arm(*arming), train_once(own)))
            kills[place] += ended == signal.SIGKILL
            if path.exists():
                resumed += checkpoint.load(path).values["step"] > 0
        found = train_once(own)
        wrong += not all(torch.equal(found[name], wanted[name]) for name in wanted)
    print(json.dumps({"points": points, "kills": kills, "resumed": resumed, "wrong": wrong}))
    return int(wrong > 0 or not all(kills[place] for place in PLACES))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
