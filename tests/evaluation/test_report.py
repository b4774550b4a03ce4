"""The report: what it says, that it stands alone, and how a browser shows it."""

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
from retrodict.evaluation.ranks import looked_at
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
    """A model with networks that were never trained, and a history as if they were."""
    proposal = Proposal.of(rd.invert(rd.trace(rates, ["y<script>"])))
    estimator = rd.MADE(hidden=(4,), components=1, context=(4,))
    networks = {
        name: estimator.build(key(), first.latents, first.inputs)
        for name, (first, *_) in proposal.networks().items()
    }
    rejected = RejectionCounts(10_000, Counter({("theta & co", "underflow"): 1234}))
    once = NetworkHistory(
        [0, 64, 128], [3.0, 1.5, 1.25], [64], 1.25, 3.5, "no progress", rejected
    )  # fmt: skip
    plan = Plan("smc", {"importance": 20.0, "smc": 120.0}, 200, 16)
    return Compiled(proposal, networks, estimator, History(dict.fromkeys(networks, once)), plan)


@dataclasses.dataclass
class Check:
    """What a calibration of 300 data sets could have found."""

    ranks: dict
    poor: int = 0
    num_particles: int = 1000

    def __post_init__(self):
        rng = np.random.default_rng(0)
        self.ess = rng.uniform(200, 800, 300)
        self.pareto_k = np.where(np.arange(300) < self.poor, np.inf, rng.uniform(0, 0.5, 300))
        self.trust = np.where(np.arange(300) < self.poor, "poor", "good")


def uniform(power=1.0):
    rng = np.random.default_rng(1)
    return {"alpha": rng.uniform(size=300) ** power, "theta & co": rng.uniform(size=(300, 3))}


class Reader(HTMLParser):
    """Tags in their order, and whether every one is closed."""

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
    reader = Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    assert not reader.open
    return reader


def test_it_stands_alone_and_tells_all(tmp_path):
    path = write_report(tmp_path / "report.html", compiled(), Check(uniform()))
    reader = read(path)
    assert not {"script", "iframe", "object", "img"} & set(reader.tags)
    assert all(link.startswith(("#", "data:")) for link in reader.links)
    text = path.read_text(encoding="utf-8")
    fetched = re.findall(r"url\(([^)]*)\)|@import", text)
    assert all(target.startswith("#") for target in fetched)
    assert 'name="viewport"' in text and "prefers-color-scheme: dark" in text
    words = " ".join("".join(reader.text).split())
    for expected in (
        "rates", "These answers can be relied on", "300 data sets", "theta & co", "y<script>",
        "each of 3 n<i>", "φ₁", "no progress", "underflow", "12.3%", "Method: faithful",
        "90 % held", "Effective sample size", "Inference uses smc",
    ):  # fmt: skip
        assert expected in words, expected
    assert reader.tags.count("svg") == 2 + len(compiled().networks) + 4 + 1


def test_pictures_take_the_colours_of_the_page(tmp_path):
    text = write_report(tmp_path / "report.html", compiled(), Check(uniform(2.0), False)).read_text(
        encoding="utf-8"
    )
    body = text[text.index("<body>") :]
    assert not re.findall(r"#[0-9a-f]{6}\b", body)
    for name in set(re.findall(r"var\(--([a-z]+)\)", text)):
        assert f"--{name}:" in text
    assert body.count("aria-label") >= 4 and "of which 1 stray from uniform" in body


def test_without_a_calibration_it_says_so(tmp_path):
    text = write_report(tmp_path / "report.html", compiled()).read_text(encoding="utf-8")
    assert "Not checked yet" in text and "retrodict check" in text
    assert "relied on" not in re.sub(r"<dl class='words'>.*", "", text, flags=re.DOTALL)


def test_an_untrained_model_can_be_reported(tmp_path):
    fresh = dataclasses.replace(compiled(), history=History())
    assert "have not been trained" in write_report(tmp_path / "r.html", fresh).read_text("utf-8")


def test_a_wide_picture_keeps_its_size():
    def chain():
        x = numpyro.sample("x_0", dist.Normal(0, 1))
        for i in range(12):
            numpyro.sample(f"a_rather_long_name_{i}", dist.Normal(x, 1))
        numpyro.sample("y", dist.Normal(x, 1))

    graph = rd.trace(chain, ["y"])
    shown = SimpleNamespace(graph=graph, inverse=rd.invert(graph), networks={})
    assert "<svg class='wide'" in sections.structure(shown)
    assert "the model's own" in sections.factors(shown)
    assert "wide" not in sections.structure(compiled())


@pytest.mark.parametrize(
    ("check", "tone", "headline"),
    [
        (None, "none", "Not checked yet"),
        (Check(uniform()), "good", "These answers can be relied on"),
        (Check(uniform(), poor=10), "good", "These answers can be relied on"),
        (Check(uniform(), poor=30), "fair", "Right, but often too coarse"),
        (Check(uniform(3.0)), "poor", "Do not rely on these answers"),
    ],
)
def test_the_verdict_in_words(check, tone, headline):
    found = judge(check)
    assert (found.tone, found.headline) == (tone, headline)
    if check is not None:
        columns = [rank.column for rank in looked_at(check.ranks)]
        held = np.mean([np.mean(np.abs(r - 0.5) <= 0.45) for r in columns])
        assert f"{held:.0%} did" in found.reasons[-3]
        assert f"{check.poor or 'None'} of 300 answers called themselves poor" in found.reasons[-1]


needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt: chromium)")


@pytest.fixture(scope="module")
def tab():
    with browser() as opened:
        yield opened


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1100])
def test_in_a_browser(tab, width, scheme, tmp_path):
    path = write_report(tmp_path / "report.html", compiled(), Check(uniform(3.0)))
    tab.open(path, width, scheme=scheme)
    assert tab.complaints() == []
    assert tab.requests() == [path.resolve().as_uri()]
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    # Nothing but what scrolls by itself may reach past the edge, and no letter may be tiny.
    inside = f"""[...document.querySelectorAll('main *')].filter(e =>
        !e.closest('.scroll, .graph') && e.getBoundingClientRect().right > {width} + 1).length"""
    assert tab.evaluate(inside) == 0
    smallest = """Math.min(...[...document.querySelectorAll('svg.chart text')].map(e =>
        e.getBoundingClientRect().height))"""
    assert tab.evaluate(smallest) >= 8
    ink, page = (
        tab.evaluate(f"getComputedStyle(document.body).{what}")
        for what in ("color", "backgroundColor")
    )
    bright = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in (ink, page)]
    assert (bright[0] > bright[1]) == (scheme == "dark")
    assert abs(bright[0] - bright[1]) > 450
    # Lines are drawn in the page's colours, not in the ones that stood for them.
    line = """getComputedStyle(document.querySelector(
        'svg.chart path[style*="stroke: var(--accent)"]')).stroke"""
    assert (
        tab.evaluate(line) == {"light": "rgb(42, 111, 151)", "dark": "rgb(108, 180, 222)"}[scheme]
    )
    assert tab.evaluate("document.querySelector('.verdict h2').innerText").startswith("Do not rely")


@needs_chromium
def test_the_browser_tells_of_faults(tab, tmp_path):
    """The test above could not fail if these went unseen."""
    page = tmp_path / "bad.html"
    page.write_text(
        "<meta name='viewport' content='width=device-width'><script>console.error('x'); lost()"
        "</script><img src='http://127.0.0.1:9/x.png'><div style='width:900px'>wide</div>"
    )
    tab.open(page, 390)
    assert len(tab.requests()) == 2
    assert len(tab.complaints()) >= 2
    assert tab.evaluate("document.documentElement.scrollWidth") > 390
