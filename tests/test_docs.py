"""Every block of Python in README and documentation runs, with networks that learn little."""

import re
import warnings
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import pytest

import retrodict as rd
from oracles import slow_if
from retrodict.compiled import Compiled
from retrodict.estimators.encoders import Embedding
from retrodict.inference.methods import Inference
from retrodict.inference.planning import Plan
from retrodict.inference.samplers import first_choice

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
TINY = rd.MADE((8,), 2, (8,), Embedding((8,), (8,), 8, 1))
SHORT = rd.Training(max_steps=10, batch_size=32, dataset_size=128, heldout_size=32)


def blocks(page, language):
    return [text for kind, text in BLOCK.findall(page.read_text("utf-8")) if kind == language]


def without_rescue(method):
    return lambda self, *args, **options: method(self, *args, **options | {"rescue": False})


def case(page):
    name = page.relative_to(ROOT)
    # one's first page always; `make docs` runs the tutorials, and with networks that learn
    return pytest.param(page, id=str(name), marks=slow_if(len(name.parts) > 1))


@pytest.mark.parametrize("page", [case(page) for page in PAGES if blocks(page, "python")])
def test_code_blocks_run(page, tmp_path, monkeypatch):
    real = rd.compile

    def quick(rng_key, model, observed, **options):
        options |= {"estimator": TINY, "training": SHORT, "progress_bar": False}
        return real(rng_key, model, observed, **options)

    # Planning and rescue have tests of their own, and take longer than all else here.
    for name in ("infer", "infer_many"):
        monkeypatch.setattr(Compiled, name, without_rescue(getattr(Compiled, name)))
    monkeypatch.setattr(Inference, "plan", lambda self, *_: Plan(first_choice(self.proposal)))
    monkeypatch.setattr(rd, "compile", quick)
    monkeypatch.chdir(tmp_path)
    cache = jax.config.jax_compilation_cache_dir
    names = {"t": [94.3, 15.7, 62.9, 126, 5.24, 31.4, 1.05, 1.05, 2.1, 10.5]}
    names["y"] = [5, 1, 5, 14, 3, 19, 1, 1, 4, 22]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, text in enumerate(blocks(page, "python")):
            exec(compile(text, f"{page.name}, block {number + 1}", "exec"), names)
    plt.close("all")
    jax.config.update("jax_compilation_cache_dir", cache)  # one page shows how to set it


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_all_that_is_public_is_in_the_reference():
    text = (ROOT / "docs" / "reference.md").read_text("utf-8")
    assert set(re.findall(r"^::: retrodict\.(\w+)$", text, re.MULTILINE)) == set(rd.__all__)


def test_options_of_commands_shown_exist(capsys):
    from retrodict.cli.main import main

    shown = "\n".join(text for page in PAGES for text in blocks(page, "sh"))
    for command in set(re.findall(r"^retrodict (\w+)", shown, re.MULTILINE)):
        main([command, "--help"])
        known = capsys.readouterr().out
        lines = re.findall(rf"^retrodict {command} .*$", shown, re.MULTILINE)
        for option in set(re.findall(r"(?<= )--?[a-z]+", " ".join(lines))):
            assert option in known, f"retrodict {command} {option}"
