"""Rows of families are data that lead somewhere, each has a tiny model, and docs/families.md says what they say."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from rheoscope.models import families
from rheoscope.models.families import FAMILIES, REFUSED, REFUSED_KINDS, Family, Packing, Residual, Rope, When
from tests import tiny
from tests.models.views import view_of
from tests.tiny import VARIANTS

DOCS = Path(__file__).parents[2] / "docs" / "families.md"
BLOCK_PATHS = ("attn", "o", "norm_attn", "norm_ffn", "attn_term", "ffn_term", "mid_output", "q_norm", "k_norm")
BLOCKS = {
    Residual.SEQUENTIAL: "sequential",
    Residual.PARALLEL: "parallel",
    Residual.POST_NORM: "norm after the sum",
}
PROJECTIONS = {Packing.SEPARATE: "separate", Packing.BLOCKS: "fused, in blocks", Packing.PER_HEAD: "fused, per head"}
ROPE = {Rope.NONE: "learned", Rope.HALVES: "RoPE, halves", Rope.INTERLEAVED: "RoPE, interleaved"}


def either(value, words):
    """A choice in words; one that hangs on the configuration names the flag."""
    if isinstance(value, When):
        return f"{words(value.yes)} if `{value.flag}`, else {words(value.no)}"
    return words(value)


def peculiarities(row):
    """What a row says beyond the four columns."""
    said = []
    if row.q_norm:
        what = "QK-norm over all heads" if row.norm_joint else "QK-norm"
        said.append(f"{what} if `{row.q_norm.flag}`" if isinstance(row.q_norm, When) else what)
    if row.rope_if:
        said.append(f"no RoPE in layers without `{row.rope_if}`")
    if row.attn_term and row.residual is not Residual.POST_NORM:
        said.append("norms after attention and FFN")
    if row.multiplier:
        said.append(f"`{row.multiplier}`")
    if row.clip:
        said.append(f"`{row.clip}`")
    if row.unit_offset:
        said.append("gain 1 + weight")
    if row.prescaled:
        said.append("queries scaled before the score")
    if row.damped_if:
        said.append("attention of other kinds: see networks.md")
    if row.transposed:
        said.append("weights stored [in, out]")
    return ", ".join(said)


def line(name):
    """The row of the table in docs/families.md that FAMILIES stands for."""
    row = FAMILIES[name]
    cells = (
        f"`{name}`",
        either(row.residual, BLOCKS.get),
        either(row.packing if row.qkv else Packing.SEPARATE, PROJECTIONS.get),
        either(row.rope, ROPE.get),
        peculiarities(row),
    )
    return "| " + " | ".join(cells) + " |"


@pytest.mark.parametrize("name", FAMILIES)
def test_the_documentation_has_the_row_of_every_family(name):
    assert line(name) in DOCS.read_text().splitlines()


def test_the_documentation_has_no_other_rows():
    table = DOCS.read_text().partition("## Handled")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.M) == list(FAMILIES)


@pytest.mark.parametrize("name", [*REFUSED, *REFUSED_KINDS])
def test_the_documentation_says_what_is_refused_and_why(name):
    reason = (REFUSED | REFUSED_KINDS)[name]
    table = DOCS.read_text().partition("## Refused")[2]
    assert any(f"`{name}`" in row and reason in row for row in table.splitlines())


def test_every_family_has_a_tiny_model_and_every_tiny_model_a_family():
    assert set(tiny.FAMILIES) == set(FAMILIES)
    assert not set(FAMILIES) & set(REFUSED)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_path_of_a_row_leads_to_a_module(name):
    view = view_of(name)
    row = view.family
    for path in (row.blocks, row.embed, row.final_norm, row.rotary if row.rope is not Rope.NONE else None):
        assert path is None or view.model.base_model.get_submodule(path) is not None
    paths = [getattr(row, field) for field in BLOCK_PATHS] + list(row.ffn)
    paths += [row.qkv] if row.qkv else [row.q, row.k, row.v]
    for path in filter(None, paths):
        assert view.part(0, path) is view.blocks[0].get_submodule(path)
    assert view.model.base_model.get_submodule(row.embed) is view.model.get_input_embeddings()


@pytest.mark.parametrize("name", VARIANTS)
def test_a_row_has_no_choice_left_once_it_is_resolved(name):
    row = view_of(name).family
    assert not any(isinstance(getattr(row, field.name), When) for field in fields(Family))


@pytest.mark.parametrize("name", [name for name, row in FAMILIES.items() if row.residual is not Residual.POST_NORM])
def test_every_choice_of_a_row_is_met_both_ways_by_the_tiny_models(name):
    variants = [view_of(variant).family for variant in VARIANTS if VARIANTS[variant].family == name]
    for field in fields(Family):
        choice = getattr(FAMILIES[name], field.name)
        if isinstance(choice, When):
            assert {getattr(row, field.name) for row in variants} == {choice.yes, choice.no}, field.name


def test_a_row_is_data_alone():
    source = Path(families.__file__).read_text()
    assert "isinstance(value, When)" in source
    assert source.count("isinstance") == 2  # that one, and the rule against others
    assert "torch" not in source
