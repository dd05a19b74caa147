"""`rheoscope ablate`: what attention, the FFN and its parts are worth to a model on a text, by taking them away.

    run = ablate(view, corpus, parallel_curve=True, gates=True)
    print("\n".join(ablation_lines(run)))

Every change is a loss with an edit minus the loss without, on the same windows, paired by document, in nats per token.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import xarray as xr

from rheoscope.corpus import Corpus
from rheoscope.errors import RheoscopeError
from rheoscope.instruments.catalog import describe
from rheoscope.instruments.engine import Progress, refuse_window, silent
from rheoscope.instruments.loss import refuse_loss
from rheoscope.instruments.measure import provenance
from rheoscope.models.field import refuse_field
from rheoscope.models.view import ModelView
from rheoscope.run import Run
from rheoscope.surgery.gates import Fit, gate_readings, split_units
from rheoscope.surgery.parallel import parallel_curve as parallel_curve_readings
from rheoscope.surgery.parallel import parallel_layers
from rheoscope.surgery.passes import Passes
from rheoscope.surgery.prefix import prefix_readings
from rheoscope.surgery.pressure import pressure_readings
from rheoscope.surgery.score_curves import first_windows, linearisation_curve, score_readings
from rheoscope.surgery.variants import variant_table, variants_by_layer

NAME = "ablation"


def ablate(
    view: ModelView,
    corpus: Corpus,
    *,
    variants: bool = True,
    by_layer: bool = False,
    parallel_curve: bool = False,
    sizes: Sequence[int] | None = None,
    n_random: int = 5,
    gates: bool = False,
    fit: Fit | None = None,
    pressure: bool = False,
    prefix: bool = False,
    scores: bool = False,
    linear: bool = False,
    calibration: Corpus | None = None,
    batch_size: int | None = None,
    memory: str | Path | None = None,
    seed: int = 0,
    command: Sequence[str] = (),
    progress: Progress = silent,
) -> Run:
    """The five-variant table, and what else is asked for, as a run with the one dataset `ablation`.

    by_layer: also each variant in each layer alone. parallel_curve: every layer made parallel alone, then `sizes` of
    them low-defect first, in `n_random` random orders, and high-defect first. gates: fitted on half of the documents,
    judged on both halves. pressure: attention times 1 to 3, and diversity by depth under each variant. prefix: another
    text before the last few tokens, and how far attention passes changes on. scores: routing and filtering cut to each
    rank, and put in simple forms, fitted on `calibration` (by default the first windows of the text). linear: layers 0
    to n - 1 made linear, for every n. memory: a file that keeps every pass, so
    that a stopped run goes on where it was. command: the command line, for the provenance.
    Raises Refused for a model without loss or without the sites, RheoscopeError where no text is left to hold out.
    """
    started = time.monotonic()
    refuse_loss(view)
    refuse_window(view, corpus.window)
    of_terms = variants or by_layer or parallel_curve or gates or pressure or prefix
    if not (of_terms or scores or linear):
        raise RheoscopeError("an ablation without any part asked for: ask for variants, parallel_curve, gates, …")
    if of_terms:
        refuse_field(view, "ablation")
    made = {"batch_size": batch_size, "memory": Path(memory) if memory else None, "progress": progress}
    passes = Passes(view, corpus, **made)
    splits = [Passes(view, text, **made) for text in split_units(corpus, seed=seed)] if gates else []
    parts = []
    parts += [variant_table(passes)] if variants else []
    parts += [variants_by_layer(passes)] if by_layer else []
    if parallel_curve:
        parts.append(parallel_layers(passes))
        orders = [parts[-1][name].values for name in ("parallel_defect", "parallel_displacement")]
        parts.append(parallel_curve_readings(passes, *orders, sizes=sizes, n_random=n_random, seed=seed))
    parts += [pressure_readings(passes)] if pressure else []
    parts += [prefix_readings(passes, seed=seed)] if prefix else []
    calibration = calibration or first_windows(corpus)
    parts += score_readings(passes, calibration) if scores else []
    parts += [linearisation_curve(passes)] if linear else []
    fit = fit or Fit(seed=seed)
    parts += [gate_readings(*splits, fit)] if gates else []
    data = xr.merge(parts, combine_attrs="drop")
    plain = passes.losses(task="unedited")
    data["plain_loss"] = plain.window_nll.sum() / plain.window_tokens.sum()
    used = (passes, *splits)
    data.attrs = {"n": _n_units(corpus), "n_passes": sum(part.n_run for part in used)}
    config = {
        "ablation": {
            "variants": variants,
            "by_layer": by_layer,
            "parallel_curve": parallel_curve,
            "sizes": None if sizes is None else list(sizes),
            "n_random": n_random,
            "gates": asdict(fit) if gates else False,
            "pressure": pressure,
            "prefix": prefix,
            "scores": _named(calibration) if scores else False,
            "linear": linear,
            "batch_size": passes.batch_size,
        },
        "seed": seed,
        "command": shlex.join(command),
    }
    return Run.of({NAME: describe(data, NAME)}, provenance(view, corpus, config, seconds=time.monotonic() - started))


def _named(calibration: Corpus) -> dict[str, object]:
    """What a calibration text was, for the provenance."""
    return {
        "calibration_sources": list(calibration.sources),
        "calibration_windows": calibration.n_windows,
        "calibration_hash": calibration.hash,
    }


def _n_units(corpus: Corpus) -> int:
    return len(set(corpus.units.tolist()))


def ablation_lines(run: Run) -> list[str]:
    """The ablation in words and columns, ready to print."""
    data = run[NAME]
    unit = run.provenance["text"]["error_unit"]
    lines = [
        f"loss without edits: {float(data.plain_loss):.4f} nats/token; changes ± standard error over "
        f"{data.attrs['n']} {unit}s; {data.attrs['n_passes']} passes"
    ]
    if "variant_change" in data:
        lines += ["", f"{'change of the loss':<24}" + "".join(f"{_spared(str(s)):>24}" for s in data.spare.values)]
        for variant in map(str, data.variant.values):
            cells = (data.variant_change.sel(variant=variant, spare=s) for s in data.spare)
            errors = (data.variant_change_se.sel(variant=variant, spare=s) for s in data.spare)
            lines.append(f"{variant:<24}" + "".join(f"{_pm(c, e):>24}" for c, e in zip(cells, errors, strict=True)))
    if "parallel_change_low" in data:
        lines += ["", *_curve_lines(data)]
    if "gain_change" in data:
        lines += ["", "attention times a gain"]
        lines += [
            f"{float(g):<24g}{_pm(data.gain_change.sel(gain=g), data.gain_change_se.sel(gain=g))}" for g in data.gain
        ]
    lines += _score_lines(data)
    if "gate" in data:
        lines += [
            "",
            f"gates: mean {float(data.gate_mean):.3f}, {float(data.gate.min()):.3f} to {float(data.gate.max()):.3f}",
        ]
        for split in ("calibration", "held_out"):
            change, error = data[f"gate_change_{split}"], data[f"gate_change_{split}_se"]
            lines.append(f"{split.replace('_', '-'):<24}{_pm(change, error)}")
    return lines


def _curve_lines(data: xr.Dataset) -> list[str]:
    """One line per number of parallel layers."""
    columns = ("low-defect first", "low displacement first", "random, mean (lowest to highest)", "high-defect first")
    lines = [f"{'parallel layers':<17}" + "".join(f"{column:>34}" for column in (*columns, "est. speed-up, low"))]
    for size in data.n_parallel.values:
        row = data.sel(n_parallel=size)
        random = row.parallel_change_random
        cells = (
            _pm(row.parallel_change_low, row.parallel_change_low_se),
            _pm(row.parallel_change_displacement, row.parallel_change_displacement_se),
            f"{float(random.mean()):+.4f} ({float(random.min()):+.4f} to {float(random.max()):+.4f})",
            _pm(row.parallel_change_high, row.parallel_change_high_se),
            f"{float(row.parallel_speedup_low):.3f}x",
        )
        lines.append(f"{size:<17}" + "".join(f"{cell:>34}" for cell in cells))
    return lines


def _score_lines(data: xr.Dataset) -> list[str]:
    """One line per rank, per simple form of the scores, and per number of linear layers."""
    lines = []
    if "routing_change" in data:
        parts = [part for part in ("routing", "filtering") if f"{part}_change" in data]
        lines += ["", f"{'rank in all layers':<24}" + "".join(f"{part:>24}" for part in parts)]
        for rank in data["rank"]:
            cells = (
                _pm(*(data[name].sel(rank=rank) for name in (f"{part}_change", f"{part}_change_se"))) for part in parts
            )
            lines.append(f"{int(rank):<24}" + "".join(f"{cell:>24}" for cell in cells))
        for form in data.score_edit:
            change = _pm(data.score_edit_change.sel(score_edit=form), data.score_edit_change_se.sel(score_edit=form))
            lines.append(f"{form.values!s:<24}{change:>24}")
    if "linear_change" in data:
        lines += ["", f"{'linear layers, from 0':<24}{'':>24}{'perplexity':>24}"]
        for n in data.n_linear:
            change = data.linear_change.sel(n_linear=n)
            growth = f"{100 * np.expm1(float(change)):+.1f} %"
            lines.append(f"{int(n):<24}{_pm(change, data.linear_change_se.sel(n_linear=n)):>24}{growth:>24}")
    return lines


def _pm(value: xr.DataArray, error: xr.DataArray) -> str:
    return f"{float(value):+.4f} ± {float(error):.4f}"


def _spared(which: str) -> str:
    return "all tokens" if which == "none" else f"{which} token{'s' if which == 'massive' else ''} spared"
