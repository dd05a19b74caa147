"""The page as a reader sees it, in a headless browser: quiet, offline, dark or light, wide or narrow, answering."""

import copy
import itertools
import re

import pytest

from rheoscope.report.comparison import compared
from rheoscope.report.comparison_page import comparison_html
from rheoscope.run import Run

from . import browser
from .browser import draw_everything, opened
from .synthetic import PROVENANCE, synthetic_run
from .test_page import HOSTILE

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def run() -> Run:
    return synthetic_run(4, 3, lags=31)


@pytest.fixture(scope="module")
def path(tmp_path_factory, run):
    return run.report(tmp_path_factory.mktemp("report") / "run.html")


@pytest.fixture(scope="module")
def chromium():
    with browser.started() as started:
        yield started


def background(page) -> str:
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


def paper(page, panel: int = 0) -> str:
    return page.evaluate(f"document.querySelectorAll('.chart')[{panel}].querySelector('.main-svg').style.background")


def test_every_figure_is_drawn_without_a_request_or_a_complaint(chromium, path):
    with opened(chromium, path) as (page, seen):
        draw_everything(page)
        drawn = page.evaluate("[...document.querySelectorAll('.chart')].map(chart => chart.data.length)")
        assert len(drawn) == 11
        assert min(drawn) > 0
    assert seen.requests == [path.as_uri()]
    assert seen.complaints == []


def test_no_button_of_a_figure_sends_its_data_away(chromium, path):
    with opened(chromium, path) as (page, _):
        draw_everything(page)
        buttons = page.evaluate("[...document.querySelectorAll('.modebar-btn')].map(button => button.ariaLabel)")
        assert set(buttons) <= {"Download plot as a PNG", "Zoom", "Pan", "Zoom in", "Zoom out", "Reset axes"}
        assert page.evaluate("[...document.querySelectorAll('.chart')].every(c => c._context.plotlyServerURL === '')")


def test_every_choice_of_every_panel_draws_and_changes_the_caption(chromium, path):
    with opened(chromium, path) as (page, seen):
        for panel in page.query_selector_all("[data-panel]"):
            for button in panel.query_selector_all(".views button"):
                button.click()
                assert button.get_attribute("aria-pressed") == "true"
                assert len(panel.query_selector_all(".views button[aria-pressed=true]")) == 1
                assert panel.query_selector("figcaption").inner_text()
        panel = page.query_selector(".panel:has(.slider)")
        panel.scroll_into_view_if_needed()
        panel.wait_for_selector(".main-svg", state="attached")
        drawn = "figure => JSON.stringify(figure.querySelector('.chart').data[2].r)"
        first = panel.evaluate(drawn)
        panel.query_selector("input").press("ArrowRight")
        assert panel.query_selector("output").inner_text() == "1"
        assert panel.evaluate(drawn) != first
    assert seen.complaints == []


def test_pointing_at_a_head_shows_its_numbers(chromium, path, run):
    share = run["routing"].routing_share
    with opened(chromium, path) as (page, _):
        panel = page.query_selector("#routing-which-heads-differ")
        panel.scroll_into_view_if_needed()
        plot = panel.wait_for_selector(".nsewdrag")
        box = plot.bounding_box()
        layers, heads = share.sizes["layer"], share.sizes["head"]
        page.mouse.move(box["x"] + box["width"] * 2.5 / layers, box["y"] + box["height"] * 1.5 / heads)
        text = panel.wait_for_selector(".hovertext").text_content()
    assert "layer 2, head 1" in text
    assert f"{float(share.sel(layer=2, head=1)):.4g}" in text
    assert "±" in text
    assert "untrained model" in text


def test_hostile_text_does_not_run(chromium, tmp_path):
    provenance = copy.deepcopy(PROVENANCE)
    provenance["model"]["ref"] = HOSTILE
    provenance["text"] |= {"sources": [HOSTILE], "first_tokens": [HOSTILE, "\ud83d", "\0"]}
    provenance["check"] = [{"identity": HOSTILE, "reason": HOSTILE}]
    base = synthetic_run(2, 3, lags=7)
    names = [f"<a href='javascript:alert(2)'>{HOSTILE}</a>{i}" for i in range(base["loss"].sizes["document"])]
    loss = base["loss"].assign_coords(document=names)
    path = Run.of({"loss": loss, "routing": base["routing"]}, provenance).report(tmp_path / "run.html")
    with opened(chromium, path) as (page, seen):
        draw_everything(page)
        page.click("text=By length")
        assert page.title().startswith("</script><script>")
        assert HOSTILE in page.inner_text("h1")
        assert page.query_selector(".token").inner_text() == HOSTILE
        assert page.query_selector("img") is None
    assert seen.dialogs == []
    assert seen.complaints == []
    assert seen.requests == [path.as_uri()]


def test_a_script_that_gets_into_the_page_does_not_run(chromium, path, tmp_path):
    planted = (
        "<script>alert(1)</script><img src=x onerror=alert(2)><svg onload=alert(3)></svg>"
        "<a id=planted href='javascript:alert(4)'>x</a><iframe srcdoc='<script>alert(5)</script>'></iframe>"
        "<script src='data:text/javascript,alert(6)'></script><form action='https://example.org'></form>"
    )
    page_with = path.read_text(encoding="utf-8").replace("</main>", planted + "</main>")
    assert planted in page_with
    other = tmp_path / "planted.html"
    other.write_text(page_with, encoding="utf-8")
    with opened(chromium, other) as (page, seen):
        draw_everything(page)  # the page's own scripts do run
        page.evaluate("document.querySelector('#planted').click()")
        page.wait_for_timeout(200)
    assert seen.dialogs == []
    assert any("Content Security Policy" in complaint for complaint in seen.complaints)
    assert not any(url.startswith("http") for url in seen.requests)


def test_hostile_text_does_not_run_in_the_page_of_two_runs(chromium, tmp_path):
    provenance = copy.deepcopy(PROVENANCE)
    provenance["model"]["ref"] = HOSTILE
    base = synthetic_run(2, 3, lags=7)
    kept = base["routing"].routing_share.assign_attrs(long_name=HOSTILE, units=HOSTILE)
    run = Run.of({"routing": base["routing"].assign(routing_share=kept), HOSTILE: base["loss"]}, provenance)
    path = tmp_path / "change.html"
    path.write_text(comparison_html(compared(run, run)), encoding="utf-8")
    with opened(chromium, path) as (page, seen):
        draw_everything(page)
        assert HOSTILE in page.inner_text("h1") or HOSTILE in page.inner_text("main")
        assert page.query_selector("img") is None
    assert seen.dialogs == []
    assert seen.complaints == []
    assert seen.requests == [path.as_uri()]


@pytest.mark.parametrize("dark", [False, True])
def test_the_page_follows_the_system_and_the_button_turns_it_over(chromium, path, dark):
    with opened(chromium, path, dark=dark) as (page, _):
        draw_everything(page)
        before = background(page), paper(page), paper(page, 4)
        assert ("15, 19, 24" in before[0]) == dark
        page.click("#theme")
        page.wait_for_timeout(300)
        after = background(page), paper(page), paper(page, 4)
        assert all(old != new for old, new in zip(before, after, strict=True))
        page.click("#theme")
        page.wait_for_timeout(300)
        assert (background(page), paper(page), paper(page, 4)) == before


def test_a_narrow_screen_needs_no_sideways_scrolling(chromium, path):
    with opened(chromium, path, width=400) as (page, _):
        draw_everything(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        assert page.evaluate("Math.max(...[...document.querySelectorAll('.main-svg')].map(s => s.clientWidth))") <= 400


def test_the_contents_lead_to_every_section_and_panel(chromium, path):
    with opened(chromium, path, width=1400) as (page, _):
        targets = page.evaluate("[...document.querySelectorAll('.contents a')].map(link => link.hash.slice(1))")
        panels = page.evaluate("[...document.querySelectorAll('[data-panel]')].map(panel => panel.id)")
        assert set(panels) < set(targets)
        assert all(page.query_selector(f"[id='{target}']") for target in targets)


def test_everything_can_be_reached_and_is_named_without_a_mouse(chromium, path):
    with opened(chromium, path) as (page, _):
        draw_everything(page)
        named = "e => e.innerText || e.ariaLabel || e.labels?.length"
        assert page.evaluate(f"[...document.querySelectorAll('main button, main input')].every({named})")
        assert page.evaluate("document.documentElement.lang") == "en"
        levels = page.evaluate("[...document.querySelectorAll('h1, h2, h3')].map(h => +h.tagName[1])")
        assert levels[0] == 1
        assert all(b - a <= 1 for a, b in itertools.pairwise(levels))
        labels = page.evaluate(
            "[...document.querySelectorAll('.chart')].map(chart => chart.getAttribute('aria-label'))"
        )
        assert all(re.match(r".+\? .+\.", label) for label in labels)


def test_without_a_browser_the_tests_fail_in_one_clear_sentence(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(
        FileNotFoundError, match="need a browser: install one of chromium, chromium-browser, google-chrome"
    ):
        browser.browser_path()
