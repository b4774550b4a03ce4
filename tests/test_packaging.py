"""What users install: wheel and sdist, and the quick start from a clean environment."""

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
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Wheel and sdist, from a copy of what is under version control or would be."""
    place = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", place, ROOT)
    return next(place.glob("*.whl")), next(place.glob("*.tar.gz"))


@pytest.mark.xdist_group("packaging")
def test_wheel_holds_the_package_and_its_types(built):
    names = zipfile.ZipFile(built[0]).namelist()
    inside = {name.split("/")[0] for name in names}
    assert inside == {"retrodict", f"retrodict-{VERSION}.dist-info"}
    assert "retrodict/py.typed" in names
    modules = {str(p.relative_to(ROOT / "src")) for p in (ROOT / "src").rglob("*.py")}
    assert modules <= set(names)


@pytest.mark.xdist_group("packaging")
def test_sdist_holds_what_developers_need(built):
    with tarfile.open(built[1]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    texts = {"README.md", "LICENSE", "CITATION.cff", "CONTRIBUTING.md", "CHANGELOG.md"}
    assert texts | {"pyproject.toml", "Makefile", "tests/zoo.py"} <= names
    assert not [name for name in names if name.startswith((".venv", "out/"))]


@pytest.mark.slow
@pytest.mark.xdist_group("packaging")
def test_quick_start_from_a_clean_environment(built, tmp_path):
    """The README's example, and the command, with nothing installed but the wheel's own needs."""
    home = tmp_path / "venv"
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    install = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile")
    run(python, *install, built[0])
    installed = json.loads(run(python, "-m", "pip", "list", "--format", "json"))
    assert not {"pytest", "ruff", "mypy", "mkdocs"} & {package["name"] for package in installed}
    block = re.search(r"## Example\n\n```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    compiled = "compiled = rd.compile("
    code = block[1].replace(
        compiled,
        "import numpy as np\n"
        "t, y = np.array([94.3, 15.7, 62.9, 126, 5.24, 31.4, 1.05, 1.05, 2.1, 10.5]), "
        "np.array([5, 1, 5, 14, 3, 19, 1, 1, 4, 22])\n" + compiled,
    )
    # as it stands it trains for minutes; here it trains for seconds
    code = code.replace(
        'observed=("t", "y"))',
        'observed=("t", "y"), progress_bar=False, '
        "training=rd.Training(max_steps=50, dataset_size=4096))",
    )
    assert "max_steps=50" in code
    (tmp_path / "start.py").write_text(code)
    printed = run(python, "-W", "ignore", "start.py", cwd=tmp_path)
    assert "alpha" in printed
    assert VERSION in run(python, "-m", "retrodict", "--version", cwd=tmp_path)


def test_citation_and_changelog_speak_of_this_version():
    assert f"\nversion: {VERSION}\n" in (ROOT / "CITATION.cff").read_text()
    assert VERSION.partition(".dev")[0] in (ROOT / "CHANGELOG.md").read_text()
