"""The wheel and the sdist, and the quick start in a clean environment."""

import json
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def run(*command, **options):
    process = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """Build the wheel and the sdist and return their paths."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT)
    return next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))


@pytest.mark.xdist_group("packaging")
def test_wheel_contains_the_package_and_its_types(distributions):
    wheel, _ = distributions
    names = zipfile.ZipFile(wheel).namelist()
    top_level = {name.split("/")[0] for name in names}
    assert top_level == {"retrodict", f"retrodict-{VERSION}.dist-info"}
    assert "retrodict/py.typed" in names
    modules = {str(p.relative_to(ROOT / "src")) for p in (ROOT / "src").rglob("*.py")}
    assert modules <= set(names)


@pytest.mark.xdist_group("packaging")
def test_sdist_contains_documents_and_tests(distributions):
    _, sdist = distributions
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    documents = {"README.md", "LICENSE", "CITATION.cff", "CONTRIBUTING.md", "CHANGELOG.md"}
    assert documents | {"pyproject.toml", "Makefile", "tests/zoo.py"} <= names
    assert not [name for name in names if name.startswith((".venv", "out/"))]


@pytest.mark.slow
@pytest.mark.xdist_group("packaging")
def test_quick_start_in_a_clean_environment(distributions, tmp_path):
    """The README's example and the command run with only the wheel and its dependencies."""
    wheel, _ = distributions
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    install = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile")
    run(python, *install, wheel)
    packages = json.loads(run(python, "-m", "pip", "list", "--format", "json"))
    assert not {"pytest", "ruff", "mypy", "mkdocs"} & {package["name"] for package in packages}
    block = re.search(r"## Example\n\n```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    statement = "compiled = rd.compile("
    code = block[1].replace(
        statement,
        "import numpy as np\n"
        "t, y = np.array([94.3, 15.7, 62.9, 126, 5.24, 31.4, 1.05, 1.05, 2.1, 10.5]), "
        "np.array([5, 1, 5, 14, 3, 19, 1, 1, 4, 22])\n" + statement,
    )
    # The example trains for minutes; a few seconds are enough here.
    code = code.replace(
        'observed=("t", "y"))',
        'observed=("t", "y"), progress_bar=False, '
        "training=rd.Training(max_steps=50, dataset_size=4096))",
    )
    assert "max_steps=50" in code
    (tmp_path / "start.py").write_text(code)
    assert "alpha" in run(python, "-W", "ignore", "start.py", cwd=tmp_path)
    assert VERSION in run(python, "-m", "retrodict", "--version", cwd=tmp_path)


def test_citation_and_changelog_name_the_current_version():
    assert f"\nversion: {VERSION}\n" in (ROOT / "CITATION.cff").read_text()
    assert VERSION.partition(".dev")[0] in (ROOT / "CHANGELOG.md").read_text()
