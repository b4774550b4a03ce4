"""Rules of the code's layout that no linter checks: modules, class names, function lengths.

`make lint` checks the order of imports between packages and the complexity of functions.
Each list of exceptions must be complete and necessary, so that it can only shrink.
"""

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "retrodict"

TOP_LEVEL = {"__init__", "__main__", "artefact", "compiled", "errors", "saving", "types"}

MAX_LINES = 60
LONG_FUNCTIONS: set[str] = set()

REPEATED_CLASS_NAMES: set[str] = set()

# A module is named after what it holds, by a term of the field. Words that end like a participle
# are suspicious; these are terms.
VERBAL_TERMS = {
    "closed",  # of conditionals in closed form
    "compiled",  # the public type
    "crossing",  # of edges in a drawing
    "drawing",  # of a diagram
    "filtering",
    "layered",  # of a layout
    "orderings",
    "lifting",
    "matching",
    "planning",
    "recording",
    "resampling",
    "routing",  # of edges in a drawing
    "saving",
    "stacked",
    "tempered",
    "tempering",
    "tuning",
    "weighted",  # of statistics
}
# Coined words for what the field has terms for.
COINED_WORDS = {"likeness", "likenesses", "meets", "rows"}


def sources(*folders):
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def definitions(path, kind):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, kind)]


def test_few_modules_are_outside_of_packages():
    assert {path.stem for path in PACKAGE.glob("*.py")} == TOP_LEVEL


def test_every_package_has_a_folder_of_tests():
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    tests = {path.parent.name for path in ROOT.glob("tests/*/test_*.py")}
    assert packages == tests


def test_class_names_are_unique():
    names = Counter(
        node.name for path in sources("src") for node in definitions(path, ast.ClassDef)
    )
    assert {name for name, count in names.items() if count > 1} == REPEATED_CLASS_NAMES


def test_functions_are_short():
    long = {
        f"{path.relative_to(ROOT).as_posix()}: {node.name}"
        for path in sources("src", "tests", "benchmarks")
        for node in definitions(path, ast.FunctionDef | ast.AsyncFunctionDef)
        if node.end_lineno - node.lineno + 1 > MAX_LINES
    }
    assert long == LONG_FUNCTIONS


def test_modules_are_named_by_terms_of_the_field():
    words = {word for path in sources("src") for word in path.stem.split("_")}
    assert {word for word in words if word.endswith(("ing", "ings", "ed"))} == VERBAL_TERMS
    assert not words & COINED_WORDS
