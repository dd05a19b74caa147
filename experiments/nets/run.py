"""Trains the networks that a configuration names, one after another, every seed of the first before the next seed.

    python experiments/nets/run.py experiments/nets/cascade.yaml --text tinyshakespeare.txt --out runs/

Every network is a folder NAME-SEED in the output folder, with its recipe in training.json and its loss in loss.csv.
Started again, the command leaves what is finished as it is and goes on where it was; configurations may share networks.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import yaml

from rheoscope.errors import RheoscopeError
from rheoscope.nets.ranks import training_ranks
from rheoscope.nets.train import Trained, train


def main() -> None:
    """Train what is missing, a line for each network."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--text", required=True, help="the text, such as tinyshakespeare.txt")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="these networks alone")
    arguments = parser.parse_args()
    config = yaml.safe_load(arguments.config.read_text(encoding="utf-8"))
    for name, seed, recipe in planned(config):
        if arguments.only and name not in arguments.only:
            continue
        run = trained(arguments.out / f"{name}-{seed}", arguments.text, config, recipe | {"seed": seed})
        print(
            f"{name}, seed {seed}: loss {run.loss:.4f}, held out {run.held_out_loss:.4f}, {run.seconds:.0f} s",
            file=sys.stderr,
            flush=True,
        )


def planned(config: dict) -> list[tuple[str, int, dict]]:
    """Name, seed and recipe of every network in order; a network may ask for fewer seeds than the others."""
    networks = {name: dict(fields) for name, fields in config["networks"].items()}
    seeds = {name: fields.pop("seeds", config["seeds"]) for name, fields in networks.items()}
    order = sorted({seed for chosen in seeds.values() for seed in chosen})
    return [
        (name, seed, config["recipe"] | fields)
        for seed in order
        for name, fields in networks.items()
        if seed in seeds[name]
    ]


def trained(out: Path, text: str, config: dict, recipe: dict) -> Trained:
    """One network, trained or found trained. A network that diverges says which one it was."""
    try:
        return train(
            text=text, out=out, probe=training_ranks, probe_every=config["probe_every"], progress=True, **recipe
        )
    except RheoscopeError as error:
        raise RheoscopeError(f"{out.name}: {error}") from error


if __name__ == "__main__":
    main()
