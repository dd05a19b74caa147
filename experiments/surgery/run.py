"""Loss against savings: measured choice and random choices, as they are, after the refit, and after distillation.

    python experiments/surgery/run.py experiments/surgery/smollm2.yaml --text wiki.valid.raw --out results/

Every pass and every point is kept in the output folder: started again, the command goes on where it was. `tables.py`
turns the folder into the tables of docs/results/surgery.md.
"""

from __future__ import annotations

import argparse
import copy
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
from rheoscope.surgery.distill import Distillation, distil
from rheoscope.surgery.edited_model import EditedForCausalLM
from rheoscope.surgery.effects import loss_change, window_losses
from rheoscope.surgery.greedy import Bounds, alone, edits_of, greedy, random_choice
from rheoscope.surgery.passes import Passes
from rheoscope.surgery.recover import LayerFit, refit, refitted
from rheoscope.surgery.redundancy import lost_with_groups
from rheoscope.surgery.restructure import restructured
from rheoscope.surgery.sink_effects import head_means
from rheoscope.surgery.sizes import flops_per_token, parameters
from rheoscope.surgery.structure import wrapped


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
    """Windows to choose by, to fit on, to train on and to check on: numbers of documents.

    The first choose and calibrate, by their first windows, and train by all of theirs; the last check.
    """
    documents, firsts = np.unique(whole.documents, return_index=True)
    n = len(documents)
    ranges = {"choosing": (0, choosing), "calibration": (0, calibration), "checking": (n - checking, n)}
    texts = {name: whole.of_windows(firsts[start:end]) for name, (start, end) in ranges.items()}
    training = np.isin(whole.documents, documents[:calibration])
    return texts | {"training": whole.of_windows(np.flatnonzero(training))}


class Curves:
    """Points of the curves, in a file of one JSON object a line."""

    def __init__(self, view: ModelView, texts: dict[str, Corpus], config: dict[str, Any], out: Path):
        self.view, self.texts, self.config, self.out = view, texts, config, out
        self.file = out / "points.jsonl"
        lines = self.file.read_text(encoding="utf-8").splitlines() if self.file.exists() else []
        self.points = {(p["choice"], p["size"], p["recovery"]): p for p in map(json.loads, lines)}
        made = {"memory": out / "passes.jsonl", "progress": show}
        self.passes = Passes(view, texts["choosing"], **made)
        self.check = Passes(view, texts["checking"], **made)

    def run(self) -> None:
        """Choose, then measure every point that is not there yet, the cheap ones first."""
        config = self.config
        found, _ = candidates(self.view, head_means(self.view, self.texts["choosing"]), only=config["kinds"])
        lost = lost_with_groups(self.view, self.texts["choosing"])
        promising = sorted(found, key=lambda one: lost[one.layer, one.group])[: config["most_candidates"]]
        changes = alone(self.passes, promising)
        bounds = Bounds(float("inf"), most=max(config["sizes"]), batch=config["batch"])
        choice = greedy(self.passes, changes, bounds)
        generator = np.random.default_rng(config["seed"])
        randoms = [random_choice(found, choice.chosen, generator) for _ in range(config["n_random"])]
        chosen = {"measured": choice.chosen} | {f"random {number}": drawn for number, drawn in enumerate(randoms)}
        for size in config["sizes"]:
            for name, drawn in chosen.items():
                predicted = {"predicted": predicted_of(choice.steps[:size])} if name == "measured" else {}
                self.point(name, drawn[:size], **predicted)
        self.sizes_and_times(choice.chosen)
        self.distilled("original", [])
        for name, size in config["distilled"]:
            self.distilled(name, chosen[name][:size])

    def point(self, name: str, chosen: Sequence[Candidate], **more: Any) -> None:
        """Loss change on the checking text by some candidates, as they are and after the refit."""
        edits, size = edits_of(chosen), len(chosen)
        about = self.about(name, chosen) | more
        if (name, size, "none") not in self.points:
            self.keep(about | {"recovery": "none"}, self.check.losses(*edits, task=f"{name} {size}"), [])
        if (name, size, "refit") not in self.points:
            started = time.monotonic()
            fits = refit(self.view, edits, self.texts["calibration"], progress=show)
            seconds = time.monotonic() - started
            with refitted(self.view, fits):
                after = window_losses(self.view, self.texts["checking"], edits, progress=show)
            self.keep(about | {"recovery": "refit", "refit_seconds": seconds}, after, fits)

    def distilled(self, name: str, chosen: Sequence[Candidate]) -> None:
        """Loss change after refit and distillation; of no candidates, by as long a training of the original itself."""
        edits, size = edits_of(chosen), len(chosen)
        if (name, size, "distilled") in self.points:
            return
        fits = refit(self.view, edits, self.texts["calibration"], progress=show)
        model = self.made(edits, fits)
        started = time.monotonic()
        memory = self.out / f"{name.replace(' ', '_')}_{size}.safetensors"
        settings = Distillation(**self.config["distillation"])
        found = distil(self.view, model, self.texts["training"], settings, memory=memory, progress=steps_shown)
        trained = ModelView(model, self.view.tokenizer, name)
        after = window_losses(trained, self.texts["checking"], progress=show)
        more = {"recovery": "distilled", "steps": found.steps, "distil_seconds": time.monotonic() - started}
        self.keep(self.about(name, chosen) | more, after, fits)
        memory.unlink()

    def made(self, edits: Sequence[Any], fits: Sequence[LayerFit]) -> EditedForCausalLM:
        """The edited model; without edits, a copy of the original that can be trained in the same way."""
        if not edits:
            return wrapped(copy.deepcopy(self.view.model)).eval()
        with refitted(self.view, fits):
            return restructured(self.view, edits)

    def sizes_and_times(self, chosen: Sequence[Candidate]) -> None:
        """Parameters, operations and times of the measured choice beside the original, in turns, at every size."""
        family, length = self.view.family, self.texts["checking"].window
        for size in self.config["sizes"]:
            if ("measured", size, "clock") in self.points:
                continue
            edited = restructured(self.view, edits_of(chosen[:size]))
            sides = ((self.view.model, self.view.blocks), (edited, edited.blocks))
            point = self.about("measured", chosen[:size]) | {
                "recovery": "clock",
                "parameters": [parameters(model) for model, _ in sides],
                "flops": [flops_per_token(model, blocks, family, length=length) for model, blocks in sides],
                "latencies": [asdict(one) for one in latencies(self.view.model, edited, **self.config["clock"])],
            }
            self.write(point)

    def about(self, name: str, chosen: Sequence[Candidate]) -> dict[str, Any]:
        """What a point is of."""
        saved = sum(one.saving for one in chosen)
        return {
            "choice": name,
            "size": len(chosen),
            "places": [one.place for one in chosen],
            "saving": saved,
            "share": saved / attention_parameters(self.view),
        }

    def keep(self, point: dict[str, Any], after: Any, fits: Sequence[LayerFit]) -> None:
        """Write one point down."""
        change = loss_change(after, self.check.losses(task="unedited"))
        point |= {"change": float(change.value), "se": float(change.se), "n": int(change.n)}
        point |= {"window_nll": after.window_nll.tolist(), "window_tokens": after.window_tokens.tolist()}
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


def steps_shown(task: str, done: int, total: int) -> None:
    if done % 10 == 0:
        print(time.strftime("%H:%M:%S"), task, done, total, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
