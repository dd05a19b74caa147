"""The experiment of steering runs from its configuration, leaves what is done as it is, and prints its tables."""

import sys
from pathlib import Path

import pytest
import yaml

from rheoscope.models.view import ModelView
from tests.corpus.small_tokenizers import byte_tokenizer
from tests.tiny import tiny

FOLDER = Path(__file__).parents[2] / "experiments" / "steering"
TEXT = {"window": 24, "n_windows": 9, "windows_per_document": 1, "split": "blank"}


@pytest.fixture
def experiment(scripts):
    return scripts(FOLDER, "run", "tables")


def test_a_configuration_is_run_once_and_printed(experiment, tmp_path, monkeypatch, capsys):
    run, tables = experiment
    stages = {
        "measure": {"kind": "measure", "text": TEXT, "n_null": 2},
        "curve": {
            "kind": "ablate",
            "text": TEXT,
            "variants": False,
            "parallel_curve": True,
            "sizes": [1, 2],
            "n_random": 2,
        },
        "criticals": {"kind": "criticals", "text": TEXT, "layer": 1, "n_starts": 3, "n_steps": 3},
        "other": {"kind": "choices", "text": TEXT, "sizes": [1], "n_random": 2, "batch_size": 3, "seed": 1},
    }
    monkeypatch.setattr(run, "load", lambda ref: ModelView(tiny("llama", vocab_size=300), byte_tokenizer(), ref))
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"the cat sat on the mat number {k}, and on the next one too" for k in range(12)))
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"models": {"manual": "somewhere"}, "stages": stages}))
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["run.py", str(config), "--text", str(text), "--out", str(out)])
    run.main()
    made = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    assert {f"manual-{stage}.nc" for stage in stages} | {"passes.jsonl"} == set(made)
    run.main()
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == made
    capsys.readouterr()
    tables.main(out)
    printed = capsys.readouterr().out
    for words in ("angular_deficit_slope", "low defect costs", "attention only: "):
        assert words in printed


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_configuration_names_stages_that_exist(path):
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert config["models"]
    for stage in config["stages"].values():
        assert stage["kind"] in ("measure", "ablate", "choices", "criticals")
        assert stage["text"]["window"] > 1
