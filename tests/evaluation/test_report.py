"""The report: its content, that it is self-contained, and how a browser shows it."""

import dataclasses
import re
from collections import Counter
from functools import cache
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import retrodict as rd
from browser import CHROMIUM, browser
from retrodict.compiled import Compiled, History
from retrodict.evaluation.rank_uniformity import analyse_coordinates, coverage
from retrodict.evaluation.report import judge, sections, write_report
from retrodict.inference.planning import Plan
from retrodict.proposal.proposal import Proposal
from retrodict.training.history import NetworkHistory
from retrodict.training.rejections import RejectionCounts
from zoo import key


def rates(n=3):
    alpha = numpyro.sample("alpha", dist.Gamma(2.0, 1.0))
    with numpyro.plate("n<i>", n):
        theta = numpyro.sample("theta & co", dist.Gamma(alpha, 1.0))
        numpyro.sample("y<script>", dist.Poisson(theta))


@cache
def compiled():
    """A model with untrained networks, and an invented history of their training."""
    proposal = Proposal.of(rd.invert(rd.trace(rates, ["y<script>"])), analytic=False)
    estimator = rd.MADE(hidden=(4,), components=1, context=(4,))
    networks = {
        name: proposal.build(estimator, key(), structures)
        for name, structures in proposal.networks().items()
    }
    rejected = RejectionCounts(10_000, Counter({("theta & co", "underflow"): 1234}))
    history = NetworkHistory(
        [0, 64, 128], [3.0, 1.5, 1.25], [64], 1.25, 3.5, "no progress", rejected
    )  # fmt: skip
    plan = Plan("smc", {"importance": 20.0, "smc": 120.0}, 200, 16)
    return Compiled(proposal, networks, estimator, History(dict.fromkeys(networks, history)), plan)


@dataclasses.dataclass
class InventedCalibration:
    """Invented results of a calibration with 300 data sets."""

    ranks: dict
    num_poor: int = 0
    num_particles: int = 1000

    def __post_init__(self):
        rng = np.random.default_rng(0)
        self.ess = rng.uniform(200, 800, 300)
        self.pareto_k = np.where(np.arange(300) < self.num_poor, np.inf, rng.uniform(0, 0.5, 300))
        self.trust = np.where(np.arange(300) < self.num_poor, "poor", "good")


def invented_ranks(power=1.0):
    """Uniform ranks, but for a power other than 1."""
    rng = np.random.default_rng(1)
    return {"alpha": rng.uniform(size=300) ** power, "theta & co": rng.uniform(size=(300, 3))}


class PageReader(HTMLParser):
    """Collect tags, links and text, and check that every tag is closed."""

    EMPTY = ("meta", "link")

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.links, self.text = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [v for k, v in attrs if k in ("src", "href", "xlink:href", "data", "action")]
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.EMPTY:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def read(path):
    reader = PageReader()
    reader.feed(path.read_text(encoding="utf-8"))
    assert not reader.open
    return reader


def test_page_is_self_contained_and_complete(tmp_path):
    path = write_report(tmp_path / "report.html", compiled(), InventedCalibration(invented_ranks()))
    reader = read(path)
    assert not {"script", "iframe", "object", "img"} & set(reader.tags)
    assert all(link.startswith(("#", "data:")) for link in reader.links)
    text = path.read_text(encoding="utf-8")
    fetched = re.findall(r"url\(([^)]*)\)|@import", text)
    assert all(target.startswith("#") for target in fetched)
    assert 'name="viewport"' in text and "prefers-color-scheme: dark" in text
    words = " ".join("".join(reader.text).split())
    for expected in (
        "rates", "These results can be relied on", "300 data sets", "theta & co", "y<script>",
        "each of 3 n<i>", "φ₁", "no progress", "underflow", "12.3%", "Method: faithful",
        "90 % coverage", "Effective sample size", "The default method is smc",
    ):  # fmt: skip
        assert expected in words, expected
    assert reader.tags.count("svg") == 2 + len(compiled().networks) + 4 + 1


def test_charts_use_the_colours_of_the_page(tmp_path):
    text = write_report(
        tmp_path / "report.html", compiled(), InventedCalibration(invented_ranks(2.0))
    ).read_text(encoding="utf-8")
    body = text[text.index("<body>") :]
    assert not re.findall(r"#[0-9a-f]{6}\b", body)
    for name in set(re.findall(r"var\(--([a-z]+)\)", text)):
        assert f"--{name}:" in text
    assert body.count("aria-label") >= 4 and "of which 1 are not uniform" in body


def test_page_without_a_calibration_says_so(tmp_path):
    text = write_report(tmp_path / "report.html", compiled()).read_text(encoding="utf-8")
    assert "Not checked yet" in text and "retrodict check" in text
    assert "relied on" not in re.sub(r"<dl class='glossary'>.*", "", text, flags=re.DOTALL)


def test_untrained_model_can_be_reported(tmp_path):
    untrained = dataclasses.replace(compiled(), history=History())
    text = write_report(tmp_path / "r.html", untrained).read_text("utf-8")
    assert "have not been trained" in text


def test_wide_picture_keeps_its_size():
    def chain():
        x = numpyro.sample("x_0", dist.Normal(0, 1))
        for i in range(12):
            numpyro.sample(f"a_rather_long_name_{i}", dist.Normal(x, 1))
        numpyro.sample("y", dist.Normal(x, 1))

    graph = rd.trace(chain, ["y"])
    wide = SimpleNamespace(graph=graph, inverse=rd.invert(graph), networks={})
    assert "<svg class='wide'" in sections.structure(wide)
    assert "none: prior" in sections.factors(wide)
    assert "wide" not in sections.structure(compiled())


@pytest.mark.parametrize(
    ("calibration", "tone", "headline"),
    [
        (None, "none", "Not checked yet"),
        (InventedCalibration(invented_ranks()), "good", "These results can be relied on"),
        (InventedCalibration(invented_ranks(), 10), "good", "These results can be relied on"),
        (InventedCalibration(invented_ranks(), 30), "fair", "Correct, but often imprecise"),
        (InventedCalibration(invented_ranks(3.0)), "poor", "Do not rely on these results"),
    ],
)
def test_verdict_follows_from_the_calibration(calibration, tone, headline):
    verdict = judge(calibration)
    assert (verdict.tone, verdict.headline) == (tone, headline)
    if calibration is not None:
        coordinates = analyse_coordinates(calibration.ranks)
        share = np.mean([coverage(coordinate.ranks, 0.9) for coordinate in coordinates])
        assert f"held the true value in {share:.0%}" in verdict.reasons[-3]
        num_poor = calibration.num_poor or "None"
        assert f"{num_poor} of 300 posteriors have trust “poor”" in verdict.reasons[-1]


needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt: chromium)")


@pytest.fixture(scope="module")
def tab():
    with browser() as opened:
        yield opened


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1100])
def test_page_in_a_browser(tab, width, scheme, tmp_path):
    path = write_report(
        tmp_path / "report.html", compiled(), InventedCalibration(invented_ranks(3.0))
    )
    tab.open(path, width, scheme=scheme)
    assert tab.errors() == []
    assert tab.requests() == [path.resolve().as_uri()]
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    # Only elements that scroll may extend beyond the edge, and no text may be tiny.
    num_outside = f"""[...document.querySelectorAll('main *')].filter(e =>
        !e.closest('.scroll, .graph') && e.getBoundingClientRect().right > {width} + 1).length"""
    assert tab.evaluate(num_outside) == 0
    smallest = """Math.min(...[...document.querySelectorAll('svg.chart text')].map(e =>
        e.getBoundingClientRect().height))"""
    assert tab.evaluate(smallest) >= 8
    ink, page = (
        tab.evaluate(f"getComputedStyle(document.body).{property}")
        for property in ("color", "backgroundColor")
    )
    brightness = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in (ink, page)]
    assert (brightness[0] > brightness[1]) == (scheme == "dark")
    assert abs(brightness[0] - brightness[1]) > 450
    # Lines have the page's colours, not the placeholders.
    line = """getComputedStyle(document.querySelector(
        'svg.chart path[style*="stroke: var(--accent)"]')).stroke"""
    assert (
        tab.evaluate(line) == {"light": "rgb(42, 111, 151)", "dark": "rgb(108, 180, 222)"}[scheme]
    )
    assert tab.evaluate("document.querySelector('.verdict h2').innerText").startswith("Do not rely")


@needs_chromium
def test_browser_reports_errors(tab, tmp_path):
    """Otherwise the test above could not fail."""
    page = tmp_path / "bad.html"
    page.write_text(
        "<meta name='viewport' content='width=device-width'><script>console.error('x'); lost()"
        "</script><img src='http://127.0.0.1:9/x.png'><div style='width:900px'>wide</div>"
    )
    tab.open(page, 390)
    assert len(tab.requests()) == 2
    assert len(tab.errors()) >= 2
    assert tab.evaluate("document.documentElement.scrollWidth") > 390
