"""`python -m tests.fuzz --minutes 10 READER …`: readers fuzzed for so long, every finding kept with its input.

Each reader runs in a process of its own, under a limit of memory, and is started anew where it dies. A finding is a
folder: the input under its own name, and what it did.
"""

import argparse
import faulthandler
import hashlib
import resource
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings

from .readers import READERS, Damaged, inputs
from .trial import SECONDS, Trial

BLOCK = 500  # inputs under one seed
ROOM = 6 * 2**30  # bytes of address space beyond those of the libraries
UNHURRIED = {"deadline": None, "database": None, "phases": [Phase.generate]}
HANGS = 15 * SECONDS  # of the clock, after which a reader that does not listen is ended
LAST = "last-input"  # what the reader was given when its process died


def fuzzed(name: str, until: float, first_seed: int, findings: Path) -> Counter:
    """How many inputs were read, how many refused, and how many did something else."""
    counts: Counter = Counter()
    with tempfile.TemporaryDirectory() as scratch:
        trial = Trial(READERS[name], Path(scratch))
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, used + ROOM))
        number = first_seed
        while time.time() < until:
            _block(trial, number, until, findings / name, counts)
            number += 1
    (findings / name / LAST).unlink(missing_ok=True)
    counts["next seed"] = number
    return counts


def _block(trial: Trial, number: int, until: float, findings: Path, counts: Counter) -> None:
    @given(inputs(trial.reader, trial.folder))
    @seed(number)
    @settings(max_examples=BLOCK, suppress_health_check=list(HealthCheck), **UNHURRIED)
    def one(chosen: Damaged) -> None:
        if time.time() > until:
            return
        findings.mkdir(parents=True, exist_ok=True)
        (findings / LAST).write_bytes(chosen.name.encode() + b"\n" + chosen.content)
        faulthandler.dump_traceback_later(HANGS, exit=True)
        try:
            counts[trial(chosen.name, chosen.content)] += 1
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is what is looked for
            counts["findings"] += 1
            _keep(findings, chosen, error)
        finally:
            faulthandler.cancel_dump_traceback_later()

    one()


def _keep(findings: Path, chosen: Damaged, error: BaseException) -> None:
    """One folder for each place where something is raised; the first input that came there stays."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{type(error).__name__} {[(frame.filename, frame.lineno) for frame in frames[-3:]]}"
    folder = findings / f"{type(error).__name__}-{hashlib.sha256(place.encode()).hexdigest()[:8]}"
    if not folder.exists():
        folder.mkdir()
        (folder / chosen.name).write_bytes(chosen.content)
        (folder / "traceback.txt").write_text("".join(traceback.format_exception(error)), errors="backslashreplace")


def _in_a_process(name: str, minutes: float, first_seed: int, findings: Path) -> None:
    """Runs a reader until its time is over, again after each death."""
    until, deaths, first = time.time() + 60 * minutes, 0, first_seed
    while time.time() < until:
        command = [sys.executable, "-m", "tests.fuzz", name, "--until", str(until), "--seed", str(first)]
        done = subprocess.run([*command, "--findings", str(findings)], capture_output=True, text=True, check=False)
        print(done.stdout, end="", flush=True)
        if done.returncode == 0:
            return
        deaths += 1
        first += 1000
        folder = findings / name / f"death-{deaths}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "stderr.txt").write_text(f"exit {done.returncode}\n{done.stderr}")
        last = findings / name / LAST
        if last.exists():
            last.replace(folder / LAST)
        print(f"{name}: died with {done.returncode}, see {folder}", flush=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("readers", nargs="*", help=f"of {', '.join(READERS)}; all if left out")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings"))
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if unknown := [name for name in chosen.readers if name not in READERS]:
        parser.error(f"there is no reader {unknown[0]}; choose of {', '.join(READERS)}")
    if chosen.until:
        warnings.simplefilter("ignore")
        (name,) = chosen.readers
        started = time.time()
        counts = fuzzed(name, chosen.until, chosen.seed, chosen.findings)
        print(f"{name}: {dict(counts)} in {time.time() - started:.0f} s, from seed {chosen.seed}")
        return
    for name in chosen.readers or READERS:
        _in_a_process(name, chosen.minutes, chosen.seed, chosen.findings)


if __name__ == "__main__":
    main()
