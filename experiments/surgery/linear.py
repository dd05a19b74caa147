"""What one linear layer costs, by feature map: every third layer of a model alone, without recovery.

    python experiments/surgery/linear.py --text wiki.valid.raw --out results/

Every pass is kept in the output folder: started again, the command goes on where it was.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from rheoscope import corpus
from rheoscope.models.load import load
from rheoscope.surgery.edits_linear import Linearize
from rheoscope.surgery.passes import Passes

MAPS = (("elu", False), ("elu", True), ("softmax", False), ("softmax", True), ("taylor", True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--text", required=True)
    parser.add_argument("--split", default="heading")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--every", type=int, default=3)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    view = load(arguments.model)
    layout = {"window": arguments.window, "windows_per_document": 1, "split": arguments.split}
    text = corpus.read(arguments.text, tokenizer=view.tokenizer, **layout)
    passes = Passes(view, text.of_windows(np.arange(arguments.documents)), memory=arguments.out / "passes.jsonl")
    print(f"| layer | {' | '.join(feature + (', scaled' if scaled else '') for feature, scaled in MAPS)} |")
    print("|---" * (1 + len(MAPS)) + "|")
    for layer in range(0, view.n_layers, arguments.every):
        changes = (passes.change(Linearize((layer,), feature=feature, scaled=scaled)) for feature, scaled in MAPS)
        cells = (f"{float(change.value):+.3f} ± {float(change.se):.3f}" for change in changes)
        print(f"| {layer} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
