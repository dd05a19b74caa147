"""`python -m tests.faults --kills 20 [--seed 0] [COMMAND …]`: what random kills leave of measure, train and edit."""

import argparse
import tempfile
import time
from pathlib import Path

from .commands import COMMANDS, prepared
from .kills import killed


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("commands", nargs="*", help=f"of {', '.join(COMMANDS)}; all if left out")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    for name in chosen.commands or COMMANDS:
        with tempfile.TemporaryDirectory() as scratch:
            base = prepared(Path(scratch) / "base")
            begun = time.monotonic()
            found = killed(COMMANDS[name], base, Path(scratch), n=chosen.kills, seed=chosen.seed)
            print(f"{name}: {dict(found)} in {time.monotonic() - begun:.0f} s, seed {chosen.seed}", flush=True)


if __name__ == "__main__":
    main()
