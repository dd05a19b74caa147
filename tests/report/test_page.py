"""The page as a file: one copy of the script, no way out to a network, all text escaped, every number from the run."""

import base64
import copy
import hashlib
import json
import re

import numpy as np
import pytest
import xarray as xr
from plotly.offline import get_plotlyjs

from rheoscope.errors import RheoscopeError
from rheoscope.report.page import html
from rheoscope.report.sections import SECTIONS
from rheoscope.run import Run

from .synthetic import PROVENANCE, synthetic_run

HOSTILE = "</script><script>document.title='run'</script><img src=x onerror=alert(1)>"
MAPS = ("routing_share", "gauge_share", "diagonal_share", "routing_k90", "filtering_k90", "utilisation")


def payload(page: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])


def decoded(values):
    if isinstance(values, dict):
        shape = [int(n) for n in str(values.get("shape", "-1")).split(",")]
        return np.frombuffer(base64.b64decode(values["bdata"]), values["dtype"]).reshape(shape)
    return np.array(values)


@pytest.fixture(scope="module")
def run() -> Run:
    return synthetic_run()


@pytest.fixture(scope="module")
def page(run) -> str:
    return html(run)


@pytest.fixture(scope="module")
def figures(page) -> dict:
    return payload(page)["figures"]


@pytest.mark.parametrize(("n_layers", "n_heads"), [(30, 9), (36, 64)])
def test_a_page_is_smaller_than_15_megabytes(n_layers, n_heads):
    assert len(html(synthetic_run(n_layers, n_heads, lags=1023)).encode()) < 15e6


def test_the_plotting_script_is_in_the_page_once(page):
    assert page.count(get_plotlyjs()) == 1
    assert len(re.findall(r"<script[ >]", page)) == 3  # the data, the plotting script, the page's own


def test_nothing_outside_the_plotting_script_names_a_network_address(page):
    rest = page.replace(get_plotlyjs(), "")
    assert not re.search(r"(src|href)\s*=\s*[\"'](?!#|data:)", rest)
    assert "http://" not in rest
    assert "https://" not in rest
    assert "@import" not in rest
    assert "url(" not in rest


def test_the_policy_lets_only_the_scripts_of_the_page_run(page):
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1].replace("&#39;", "'")
    scripts = re.findall(r"<script>(.*?)</script>", page, re.S)
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == " ".join(f"'sha256-{digest}'" for digest in digests)
    assert page.index("Content-Security-Policy") < page.index("<style")


def test_hostile_text_is_escaped_wherever_it_comes_from():
    provenance = copy.deepcopy(PROVENANCE)
    provenance["model"]["ref"] = HOSTILE
    provenance["text"] |= {"sources": [HOSTILE], "first_tokens": [HOSTILE, "\ud83d", "\0"]}
    provenance["check"] = [{"identity": HOSTILE, "status": HOSTILE, "reason": HOSTILE, HOSTILE: 1}]
    provenance["command"] = provenance["versions"] = {HOSTILE: HOSTILE}
    base = synthetic_run(2, 3, lags=7)
    loss = base["loss"].assign_coords(document=[f"{HOSTILE}{i}" for i in range(base["loss"].sizes["document"])])
    page = html(Run.of({"loss": loss, "routing": base["routing"]}, provenance))
    assert HOSTILE not in page
    assert "<img" not in page.replace(get_plotlyjs(), "")
    assert page.count("</script>") == 3
    by_length = payload(page)["figures"]["loss-which-documents-are-hard"][1]
    assert by_length["data"][0]["customdata"][0].startswith("&lt;/script&gt;")  # shown as typed, not read as markup
    page.encode("utf-8", "strict")


def test_the_page_prints_the_first_tokens_in_order(page):
    shown = re.findall(r'<bdi class="token">(.*?)</bdi>', page)
    assert shown == ["&lt;|begin|&gt;", "The", " flow", " of", "\\n", " Naïve", "\\u202e", "…"]


def test_the_data_element_holds_no_markup(page):
    text = re.search(r'id="data">(.*?)</script>', page, re.S)[1]
    assert not set("<>&") & set(text)


def test_a_run_that_lacks_an_instrument_has_no_section_of_it():
    run = synthetic_run(2, 3, lags=7)
    page = html(Run.of({"loss": run["loss"]}, run.provenance))
    assert 'id="loss"' in page
    assert 'id="routing-and-filtering"' not in page
    assert "What was measured" in html(Run.of({}, {}))


def test_an_instrument_without_figures_is_named_rather_than_left_out_in_silence():
    run = synthetic_run(2, 3, lags=7)
    other = xr.Dataset({"energy": 1.0})
    page = html(Run.of({"loss": run["loss"], "wavelets": other}, run.provenance))
    assert "This run also holds wavelets" in page


def test_panels_whose_quantities_are_missing_are_left_out():
    run = synthetic_run(2, 3, lags=7)
    only = run["routing"][["routing_share"]]
    assert len(payload(html(Run.of({"routing": only}, run.provenance)))["figures"]) == 2
    optional = ("capacity", "minimal_rank_share", "kernel_routing_share", "kernel_routing_share_averaged")
    nulls = [name for name in run["routing"] if "_null" in name or name.endswith("_se")]
    bare = run["routing"].drop_vars([*optional, *nulls])
    assert len(payload(html(Run.of({"routing": bare}, run.provenance)))["figures"]) == 9


@pytest.mark.parametrize("size", [(1, 1), (1, 5), (3, 1)])
def test_the_smallest_models_have_a_page(size):
    assert payload(html(synthetic_run(*size, lags=3)))["figures"]


def test_quantities_that_are_defined_nowhere_say_so():
    run = synthetic_run(2, 3, lags=7)
    nowhere = {name: run["routing"][name] * np.nan for name in ("routing_share", "routing_k90", "gauge_share")}
    kept = {name: value.assign_attrs(run["routing"][name].attrs) for name, value in nowhere.items()}
    page = html(Run.of({"routing": run["routing"].assign(kept)}, run.provenance))
    assert "not defined" in page


def test_every_number_of_the_maps_is_the_number_of_the_run(run, figures):
    views = figures["routing-which-heads-differ"]
    for name, view in zip(MAPS, views, strict=False):
        np.testing.assert_array_equal(decoded(view["data"][0]["z"]), run["routing"][name].transpose("head", "layer"))
        se = run["routing"].get(f"{name}_se")
        if se is not None:
            np.testing.assert_array_equal(decoded(view["data"][0]["customdata"])[..., 0], se.transpose("head", "layer"))


def test_every_number_by_depth_is_a_head_or_the_median_of_heads_of_the_run(run, figures):
    share = run["routing"].routing_share
    traces = figures["routing-how-much-of-the-score-is-routing"][0]["data"]
    named = {trace.get("name"): trace for trace in traces}
    np.testing.assert_array_equal(decoded(named["one head"]["y"]), share.values.ravel())
    np.testing.assert_array_equal(decoded(named["routing share, median head"]["y"]), np.median(share, axis=1))
    untrained = np.median(run["routing"].routing_share_null, axis=1)
    np.testing.assert_array_equal(decoded(named["untrained model"]["y"]), untrained)
    assert set(decoded(named["unrelated queries and keys"]["y"])) == {0.5}


def test_every_eigenvalue_of_the_page_is_one_of_the_run(run, figures):
    for layer, view in enumerate(figures["routing-would-a-head-on-its-own-be-stable"]):
        heads = [trace for trace in view["data"] if trace.get("name", "").startswith("head")]
        for head, trace in enumerate(heads):
            of_head = run["routing"].sel(layer=layer, head=head)
            shown = decoded(trace["customdata"])
            np.testing.assert_array_equal(shown[:, 0], of_head.eigenvalues_re.astype(np.float32))
            np.testing.assert_array_equal(shown[:, 1], of_head.eigenvalues_im.astype(np.float32))
            angle = np.radians(decoded(trace["theta"]))
            np.testing.assert_allclose(np.cos(angle), shown[:, 0] / np.hypot(*shown.T), atol=1e-5)


def test_every_lag_of_the_page_is_one_of_the_run(run, figures):
    by_lag = run["routing"].routing_share_by_lag
    drawn = figures["routing-at-which-distances-is-the-score-one-way"][0]["data"][0]
    np.testing.assert_array_equal(decoded(drawn["z"]), by_lag.sel(lag=decoded(drawn["x"])))


def test_the_figures_of_the_summary_are_those_of_the_run(run, page):
    text = re.sub(r"<[^>]+>", " ", page.split('<ul class="tiles">')[1].split("</ul>")[0])
    loss, share = run["loss"], run["routing"].routing_share
    assert f"{float(loss.nll_mean):.3f}" in text
    assert f"± {float(loss.nll_mean_se):.3f}" in text
    assert f"{float(share.median()):.3g}" in text
    assert f"{float(run['routing'].routing_share_null.median()):.3g}" in text


def test_every_figure_is_drawn_by_hand_over_text_or_is_marked_as_without(figures):
    for views in figures.values():
        for view in views:
            assert any("hovertemplate" in trace for trace in view["data"])
            for trace in view["data"]:
                assert "hovertemplate" in trace or trace["hoverinfo"] == "skip"


def test_every_axis_has_a_title_with_its_unit(figures):
    for name, views in figures.items():
        for view in views:
            for axis in ("xaxis", "yaxis"):
                if axis in view["layout"]:
                    assert view["layout"][axis]["title"]["text"], name
    by_document = figures["loss-which-documents-are-hard"][1]["layout"]
    assert by_document["yaxis"]["title"]["text"] == "loss of a document (nats/token)"


def test_every_panel_asks_a_question_and_every_view_has_a_caption(run):
    drawn = [section for section in SECTIONS if section.instrument in run]
    assert drawn
    for section in drawn:
        for panel in section.panels(run[section.instrument]):
            assert panel.title.endswith("?")
            assert panel.answer.endswith(".")
            assert all(view.caption for view in panel.views)
            assert panel.quantities


def test_a_report_is_written_whole_or_not_at_all(tmp_path, run):
    path = run.report(tmp_path / "run.html")
    assert path.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    with pytest.raises(RheoscopeError, match="exists already"):
        run.report(path)
    with pytest.raises(RheoscopeError, match="no folder"):
        run.report(tmp_path / "absent" / "run.html")
    assert list(tmp_path.iterdir()) == [path]
