"""transformers' Trainer with what a training run needs beside it: divergence, probes, progress, a loss curve."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import torch
from jaxtyping import Int
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from rheoscope.errors import RheoscopeError
from rheoscope.nets.decoder import RheoscopeForCausalLM
from rheoscope.nets.folder import write_text
from rheoscope.nets.recipe import ADAM_BETAS, GRADIENT_NORM, WEIGHT_DECAY, Recipe

CURVE = "loss.csv"
CURVE_COLUMNS = ("step", "loss", "held_out_loss", "learning_rate", "grad_norm")  # the probe's come after them
LINES = 20  # without a terminal, progress is this many lines

# Given the model in training and some held-out windows: named numbers to put beside the loss.
Probe = Callable[[RheoscopeForCausalLM, Int[Tensor, "window position"]], dict[str, float]]


class Windows(torch.utils.data.Dataset):
    """Windows of tokens, each its own target."""

    def __init__(self, tokens: Int[Tensor, "window position"]) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, window: int) -> dict[str, Int[Tensor, " position"]]:
        return {"input_ids": self.tokens[window], "labels": self.tokens[window]}


class NetTrainer(Trainer):
    """A Trainer that stops with one sentence when loss or gradient is no longer finite, before anything is saved."""

    @torch.no_grad()
    def evaluate(self, *_: object, **__: object) -> dict[str, float]:
        """Mean loss over the held-out windows, logged.

        Every process takes all of them, so the number does not depend on how many there are; the Trainer's own mean
        counts the windows of a last, smaller batch as if they filled it.
        """
        tokens, model = self.eval_dataset.tokens, self.model_wrapped.eval()
        total = 0.0
        for part in tokens.split(self.args.per_device_eval_batch_size):
            batch = part.to(self.args.device)
            total += model(input_ids=batch, labels=batch, use_cache=False).loss.item() * len(part)
        model.train()
        metrics = {"eval_loss": total / len(tokens)}
        self.log(metrics)
        return metrics

    def get_decay_parameter_names(self, model: torch.nn.Module) -> list[str]:
        """Matrices alone decay: not norms and biases, and neither slopes, thresholds nor frequencies."""
        decayed = super().get_decay_parameter_names(model)
        return [name for name in decayed if model.get_parameter(name).ndim > 1]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        for name in ("loss", "grad_norm"):
            if not math.isfinite(logs.get(name, 0.0)):
                raise RheoscopeError(_divergence(name, logs, self.state))
        super().log(logs, start_time)


def _divergence(name: str, logs: dict[str, float], state: TrainerState) -> str:
    what = "loss" if name == "loss" else "gradient"
    earlier = [entry for entry in state.log_history if "loss" in entry]
    before = "it never was finite"
    if earlier:
        before = f"the last finite loss was {earlier[-1]['loss']:.4g} at step {earlier[-1]['step']}"
    return (
        f"training diverged: the {what} is {logs[name]} at step {state.global_step} and {before}; lower the learning "
        f"rate ({logs.get('learning_rate', math.nan):.3g} here) or train with norms; earlier checkpoints are unharmed"
    )


class ProbeCallback(TrainerCallback):
    """Calls the probe every so many steps, before the first one too, and logs what it returns."""

    def __init__(self, probe: Probe, every: int, windows: Int[Tensor, "window position"]) -> None:
        self.probe, self.every, self.windows = probe, every, windows
        self.trainer: Trainer | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_) -> None:
        if state.global_step == 0:
            self._take(state)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_) -> None:
        if state.global_step % self.every == 0:
            self._take(state)

    def _take(self, state: TrainerState) -> None:
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        training = model.training
        with torch.no_grad():
            readings = self.probe(model.eval(), self.windows.to(model.device))
        model.train(training)
        state.log_history.append({"step": state.global_step, **readings})


class StepsAreOver(Exception):  # noqa: N818 - it is no error
    """A run goes on from a checkpoint of its last step: there is nothing left to train."""


class EndCallback(TrainerCallback):
    """Ends a run that goes on from its last step. The Trainer would take one step more before it looks."""

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_) -> None:
        if state.global_step >= state.max_steps:
            raise StepsAreOver


class CurveCallback(TrainerCallback):
    """Writes the loss curve whenever a checkpoint is written."""

    def __init__(self, out: Path) -> None:
        self.out = out

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_) -> None:
        if state.is_world_process_zero:
            write_curve(self.out, state)


class ProgressCallback(TrainerCallback):
    """One bar on a terminal; elsewhere a line now and then."""

    def __init__(self) -> None:
        self.console = Console(stderr=True)
        self.bar: Progress | None = None
        self.next_line = 0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_) -> None:
        if not state.is_world_process_zero or not self.console.is_terminal:
            return
        columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]}"))
        self.bar = Progress(*columns, TimeRemainingColumn(), console=self.console)
        self.task = self.bar.add_task("training", total=state.max_steps, completed=state.global_step, loss="…")
        self.bar.start()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs=None, **_) -> None:
        if not state.is_world_process_zero or "loss" not in (logs or {}):
            return
        if self.bar is not None:
            self.bar.update(self.task, completed=state.global_step, loss=f"{logs['loss']:.4f}")
        elif state.global_step >= self.next_line:
            self.next_line = state.global_step + state.max_steps / LINES
            print(
                f"step {state.global_step} of {state.max_steps}, loss {logs['loss']:.4f}", file=sys.stderr, flush=True
            )

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self.bar is not None:
            self.bar.stop()


def curve_of(state: TrainerState) -> pd.DataFrame:
    """One row per step that has a reading: loss, learning rate, gradient norm, held-out loss and the probe's."""
    kept = [entry for entry in state.log_history if "train_runtime" not in entry]
    rows: dict[int, dict[str, float]] = {}
    for entry in kept:
        rows.setdefault(entry["step"], {}).update(entry)
    frame = pd.DataFrame([rows[step] for step in sorted(rows)]).rename(columns={"eval_loss": "held_out_loss"})
    timing = [name for name in frame if name.startswith("eval_") or name == "epoch"]
    first = [name for name in CURVE_COLUMNS if name in frame]
    return frame[first + sorted(set(frame) - set(first) - set(timing))]


def write_curve(out: Path, state: TrainerState) -> None:
    """The loss curve as CSV, numbers in full."""
    write_text(out / CURVE, curve_of(state).to_csv(index=False, float_format="%.17g"))


def read_curve(out: Path) -> pd.DataFrame:
    """The loss curve as it was written, to the last bit."""
    return pd.read_csv(out / CURVE, dtype=str).astype(float).astype({"step": int})


def arguments(recipe: Recipe, out: Path, *, processes: int, options: dict[str, object]) -> TrainingArguments:
    """The recipe in the Trainer's words; `options` are further ones of its own (fsdp, use_cpu, …)."""
    if recipe.batch % processes:
        raise RheoscopeError(
            f"a batch of {recipe.batch} windows was asked for over {processes} processes: choose a multiple"
        )
    fields = {
        "output_dir": str(out),
        "max_steps": recipe.steps,
        "per_device_train_batch_size": recipe.batch // processes,
        "per_device_eval_batch_size": recipe.batch // processes,
        "learning_rate": recipe.learning_rate,
        "lr_scheduler_type": "cosine",
        "warmup_steps": math.ceil(recipe.warmup * recipe.steps),
        "adam_beta1": ADAM_BETAS[0],
        "adam_beta2": ADAM_BETAS[1],
        "weight_decay": WEIGHT_DECAY,
        "max_grad_norm": GRADIENT_NORM,
        "bf16": recipe.precision == "bf16",
        "activation_checkpointing": recipe.gradient_checkpointing,
        "logging_steps": recipe.log_every,
        "logging_nan_inf_filter": False,
        "save_steps": recipe.save_every,
        "save_total_limit": 2,
        "eval_strategy": "steps",
        "eval_steps": recipe.save_every,
        "prediction_loss_only": True,
        "dataloader_drop_last": True,
        "dataloader_pin_memory": torch.cuda.is_available(),
        "ddp_find_unused_parameters": False,
        "seed": recipe.seed,
        "report_to": "none",
        "disable_tqdm": True,
    }
    return TrainingArguments(**(fields | options))
