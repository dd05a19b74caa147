"""Numbers and texts as a reader would write them."""

import math

import pytest

from rheoscope.report.facts import checks, facts, in_one_line, name_of
from rheoscope.report.words import duration, median, moment, number, percent, visible, with_error, worded


@pytest.mark.parametrize(
    ("value", "written"),
    [(0.12345, "0.123"), (12.0, "12"), (134515008, "134,515,008"), (1234.5, "1,234"), (math.nan, "not defined")],
)
def test_numbers_have_three_digits(value, written):
    assert number(value) == written


@pytest.mark.parametrize(
    ("value", "se", "written"),
    [
        (3.14159, 0.0123, ("3.142", "0.012")),
        (3.14159, 0.0996, ("3.14", "0.10")),
        (25.4831, 2.4837, ("25.5", "2.5")),
        (1234.5, 83.0, ("1,234", "83")),
        (3.14159, 0.0, ("3.14", "")),
        (3.14159, math.nan, ("3.14", "")),
    ],
)
def test_a_value_ends_at_the_second_digit_of_its_error(value, se, written):
    assert with_error(value, se) == written


@pytest.mark.parametrize(
    ("share", "written"),
    [(0.5, "50 %"), (0.004, "0.4 %"), (0.996, "99.6 %"), (0.0, "0 %"), (1.0, "100 %"), (math.nan, "not defined")],
)
def test_shares_are_written_in_percent(share, written):
    assert percent(share).replace("\N{NO-BREAK SPACE}", " ") == written


def test_the_median_leaves_out_what_is_not_defined():
    assert median([1.0, math.nan, 5.0, 3.0]) == 3.0
    assert math.isnan(median([math.nan]))


@pytest.mark.parametrize(
    ("seconds", "written"), [(12.34, "12.3 s"), (59.99, "1 min 0 s"), (754.2, "12 min 34 s"), (7384.0, "2 h 3 min")]
)
def test_times_are_written_in_units_that_suit_them(seconds, written):
    assert duration(seconds) == written


def test_moments_lose_their_letters_and_stay_where_they_are_no_dates():
    assert moment("2026-07-01T12:00:00+00:00") == "2026-07-01 12:00 UTC"
    assert moment("2026-07-01T12:00:00") == "2026-07-01 12:00"
    assert moment("yesterday\n") == "yesterday\\n"


def test_what_cannot_be_seen_is_spelled_out():
    assert visible("a\tb\0\u202e\ud83d é") == "a\\tb\\x00\\u202e\\ud83d é"


def test_records_are_worded_with_commas():
    assert worded({"a": 1200, "b": [True, "x"]}) == "a: 1,200, b: yes, x"


def test_what_the_provenance_does_not_say_is_left_out():
    assert facts({}) == []
    assert facts({"seed": 0, "text": {"left_out": {"documents": 0}}}) == [
        ("Text", [("Left out", "nothing")]),
        ("Run", [("Seed", "0")]),
    ]
    assert in_one_line({"model": None}) == ""


def test_a_model_in_a_folder_is_called_by_the_name_of_the_folder():
    assert name_of({"model": {"ref": "/models/small"}}) == "small"
    assert name_of({"model": {"ref": "org/small"}}) == "org/small"
    assert name_of({}) == "unnamed model"


def test_checks_are_read_from_records_and_from_mappings():
    records = [{"identity": "a", "error": 2e-7}, {"identity": "b", "reason": "none"}]
    assert checks(records) == {
        "columns": ["identity", "error", "reason"],
        "rows": [["a", "2.0e-07", ""], ["b", "", "none"]],
    }
    assert checks({"a": True, "b": {"status": "holds"}})["rows"] == [["a", "yes", ""], ["b", "", "holds"]]
    assert checks([]) is None
