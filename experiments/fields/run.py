"""Fields of one or several models by number of snapshots, with untrained and shuffled nulls at the same number.

    python experiments/fields/run.py experiments/fields/language.yaml --text wiki.test.raw --out runs/
    python experiments/fields/tables.py runs/ --figures docs/results

Every stage of every model is a run file in the output folder: started again, the command goes on where it was.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import yaml

from rheoscope import corpus
from rheoscope.errors import RheoscopeError
from rheoscope.instruments.fields.fields import Fields
from rheoscope.instruments.fields.nulls import chance_corpus
from rheoscope.instruments.measure import measure
from rheoscope.models.load import load
from rheoscope.models.untrained import untrained

SEED = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--text", required=True, help="the text, such as wiki.test.raw")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ref", nargs="*", default=[], metavar="NAME=REF", help="another place for a model")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="these models alone")
    arguments = parser.parse_args()
    config = yaml.safe_load(arguments.config.read_text(encoding="utf-8"))
    refs = dict(pair.split("=", 1) for pair in arguments.ref)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, model in config["models"].items():
        if not arguments.only or name in arguments.only:
            run_model(name, refs.get(name, model["ref"]), model, config, arguments)


def run_model(name: str, ref: str, model: dict, config: dict, arguments: argparse.Namespace) -> None:
    """All stages of one model; those whose file is there are left as they are."""
    stages = {stage: config["stages"][stage] for stage in model.get("stages", config["stages"])}
    waiting = {stage: choices for stage, choices in stages.items() if not path_of(arguments.out, name, stage).exists()}
    if not waiting:
        return
    view = load(ref)
    for stage, choices in waiting.items():
        started = time.monotonic()
        n_windows, most = choices["text"]
        windows = corpus.read(
            arguments.text,
            tokenizer=view.tokenizer,
            n_windows=n_windows,
            windows_per_document=most,
            **config["reading"],
        )
        if windows.n_windows < n_windows:
            raise RheoscopeError(f"{stage} asks for {n_windows} windows; the text has {windows.n_windows}: give more")
        null = choices.get("null_of")
        options = Fields.Options(n_null=0 if null else 16, **choices.get("options", {}))
        with untrained(view, SEED) if null == "untrained" else nullcontext():
            run = measure(
                view,
                chance_corpus(windows, SEED) if null == "shuffled" else windows,
                instruments=["fields"],
                options={"fields": options},
                nulls=not null,
                seed=SEED,
            )
        run.save(path_of(arguments.out, name, stage))
        print(f"{name} {stage}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)


def path_of(out: Path, name: str, stage: str) -> Path:
    return out / f"{name}-{stage}.nc"


if __name__ == "__main__":
    main()
