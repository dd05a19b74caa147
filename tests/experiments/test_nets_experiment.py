"""The experiment on networks: trained, measured and edited once each, and printed; no network is trained twice."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from rheoscope.errors import RheoscopeError
from rheoscope.nets.presets import PRESETS
from rheoscope.nets.recipe import Recipe
from rheoscope.nets.train import Trained

FOLDER = Path(__file__).parents[2] / "experiments" / "nets"
MODULES = ("run", "text", "measure", "edits", "tables")
CONFIG = {
    "recipe": {"window": 24, "batch": 4, "steps": 4, "save_every": 4, "log_every": 4, "precision": "float32"},
    "probe_every": 2,
    "seeds": [0],
    "networks": {
        "softmax": {"kind": "softmax"},
        "sd_no_norm": {"kind": "sd", "use_norm": False},
        "ega_published": {"kind": "ega_published"},
        "from_rank": {"kind": "sd", "use_norm": False, "ranks_of": "sd_no_norm"},
    },
}


@pytest.fixture
def experiment(scripts):
    """The scripts of the folder by name."""
    return dict(zip(MODULES, scripts(FOLDER, *MODULES), strict=True))


def called(module, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *map(str, arguments)])
    module.main()


def times(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_networks_are_trained_measured_and_edited_once_and_printed(experiment, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    text, config, runs = tmp_path / "text.txt", tmp_path / "config.yaml", tmp_path / "runs"
    text.write_text("".join(f"the cat sat on mat {k} and the dog on mat {k * k}. " for k in range(60)))
    config.write_text(yaml.safe_dump(CONFIG, sort_keys=False))
    commands = {
        "run": (config, "--text", text, "--out", runs),
        "measure": (runs, "--text", text, "--out", tmp_path / "measured"),
        "edits": (runs, "--text", text, "--out", tmp_path / "edited"),
    }
    for name, arguments in commands.items():
        called(experiment[name], monkeypatch, *arguments)
    assert {path.name for path in runs.iterdir()} == {f"{name}-0" for name in CONFIG["networks"]}
    assert {path.stem for path in (tmp_path / "edited").glob("*.json")} == {"softmax-0", "sd_no_norm-0"}
    made = times(tmp_path)
    for name, arguments in commands.items():
        called(experiment[name], monkeypatch, *arguments)
    assert times(tmp_path) == made
    capsys.readouterr()
    called(experiment["tables"], monkeypatch, runs, tmp_path / "measured", tmp_path / "edited")
    printed = capsys.readouterr().out
    for heading in ("Losses", "Ranks by layer", "Damping", "Gates", "Head sizes", "taken away", "made linear"):
        assert heading in printed
    assert "nan" not in printed
    found = experiment["tables"].read(tmp_path / "measured")
    assert found["ega_published"][0]["leak"] > 1e-9 > found["softmax"][0]["leak"]
    for reading in ("window", "prefix"):
        assert len(found["softmax"][0][reading]) == 23
    np.testing.assert_allclose(found["softmax"][0]["prefix"], found["softmax"][0]["window"], atol=1e-5)


def test_seeds_are_interleaved_and_a_network_may_have_fewer(experiment):
    config = {"recipe": {"steps": 1}, "seeds": [0, 1], "networks": {"a": {"kind": "sd"}, "b": {"seeds": [1]}}}
    planned = experiment["run"].planned(config)
    assert [(name, seed) for name, seed, _ in planned] == [("a", 0), ("a", 1), ("b", 1)]
    assert planned[0][2] == {"steps": 1, "kind": "sd"}


def test_head_sizes_hold_the_median_rank_of_the_seeds(experiment, tmp_path):
    run = experiment["run"]
    for seed, last in enumerate(([2, 4.1], [3, 9], [30, 7.9])):
        folder = tmp_path / f"sd-{seed}"
        folder.mkdir()
        rows = ["step,loss,routing_k90_0,routing_k90_1", "0,,64,64", f"9,2.5,{last[0]},{last[1]}", "10,2.4,,"]
        (folder / "loss.csv").write_text("\n".join(rows))
        (folder / "training.json").write_text('{"finished": {}}')
    assert run.head_dims_from_ranks(tmp_path, "sd") == [4, 8]
    with pytest.raises(RheoscopeError, match="ranks of 'ega' asked for"):
        run.head_dims_from_ranks(tmp_path, "ega")


def test_a_network_that_cannot_be_trained_is_named(experiment, tmp_path):
    (tmp_path / "text.txt").write_text("short")
    with pytest.raises(RheoscopeError, match="ega-3: "):
        experiment["run"].trained(tmp_path / "ega-3", str(tmp_path / "text.txt"), CONFIG, {"kind": "ega"})


def test_counted_baselines_of_a_cycle_are_known(experiment):
    class Cycle:
        tokens = np.tile([0, 1, 2, 3], (200, 8))

    found = experiment["text"].baselines(Cycle, Cycle)
    assert found["unigram"] == pytest.approx(np.log(4), abs=0.01)
    assert found["bigram"] == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_configuration_is_a_plan_of_recipes(path, experiment):
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    plans = experiment["run"].planned(config)
    assert len({(name, seed) for name, seed, _ in plans}) == len(plans) > 1
    for _, seed, recipe in plans:
        recipe.pop("ranks_of", None)
        plan = Recipe(text=["text"], seed=seed, **recipe).filled()
        assert plan.size in PRESETS
        assert plan.config(vocabulary=257, end=0).num_hidden_layers == PRESETS[plan.size].n_layers


def test_a_finished_network_is_returned(experiment, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("a b c d e f g h " * 60)
    recipe = CONFIG["recipe"] | {"kind": "softmax"}
    first, second = (experiment["run"].trained(tmp_path / "s-0", str(text), CONFIG, dict(recipe)) for _ in range(2))
    assert isinstance(first, Trained)
    assert first == second
