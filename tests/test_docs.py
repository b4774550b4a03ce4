"""Tests of the README and the documentation: code, links, commands, reference and pictures."""

import re
import warnings
from importlib import import_module
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import pytest

import retrodict as rd
from oracles import slow_if
from retrodict.compiled import Compiled
from retrodict.estimators.encoders import Embedding
from retrodict.plotting.picture import Picture

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
TINY = rd.MADE((8,), 2, (8,), Embedding((8,), (8,), 8, 1))
SHORT = rd.Training(max_steps=10, batch_size=32, dataset_size=128, heldout_size=32)


def code_blocks(page, language):
    return [text for name, text in BLOCK.findall(page.read_text("utf-8")) if name == language]


def without_rescue(method):
    return lambda self, *args, **options: method(self, *args, **options | {"rescue": False})


def page_case(page):
    path = page.relative_to(ROOT)
    # The README is always run. `make docs` runs the tutorials, with fully trained networks.
    return pytest.param(page, id=str(path), marks=slow_if(len(path.parts) > 1))


@pytest.mark.parametrize("page", [page_case(page) for page in PAGES if code_blocks(page, "python")])
def test_code_blocks_run(page, tmp_path, monkeypatch, without_planning):
    original_compile = rd.compile

    def quick_compile(rng_key, model, observed, **options):
        options |= {"estimator": TINY, "training": SHORT, "progress_bar": False}
        return original_compile(rng_key, model, observed, **options)

    # The fallback to tempering is slow and has tests of its own.
    for name in ("infer", "infer_many"):
        monkeypatch.setattr(Compiled, name, without_rescue(getattr(Compiled, name)))
    monkeypatch.setattr(rd, "compile", quick_compile)
    monkeypatch.chdir(tmp_path)
    cache = jax.config.jax_compilation_cache_dir
    namespace = {
        "t": [94.3, 15.7, 62.9, 126, 5.24, 31.4, 1.05, 1.05, 2.1, 10.5],
        "y": [5, 1, 5, 14, 3, 19, 1, 1, 4, 22],
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, text in enumerate(code_blocks(page, "python")):
            exec(compile(text, f"{page.name}, block {number + 1}", "exec"), namespace)
    plt.close("all")
    jax.config.update("jax_compilation_cache_dir", cache)  # one page shows how to set it


def test_link_targets_exist():
    for page in PAGES:
        text = page.read_text("utf-8")
        links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
        for target in (*links, *re.findall(r'<img [^>]*src="([^":]+)"', text)):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_reference_lists_all_public_names():
    text = (ROOT / "docs" / "reference.md").read_text("utf-8")
    assert set(re.findall(r"^::: retrodict\.(\w+)$", text, re.MULTILINE)) == set(rd.__all__)


def test_command_line_options_in_examples_exist(capsys):
    from retrodict.cli.main import main

    examples = "\n".join(text for page in PAGES for text in code_blocks(page, "sh"))
    for command in set(re.findall(r"^retrodict (\w+)", examples, re.MULTILINE)):
        main([command, "--help"])
        help_text = capsys.readouterr().out
        lines = re.findall(rf"^retrodict {command} .*$", examples, re.MULTILINE)
        for option in set(re.findall(r"(?<= )--?[a-z]+", " ".join(lines))):
            assert option in help_text, f"retrodict {command} {option}"


@pytest.fixture
def architecture(monkeypatch):
    """Return the script `docs/architecture.py` as a module."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    return import_module("architecture")


def test_architecture_picture_shows_the_import_contract(architecture):
    """If this fails, run `python docs/architecture.py`: the description lists nodes and edges."""
    contract = architecture.import_contract()
    svg = Picture(architecture.contract_diagram(contract)).to_svg()
    description = re.compile(r"<desc>.*?</desc>", re.DOTALL)
    committed = architecture.PICTURE.read_text("utf-8")
    assert description.search(committed)[0] == description.search(svg)[0]


def test_architecture_page_lists_every_package_of_the_contract_in_order(architecture):
    layers = architecture.contract_layers(architecture.import_contract())
    from_top = [name for layer in layers for name in layer]
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    assert re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE) == from_top[::-1]
