"""All benchmarks with small defaults, one after the other: python benchmarks [NAME ...]

On one thread unless OMP_NUM_THREADS says otherwise. Each can be run alone with other sizes; `--help` of it says how.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from machine import machine

FOLDER = Path(__file__).parent
COMMANDS = {
    "spectra": ["spectra.py"],
    "energies": ["energies.py", "--batch", "1"],
    "measure": ["measure.py", "--windows", "16", "--memory-windows", "16"],
    "peers": ["peers.py", "--windows", "2", "--all-windows", "0"],
    "scaling": ["scaling.py", "--repeats", "1"],
    "pod": ["fields.py", "pod"],
    "wavelets": ["fields.py", "wavelets"],
    "steering": ["steering.py", "--windows", "4", "--repeats", "1"],
    "sinks": ["sinks.py", "builtin:manual", "--text", "builtin:manual-all", "--split", "file", "--window", "256"],
    "prefill": ["surgery.py", "prefill", "--threads", "1"],
    "parallel": ["surgery.py", "parallel", "--threads", "1"],
    "nets": ["nets.py", "--repeats", "2"],
}


def main() -> int:
    """Run what was named, or all; 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(COMMANDS))
    names = parser.parse_args().names or list(COMMANDS)
    unknown = [name for name in names if name not in COMMANDS]
    if unknown:
        parser.error(f"{', '.join(unknown)} asked for; there are {', '.join(COMMANDS)}")
    print(machine(), flush=True)
    failed = [name for name in names if not passed(name)]
    print(f"\nfailed: {', '.join(failed)}" if failed else "\nall ran to their end")
    return bool(failed)


def passed(name: str) -> bool:
    """Whether a benchmark ran to its end; what it prints goes to the terminal."""
    script, *options = COMMANDS[name]
    print(f"\n## {' '.join([script, *options])}", flush=True)
    started = time.monotonic(), processor_seconds()
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    done = subprocess.run([sys.executable, FOLDER / script, *options], env=os.environ | threads)
    wall, processor = time.monotonic() - started[0], processor_seconds() - started[1]
    print(f"({wall:.0f} s, processor {processor:.0f} s)", flush=True)
    return done.returncode == 0


def processor_seconds() -> float:
    """Processor time of all benchmarks so far: what they take of an idle machine on one thread."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main())
