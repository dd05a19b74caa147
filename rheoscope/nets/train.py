"""Train a network: a recipe and a folder in, an ordinary transformers checkpoint and its loss curve out.

A run that was killed goes on from its last checkpoint to the same numbers; a finished one is returned as it is. Under
torchrun or accelerate the batch is divided over the processes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
import transformers
from accelerate import PartialState
from transformers import PreTrainedTokenizerBase, set_seed
from transformers.trainer_callback import PrinterCallback

from rheoscope.corpus import Corpus, read
from rheoscope.errors import RheoscopeError
from rheoscope.nets.decoder import RheoscopeForCausalLM
from rheoscope.nets.folder import (
    UNFINISHED,
    last_checkpoint,
    put_in_place,
    read_record,
    record_of,
    refuse_another_run,
    refuse_unwritable,
    remove_checkpoints,
    write_record,
    written_to,
)
from rheoscope.nets.recipe import Recipe
from rheoscope.nets.trainer import (
    CurveCallback,
    EndCallback,
    NetTrainer,
    Probe,
    ProbeCallback,
    ProgressCallback,
    StepsAreOver,
    Windows,
    arguments,
    read_curve,
    write_curve,
)
from rheoscope.nets.vocabulary import tokenizer_named, vocabulary_hash

PROBE_WINDOWS = 8  # held-out windows that a probe is given


@dataclass(frozen=True)
class Trained:
    """A finished run: where it lies, the loss (nats per token) at its last log and on the held-out windows.

    `seconds` counts from its last start.
    """

    folder: Path
    loss: float
    held_out_loss: float
    steps: int
    seconds: float

    @property
    def curve(self) -> pd.DataFrame:
        """The loss curve: one row per step that was logged."""
        return read_curve(self.folder)


def train(
    kind: str | Sequence[str],
    *,
    text: str | Path | Sequence[str | Path],
    out: str | Path,
    probe: Probe | None = None,
    probe_every: int = 100,
    progress: bool = False,
    trainer_options: dict[str, object] | None = None,
    **recipe: object,
) -> Trained:
    """A network of that attention kind trained on a text, saved in the folder `out`.

    recipe: fields of `Recipe` (size, seed, steps, …). probe: called every `probe_every` steps. trainer_options: further
    TrainingArguments. Raises RheoscopeError, with nothing overwritten, for a folder that holds something else, a text
    shorter than a window, or a shape that does not fit; and when training diverges.
    """
    if probe_every < 1:
        raise RheoscopeError(f"a probe every {probe_every} steps asked for; it must be at least 1")
    sources = [str(text)] if isinstance(text, str | Path) else [str(source) for source in text]
    kinds = kind if isinstance(kind, str) else list(kind)
    plan = Recipe(kind=kinds, text=sources, **recipe).filled()
    return run(plan, Path(out), probe=probe, probe_every=probe_every, progress=progress, options=trainer_options or {})


def run(
    plan: Recipe, out: Path, *, probe: Probe | None, probe_every: int, progress: bool, options: dict[str, object]
) -> Trained:
    """Begin the run, go on with it, or return it if it is finished."""
    found = read_record(out)
    refuse_unwritable(out)
    how = {"split": plan.split, "field": plan.field}
    tokenizer = tokenizer_named(plan.tokenizer, plan.text, **how)
    corpus = read(plan.text, tokenizer=tokenizer, window=plan.window, pack=True, **how)
    record = record_of(
        plan, text_hash=corpus.hash, vocabulary_hash=vocabulary_hash(tokenizer), vocabulary=len(tokenizer)
    )
    if found is not None:
        refuse_another_run(out, found, record)
        if "finished" in found:
            return Trained(out, **found["finished"])
    training, held_out = divided(corpus, plan)
    options = {"use_cpu": not torch.accelerator.is_available()} | options
    processes = PartialState(cpu=options["use_cpu"]).num_processes
    args = arguments(plan, out, processes=processes, options=options)
    set_seed(plan.seed)
    model = RheoscopeForCausalLM(plan.config(vocabulary=len(tokenizer), end=tokenizer.eos_token_id))
    if args.should_save and found is None:
        with written_to(out):
            out.mkdir(parents=True, exist_ok=True)
            write_record(out, record)
    callbacks = [CurveCallback(out)]
    if probe is not None:
        callbacks.append(ProbeCallback(probe, probe_every, held_out.tokens[:PROBE_WINDOWS]))
    trainer = NetTrainer(model, args, train_dataset=training, eval_dataset=held_out, callbacks=callbacks)
    for callback in callbacks:
        callback.trainer = trainer
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(EndCallback)
    with written_to(out):
        return finished(trainer, tokenizer, out, record, progress=progress)


def finished(
    trainer: NetTrainer, tokenizer: PreTrainedTokenizerBase, out: Path, record: dict, *, progress: bool
) -> Trained:
    """Train to the end, then write model, tokenizer, curve and, last, that the run is finished."""
    started = time.monotonic()
    bar = ProgressCallback()
    if progress:
        trainer.add_callback(bar)
    checkpoint = last_checkpoint(out)
    try:
        with quiet():
            with suppress(StepsAreOver):
                trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
            if not any("eval_loss" in entry and entry["step"] == trainer.args.max_steps for entry in history(trainer)):
                trainer.evaluate()
            part = out / UNFINISHED
            trainer.save_model(str(part))
    finally:
        bar.close()
    result = {
        "loss": [entry["loss"] for entry in history(trainer) if "loss" in entry][-1],
        "held_out_loss": [entry["eval_loss"] for entry in history(trainer) if "eval_loss" in entry][-1],
        "steps": trainer.state.global_step,
        "seconds": round(time.monotonic() - started, 3),
    }
    if trainer.args.should_save:
        (part / "training_args.bin").unlink()  # a pickle; training.json says the same
        tokenizer.save_pretrained(part)
        put_in_place(part, out)
        write_curve(out, trainer.state)
        write_record(out, record | {"finished": result})
        remove_checkpoints(out)
    trainer.accelerator.wait_for_everyone()
    return Trained(out, **result)


def history(trainer: NetTrainer) -> list[dict[str, float]]:
    """Everything logged so far, also before the run was resumed."""
    return trainer.state.log_history


@contextmanager
def quiet() -> Iterator[None]:
    """No bars of transformers for each file it writes, no remarks on the tied weights that it leaves out of them."""
    level, shown = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)
        if shown:
            transformers.logging.enable_progress_bar()


def divided(corpus: Corpus, plan: Recipe) -> tuple[Windows, Windows]:
    """Windows to train on, and the last ones, held out. Raises RheoscopeError where they make no batch."""
    tokens = torch.from_numpy(corpus.tokens).long()
    n_held_out = max(1, round(plan.held_out * len(tokens)))
    n_training = len(tokens) - n_held_out
    if n_training < plan.batch:
        raise RheoscopeError(
            f"the text gives {len(tokens)} windows of {plan.window} tokens, {n_held_out} of them held out; a batch of "
            f"{plan.batch} was asked for: use more text, a shorter window or a smaller batch"
        )
    return Windows(tokens[:n_training]), Windows(tokens[n_training:])
