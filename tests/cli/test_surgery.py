"""measure → prescribe → edit → compare, as a person runs them, and what they refuse."""

import json

import numpy as np
import pytest
import yaml

from rheoscope.corpus.sources import documents
from rheoscope.run import Run

QUICK = ("--window", 32, "--windows", 10, "--windows-per-document", 1)
BUILT_IN = "builtin:manual"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of the built-in model and one of another."""
    from .running import run

    folder = tmp_path_factory.mktemp("runs")
    for name, model in (("a", BUILT_IN), ("b", BUILT_IN), ("c", "builtin:manual-softmax")):
        windows = ("--windows", 8) if name == "b" else ("--windows", 10)
        outcome = run(
            *(folder, "measure", model, "--window", 32, *windows, "--windows-per-document", 1),
            *("--instruments", "loss,sinks", "--no-nulls", "--out", f"{name}.nc"),
        )
        assert outcome.code == 0, outcome
    return folder


def plan_of(path, *edits, **more):
    path.write_text(yaml.safe_dump({"edits": list(edits), **more}), encoding="utf-8")
    return path


@pytest.fixture
def plan(tmp_path):
    edits = ({"edit": "ConstantHeads", "heads": [[5, 3], [5, 4]]}, {"edit": "DropHeads", "heads": [[2, 4]]})
    return plan_of(tmp_path / "plan.yaml", *edits)


def test_prescribe_writes_a_plan_and_says_how_good_its_predictions_were(command, runs, tmp_path):
    outcome = command(
        *("prescribe", runs / "a.nc", *QUICK, "--only", "parallelize", "--max-loss", 0.5, "--out", "p.yaml"),
        *("--n-random", 2),
    )
    assert outcome.code == 0, outcome
    for words in ("alone", "predicted (sum of the changes alone)", "on other documents", "random plans"):
        assert words in outcome.out
    plan = yaml.safe_load((tmp_path / "p.yaml").read_text(encoding="utf-8"))
    assert plan["model"] == BUILT_IN
    assert plan["found"]["change_choosing"] <= 0.5
    assert len(plan["found"]["random_changes_checking"]) == 2


def table_of(path):
    """The built-in text, a document on each line of a table, under a name of its own."""
    texts = [document.text for document in documents("builtin:manual", split="file", field="text")]
    path.write_text("\n".join(json.dumps({"content": text}) for text in texts), encoding="utf-8")


def test_prescribe_reads_the_text_of_a_run_as_the_run_read_it(command, tmp_path):
    table_of(tmp_path / "a.jsonl")
    few = ("--instruments", "loss", "--no-nulls", "--out", "r.nc")
    measured = command("measure", BUILT_IN, "--text", "a.jsonl", "--field", "content", *QUICK, *few)
    assert measured.code == 0, measured
    arguments = ("prescribe", "r.nc", *QUICK, "--only", "parallelize", "--max-loss", 0.5, "--n-random", 1)
    found = command(*arguments, "--out", "p.yaml")
    assert found.code == 0, found
    refused = command(*arguments, "--out", "q.yaml", "--field", "text")
    assert 'has no field "text", it has content; name the one with the text: --field.' in refused.err
    run = Run.load(tmp_path / "r.nc")
    said = run.provenance
    del said["text"]["field"], said["text"]["split"]  # as in runs of earlier versions
    Run.of({"loss": run["loss"]}, said).save(tmp_path / "old.nc")
    given = command("prescribe", "old.nc", *arguments[2:], "--field", "content", "--out", "old.yaml")
    assert given.code == 0, given


def test_edit_reads_the_field_of_a_table_that_it_is_told(command, plan, tmp_path):
    table_of(tmp_path / "a.jsonl")
    arguments = ("edit", BUILT_IN, plan, "--text", "a.jsonl", *QUICK, "--no-clock", "--no-refit")
    assert "--field" in command(*arguments).err
    assert command(*arguments, "--field", "content").code == 0


def test_edit_carries_out_verifies_and_saves(command, plan, tmp_path):
    outcome = command("edit", BUILT_IN, plan, *QUICK, "--out", "edited")
    assert outcome.code == 0, outcome
    for words in ("KL(original ‖ edited)", "attention parameters", "a random plan", "decode", "refit of layer 5"):
        assert words in outcome.out
    folder = tmp_path / "edited"
    assert {"model.safetensors", "config.json", "plan.yaml", "verification.json"} <= {p.name for p in folder.iterdir()}
    found = json.loads((folder / "verification.json").read_text(encoding="utf-8"))
    assert found["parameters"]["after"] < found["parameters"]["before"]
    assert found["controls"][0]["change_recovered"] is not None
    again = command("measure", folder, *QUICK, "--instruments", "loss", "--no-nulls", "--out", "after.nc")
    assert again.code == 0, again
    kept = yaml.safe_load((folder / "plan.yaml").read_text(encoding="utf-8"))
    assert len(kept["edits"][0]["constants"]) == 2  # replayable to the number


@pytest.mark.parametrize("name", ["prescribe", "edit", "compare"])
def test_what_was_made_is_written_before_anything_is_said_of_it(command, runs, plan, tmp_path, monkeypatch, name):
    def unprintable(*_):
        raise ZeroDivisionError("a fault of the table")

    table, output, arguments = {
        "prescribe": ("plan_table", "p.yaml", (runs / "a.nc", *QUICK, "--only", "parallelize", "--out", "p.yaml")),
        "edit": ("verification_table", "edited/config.json", (BUILT_IN, plan, *QUICK, "--no-clock", "--no-refit")),
        "compare": ("difference_table", "page.html", (runs / "a.nc", runs / "c.nc", "--report", "page.html")),
    }[name]
    monkeypatch.setattr(f"rheoscope.cli.{name}.{table}", unprintable)
    with pytest.raises(ZeroDivisionError, match="a fault of the table"):
        command(name, *arguments)
    assert (tmp_path / output).is_file()


def test_the_sizes_that_are_timed_are_the_users_choice(command, plan, tmp_path):
    quick = ("edit", BUILT_IN, plan, *QUICK, "--no-refit", "--n-random", 0)
    outcome = command(*quick, "--clock-lengths", "8, 16", "--clock-batches", 3, "--out", "a")
    assert outcome.code == 0, outcome
    assert "clock, 3 x 16 tokens, decode: 5/5 turns" in outcome.err
    times = json.loads((tmp_path / "a" / "verification.json").read_text(encoding="utf-8"))["latencies"]
    assert [(one["phase"], one["batch"], one["length"]) for one in times] == [
        *(("prefill", 3, 8), ("decode", 3, 8), ("prefill", 3, 16), ("decode", 3, 16))
    ]
    outcome = command(*quick, "--clock-lengths", "8,32", "--clock-batches", 1, "--clock-seconds", 0, "--out", "b")
    assert "not timed: 1 x 32 tokens; allow more with --clock-seconds" in outcome.out
    outcome = command(*quick, "--no-clock", "--out", "c")
    assert outcome.code == 0, outcome
    assert "turns" not in outcome.out + outcome.err
    found = json.loads((tmp_path / "c" / "verification.json").read_text(encoding="utf-8"))
    assert found["latencies"] == []
    assert found["memory"] == {"before": None, "after": None}
    for wrong in (",", "1,two", "0", "-4", "1.5"):
        outcome = command(*quick, "--clock-lengths", wrong, "--out", "d")
        assert outcome.code == 2, outcome
        assert "give whole numbers from 1, with commas" in outcome.err


def test_adapters_without_a_distillation_are_refused(command, plan):
    outcome = command("edit", BUILT_IN, plan, *QUICK, "--lora-rank", 4, "--out", "edited")
    assert outcome.code == 2, outcome
    assert outcome.err.strip().endswith("--lora-rank given without a distillation: add --distill-minutes")


def test_compare_prints_differences_with_errors_and_writes_a_page(command, runs, tmp_path):
    outcome = command("compare", runs / "a.nc", runs / "b.nc", "--report", "page.html")
    assert outcome.code == 0, outcome
    assert "different texts" in outcome.err
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<script src" not in page
    assert "sink mass" in page
    assert "places beyond 3 errors" in outcome.out


def test_losses_on_the_same_text_are_paired_by_document(runs):
    from rheoscope.report.comparison import compared

    run = Run.load(runs / "a.nc")
    loss = run["loss"]
    shift = np.linspace(0.1, 0.2, loss.nll.size)
    worse = loss.assign(nll=loss.nll + shift, nll_mean=loss.nll_mean + 0.15)
    comparison = compared(run, Run.of({"loss": worse}, run.provenance))
    (one,) = [one for one in comparison.differences if one.quantity == "nll_mean"]
    assert one.paired
    assert one.change == pytest.approx(float(np.average(shift, weights=loss.tokens)))
    assert one.se < 0.02 < float(loss.nll_mean_se)
    assert "sinks" in comparison.left_out


REFUSED = {
    "a plan of another model": ({"edit": "DropAttention", "layers": [1]}, {"shape": {"n_layers": 9}}, "n_layers = 9"),
    "an unknown edit": ({"edit": "Explode"}, {}, "no edit is called 'Explode'"),
    "heads out of range": ({"edit": "DropHeads", "heads": [[0, 8]]}, {}, "asked for"),
    "an edit that cannot be kept": ({"edit": "TopAttention", "k": 3}, {}, "acts through taps only"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_plan_that_cannot_be_carried_out_writes_nothing(command, tmp_path, name):
    edit, more, sentence = REFUSED[name]
    outcome = command("edit", BUILT_IN, plan_of(tmp_path / "bad.yaml", edit, **more), *QUICK, "--out", "edited")
    assert outcome.code == 2, outcome
    assert sentence in outcome.err.splitlines()[-1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.yaml"]


def test_inputs_that_are_missing_or_in_the_way_end_in_one_sentence(command, runs, plan, model, text, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "config.json").write_text("{}", encoding="utf-8")
    lost = tmp_path / "lost.nc"
    Run.of({"loss": Run.load(runs / "a.nc")["loss"]}, {"model": {"ref": "builtin:gone"}}).save(lost)
    gone = plan_of(tmp_path / "p.yaml", {"edit": "DropAttention", "layers": [1]})
    cases = {
        ("edit", BUILT_IN, plan, "--out", "full"): "exists",
        ("edit", BUILT_IN, "nowhere.yaml", "--out", "e"): "cannot be read as a plan",
        ("edit", model, gone, "--text", text, "--window", 29, "--out", "e"): "1 document",
        ("prescribe", lost, "--text", text, "--out", "q.yaml"): "gone",
        ("prescribe", runs / "c.nc", "--model", BUILT_IN, *QUICK, "--out", "q.yaml"): "give the run of this model",
        ("prescribe", runs / "a.nc", *QUICK, "--only", "burn", "--out", "q.yaml"): "kind 'burn'",
        ("compare", runs / "a.nc", lost.with_name("gone.nc")): "no file",
    }
    before = sorted(tmp_path.rglob("*"))
    for arguments, sentence in cases.items():
        outcome = command(*arguments)
        assert outcome.code == 2, outcome
        assert sentence in outcome.err.splitlines()[-1], outcome
        assert "Traceback" not in outcome.err
        assert sorted(tmp_path.rglob("*")) == before


def test_a_memory_that_cannot_be_kept_is_refused_before_the_model_is_opened(command, runs, plan, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "notes.bin").write_bytes(b"\xff\xfe\x00")
    cases = {
        "gone/memory": "cannot be written: there is no folder",
        "folder": "cannot be written: it is a folder",
        "notes.bin": "name another file",
    }
    before = sorted(tmp_path.rglob("*"))
    for memory, sentence in cases.items():
        for arguments in (
            ("ablate", BUILT_IN, "--out", "a.nc"),
            ("prescribe", runs / "a.nc", "--out", "p.yaml"),
            ("edit", BUILT_IN, plan, "--distill-minutes", 1, "--out", "e"),
        ):
            outcome = command(*arguments, *QUICK, "--memory", memory)
            assert outcome.code == 2, outcome
            assert sentence in outcome.err.splitlines()[-1], outcome
            assert (" layers, " in outcome.err) == (memory == "notes.bin" and arguments[0] != "edit")
            assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "notes.bin").read_bytes() == b"\xff\xfe\x00"


def test_edits_that_fit_nowhere_else_have_no_random_plan_beside_them_and_edit_says_so(command, tmp_path):
    everywhere = plan_of(tmp_path / "all.yaml", {"edit": "Linearize"})
    outcome = command("edit", BUILT_IN, everywhere, *QUICK, "--no-refit", "--no-clock", "--out", "edited")
    assert outcome.code == 0, outcome
    assert "1 of 1 random plans left out: no other layers or key groups" in outcome.out


def test_edit_says_how_many_documents_it_verifies_on_were_chosen_on(command, runs, tmp_path):
    outcome = command(
        *("prescribe", runs / "a.nc", *QUICK, "--only", "parallelize", "--max-loss", 0.5, "--out", "p.yaml"),
        *("--n-random", 1, "--share", 0.9),
    )
    assert outcome.code == 0, outcome
    quick = ("edit", BUILT_IN, "p.yaml", *QUICK, "--no-clock", "--no-refit", "--n-random", 0)
    outcome = command(*quick, "--seed", 3, "--out", "few")
    assert "of the documents are among those the plan was chosen on, which flatters it" in outcome.out
    outcome = command(*quick, "--windows", 30, "--seed", 3, "--out", "enough")
    assert outcome.code == 0, outcome
    assert "which flatters it" not in outcome.out
    assert json.loads((tmp_path / "enough" / "verification.json").read_text(encoding="utf-8"))["n_chosen_on"] == 0
