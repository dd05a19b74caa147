"""Trains the networks that a configuration names, one after another, every seed of the first before the next seed.

    python experiments/nets/run.py experiments/nets/cascade.yaml --text tinyshakespeare.txt --out runs/

Every network is a folder NAME-SEED in the output folder, with its recipe in training.json and its loss in loss.csv.
Started again, the command leaves what is finished as it is and goes on where it was; configurations may share networks.
A network with `ranks_of: NAME` gets its head sizes from the ranks that the networks NAME, trained before, ended with.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import numpy as np
import yaml
from text import finished

from rheoscope.errors import RheoscopeError
from rheoscope.nets.ranks import training_ranks
from rheoscope.nets.train import Trained, train
from rheoscope.nets.trainer import read_curve

SIZE_STEP = 4  # head sizes from ranks are multiples of it


def main() -> None:
    """Train what is missing, a line for each network."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--text", required=True, help="the text, such as tinyshakespeare.txt")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="these networks alone")
    parser.add_argument("--seeds", nargs="*", default=[], type=int, metavar="SEED", help="these seeds alone")
    arguments = parser.parse_args()
    config = yaml.safe_load(arguments.config.read_text(encoding="utf-8"))
    for name, seed, recipe in planned(config):
        if (arguments.only and name not in arguments.only) or (arguments.seeds and seed not in arguments.seeds):
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
    if name := recipe.pop("ranks_of", None):
        recipe["head_dims"] = head_dims_from_ranks(out.parent, name)
    try:
        return train(
            text=text, out=out, probe=training_ranks, probe_every=config["probe_every"], progress=True, **recipe
        )
    except RheoscopeError as error:
        raise RheoscopeError(f"{out.name}: {error}") from error


def head_dims_from_ranks(runs: Path, name: str) -> list[int]:
    """Per layer the least multiple of 4 not below k90 of S, median over seeds, at the end of training."""
    folders = [runs / found for found in finished(runs) if found.rpartition("-")[0] == name]
    if not folders:
        raise RheoscopeError(f"ranks of {name!r} asked for; {runs} has no such network finished: train it first")
    last = [read_curve(folder).dropna(subset="routing_k90_0").iloc[-1] for folder in folders]
    n_layers = sum(column.startswith("routing_k90_") and column[12:].isdecimal() for column in last[0].index)
    ranks = np.median([[row[f"routing_k90_{layer}"] for layer in range(n_layers)] for row in last], axis=0)
    return [SIZE_STEP * math.ceil(rank / SIZE_STEP) for rank in ranks]


if __name__ == "__main__":
    main()
