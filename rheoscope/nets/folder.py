"""The folder of a training run: what may be begun or gone on with there, and what is refused with nothing changed.

training.json   the recipe, hashes of text and vocabulary, and when finished what came of it
checkpoint-N/   transformers' own, gone once finished
loss.csv        the loss curve
config.json, model.safetensors, tokenizer.json   the model, when finished
unfinished/     the same while they are written
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from safetensors import SafetensorError

from rheoscope.errors import RheoscopeError
from rheoscope.models.checkpoint import first_line
from rheoscope.nets.recipe import Recipe
from rheoscope.storage import refuse_output

RECORD = "training.json"
UNFINISHED = "unfinished"
WRITERS = ("PytorchStreamWriter", "inline_container")  # of torch.save, in the RuntimeError of a file it cannot write
# These may differ between a run and its continuation: they move no number of it.
FREE = ("text", "log_every", "save_every", "tokenizer", "split", "field")


def record_of(recipe: Recipe, *, text_hash: str, vocabulary_hash: str, vocabulary: int) -> dict:
    """What is written beside the weights to know the run again."""
    return {
        "recipe": asdict(recipe),
        "text_hash": text_hash,
        "vocabulary_hash": vocabulary_hash,
        "vocabulary": vocabulary,
    }


def read_record(out: Path) -> dict | None:
    """The record in a folder; None for a folder that is new or empty. Raises RheoscopeError for anything else there."""
    path = out / RECORD
    if path.is_file():
        try:
            record = json.loads(path.read_text())
            return record | {"recipe": dict(record["recipe"])}
        except (KeyError, TypeError, ValueError, RecursionError):
            raise RheoscopeError(f"{path} is not the record of a training run: choose another folder") from None
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RheoscopeError(f"{out} holds files but no training run ({RECORD}): choose a new or empty folder")
    return None


def refuse_unwritable(out: Path) -> None:
    """Raise RheoscopeError, before any work is done, where the folder could not be made or takes no files."""
    missing = [path for path in (out, *out.parents) if not path.exists()]
    refuse_output(missing[-1] if missing else out / RECORD, overwrite=True)


@contextmanager
def written_to(out: Path) -> Iterator[None]:
    """A block that writes to the folder; what a full disk, or one that is gone, raises there becomes one sentence."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(name in str(error) for name in WRITERS):
            raise
        reason = getattr(error, "strerror", None) or first_line(error)
        raise RheoscopeError(
            f"{out} could not be written ({reason}): make room and give the same command again, it goes on from there"
        ) from error


def refuse_another_run(out: Path, found: dict, wanted: dict) -> None:
    """Raise RheoscopeError where the folder holds a run with other numbers than the one asked for."""
    old, new = found["recipe"], wanted["recipe"]
    if old.get("kind") != new["kind"]:
        raise RheoscopeError(
            f"{out} holds a run of kind {old.get('kind')!r} and {new['kind']!r} was asked for: choose another folder"
        )
    if found.get("vocabulary_hash") != wanted["vocabulary_hash"]:
        raise RheoscopeError(
            f"{out} was begun with a vocabulary of {found.get('vocabulary')} tokens, and this tokenizer has "
            f"{wanted['vocabulary']}, or others: use the tokenizer of the run, or choose another folder"
        )
    if found.get("text_hash") != wanted["text_hash"]:
        raise RheoscopeError(f"{out} was begun with another text or window: use the same, or choose another folder")
    for name, value in new.items():
        if name not in FREE and old.get(name) != value:
            raise RheoscopeError(
                f"{out} was begun with {name} = {old.get(name)}, and {value} was asked for: use the same, or choose "
                "another folder"
            )


def last_checkpoint(out: Path) -> Path | None:
    """The latest checkpoint that was written to its end: the trainer's state comes last."""
    for folder in sorted(_checkpoints(out), key=_step, reverse=True):
        try:
            state = json.loads((folder / "trainer_state.json").read_text())
        except (OSError, ValueError, RecursionError):
            continue
        if state.get("global_step") == _step(folder):
            return folder
    return None


def remove_checkpoints(out: Path) -> None:
    """Delete the checkpoints of a finished run."""
    for folder in _checkpoints(out):
        shutil.rmtree(folder)


def put_in_place(part: Path, out: Path) -> None:
    """Move the files of a model, which are whole, into the folder, its weights last, without which it is no model."""
    for path in sorted(part.iterdir(), key=lambda path: path.suffix == ".safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        path.replace(out / path.name)
    part.rmdir()


def write_text(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all."""
    part = path.with_name(path.name + ".part")
    with part.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def write_record(out: Path, record: dict) -> None:
    """Write the record of a run."""
    write_text(out / RECORD, json.dumps(record, indent=2, allow_nan=False) + "\n")


def _checkpoints(out: Path) -> list[Path]:
    return [folder for folder in out.glob("checkpoint-*") if folder.is_dir() and folder.name[11:].isdecimal()]


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("checkpoint-"))
