"""What sink heads are worth: ranked, replaced by their mean output, frozen, removed; against as many random heads.

    python experiments/sinks/run.py MODEL --text TUNING --heldout OTHER --config CONFIG --out FOLDER

Resumable: every finished pass is a line in FOLDER/passes.jsonl, and a run that starts again goes on after the last one.
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import torch
import yaml
from torch import Tensor

from rheoscope import corpus
from rheoscope.corpus import Corpus, batches
from rheoscope.instruments.engine import batch_size_for
from rheoscope.instruments.measure import measure
from rheoscope.instruments.sinks.sinks import SinkReadings
from rheoscope.models.load import load
from rheoscope.models.view import ModelView
from rheoscope.run import Run
from rheoscope.surgery.edits import Edit
from rheoscope.surgery.edits_sinks import DropHeads, IdentityHeads, SinkOneHot
from rheoscope.surgery.sink_effects import Measured, constant_heads, effect, head_means, measured

Pair = tuple[int, int]
THRESHOLD = SinkReadings.Options().threshold


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", required=True, help="what the readings are made on")
    parser.add_argument("--heldout", required=True, help="what the replacements are judged on")
    parser.add_argument("--config", required=True)
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = yaml.safe_load(Path(options.config).read_text(encoding="utf-8"))
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    Experiment(load(options.model), config, options.text, options.heldout, folder).run()


class Experiment:
    """One model; passes are named, and what was done is not done again."""

    def __init__(self, view: ModelView, config: dict, text: str, heldout: str, folder: Path):
        self.view, self.config, self.folder = view, config, folder
        self.sources = {"measure": text, "sensitivity": text, "evaluate": heldout}
        self.path = folder / "passes.jsonl"
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        self.done = {entry["name"]: entry for entry in map(json.loads, lines)}
        self.before: dict[str, Measured] = {}
        self.texts: dict[str, Corpus] = {}
        self.streams: list[Tensor] = []

    def run(self) -> None:
        """Readings, rankings by them, every head in turn, the ranking by what that cost, and each head as a map."""
        data = self.readings()
        self.means = self.mean_outputs()
        self.heads = [(layer, head) for layer in range(self.view.n_layers) for head in range(self.view.n_heads)]
        for name, edit in (*self.by_reading(data), *self.sink_heads(data)):
            self.judge(name, edit, on="evaluate")
        for pair in self.heads:
            self.judge_head(pair, "constant", constant_heads((pair,), self.means))
        for name, edit in self.by_sensitivity():
            self.judge(name, edit, on="evaluate")
        for pair in self.diagonal(data):
            self.judge_head(pair, "mlp", IdentityHeads(heads=(pair,)))

    def readings(self) -> Run:
        """The sink readings of the tuning text."""
        path = self.folder / "readings.nc"
        if not path.exists():
            chosen = {"sinks": SinkReadings.Options(n_null=0)}
            measure(self.view, self.text("measure"), instruments=["loss", "sinks"], options=chosen).save(path)
        return Run.load(path)

    def diagonal(self, run: Run) -> list[Pair]:
        """Heads with some attention to the token itself, the most first: candidates for a map of each token."""
        mass = run["sinks"].diagonal_mass.values
        order = [divmod(int(place), self.view.n_heads) for place in np.argsort(-mass, axis=None, kind="stable")]
        return [pair for pair in order if mass[pair] > self.config["least_diagonal"]]

    def mean_outputs(self) -> np.ndarray:
        """Mean z of every head over the tuning text."""
        path = self.folder / "means.npy"
        if not path.exists():
            np.save(path, head_means(self.view, self.text("measure")))
        return np.load(path)

    def by_reading(self, run: Run) -> Iterator[tuple[str, Edit]]:
        """Constant replacement of the heads that rest most, of those whose sink writes least, and of random ones."""
        data = run["sinks"]
        rankings = {"sink mass": -data.sink_mass.values, "sink value": data.value_ratio.values}
        generator = np.random.default_rng(self.config["seed"])
        for draw in range(self.config["random_draws"]):
            rankings[f"random {draw}"] = generator.random(data.sink_mass.shape)
        yield from self.ranked(rankings)

    def by_sensitivity(self) -> Iterator[tuple[str, Edit]]:
        """Constant replacement of the heads that cost least one by one."""
        costs = [self.done[f"head {layer}.{head} constant"]["loss"] for layer, head in self.heads]
        yield from self.ranked({"sensitivity": np.reshape(costs, (self.view.n_layers, self.view.n_heads))})

    def ranked(self, rankings: dict[str, np.ndarray]) -> Iterator[tuple[str, Edit]]:
        for name, order in rankings.items():
            heads = [divmod(int(place), self.view.n_heads) for place in np.argsort(order, axis=None, kind="stable")]
            for count in self.config["counts"]:
                yield f"constant, {count} by {name}", constant_heads(tuple(heads[:count]), self.means)

    def sink_heads(self, run: Run) -> Iterator[tuple[str, Edit]]:
        """Every sink head removed, sent to the first token for good, or made constant; and as many random heads."""
        sinks = np.argwhere(run["sinks"].sink_mass.values > THRESHOLD)
        if not len(sinks):
            return
        choices = {"all sink heads": tuple((int(layer), int(head)) for layer, head in sinks)}
        generator = np.random.default_rng(self.config["seed"] + 1)
        for draw in range(self.config["random_draws"]):
            chosen = generator.choice(len(self.heads), size=len(sinks), replace=False)
            choices[f"random {draw}"] = tuple(self.heads[place] for place in chosen)
        for name, heads in choices.items():
            yield f"drop, {len(heads)} {name}", DropHeads(heads=heads)
            yield f"one-hot, {len(heads)} {name}", SinkOneHot(heads=heads)
            yield f"constant, {len(heads)} {name}", constant_heads(heads, self.means)

    def judge(self, name: str, edit: Edit, *, on: str) -> None:
        """One pass with the edit in place, unless it was done before."""
        if name in self.done:
            return
        if on not in self.before:
            self.before[on] = measured(self.view, self.text(on))
        found = effect(self.view, self.text(on), [edit], before=self.before[on])
        entry = {"name": name, "on": on, "loss": float(found.loss.value), "loss_se": float(found.loss.se)}
        entry |= {"cosine": float(found.cosine.value), "cosine_se": float(found.cosine.se), "n": int(found.loss.n)}
        entry["before"] = float(self.before[on].loss.finalize().nll_mean)
        self.done[name] = entry
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def judge_head(self, pair: Pair, kind: str, edit: Edit) -> None:
        """One head changed, on the tuning text; the layers before it are not run again where the text is one batch."""
        name, text = f"head {pair[0]}.{pair[1]} {kind}", self.text("sensitivity")
        if name in self.done or text.n_windows > batch_size_for(self.view, text.window):
            return self.judge(name, edit, on="sensitivity")
        if not self.streams:
            self.streams = entering_streams(self.view, text)
        with begun_at(self.view, pair[0], self.streams[pair[0]]):
            self.judge(name, edit, on="sensitivity")

    def text(self, use: str) -> Corpus:
        if use not in self.texts:
            size = self.config[use]
            self.texts[use] = corpus.read(
                self.sources[use],
                tokenizer=self.view.tokenizer,
                window=size["window"],
                n_windows=size["windows"],
                windows_per_document=1,
                split=self.config["split"],
            )
        return self.texts[use]


@torch.no_grad()
def entering_streams(view: ModelView, text: Corpus) -> list[Tensor]:
    """The stream that enters every layer, for a text of one batch."""
    kept: list[Tensor] = []
    (batch,) = batches(text, text.n_windows)
    with view.tapped({"resid_pre": lambda _, x: kept.append(x.clone())}):
        view.forward(batch.tokens, batch.valid, head=False)
    return kept


@contextmanager
def begun_at(view: ModelView, layer: int, stream: Tensor) -> Iterator[None]:
    """Passes that begin at a layer with a stream kept from before; the layers before it hand on what they are given."""
    with ExitStack() as undo:
        for block in view.blocks[:layer]:
            undo.callback(block.__dict__.pop, "forward")
            block.forward = lambda x, *_, **__: x
        undo.enter_context(view.tapped({"resid_pre": lambda _, x: stream}, layers=[layer]))
        yield


if __name__ == "__main__":
    main()
