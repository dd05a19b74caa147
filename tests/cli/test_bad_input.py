"""Bad input ends in one sentence, exit code 2 and no file; nothing that existed is lost."""

import os
import shutil
import socket

import pytest
from huggingface_hub import constants

from rheoscope.errors import RheoscopeError
from rheoscope.instruments.loss import Loss

from .running import run

QUICK = ("--instruments", "loss", "--window", 29, "--windows", 4, "--no-nulls")


@pytest.fixture
def refused(command, tmp_path):
    """Runs a command that must be refused, and gives its sentence."""

    def sentence_of(*arguments):
        before = contents(tmp_path)
        outcome = command(*arguments)
        assert outcome.code == 2, outcome
        assert outcome.out == ""
        assert contents(tmp_path) == before
        sentence = outcome.err.removesuffix("\n").splitlines()[-1]
        assert sentence.startswith("rheoscope: ")
        assert "Traceback" not in outcome.err
        # what may stand before it says what was opened and how far it came
        told = (" layers, ", " windows", "memory: about ")  # what a measurement says before it fails
        assert all(any(words in line for words in told) for line in outcome.err.splitlines()[:-1])
        return sentence

    return sentence_of


def contents(folder):
    """Every path below a folder, and the bytes of every file."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


TEXTS = {
    "a missing file": (None, "there is no file"),
    "an empty text": (b"", "holds no text"),
    "white space alone": (b" \n\n \n", "holds no text"),
    "a text that is not UTF-8": (b"caf\xe9 " * 100, "is not UTF-8: byte 3 is 0xe9"),
    "a text shorter than a window": (b"the cat", "no window of 29 tokens fits into"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_that_cannot_be_read(name, refused, model, tmp_path):
    content, sentence = TEXTS[name]
    if content is not None:
        (tmp_path / "bad.txt").write_bytes(content)
    assert sentence in refused("measure", model, "--text", tmp_path / "bad.txt", *QUICK)


OPTIONS = {
    "a window longer than the context": (("--window", 41), "windows of 41 tokens asked for; {model} takes at most 40"),
    "a window of nothing": (("--window", 0), "a window of 0 tokens was asked"),
    "fewer than no windows": (("--windows", -1), "n_windows=-1 was asked"),
    "a batch of nothing": (("--batch-size", 0), "a batch of 0 windows was asked"),
    "an unknown split": (("--split", "chapter"), 'text cannot be split by "chapter"; choose one of file, blank'),
    "an unknown tail": (("--tail", "wag"), 'tail="wag" is not known'),
    "an unknown BOS": (("--bos", "perhaps"), 'bos="perhaps" is not known'),
    "an unknown instrument": (("--instruments", "loss,los"), "instruments ['los'] asked for; there are loss, routing"),
    "no instrument": (("--instruments", ","), "instruments [] asked for"),
    "an unknown kind of table": (
        ("--tables", "t", "--table-format", "xls"),
        "tables as 'xls' asked for; there are",
    ),
    "an unknown dtype": (("--dtype", "int4"), "dtype 'int4' asked for"),
    "an unknown device": (("--device", "abacus"), "device 'abacus' asked for and not usable"),
    "a setting without a value": (("--set", "routing.n_lag"), "--set 'routing.n_lag' cannot be read: write"),
    "a setting of no instrument": (("--set", "n_lag=3"), "--set 'n_lag=3' cannot be read: write"),
    "a setting of an unknown one": (("--set", "luck.n_lag=3"), "no instrument 'luck'; there are loss, routing"),
    "a setting it does not have": (("--set", "routing.luck=3"), "routing has no option 'luck'; it has n_spectra"),
    "a setting of another kind": (("--set", "routing.n_lag=few"), "the value must be of the kind of 4"),
    "a setting that is no YAML": (
        ("--set", "routing.n_lag=["),
        "the value cannot be read as a number, a word or a list",
    ),
    "a setting of the idle": (("--set", "routing.n_lag=3"), "options of routing given, which is not measured"),
    "a setting out of range": (("--set", "routing.n_lag=0", "--instruments", "routing"), "at least one window"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_that_cannot_be_met(name, refused, model, text):
    options, sentence = OPTIONS[name]
    assert sentence.format(model=model) in refused("measure", model, "--text", text, *QUICK, *options)


UNUSABLE = {
    "a date that there is not": (("--set", "fields.scales=2020-13-01"), "the value cannot be read as a number"),
    "a number too large": (("--set", "loss.x=1"), "loss has no option"),
    "lists nested too deep": (("--set", "fields.scales=" + "[" * 5000), "the value cannot be read as a number"),
    "a memory without an end": (("--max-memory", "1e999"), "memory '1e999' asked for; write a size such as 4GiB"),
    "more windows than can be": (("--windows", 10**30), f"n_windows={10**30} was asked, more than any text has"),
    "a window larger than can be": (("--window", 10**30), f"window={10**30} was asked, more than any text has"),
    "the home of nobody": (("--text", "~nosuchuser/x.txt"), "there is no file ~nosuchuser/x.txt"),
    "an empty text": (("--text", ""), "an empty value given after --text: name something, or leave it out"),
    "an empty output": (("--out=",), "an empty value given after --out: name something, or leave it out"),
    "a blank folder of tables": (("--tables", " "), "an empty value given after --tables"),
    "an empty model": (("",), "an empty value given after "),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_a_value_that_no_file_or_number_can_have(name, refused, model):
    options, sentence = UNUSABLE[name]
    assert sentence in refused("measure", model, *QUICK, *options)


@pytest.mark.parametrize("arguments", [("check", "secret/net"), ("measure", "builtin:nobody", "--out", "secret/a.nc")])
def test_a_folder_that_may_not_be_looked_into(arguments, refused, monkeypatch):
    stat = os.stat

    def forbidden(path, *arguments, **options):
        if "secret" in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", forbidden)
    assert "Permission denied" in refused(*arguments)


MODELS = {
    "an unknown built-in": ("builtin:nobody", "no built-in model is called 'nobody'"),
    "a missing folder": ("./no/such/folder", "no model at './no/such/folder'"),
    "a missing GGUF file": ("nothing.gguf", "no GGUF file at nothing.gguf"),
    "a folder without a model": (".", "folder . has no config.json"),
}


@pytest.mark.parametrize("command_name", ["measure", "check"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_is_not_there(name, command_name, refused):
    model, sentence = MODELS[name]
    assert sentence in refused(command_name, model)


def test_a_hub_that_cannot_be_reached(refused, monkeypatch):
    def unreachable(*_, **__):
        raise OSError("no route to host")

    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "create_connection", unreachable)
    sentence = refused("measure", "some-org/some-model-nobody-has", *QUICK)
    assert "the hub cannot be reached and the model is not in the local cache" in sentence


@pytest.mark.parametrize("damage", ["cut short", "overwritten"])
def test_corrupt_weights(damage, refused, model, text, tmp_path):
    shutil.copytree(model, tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2] if damage == "cut short" else b"\xff" * len(whole))
    assert "corrupt" in refused("measure", tmp_path / "model", "--text", text, *QUICK)


def test_a_model_without_a_tokenizer(refused, model, text, tmp_path):
    shutil.copytree(model, tmp_path / "model", ignore=shutil.ignore_patterns("*token*"))
    assert "has no tokenizer to read text with" in refused("measure", tmp_path / "model", "--text", text, *QUICK)


def test_loss_asked_of_an_encoder(refused, encoder, tmp_path):
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 40)
    sentence = refused("measure", encoder, "--text", "text.txt", *QUICK)
    assert "bert reads both ways and does not predict the next token: measure it without loss" in sentence


UNWRITABLE = {
    "below a file": ("file.txt/run.nc", "there is no folder"),
    "in a missing folder": ("no/run.nc", "there is no folder"),
    "a folder": ("folder", "it is a folder"),
    "where no files can be made": ("/proc/run.nc", "takes no files"),
    "no ordinary file": ("/dev/null", "it is not an ordinary file"),
    "existing": ("file.txt", "exists already"),
}


@pytest.mark.parametrize("option", ["--out", "--report", "--tables"])
@pytest.mark.parametrize("name", UNWRITABLE)
def test_an_output_that_cannot_be_written_is_refused_before_the_model_is_opened(name, option, refused, text, tmp_path):
    (tmp_path / "file.txt").write_text("precious")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "provenance.json").write_text("precious")
    path, sentence = UNWRITABLE[name]
    if option == "--tables":
        sentence = {"a folder": "exists already", "existing": "it is no folder"}.get(name, sentence)
        sentence = "it is no folder" if name == "no ordinary file" else sentence
    assert sentence in refused("measure", "builtin:nobody", "--text", text, option, path)


@pytest.mark.parametrize("options", [("--out", "--report"), ("--out", "--tables"), ("--report", "--tables")])
def test_one_place_for_two_outputs(options, refused):
    sentence = refused("measure", "builtin:nobody", options[0], "same", options[1], "./same")
    assert "two of run, report and tables cannot both be written to" in sentence


def test_tables_of_another_run_are_noticed_before_the_model_is_opened(refused, tmp_path):
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "loss.scalars.csv").write_text("precious")
    sentence = refused("measure", "builtin:nobody", "--tables", "tables")
    assert "loss.scalars.csv exists already" in sentence
    (tmp_path / "tables" / "loss.scalars.csv").rename(tmp_path / "tables" / "loss.csv")  # no name of ours
    assert "no built-in model" in refused("measure", "builtin:nobody", "--tables", "tables")


@pytest.mark.parametrize(
    "arguments",
    [
        ("measure", "builtin:nobody", "--text", "a.txt", "--out", "a.txt"),
        ("measure", "builtin:nobody", "--text", "a.txt", "--report", "./a.txt"),
        ("measure", "net.gguf", "--out", "net.gguf"),
        ("ablate", "builtin:nobody", "--text", "a.txt", "--out", "a.txt"),
        ("prescribe", "a.txt", "--out", "a.txt"),
        ("edit", "net", "plan.yaml", "--out", "net"),
        ("compare", "a.txt", "net.gguf", "--report", "net.gguf"),
        ("compare", "link", "net.gguf", "--report", "a.txt"),
    ],
)
def test_no_output_takes_the_place_of_what_it_is_made_from(arguments, refused, tmp_path):
    for name in ("a.txt", "net.gguf"):
        (tmp_path / name).write_text("precious")
    (tmp_path / "link").symlink_to("a.txt")
    assert "which it is made from: name another file" in refused(*arguments, "--overwrite")


def test_a_format_of_tables_that_there_is_not(refused, tmp_path):
    sentence = refused("measure", "builtin:nobody", "builtin:noone", "--tables", "tables", "--table-format", "xlsx")
    assert "tables as 'xlsx' asked for; there are csv, parquet" in sentence
    assert not list(tmp_path.iterdir())


REPORTS = {
    "a missing run": (("none.nc",), "There is no file none.nc"),
    "a folder": ((".",), ". is a folder"),
    "another file": (("text.txt",), "text.txt is not a run file"),
    "an existing page": (("run.nc",), "run.html exists already"),
    "a page in the place of the run": (
        ("run.nc", "--out", "run.nc", "--overwrite"),
        "would replace run.nc",
    ),
}


@pytest.mark.parametrize("name", REPORTS)
def test_a_report_that_cannot_be_drawn(name, refused, run_file, tmp_path):
    shutil.copy(run_file, tmp_path / "run.nc")
    (tmp_path / "run.html").write_text("precious")
    (tmp_path / "text.txt").write_text("no run")
    arguments, sentence = REPORTS[name]
    assert sentence in refused("report", *arguments)


@pytest.fixture(scope="module")
def run_file(tmp_path_factory, model, text):
    """A small run on disk."""
    folder = tmp_path_factory.mktemp("run")
    assert run(folder, "measure", model, "--text", text, *QUICK).code == 0
    return folder / "run.nc"


def test_a_damaged_run(refused, run_file, tmp_path):
    whole = run_file.read_bytes()
    (tmp_path / "run.nc").write_bytes(whole[: len(whole) // 2])
    assert "is not a run file, or it is damaged or incomplete" in refused("report", "run.nc")


def test_a_measurement_that_fails_midway_leaves_the_old_run_in_place(refused, model, text, tmp_path, monkeypatch):
    def full(*_, **__):
        raise RheoscopeError("no space left")

    (tmp_path / "run.nc").write_text("precious")
    monkeypatch.setattr(Loss, "finalize", full)
    refused("measure", model, "--text", text, *QUICK, "--overwrite")
