"""What several commands take: a model and a text, and how both are opened."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rheoscope.cli.console import err
from rheoscope.errors import RheoscopeError

if TYPE_CHECKING:
    from rheoscope.corpus import Corpus
    from rheoscope.models.view import ModelView

WINDOW = 512

Model = Annotated[
    str, typer.Argument(help="Hub name (org/name or org/name@revision), folder, .gguf file, or builtin:NAME.")
]
Models = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL...", help="One or more: hub name (org/name or org/name@revision), folder, .gguf, builtin:NAME."
    ),
]
Dtype = Annotated[str, typer.Option(help="float64, float32, bfloat16, float16, or auto.")]
Device = Annotated[
    str, typer.Option(help="cpu, cuda, mps, map (over all devices), disk (weights stay there), or auto.")
]
Seed = Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Seed of everything that is drawn at random.")]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace files that exist.")]
Text = Annotated[
    list[str], typer.Option(help='.txt, .jsonl, .parquet, a folder of them, "-", hf:NAME[:SPLIT] or builtin:manual.')
]
Window = Annotated[int | None, typer.Option(help="Tokens per window; 512, or the model's context if shorter.")]
Windows = Annotated[int, typer.Option(help="Windows to read; 0 reads the whole text.")]
PerDocument = Annotated[
    int | None, typer.Option("--windows-per-document", help="At most so many windows of one document.")
]
Split = Annotated[str, typer.Option(help="What a document of a .txt is: file, blank, line or heading.")]
Field = Annotated[str, typer.Option(help="The field of .jsonl, .parquet and data sets that holds the text.")]
SplitOfRun = Annotated[
    str | None, typer.Option("--split", help="What a document of a .txt is; as the run's text was split if left out.")
]
FieldOfRun = Annotated[
    str | None, typer.Option("--field", help="The field that holds the text; that of the run's text if left out.")
]
BatchSize = Annotated[int | None, typer.Option(help="Windows at a time; chosen by memory if left out.")]


def opened(
    model: str,
    text: Sequence[str],
    *,
    window: int | None,
    n_windows: int | None,
    loading: Mapping[str, Any],
    **reading: Any,
) -> tuple[ModelView, Corpus]:
    """The model and the windows of its text, with a line that says what they are."""
    from rheoscope.corpus import read
    from rheoscope.models.load import load

    view = load(model, **loading)
    if view.tokenizer is None:
        raise RheoscopeError(f"model {model} has no tokenizer to read text with: add its tokenizer files to the folder")
    corpus = read(
        list(text),
        tokenizer=view.tokenizer,
        window=min(WINDOW, view.context or WINDOW) if window is None else window,
        n_windows=n_windows,
        **reading,
    )
    err.print(
        f"{model}: {view.n_layers} layers, {_counts(size.n_heads for size in view.sizes)} heads "
        f"({_counts(size.n_kv_heads for size in view.sizes)} of keys), "
        f"{view.n_parameters / 1e6:.1f} M parameters; {corpus.n_windows} windows of {corpus.window} tokens "
        f"from {corpus.n_documents} document{'' if corpus.n_documents == 1 else 's'}",
        markup=False,
        soft_wrap=True,
    )
    return view, corpus


def _counts(of_layers: Iterable[int]) -> str:
    """The number of every layer, or the smallest and largest."""
    counts = set(of_layers)
    return str(*counts) if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
