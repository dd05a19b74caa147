"""The parts of a report: a section asks questions of one instrument, a panel answers one with a figure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import plotly.graph_objects as go
import xarray as xr


@dataclass(frozen=True)
class View:
    """One figure of a panel, the name by which it is chosen, and how to read it."""

    label: str
    figure: go.Figure
    caption: str


@dataclass(frozen=True)
class Panel:
    """A question, its answer in one sentence made from the numbers, and the figure to see it in."""

    title: str
    answer: str
    views: tuple[View, ...]
    quantities: tuple[str, ...]  # variables whose definitions are shown below
    choice: str = ""  # what the views differ in: "" for buttons, else the name before a slider ("layer")


@dataclass(frozen=True)
class Question:
    """A panel that is drawn where the dataset has the variables it needs, and the panel has something to say."""

    needs: tuple[str, ...]
    panel: Callable[[xr.Dataset], Panel | None]


@dataclass(frozen=True)
class Section:
    """What the report shows of one instrument."""

    title: str
    instrument: str
    lead: str  # what the instrument looks at, for a reader who does not know the paper
    questions: tuple[Question, ...]

    def panels(self, dataset: xr.Dataset) -> list[Panel]:
        answerable = (question for question in self.questions if all(name in dataset for name in question.needs))
        return [panel for question in answerable if (panel := question.panel(dataset))]
