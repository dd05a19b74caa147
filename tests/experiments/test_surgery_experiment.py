"""The experiment of surgery: every point of the curves once, with a control that is trained alike, and its tables."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from rheoscope import corpus
from rheoscope.models.view import ModelView
from tests.corpus.small_tokenizers import byte_tokenizer
from tests.tiny import tiny

FOLDER = Path(__file__).parents[2] / "experiments" / "surgery"
SIZES = [1, 2]
CONFIG = {
    "text": {"window": 16, "split": "blank"},
    "parts": {"choosing": 3, "calibration": 6, "checking": 8},
    "kinds": ["constant"],
    "most_candidates": 6,
    "sizes": SIZES,
    "n_random": 1,
    "batch": 2,
    "seed": 0,
    "clock": {"lengths": [8], "batch_sizes": [1], "repeats": 1},
    "distilled": [["measured", 2], ["random 0", 2]],
    "distillation": {"steps": 2, "windows": 2, "rate": 1.0e-4},
}


@pytest.fixture
def experiment(scripts):
    return scripts(FOLDER, "run", "tables")


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    lines = (f"{k * k} cats of number {k} sat on the mat {k} and on the next one {k}" for k in range(16))
    path.write_text("\n\n".join(lines))
    return path


def test_every_point_is_measured_once_and_printed(experiment, text, tmp_path, monkeypatch, capsys):
    run, tables = experiment
    monkeypatch.setattr(run, "load", lambda ref: ModelView(tiny("llama", vocab_size=300), byte_tokenizer(), ref))
    config, out = tmp_path / "config.yaml", tmp_path / "out"
    config.write_text(yaml.safe_dump({"model": "somewhere", **CONFIG}))
    monkeypatch.setattr(sys, "argv", ["run.py", str(config), "--text", str(text), "--out", str(out)])
    run.main()
    lines = (out / "points.jsonl").read_text(encoding="utf-8").splitlines()
    points = [json.loads(line) for line in lines]
    names = {(point["choice"], point["size"], point["recovery"]) for point in points}
    wanted = {(c, n, r) for c in ("measured", "random 0") for n in SIZES for r in ("none", "refit")}
    wanted |= {("measured", n, "clock") for n in SIZES} | {(*one, "distilled") for one in (("original", 0),)}
    assert names == wanted | {(name, size, "distilled") for name, size in CONFIG["distilled"]}
    assert len(points) == len(names)
    assert not list(out.glob("*.safetensors"))
    run.main()
    assert (out / "points.jsonl").read_text(encoding="utf-8").splitlines() == lines
    capsys.readouterr()
    tables.main(out)
    printed = capsys.readouterr().out
    for words in ("beside the original trained alike", "operations per token -", "of the variance"):
        assert words in printed


def test_what_checks_is_neither_chosen_by_nor_fitted_nor_trained_on(experiment, text):
    run, _ = experiment
    whole = corpus.read(str(text), tokenizer=byte_tokenizer(), **CONFIG["text"])
    parts = run.parts_of(whole, **CONFIG["parts"])
    checked = {row.tobytes() for row in parts["checking"].tokens}
    for name in ("choosing", "calibration", "training"):
        assert not checked & {row.tobytes() for row in parts[name].tokens}
    assert parts["training"].n_windows > parts["calibration"].n_windows == CONFIG["parts"]["calibration"]
    assert len(np.unique(parts["checking"].documents)) == parts["checking"].n_windows == CONFIG["parts"]["checking"]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_configuration_trains_what_it_measures(path):
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    names = {"measured"} | {f"random {number}" for number in range(config["n_random"])}
    assert all(name in names and size in config["sizes"] for name, size in config["distilled"])
