"""One input given to a reader: what came of it, how long it took, how much memory, and what it left behind."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rheoscope.errors import RheoscopeError

from .readers import Reader

SECONDS = 20.0  # of the processor, the longest that a small file may take; most take a hundredth of a second
MEMORY = 400 * 2**20  # bytes more than before, at most


class TooLongError(BaseException):
    """Raised where an input takes longer than SECONDS."""


@dataclass
class Trial:
    """A reader at work in a folder of its own, which is as before after each input."""

    reader: Reader
    folder: Path

    def __post_init__(self) -> None:
        self.reader.prepare(self.folder)
        self.whole = {
            name: (self.folder / name).read_bytes() for name in self.reader.changes if (self.folder / name).is_file()
        }
        self.before = self._contents()

    def __call__(self, name: str, content: bytes) -> str:
        """ "read" or "refused". Whatever else the reader raises, is raised; AssertionError where it breaks a bound."""
        path = self.folder / name
        path.write_bytes(content)
        resident = _peak_memory(reset=True)
        started = time.process_time()
        sentence = None
        try:
            with _deadline():
                self.reader.read(self.folder, name)
        except RheoscopeError as error:
            sentence = str(error)
        finally:
            path.write_bytes(self.whole[name])
        seconds, grown = time.process_time() - started, _peak_memory() - resident
        assert grown < MEMORY, f"{grown >> 20} MB were taken for a file of {len(content)} bytes"
        assert seconds < SECONDS, f"{seconds:.0f} s were taken for a file of {len(content)} bytes"
        assert self._contents() == self.before, "files were written, changed or removed"
        assert sentence is None or sentence.strip(), "a refusal without a sentence"
        assert sentence is None or "\n" not in sentence, f"a refusal of several lines: {sentence}"
        return "read" if sentence is None else "refused"

    def _contents(self) -> dict[str, int]:
        return {str(path): path.stat().st_size for path in sorted(self.folder.rglob("*"))}


@contextmanager
def _deadline() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TooLongError

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _peak_memory(*, reset: bool = False) -> int:
    """Bytes this process has held at most since the last reset, where the system tells; else 0."""
    if not os.path.exists("/proc/self/clear_refs"):
        return 0
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
