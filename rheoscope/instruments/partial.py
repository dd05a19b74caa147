"""What an unfinished measurement has gathered, kept beside its output: a killed one goes on to the same numbers.

A folder: `key.json` says which measurement it belongs to, `pass-N-of-PROCESS.npz` holds the state of every instrument
that reads pass N and how many batches this process has read of it. Files appear whole or not at all. Passes that were
over before they were worth keeping are run again.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
import socket
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rheoscope.errors import RheoscopeError
from rheoscope.stats import restore, state_of
from rheoscope.storage import replacing

EVERY = 60.0  # seconds between two savings, at least
SHARE = 0.05  # of the time of a run that savings may take
ASIDE = 2**20  # bytes of an array from which it is read back through a file
KEY = "key.json"
BATCHES = "batches"
OWN = re.compile(r"key\.json|pass-\d+-of-\d+\.npz|\.rheoscope-\w+\.part")  # files of an unfinished run


@dataclass
class Partial:
    """The state of one measurement in a folder; nothing is written before it is worth `every` seconds.

    key: what the numbers depend on, by the words that name it in messages.
    """

    folder: Path
    key: Mapping[str, Any]
    process: int = 0
    every: float = EVERY
    saved: float = field(default_factory=lambda: time.monotonic())
    cost: float = 0.0  # seconds that the last saving took

    def require_own(self) -> None:
        """Raise RheoscopeError where the folder belongs to another measurement."""
        held = key_in(self.folder)
        if held is None:
            return
        other = [name for name in {*held, *self.key} if held.get(name) != self.key.get(name)]
        if other:
            raise RheoscopeError(
                f"{self.folder} holds an unfinished run of something else (it differs in {', '.join(sorted(other))}): "
                "give the options it was begun with, another --out, or remove it"
            )

    def restored(self, number: int, readers: Sequence[object]) -> int:
        """Puts what was kept of a pass into its readers. Returns the batches that are done, 0 where nothing was."""
        path = self._path(number)
        if not path.exists():
            return 0
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as kept:
                state = {name: set_aside(kept[name]) for name in kept.files}
            done = int(state.pop(BATCHES))
            parts = dict(enumerate(readers))
            restore(parts, state)
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise RheoscopeError(f"{path} is damaged ({type(error).__name__}): remove {self.folder}") from error
        self.saved = time.monotonic()
        return done

    @property
    def is_due(self) -> bool:
        """Whether enough time has gone by since the last saving, and savings stay cheap."""
        return time.monotonic() - self.saved >= max(self.every, self.cost / SHARE)

    def save(self, number: int, readers: Sequence[object], *, done: int) -> None:
        """Writes the state of a pass, whole or not at all."""
        started = time.monotonic()
        self._begin()
        state = {BATCHES: np.array(done)}
        with replacing(self._path(number), overwrite=True) as part, zipfile.ZipFile(part, "w") as archive:
            for name, array in (*state.items(), *state_of(dict(enumerate(readers)))):
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)
        self.saved = time.monotonic()
        self.cost = self.saved - started

    def remove(self) -> None:
        """The folder is gone: its measurement is written."""
        remove_partial(self.folder)

    def _begin(self) -> None:
        """The folder with its key, in one step; raises RheoscopeError where another measurement has taken it."""
        if key_in(self.folder) is None:
            fresh = self.folder.with_name(f".rheoscope-{secrets.token_hex(8)}.part")
            try:
                fresh.mkdir()
                with replacing(fresh / KEY) as part:
                    part.write_text(json.dumps(self.key, indent=2) + "\n", encoding="utf-8")
                with suppress(OSError):  # another process of the same run was first
                    fresh.rename(self.folder)
            except OSError as error:
                raise RheoscopeError(
                    f"the state of the run cannot be kept in {self.folder} ({error.strerror}): choose another --out"
                ) from error
            finally:
                shutil.rmtree(fresh, ignore_errors=True)
        self.require_own()

    def _path(self, number: int) -> Path:
        return self.folder / f"pass-{number}-of-{self.process}.npz"


def set_aside(array: np.ndarray) -> np.ndarray:
    """An array of some size in a temporary file without a name, not in memory: states may be larger than that."""
    if array.nbytes < ASIDE:
        return array
    with tempfile.TemporaryFile() as file:
        aside = np.memmap(file, array.dtype, "w+", shape=array.shape)
    aside[...] = array
    return aside


def partial_of(output: Path) -> Path:
    """Where the state of an unfinished run is kept: beside its output."""
    return output.with_name(f"{output.name}.partial")


def remove_partial(folder: Path) -> None:
    """Removes an unfinished run; raises RheoscopeError for a folder of something else. The key goes last.

    Several processes of one run may do so at once.
    """
    if not folder.exists():
        return
    try:
        if key_in(folder) is not None:
            found = sorted(folder.iterdir(), key=lambda path: path.name == KEY)
            for path in found:
                if not OWN.fullmatch(path.name):
                    raise RheoscopeError(
                        f"{folder} holds {path.name}, which is no part of an unfinished run: remove it"
                    )
            for path in found:
                path.unlink(missing_ok=True)
        folder.rmdir()
    except FileNotFoundError:  # another process was first
        return
    except OSError as error:
        raise RheoscopeError(f"the folder {folder} cannot be removed ({error.strerror}): remove it") from error


@contextmanager
def held(output: Path) -> Iterator[None]:
    """A block in which no other process measures for the same output; raises RheoscopeError where one does.

    The lock is the system's and ends with the process, however that ends. A file beside the output says whose it is.
    """
    path = output.with_name(f".{output.name}.lock")
    try:
        file = _locked(path)
    except BlockingIOError:
        raise RheoscopeError(
            f"{output} is being measured already, by {_owner(path)}: wait until that ends, or give another --out"
        ) from None
    except OSError:  # a file system without locks
        file = None
        with suppress(OSError):
            path.unlink()
    try:
        yield
    finally:
        if file is not None:
            path.unlink(missing_ok=True)
            os.close(file)


def _locked(path: Path) -> int:
    """A descriptor of a file that this process has locked; raises BlockingIOError where another has."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.stat(path).st_ino == os.fstat(file).st_ino:
                os.truncate(file, 0)
                os.write(file, f"process {os.getpid()} on {socket.gethostname()}".encode())
                return file
            os.close(file)  # whoever had it has removed the file meanwhile
        except FileNotFoundError:
            os.close(file)
        except OSError:
            os.close(file)
            raise


def _owner(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip() or "another process"
    except OSError:
        return "another process"


def refuse_unfinished(folder: Path) -> None:
    """Raise RheoscopeError where an unfinished run would be lost."""
    if key_in(folder) is not None:
        raise RheoscopeError(
            f"{folder} holds an unfinished run: add --resume to go on with it, or --overwrite to begin anew"
        )


def key_in(folder: Path) -> dict[str, Any] | None:
    """What an unfinished run depends on; None where there is no folder, or an empty one that a kill left."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    try:
        key = json.loads((folder / KEY).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RheoscopeError(
            f"{folder} is no unfinished run of rheoscope ({type(error).__name__}): remove or rename it, or give "
            "another --out"
        ) from error
    return key if isinstance(key, dict) else {}
