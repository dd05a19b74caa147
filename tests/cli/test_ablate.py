"""`rheoscope ablate` as a person runs it: parts by name, a text to fit on, and what it cannot do in one sentence."""

import json

import pytest

from rheoscope.run import Run

QUICK = ("--window", 29, "--windows", 6, "--batch-size", 6)


def test_scores_and_linear_layers_by_name(command, model, text, tmp_path):
    outcome = command("ablate", model, "--text", text, *QUICK, "--scores", "--linear")
    assert outcome.code == 0, outcome
    for words in ("rank in all layers", "key-bias routing", "linear layers, from 0", "perplexity"):
        assert words in outcome.out
    data = Run.load(tmp_path / "ablation.nc")["ablation"]
    assert data.sizes["n_linear"] == 3
    assert data["rank"].values.tolist() == [0, 2, 4, 8, 14]


def test_a_text_of_its_own_to_fit_on(command, model, text, tmp_path):
    (tmp_path / "other.txt").write_text("the mat sat on the cat. " * 40, encoding="utf-8")
    outcome = command("ablate", model, "--text", text, *QUICK, "--scores", "--calibrate", "other.txt")
    assert outcome.code == 0, outcome
    said = Run.load(tmp_path / "ablation.nc").provenance["config"]["ablation"]["scores"]
    assert said["calibration_sources"] == ["other.txt"]


def test_the_field_of_a_table_that_holds_the_text_can_be_named(command, model, text, tmp_path):
    lines = [json.dumps({"content": line}) for line in text.read_text(encoding="utf-8").splitlines()]
    (tmp_path / "a.jsonl").write_text("\n".join(lines), encoding="utf-8")
    refused = command("ablate", model, "--text", "a.jsonl", *QUICK)
    assert refused.code == 2
    assert 'has no field "text", it has content; name the one with the text: --field.' in refused.err
    outcome = command("ablate", model, "--text", "a.jsonl", *QUICK, "--field", "content")
    assert outcome.code == 0, outcome
    assert Run.load(tmp_path / "ablation.nc").provenance["text"]["field"] == "content"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--calibrate", "other.txt"), "a calibration text given without --scores"),
        (("--scores", "--calibrate", "nowhere.txt"), "there is no file"),
    ],
)
def test_a_text_that_cannot_be_fitted_on_is_refused(command, model, text, tmp_path, options, sentence):
    outcome = command("ablate", model, "--text", text, *QUICK, *options)
    assert outcome.code == 2
    assert sentence in outcome.err.splitlines()[-1]
    assert not (tmp_path / "ablation.nc").exists()
