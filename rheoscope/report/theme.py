"""Colours and type of the report. Every colour has a light and a dark form; figures carry the light one.

The page turns a figure dark by replacing each light colour by its dark twin, so a light colour has one role.
"""

from __future__ import annotations

import functools

import plotly.graph_objects as go

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"

TONES: dict[str, tuple[str, str]] = {  # role: light, dark
    "page": ("#f7f8f9", "#0f1318"),
    "surface": ("#ffffff", "#171c23"),
    "ink": ("#1b2430", "#e7eaef"),
    "muted": ("#566070", "#a3adba"),
    "rule": ("#dfe3e8", "#2c343f"),
    "grid": ("#e8ebef", "#262d37"),
    "shade": ("#f1f3f6", "#1f262f"),
    "accent": ("#15627f", "#6cc3de"),
    "routing": ("#17698a", "#5fbfdf"),
    "routing band": ("rgba(23,105,138,0.15)", "rgba(95,191,223,0.20)"),
    "residue": ("#6a4fa0", "#b8a0ee"),
    "residue band": ("rgba(106,79,160,0.13)", "rgba(184,160,238,0.18)"),
    "filtering": ("#b1531a", "#f29a5c"),
    "filtering band": ("rgba(177,83,26,0.13)", "rgba(242,154,92,0.17)"),
    "score": ("#5f6876", "#aab3c0"),
    "score band": ("rgba(95,104,118,0.12)", "rgba(170,179,192,0.15)"),
    "null": ("#747d8b", "#8e98a6"),
    "veil": ("rgba(255,255,255,0.75)", "rgba(23,28,35,0.75)"),
    "growth": ("rgba(177,83,26,0.07)", "rgba(242,154,92,0.09)"),
}

# Ten colours that stay apart for most kinds of colour vision, for things without an order.
_QUALITATIVE = (
    ("#1f78a5", "#63b8e2"),
    ("#c0561b", "#f3985a"),
    ("#2b8a57", "#62c592"),
    ("#8a4fb3", "#c294ea"),
    ("#a8871a", "#dfbf52"),
    ("#c23f6d", "#f184a8"),
    ("#3f8f93", "#74cdd0"),
    ("#7d5a3c", "#c9a17f"),
    ("#5b63c4", "#9ca4f5"),
    ("#6f7d27", "#b4c566"),
)

_SCALES: dict[str, tuple[tuple[str, str], ...]] = {
    # magnitude: nothing is the colour of the paper, much stands out
    "sequential": (
        ("#f3f7f8", "#1a222b"),
        ("#d3e6eb", "#173645"),
        ("#a3cdd9", "#1a5469"),
        ("#66acc1", "#2a7891"),
        ("#2f86a2", "#4f9fb7"),
        ("#125f7d", "#8accd9"),
        ("#08405a", "#c8ecef"),
        ("#04263a", "#f2fcfb"),
    ),
    # below and above a null: two-way (filtering) and one-way (routing)
    "diverging": (
        ("#7f3208", "#fbc394"),
        ("#bb5c20", "#e98f4f"),
        ("#dd9a66", "#a85f2b"),
        ("#f1d5bf", "#5a3c28"),
        ("#f6f6f5", "#20262e"),
        ("#c5dde6", "#23485a"),
        ("#7db5cb", "#2f7b97"),
        ("#2f80a1", "#5ab4d0"),
        ("#0b4a68", "#a5dff2"),
    ),
    # first to last layer
    "depth": (
        ("#e0a526", "#f7d774"),
        ("#dc8a2b", "#f5b963"),
        ("#d37035", "#f09a5e"),
        ("#c45a45", "#e87f66"),
        ("#b04a5a", "#dd6c77"),
        ("#96426d", "#cc6390"),
        ("#7a407b", "#b566a8"),
        ("#5e4182", "#9c6cbb"),
        ("#444282", "#8375c9"),
        ("#2d417a", "#6b80d0"),
    ),
}

_PAIRS = (*TONES.values(), *_QUALITATIVE, *(pair for pairs in _SCALES.values() for pair in pairs))
DARK: dict[str, str] = dict(_PAIRS)


def tone(role: str) -> str:
    """The light colour of a role."""
    return TONES[role][0]


def distinct(index: int) -> str:
    """A colour for the index-th of several things without an order; the colours repeat after ten."""
    return _QUALITATIVE[index % len(_QUALITATIVE)][0]


def scale(name: str) -> list[list]:
    """A plotly colour scale: "sequential", "diverging" or "depth"."""
    stops = _SCALES[name]
    return [[index / (len(stops) - 1), light] for index, (light, _) in enumerate(stops)]


def at_depth(fraction: float) -> str:
    """The colour of a layer that lies at this fraction of the depth, 0 for the first and 1 for the last."""
    stops = _SCALES["depth"]
    return stops[round(fraction * (len(stops) - 1))][0]


@functools.cache
def template() -> go.layout.Template:
    """The look that all figures share."""
    axis = {
        "gridcolor": tone("grid"),
        "linecolor": tone("rule"),
        "zeroline": False,
        "ticks": "outside",
        "ticklen": 4,
        "tickcolor": tone("rule"),
        "title": {"standoff": 12, "font": {"size": 13}},
    }
    polar = {"gridcolor": tone("grid"), "linecolor": tone("rule"), "tickcolor": tone("rule")}
    layout = {
        "font": {"family": FONT, "size": 12.5, "color": tone("muted")},
        "paper_bgcolor": tone("surface"),
        "plot_bgcolor": tone("surface"),
        "colorway": [light for light, _ in _QUALITATIVE],
        "colorscale": {"sequential": scale("sequential"), "diverging": scale("diverging")},
        "margin": {"l": 56, "r": 16, "t": 40, "b": 54},
        "xaxis": axis,
        "yaxis": axis | {"automargin": True},
        "polar": {"bgcolor": tone("surface"), "radialaxis": polar, "angularaxis": polar},
        "legend": {
            "orientation": "h",
            "x": 0,
            "xanchor": "left",
            "y": 1.02,
            "yanchor": "bottom",
            "traceorder": "normal",
            "font": {"size": 12.5},
        },
        "hoverlabel": {
            "bgcolor": tone("surface"),
            "bordercolor": tone("rule"),
            "font": {"family": FONT, "size": 13, "color": tone("ink")},
            "align": "left",
        },
    }
    return go.layout.Template(layout=layout)
