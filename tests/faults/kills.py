"""kill -9 at a random moment: under the final name stands what stood there before, or all of what is to stand there."""

import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .commands import Command, ended, fresh, started, struck


@dataclass(frozen=True)
class Reference:
    """What a command gives when nothing happens to it, the seconds it takes, and what an older run of it gave."""

    numbers: object
    seconds: float
    older: Path | None


def reference_of(command: Command, base: Path, scratch: Path) -> Reference:
    """Numbers and time of an undisturbed command, and its output under another seed."""
    folder = fresh(base, scratch / f"{command.name}-reference")
    begun = time.monotonic()
    assert ended(started(command, folder, 1)) == 0, (folder / "log.txt").read_text()
    seconds = time.monotonic() - begun
    numbers = command.numbers(folder / command.output)
    if command.name == "train":  # a folder with a finished run of something else is refused, and not replaced
        return Reference(numbers, seconds, None)
    other = fresh(base, scratch / f"{command.name}-older")
    assert ended(started(command, other, 2)) == 0, (other / "log.txt").read_text()
    return Reference(numbers, seconds, other / command.output)


def killed(command: Command, base: Path, scratch: Path, *, n: int, seed: int) -> Counter:
    """Kills the command `n` times, runs it again each time, and counts what was left. AssertionError if wrong."""
    reference = reference_of(command, base, scratch)
    moments = random.Random(f"{command.name} {seed}")
    found: Counter = Counter()
    for number in range(n):
        folder = fresh(base, scratch / f"{command.name}-{number}")
        older = reference.older if number % 2 else None
        if older is not None:
            _copied(older, folder / command.output)
        code = struck(command, folder, 1, after=moments.uniform(0, reference.seconds), by=signal.SIGKILL)
        found["over before the kill" if code == 0 else "killed"] += 1
        found.update(_left(command, folder, reference, older))
        assert ended(started(command, folder, 1)) == 0, (folder / "log.txt").read_text()
        again = command.numbers(folder / command.output)
        assert again == reference.numbers, f"kill {number}: other numbers in {_differing(again, reference.numbers)}"
        shutil.rmtree(folder)
    return found


def _differing(one: object, other: object) -> list[str]:
    """Names under which two collections of numbers differ."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return ["the whole"]
    return sorted(name for name in {*one, *other} if one.get(name) != other.get(name))


def _left(command: Command, folder: Path, reference: Reference, older: Path | None) -> Iterator[str]:
    """What a kill has left. A folder that a training run goes on in is a state, and holds no weights before the end."""
    output = folder / command.output
    if any(path.name.endswith(".partial") for path in folder.iterdir()):
        yield "state to resume from"
    if command.name == "train":
        if any(output.glob("checkpoint-*")):
            yield "state to resume from"
        for name, whole in reference.numbers.items():
            assert name == "loss.csv" or (output / name).read_bytes() == whole if (output / name).exists() else True
        assert not any(output.rglob("*.bin")) or any(output.glob("checkpoint-*/training_args.bin")), "a pickle"
        return
    if not output.exists():
        assert older is None, "the output that was there is gone"
        yield "no output"
    elif older is not None and _bytes(output) == _bytes(older):
        yield "the older output"
    else:
        assert command.numbers(output) == reference.numbers, "half an output under the final name"
        yield "the whole output"


def _copied(source: Path, target: Path) -> None:
    shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)


def _bytes(path: Path) -> dict[str, bytes]:
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    return {str(file.relative_to(path)): file.read_bytes() for file in files}
