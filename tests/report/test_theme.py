"""Colours: every light one has a dark twin, and both are readable."""

import itertools

import plotly.graph_objects as go
import pytest

from rheoscope.report import theme
from rheoscope.report.sections import SECTIONS

from .synthetic import synthetic_run

TEXT, GRAPHIC = 4.5, 3.0  # least contrast for text and for lines, WCAG 2.2 AA


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: str, second: str) -> float:
    light, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("mode", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("role", ["ink", "muted", "accent"])
def test_text_is_readable(role, mode):
    for ground in ("page", "surface", "shade"):
        assert contrast(theme.TONES[role][mode], theme.TONES[ground][mode]) >= TEXT


@pytest.mark.parametrize("mode", [0, 1], ids=["light", "dark"])
def test_text_on_a_pressed_button_is_readable(mode):
    assert contrast(theme.TONES["surface"][mode], theme.TONES["accent"][mode]) >= TEXT


@pytest.mark.parametrize("mode", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("role", ["routing", "residue", "filtering", "score", "null"])
def test_lines_stand_out(role, mode):
    assert contrast(theme.TONES[role][mode], theme.TONES["surface"][mode]) >= GRAPHIC


@pytest.mark.parametrize("mode", [0, 1], ids=["light", "dark"])
def test_unordered_colours_stand_out(mode):
    for pair in theme._QUALITATIVE:
        assert contrast(pair[mode], theme.TONES["surface"][mode]) >= GRAPHIC


def test_a_light_colour_has_one_dark_twin():
    pairs = set(theme._PAIRS)
    assert len(theme.DARK) == len(pairs)


@pytest.mark.parametrize("mode", [0, 1], ids=["light", "dark"])
def test_magnitude_grows_away_from_the_paper(mode):
    grounds = [contrast(pair[mode], theme.TONES["surface"][mode]) for pair in theme._SCALES["sequential"]]
    assert grounds == sorted(grounds)


@pytest.mark.parametrize("mode", [0, 1], ids=["light", "dark"])
def test_the_null_is_the_quietest_of_the_diverging_colours(mode):
    grounds = [contrast(pair[mode], theme.TONES["surface"][mode]) for pair in theme._SCALES["diverging"]]
    middle = len(grounds) // 2
    assert grounds[middle:] == sorted(grounds[middle:])
    assert grounds[: middle + 1] == sorted(grounds[: middle + 1], reverse=True)


def colours_in(part) -> set[str]:
    """Everything that a figure paints with, found by its form."""
    if isinstance(part, str):
        return {part} if part.startswith(("#", "rgb")) else set()
    if isinstance(part, dict):
        return set(itertools.chain.from_iterable(colours_in(item) for item in part.values()))
    if isinstance(part, list | tuple):
        return set(itertools.chain.from_iterable(colours_in(item) for item in part))
    return set()


def test_figures_paint_with_colours_that_have_a_dark_twin():
    run = synthetic_run(3, 2, lags=7)
    used = colours_in(theme.template().to_plotly_json())
    for section in (section for section in SECTIONS if section.instrument in run):
        for panel in section.panels(run[section.instrument]):
            for view in panel.views:
                used |= colours_in(go.Figure(view.figure).to_plotly_json()["data"])
    assert used <= set(theme.DARK)
