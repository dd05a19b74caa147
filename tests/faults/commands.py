"""Commands small enough to be killed many times: what they write, and what of it must be equal after a second try."""

import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import yaml

from rheoscope.cli.app import main
from rheoscope.instruments import partial as partial_module
from rheoscope.instruments import scale
from rheoscope.nets.train import train
from rheoscope.run import Run
from tests.corpus.small_tokenizers import byte_tokenizer
from tests.tiny import tiny

CONTEXT = 40
TIMES = ("created", "wall_seconds", "command")  # what differs between two runs of the same measurement


@dataclass(frozen=True)
class Command:
    """work: what it does in the folder it is in, given a seed. output: what it writes; numbers: what that holds."""

    name: str
    work: Callable[[int], None]
    output: str
    numbers: Callable[[Path], object]


def prepared(folder: Path) -> Path:
    """A folder with a model, a text and a plan, for all commands."""
    tokenizer = byte_tokenizer()
    model = tiny("gpt2", dtype=torch.float32, vocab_size=len(tokenizer), n_positions=CONTEXT)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    letters = random.Random(0)
    for number in range(12):
        text = "".join(letters.choices("the cat sat on a mat. ", k=400))
        (folder / "texts").mkdir(exist_ok=True)
        (folder / "texts" / f"{number:02}.txt").write_text(text, encoding="utf-8")
    edits = [{"edit": "ConstantHeads", "heads": [[1, 2]]}, {"edit": "DropHeads", "heads": [[0, 0]]}]
    (folder / "plan.yaml").write_text(yaml.safe_dump({"edits": edits}), encoding="utf-8")
    return folder


def command_line(*arguments: object) -> None:
    with mock.patch.object(sys, "argv", ["rheoscope", *map(str, arguments)]):
        main()


def _measure(seed: int) -> None:
    """With a state kept at every opportunity, of which so short a run would have none."""
    eager = partial(scale.Scale, every=0.0)
    with mock.patch.object(scale, "Scale", eager), mock.patch.object(partial_module, "SHARE", 1.0):
        command_line(
            *("measure", "model", "--text", "texts", "--window", 29, "--windows", 24, "--batch-size", 2),
            *("--instruments", "loss,routing", "--out", "run.nc", "--seed", seed, "--resume", "--overwrite"),
        )


def _numbers_of_a_run(path: Path) -> object:
    run = Run.load(path)
    provenance = {key: value for key, value in run.provenance.items() if key not in TIMES}
    values = {
        f"{instrument}.{name}": (str(variable.dtype), variable.values.tobytes(), variable.dims)
        for instrument in run.instruments
        for name, variable in run[instrument].variables.items()
        if variable.dtype.kind not in "OU"
    }
    return {"key": provenance["key"], **values}


def _train(seed: int) -> None:
    """With checkpoints more often than so short a run would have them."""
    often = partial(train, log_every=2, save_every=4)
    with mock.patch.object(sys.modules[train.__module__], "train", often):
        command_line(
            *("train", "sd", "--text", "texts", "--steps", 30, "--window", 32, "--batch", 8, "--seed", seed),
            *("--precision", "float32", "--out", "net"),
        )


def _numbers_of_a_net(path: Path) -> object:
    files = ("model.safetensors", "loss.csv", "config.json", "tokenizer.json")
    return {name: (path / name).read_bytes() for name in files}


def _edit(seed: int) -> None:
    command_line(
        *("edit", "model", "plan.yaml", "--text", "texts", "--window", 29, "--windows", 24, "--n-random", 1),
        *("--windows-per-document", 2, "--out", "edited", "--seed", seed, "--overwrite"),
    )


def _numbers_of_an_edited_model(path: Path) -> object:
    return {name: (path / name).read_bytes() for name in ("model.safetensors", "config.json", "tokenizer.json")}


COMMANDS = {
    "measure": Command("measure", _measure, "run.nc", _numbers_of_a_run),
    "train": Command("train", _train, "net", _numbers_of_a_net),
    "edit": Command("edit", _edit, "edited", _numbers_of_an_edited_model),
}


def started(command: Command, folder: Path, seed: int) -> int:
    """The process number of the command, at work in a fork of this process: nothing has to be imported again."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # heeded even where the tests run in the background
        os.chdir(folder)
        torch.set_num_threads(1)
        with open(folder / "log.txt", "w") as log, redirect_stdout(log), redirect_stderr(log):
            try:
                command.work(seed)
                code = 0
            except SystemExit as end:
                code = end.code or 0
            except BaseException:  # noqa: BLE001 - a fork must not run on into its parent's code
                traceback.print_exc()
    finally:
        os._exit(code)


def ended(child: int) -> int:
    """Exit code of a process, or less than 0 where a signal ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def struck(command: Command, folder: Path, seed: int, *, after: float, by: signal.Signals) -> int:
    """Exit code of the command when a signal reaches it after so many seconds; 0 where it was over by then."""
    child = started(command, folder, seed)
    time.sleep(after)
    os.kill(child, by)
    return ended(child)


def fresh(base: Path, folder: Path) -> Path:
    """A copy of the prepared folder."""
    shutil.copytree(base, folder)
    return folder
