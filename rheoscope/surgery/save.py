"""A model saved to a folder that appears whole or not at all."""

from __future__ import annotations

import ctypes
import os
import re
import secrets
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import transformers
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rheoscope.errors import RheoscopeError
from rheoscope.models.checkpoint import first_line

# What a folder may hold to be replaced: what a saved model consists of, and what we or a hub put beside it.
CHECKPOINT = {
    *("config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
    *("chat_template.jinja", "chat_template.json", "plan.yaml", "verification.json"),
    *("README.md", "card.json", "LICENSE", "LICENSE.txt", "LICENSE.md", ".gitattributes"),
}
TEMPLATES = "additional_chat_templates"  # the one folder that a tokenizer may write
SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
AT_FDCWD, EXCHANGE = -100, 2  # of renameat2(2): paths from the working folder, RENAME_EXCHANGE


def save_edited(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: str | Path,
    *,
    overwrite: bool = False,
    files: Mapping[str, str] | None = None,
) -> Path:
    """Write weights, configuration, tokenizer and text files (name → text) to a folder, and return it.

    All of it is written beside the folder and renamed at the end, so nothing half-written is ever found there: not
    after Ctrl-C, nor on a full disk. Raises RheoscopeError for a folder that exists, unless it is to be overwritten
    and holds a model or nothing.
    """
    files = files or {}
    strange = [name for name in files if Path(name).name != name or name in ("", ".", "..")]
    if strange:
        raise RheoscopeError(f"a file {strange[0]!r} asked for in {folder}: give a name without folders")
    with replaced_folder(folder, overwrite=overwrite, names=files) as part:
        with _no_bars():
            model.save_pretrained(part)
        if tokenizer is not None:
            tokenizer.save_pretrained(part)
        for name, text in files.items():
            (part / name).write_text(text, encoding="utf-8")
    return Path(folder).resolve()


@contextmanager
def _no_bars() -> Iterator[None]:
    shown = transformers.logging.is_progress_bar_enabled()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers.logging.enable_progress_bar()


def refuse_folder(folder: str | Path, *, overwrite: bool = False) -> None:
    """Raise RheoscopeError where a folder could not be written, before any work is done."""
    target = Path(folder).resolve()
    _refuse_existing(target, overwrite=overwrite)
    part = _beside(target, "part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        part.mkdir()
        part.rmdir()
    except OSError as error:
        raise RheoscopeError(f"{folder} cannot be written ({_why(error)}): choose another folder") from error


@contextmanager
def replaced_folder(folder: str | Path, *, overwrite: bool = False, names: Collection[str] = ()) -> Iterator[Path]:
    """A new folder beside `folder` that takes its place when the block ends well, and is removed when it does not.

    names: of files that may be replaced beside those of a saved model.
    """
    target = Path(folder).resolve()
    _refuse_existing(target, overwrite=overwrite, names=names)
    part = _beside(target, "part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        part.mkdir()
        yield part
        for path in part.rglob("*"):
            _flush(path)
        _flush(part)
        _put_in_place(part, target)
    except (OSError, SafetensorError) as error:
        raise RheoscopeError(f"{folder} could not be written ({_why(error)}): nothing was changed there") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _refuse_existing(target: Path, *, overwrite: bool, names: Collection[str] = ()) -> None:
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise RheoscopeError(f"{target} is a file: give the name of a folder")
    holds = {path.name: path for path in sorted(target.iterdir())}
    if not holds:
        return
    if not overwrite:
        raise RheoscopeError(f"{target} exists: choose another folder, or allow overwriting")
    if "config.json" not in holds:
        raise RheoscopeError(
            f"{target} holds {next(iter(holds))} and no model, and is not overwritten: choose another folder"
        )
    strange = [name for name, path in holds.items() if not _replaceable(path, CHECKPOINT | set(names))]
    if strange:
        raise RheoscopeError(
            f"{target} holds {strange[0]}, which is no part of a saved model, and is not overwritten: "
            "choose another folder, or move it away"
        )


def _replaceable(path: Path, names: Collection[str]) -> bool:
    """Whether something in a folder is part of a saved model."""
    if path.is_dir():
        return path.name == TEMPLATES and all(inner.suffix == ".jinja" for inner in path.iterdir())
    return path.name in names or SHARD.fullmatch(path.name) is not None


def _put_in_place(part: Path, target: Path) -> None:
    """Rename the new folder; one that is there already is exchanged for it, so that one of the two is always there."""
    if not target.exists():
        part.rename(target)
    elif not _exchanged(part, target):
        old = _beside(target, "old")
        target.rename(old)
        try:
            part.rename(target)
        except BaseException:
            old.rename(target)
            raise
        shutil.rmtree(old, ignore_errors=True)
    _flush(target.parent)


def _exchanged(first: Path, second: Path) -> bool:
    """Whether two names were exchanged in one step, which Linux offers on most file systems and others do not."""
    exchange = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if sys.platform == "linux" else None
    return exchange is not None and exchange(AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second), EXCHANGE) == 0


def _beside(target: Path, what: str) -> Path:
    return target.with_name(f".{target.name}.{secrets.token_hex(4)}.{what}")


def _flush(path: Path) -> None:
    """Have a file or folder written to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _why(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
