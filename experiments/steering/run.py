"""Steering of one or several models: readings, five variants, parallel layers against random choices, gates.

    python experiments/steering/run.py experiments/steering/smollm2.yaml --text wiki.test.raw --out results/

Every stage of every model is a run file in the output folder, and every pass is kept in `passes.jsonl` there: started
again, the command goes on where it was. `tables.py` turns the folder into the tables of docs/results/steering.md.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from rheoscope import corpus
from rheoscope.corpus import Corpus
from rheoscope.instruments.catalog import describe
from rheoscope.instruments.measure import measure, provenance
from rheoscope.instruments.steering.steering import Steering
from rheoscope.models.load import load
from rheoscope.models.view import ModelView
from rheoscope.run import Run
from rheoscope.surgery.ablation import NAME, ablate
from rheoscope.surgery.gates import Fit
from rheoscope.surgery.parallel import layer_defects, parallel_curve
from rheoscope.surgery.passes import Passes
from rheoscope.theory.critical_readings import criticals


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--text", required=True, help="the text of the configuration's kind, such as wiki.test.raw")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ref", nargs="*", default=[], metavar="NAME=REF", help="another place for a model")
    arguments = parser.parse_args()
    config = yaml.safe_load(arguments.config.read_text(encoding="utf-8"))
    refs = config["models"] | dict(pair.split("=", 1) for pair in arguments.ref)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, ref in refs.items():
        run_model(name, ref, config, arguments.text, arguments.out)


def run_model(name: str, ref: str, config: dict, text: str, out: Path) -> None:
    """All stages of one model; those whose file is there are left as they are."""
    stages = config["stages"].items()
    waiting = {stage: settings for stage, settings in stages if not path_of(out, name, stage).exists()}
    if not waiting:
        return
    view = load(ref)
    for stage, settings in waiting.items():
        options = dict(settings)
        kind, reading = options.pop("kind"), options.pop("text")
        windows = corpus.read(text, tokenizer=view.tokenizer, **reading)
        started = time.monotonic()
        if kind == "measure":
            chosen = {"steering": Steering.Options(**options)}
            run = measure(view, windows, instruments=["steering", "loss"], options=chosen, progress=show)
        elif kind == "criticals":
            run = criticals(view, windows, **options)
        elif kind == "choices":
            run = choices_alone(view, windows, memory=out / "passes.jsonl", **options)
        else:
            options |= {"fit": Fit(**options.pop("fit"))} if "fit" in options else {}
            run = ablate(view, windows, memory=out / "passes.jsonl", progress=show, **options)
        run.save(path_of(out, name, stage))
        print(f"{name} {stage}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)


def choices_alone(view: ModelView, windows: Corpus, *, memory: Path, batch_size: int, seed: int, **options: Any) -> Run:
    """Sets of parallel layers by defect, by displacement and at random, without each layer alone: 30 passes fewer."""
    started = time.monotonic()
    passes = Passes(view, windows, memory=memory, batch_size=batch_size, progress=show)
    defects = layer_defects(view, windows, batch_size=batch_size)
    names = {"parallel_defect": "defect", "parallel_displacement": "defect_displacement"}
    orders = {name: defects[of].values for name, of in names.items()}
    data = parallel_curve(passes, *orders.values(), seed=seed, **options)
    data = data.assign({name: ("layer", values) for name, values in orders.items()})
    plain = passes.losses(task="unedited")
    data["plain_loss"] = plain.window_nll.sum() / plain.window_tokens.sum()
    data.attrs = {"n": len(set(windows.units.tolist())), "n_passes": passes.n_run}
    config = {"choices": {**options, "batch_size": batch_size}, "seed": seed, "command": shlex.join(sys.argv)}
    return Run.of({NAME: describe(data, NAME)}, provenance(view, windows, config, seconds=time.monotonic() - started))


def path_of(out: Path, name: str, stage: str) -> Path:
    return out / f"{name}-{stage}.nc"


def show(task: str, done: int, total: int) -> None:
    if done >= total:
        print(task, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
