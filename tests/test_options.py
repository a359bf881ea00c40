import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from attnkit.recipes.options import TrainingOptions, UsageError, option, read_config


@dataclass(frozen=True)
class Own(TrainingOptions):
    text: Path | None = option(None, "a file")
    share: float = option(0.5, "50% of it", least=0, most=1)


def parsed(*flags):
    parser = argparse.ArgumentParser()
    Own.add_arguments(parser)
    return vars(parser.parse_args(flags))


def test_flags_leave_no_trace_unless_given():
    assert parsed() == {}
    found = parsed("--steps=7", "--text=a.txt", "--batch-tokens", "9", "--resume", "--share=0.25")
    assert found == {
        "steps": 7,
        "text": Path("a.txt"),
        "batch_tokens": 9,
        "resume": True,
        "share": 0.25,
    }


def test_flags_lie_over_the_file_and_the_file_over_the_defaults(tmp_path):
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"steps": 5, "warmup": 3, "text": "b.txt", "batch-tokens": 8}))
    found = Own.from_command_line({"steps": 6}, path)
    assert (found.steps, found.warmup, found.batch_tokens) == (6, 3, 8)
    assert found.text == Path("b.txt")
    assert found.patience == TrainingOptions().patience


def test_options_survive_json():
    options = Own(text=Path("a"), share=1, steps=3)
    assert options.share == 1.0
    assert Own.from_mapping(json.loads(json.dumps(options.to_json()))) == options


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python before 3.11 reads no TOML")
def test_toml(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text('steps = 5\nschedule = "inverse-sqrt"\n')
    assert read_config(path) == {"steps": 5, "schedule": "inverse-sqrt"}


def test_toml_without_a_parser_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tomllib", None)
    path = tmp_path / "c.toml"
    path.write_text("steps = 5\n")
    with pytest.raises(UsageError, match=r"c\.toml cannot be read: TOML needs Python 3\.11"):
        read_config(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"c\.json cannot be read: "),
        ("[1]", r"c\.json holds list, expected keys and values"),
        ('{"stepz": 5}', r"c\.json: unknown key 'stepz'; did you mean 'steps'\?"),
        ('{"qqq": 5}', r"c\.json: unknown key 'qqq'; known are output, seed, steps"),
        ('{"steps": "5"}', "steps is '5', expected an integer"),
        ('{"steps": true}', "steps is True, expected an integer"),
        ('{"steps": 0}', "steps is 0, expected 1 or more"),
        ('{"share": 1.5}', r"share is 1\.5, expected 1 or less"),
        ('{"share": NaN}', "share is nan, expected 0 or more"),
        ('{"schedule": "flat"}', "schedule is 'flat', expected one of cosine, inverse-sqrt"),
        ('{"text": 5}', "text is 5, expected a path"),
        ('{"steps": null}', "steps is None, expected an integer"),
        ('{"resume": "yes"}', "resume is 'yes', expected true or false"),
    ],
)
def test_a_wrong_config_is_refused_by_name(tmp_path, content, message):
    path = tmp_path / "c.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=message):
        Own.from_command_line({}, path)


def test_a_missing_config_is_refused_by_name(tmp_path):
    with pytest.raises(UsageError, match=r"config .*none\.json is not a file"):
        read_config(tmp_path / "none.json")


def test_the_help_shows_meaning_and_default(capsys):
    with pytest.raises(SystemExit):
        parsed("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "50% of it (default: 0.5)" in text
    assert "a file" in text
