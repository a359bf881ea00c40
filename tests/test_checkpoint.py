import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from attnkit.recipes import checkpoint
from attnkit.recipes.checkpoint import Checkpoint

SCRIPT = Path(__file__).with_name("killed_training.py")


def a_checkpoint(step=3):
    tensors = {
        "model.a": torch.full((2, 2), float(step)),
        "model.b.c": torch.arange(3),
        "x.a": None,
    }
    tensors["x.a"] = tensors["model.a"]  # shared, as tied weights are
    return Checkpoint(tensors, {"step": step, "list": [1, None, 0.1]})


def test_what_was_saved_is_loaded(tmp_path):
    path = tmp_path / "new" / "c.safetensors"
    checkpoint.save(a_checkpoint(), path)
    found = checkpoint.load(path)
    assert found.values == a_checkpoint().values
    assert found.tensors.keys() == a_checkpoint().tensors.keys()
    assert all(torch.equal(found.tensors[n], t) for n, t in a_checkpoint().tensors.items())
    assert set(found.part("model")) == {"a", "b.c"}


def test_the_file_is_synced_before_it_is_renamed_and_the_folder_after(tmp_path, monkeypatch):
    events = []
    fsync, replace = os.fsync, os.replace

    def kind(handle):
        return "folder" if os.path.isdir(f"/proc/self/fd/{handle}") else "file"

    monkeypatch.setattr(os, "fsync", lambda h: (events.append(kind(h)), fsync(h)))
    monkeypatch.setattr(os, "replace", lambda a, b: (events.append("replace"), replace(a, b)))
    checkpoint.save(a_checkpoint(), tmp_path / "c")
    assert events == ["file", "replace", "folder"]


def test_a_write_that_fails_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "c"
    checkpoint.save(a_checkpoint(1), path)

    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        checkpoint.save(a_checkpoint(2), path)
    monkeypatch.undo()
    assert checkpoint.load(path).values["step"] == 1
    checkpoint.save(a_checkpoint(3), path)  # over what the failed one left
    assert checkpoint.load(path).values["step"] == 3
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_what_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="none is not a file"):
        checkpoint.load(tmp_path / "none")
    path = tmp_path / "c"
    checkpoint.save(a_checkpoint(), path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="c cannot be read"):
        checkpoint.load(path)
    save_file({"a": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match=r"c is \(None, None\), expected \('attnkit.checkpoint', "):
        checkpoint.load(path)
    content = {"schema": checkpoint.SCHEMA, "version": 99, "values": {}}
    save_file({"a": torch.zeros(1)}, path, {"attnkit": json.dumps(content)})
    with pytest.raises(ValueError, match="99"):
        checkpoint.load(path)


def test_an_optimizer_goes_on_where_it_was(tmp_path):
    def steps(model, optimizer, count):
        for _ in range(count):
            optimizer.zero_grad()
            model(torch.ones(1, 3)).square().sum().backward()
            optimizer.step()

    def fresh():
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)

    model, optimizer = fresh()
    steps(model, optimizer, 3)
    saved, weights = checkpoint.optimizer_tensors(optimizer), checkpoint.weights(model)
    saved = {name: tensor.clone() for name, tensor in saved.items()}
    steps(model, optimizer, 2)

    other, its = fresh()
    other.load_state_dict(weights)
    checkpoint.load_optimizer(its, saved)
    steps(other, its, 2)
    assert torch.equal(other.weight, model.weight)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_killed_run_ends_with_the_bits_of_an_undisturbed_one(tmp_path):
    done = subprocess.run(
        [sys.executable, SCRIPT, tmp_path, "6"],  # .ci/run does it at 50 points
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr + done.stdout
    found = json.loads(done.stdout)
    assert found["wrong"] == 0
    assert found["resumed"] > 3
