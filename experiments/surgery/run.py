"""Loss against attention parameters removed: measured choice and random choices, before and after the refit.

    python experiments/surgery/run.py experiments/surgery/smollm2.yaml --text wiki.valid.raw --out results/

Every pass and every point is kept in the output folder: started again, the command goes on where it was. `tables.py`
turns the folder into the tables of docs/results/surgery.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from rheoscope import corpus
from rheoscope.corpus import Corpus
from rheoscope.models.load import load
from rheoscope.models.view import ModelView
from rheoscope.surgery.candidates import Candidate, attention_parameters, candidates
from rheoscope.surgery.clock import latencies
from rheoscope.surgery.effects import loss_change, window_losses
from rheoscope.surgery.greedy import Bounds, alone, edits_of, greedy, random_choice
from rheoscope.surgery.passes import Passes
from rheoscope.surgery.recover import refit, refitted
from rheoscope.surgery.redundancy import lost_with_groups
from rheoscope.surgery.restructure import restructured
from rheoscope.surgery.sink_effects import head_means
from rheoscope.surgery.sizes import flops_per_token, parameters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--text", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", help="another place for the model")
    arguments = parser.parse_args()
    config = yaml.safe_load(arguments.config.read_text(encoding="utf-8"))
    arguments.out.mkdir(parents=True, exist_ok=True)
    view = load(arguments.model or config["model"])
    whole = corpus.read(arguments.text, tokenizer=view.tokenizer, **config["text"])
    Curves(view, parts_of(whole, **config["parts"]), config, arguments.out).run()


def parts_of(whole: Corpus, *, choosing: int, calibration: int, checking: int) -> dict[str, Corpus]:
    """Windows to choose by, to fit on and to check on; one window is one document, and the last have none in common."""
    n = whole.n_windows
    ranges = {"choosing": (0, choosing), "calibration": (0, calibration), "checking": (n - checking, n)}
    return {name: whole.of_windows(np.arange(*ends)) for name, ends in ranges.items()}


class Curves:
    """Points of the curves, in a file of one JSON object a line."""

    def __init__(self, view: ModelView, texts: dict[str, Corpus], config: dict[str, Any], out: Path):
        self.view, self.texts, self.config, self.file = view, texts, config, out / "points.jsonl"
        lines = self.file.read_text(encoding="utf-8").splitlines() if self.file.exists() else []
        self.points = {(p["choice"], p["size"], p["recovery"]): p for p in map(json.loads, lines)}
        made = {"memory": out / "passes.jsonl", "progress": show}
        self.passes = Passes(view, texts["choosing"], **made)
        self.check = Passes(view, texts["checking"], **made)

    def run(self) -> None:
        """Choose, then measure every point that is not there yet."""
        config = self.config
        found, _ = candidates(self.view, head_means(self.view, self.texts["choosing"]), only=config["kinds"])
        lost = lost_with_groups(self.view, self.texts["choosing"])
        promising = sorted(found, key=lambda one: lost[one.layer, one.group])[: config["most_candidates"]]
        changes = alone(self.passes, promising)
        bounds = Bounds(float("inf"), most=max(config["sizes"]), batch=config["batch"])
        choice = greedy(self.passes, changes, bounds)
        generator = np.random.default_rng(config["seed"])
        randoms = [random_choice(found, choice.chosen, generator) for _ in range(config["n_random"])]
        for size in config["sizes"]:
            self.point("measured", choice.chosen[:size], predicted=predicted_of(choice.steps[:size]))
            for number, drawn in enumerate(randoms):
                self.point(f"random {number}", drawn[:size])
        for size in config["sizes"]:
            self.clock("measured", choice.chosen[:size])

    def point(self, name: str, chosen: Sequence[Candidate], **more: Any) -> None:
        """Loss change on the checking text by some candidates, as they are and after the refit."""
        edits, size = edits_of(chosen), len(chosen)
        saved = sum(one.saving for one in chosen)
        about = {
            "choice": name,
            "size": size,
            "places": [one.place for one in chosen],
            "saving": saved,
            "share": saved / attention_parameters(self.view),
            **more,
        }
        if (name, size, "none") not in self.points:
            self.keep(about | {"recovery": "none"}, self.check.losses(*edits, task=f"{name} {size}"), [])
        if (name, size, "refit") not in self.points:
            started = time.monotonic()
            fits = refit(self.view, edits, self.texts["calibration"], progress=show)
            seconds = time.monotonic() - started
            with refitted(self.view, fits):
                after = window_losses(self.view, self.texts["checking"], edits, progress=show)
            self.keep(about | {"recovery": "refit", "refit_seconds": seconds}, after, fits)

    def clock(self, name: str, chosen: Sequence[Candidate]) -> None:
        """Sizes and times of a restructured model beside the original, in turns."""
        size = len(chosen)
        if (name, size, "clock") in self.points:
            return
        edited = restructured(self.view, edits_of(chosen))
        sides = ((self.view.model, self.view.blocks), (edited, edited.blocks))
        family, length = self.view.family, self.texts["checking"].window
        point = {
            "choice": name,
            "size": size,
            "recovery": "clock",
            "parameters": [parameters(model) for model, _ in sides],
            "flops": [flops_per_token(model, blocks, family, length=length) for model, blocks in sides],
            "latencies": [asdict(one) for one in latencies(self.view.model, edited, **self.config["clock"])],
        }
        self.write(point)

    def keep(self, point: dict[str, Any], after: Any, fits: Sequence[Any]) -> None:
        """Write one point down."""
        change = loss_change(after, self.check.losses(task="unedited"))
        point |= {"change": float(change.value), "se": float(change.se), "n": int(change.n)}
        point["fits"] = [[fit.layer, fit.strength, fit.error_before, fit.error_after] for fit in fits]
        self.write(point)
        print({key: point[key] for key in ("choice", "size", "recovery", "change", "se")}, flush=True)

    def write(self, point: dict[str, Any]) -> None:
        """Add a point to the file."""
        self.points[point["choice"], point["size"], point["recovery"]] = point
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(point) + "\n")


def predicted_of(steps: Sequence[Any]) -> dict[str, float]:
    """Sum of the changes alone, and of those predicted when each was chosen."""
    return {
        "alone": sum(float(step.alone.value) for step in steps),
        "given": sum(float(step.predicted.value) for step in steps),
    }


def show(task: str, done: int, total: int) -> None:
    if done >= total:
        print(time.strftime("%H:%M:%S"), task, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
