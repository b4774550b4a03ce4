"""The command line: every command with good and bad input, its output, files and exit status."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import types
from pathlib import Path

import arviz
import numpy as np
import pandas as pd
import pytest
import xarray

import retrodict.compiled
from retrodict import artefact
from retrodict.cli import commands, main
from retrodict.cli.resultfiles import write_posterior
from retrodict.training.progress import Interruption

MODEL = """
import numpyro
import numpyro.distributions as dist


def normal(y=None, n=4):
    mu = numpyro.sample("mu", dist.Normal(1.0, 2.0))
    with numpyro.plate("n", n):
        numpyro.sample("y", dist.Normal(mu, 1.5), obs=y)


def broken():
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    raise RuntimeError("the pump\\nis on fire")


def other():
    numpyro.sample("mu", dist.Normal(1.0, 2.0))
    numpyro.sample("z", dist.Normal(0.0, 1.0))


def talker():
    print("this is no answer")
    normal()


number = 3
"""
SMALL = ("--hidden", "8", "--components", "2", "--steps", "20")
DATA = {"y": [0.5, 1.5, 2.5, 0.0]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with models, data, and one artefact that the command line made."""
    made = tmp_path_factory.mktemp("cli")
    (made / "model.py").write_text(MODEL)
    (made / "syntax.py").write_text("def normal(:\n")
    (made / "needs.py").write_text("import os\nimport no_such_module\n")
    (made / "exits.py").write_text("raise SystemExit(0)\n")
    (made / "data.json").write_text(json.dumps(DATA))
    (made / "short.json").write_text('{"y": [1, 2]}')
    (made / "null.json").write_text('{"y": [1, 2, null, 4]}')
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        patch.setattr(sys, "path", [*sys.path])
        call = ["compile", "model.py:normal", "--observed", "y", "-o", "normal.rd", *SMALL]
        assert main.main(call) == 0
    whole = (made / "normal.rd").read_bytes()
    (made / "damaged.rd").write_bytes(whole[:-100])
    return made


@pytest.fixture(autouse=True)
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    known = set(sys.modules)
    yield
    for name in set(sys.modules) - known:
        if getattr(sys.modules[name], "__file__", None) and str(folder) in sys.modules[name].__file__:  # fmt: skip  # noqa: E501
            del sys.modules[name]


def run(capsys, *arguments):
    capsys.readouterr()
    status = main.main(arguments)
    out, err = capsys.readouterr()
    return status, out, err


def refused(capsys, *arguments):
    """The one line that a refused command leaves on standard error."""
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("retrodict: error: ") and err.count("\n") == 1, err
    return err


def test_graph_tells_and_draws(capsys):
    status, out, err = run(
        capsys, "graph", "model.py:normal", "--observed", "y", "--kwargs", '{"n": 7}', "-o", "g.svg"
    )
    assert (status, err) == (0, "retrodict: drawn to g.svg\n")
    assert "y   observed  Normal [7] in n" in out
    assert "mu given y" in out
    picture = Path("g.svg").read_text()
    assert picture.startswith("<svg") and "n: 7" in picture and "φ" not in picture
    status, out, _ = run(
        capsys, "graph", "model.py:normal", "--observed", "y", "--inverse", "blanket",
        "-o", "i.dot", "--json", "--quiet",
    )  # fmt: skip
    found = json.loads(out)
    assert found["inverse"] == "blanket"
    assert found["edges"] == [["mu", "y"]]
    assert found["factors"][0] == {
        "latents": ["mu"], "context": ["y"], "plates": [], "time": False, "network": "mu | y"
    }  # fmt: skip
    assert "φ" in Path("i.dot").read_text()


def test_infer_answers_in_every_form(capsys):
    status, out, err = run(capsys, "infer", "normal.rd", "data.json", "-o", "posterior.nc")
    assert "mu" in out and "log evidence" in out and "of 1000 particles" in out
    trust = out.split("trust")[1].split()[0]
    assert status == (1 if trust == "poor" else 0)
    assert "the model is model.py:normal" in err and "written to posterior.nc" in err
    groups = {g: xarray.open_dataset("posterior.nc", group=g) for g in ("posterior", "sample_stats", "observed_data")}  # fmt: skip  # noqa: E501
    assert groups["posterior"]["mu"].shape == (1, 1000)
    assert groups["sample_stats"].attrs["trust"] == trust
    np.testing.assert_allclose(groups["observed_data"]["y"], DATA["y"])
    assert groups["observed_data"]["y"].dims == ("n",)
    assert arviz.from_netcdf("posterior.nc")["posterior"]["mu"].shape == (1, 1000)

    same, out, _ = run(capsys, "infer", "normal.rd", "data.json", "-o", "s.json", "--json")
    found = json.loads(out)
    assert found == json.loads(Path("s.json").read_text())
    assert (same, found["trust"], found["num_particles"]) == (status, trust, 1000)
    # conjugate: mean (1/4 + Σy / 2.25) / (1/4 + 4 / 2.25)
    exact = (1 / 4 + sum(DATA["y"]) / 2.25) / (1 / 4 + 4 / 2.25)
    row = found["summary"]["mu"]
    assert abs(row["mean"] - exact) < 5 * row["mcse_mean"]
    stats = groups["sample_stats"]
    assert found["log_evidence"] == pytest.approx(float(stats["log_evidence"]), abs=1e-5)


def test_arviz_1_gives_a_tree(tmp_path):
    """From 1.0 on `to_arviz` gives xarray's DataTree; the file is the same."""
    tree = xarray.DataTree.from_dict({"posterior": xarray.Dataset({"mu": ("draw", [1.0, 2.0])})})
    stub = types.SimpleNamespace(batched=False, to_arviz=lambda: tree)
    write_posterior(tmp_path / "p.nc", stub)
    assert xarray.open_dataset(tmp_path / "p.nc", group="posterior")["mu"].shape == (2,)
    assert [path.name for path in tmp_path.iterdir()] == ["p.nc"]


def test_several_data_sets_another_size_and_a_figure(capsys):
    np.savez("many.npz", y=np.array([[0.0, 1.0], [2.0, 3.0], [8.0, 9.0]]))
    size = ("--kwargs", '{"n": 2}', "--particles", "20")
    status, out, _ = run(capsys, "infer", "normal.rd", "many.npz", *size, "-o", "many.csv")
    # 30 effective particles are the fewest that can be fair
    assert status == 1 and "data set" in out and "trust  3 poor" in out
    table = pd.read_csv("many.csv")
    assert table["dataset"].tolist() == [0, 1, 2] and set(table["parameter"]) == {"mu"}
    assert table["mean"].is_monotonic_increasing
    status, out, _ = run(capsys, "infer", "normal.rd", "many.npz", *size, "-o", "many.nc", "--json")
    found = json.loads(out)["datasets"]
    assert [one["num_particles"] for one in found] == [20, 20, 20]
    stats = xarray.open_dataset("many.nc", group="sample_stats")
    assert stats["trust"].values.tolist() == [one["trust"] for one in found]
    assert xarray.open_dataset("many.nc", group="posterior")["mu"].shape == (3, 1, 20)
    assert "--plot draws one data set" in refused(
        capsys, "infer", "normal.rd", "many.npz", *size, "--plot", "x.png"
    )
    status, _, err = run(capsys, "infer", "normal.rd", "data.json", "--plot", "p.png", "--quiet")
    assert status < 2 and "retrodict:" not in err
    assert Path("p.png").read_bytes().startswith(b"\x89PNG")


def test_a_poor_answer_is_exit_status_1(capsys):
    """30 effective particles are the fewest that can be fair."""
    status, out, _ = run(capsys, "infer", "normal.rd", "data.json", "--particles", "20")
    assert status == 1
    assert "trust         poor\n  - " in out and "To do better: more --particles" in out


COMPILE = "compile --observed y -o x.rd"
INFER = "infer normal.rd data.json"
BAD = {
    "no command": ("", "name a command: graph, compile, infer, check, demo"),
    "unknown command": ("guess", "invalid choice: 'guess'"),
    "missing argument": ("infer normal.rd", "required: data; see retrodict infer --help"),
    "not a number": (f"{INFER} --particles many", "a whole number from 1, found 'many'"),
    "no minutes": (f"{COMPILE} model.py:normal --minutes 0", "a number above 0, found '0'"),
    "no function named": (f"{COMPILE} model.py", "expected file.py:function .* model.py:normal"),
    "no such file": (f"{COMPILE} modle.py:normal", "modle.py does not exist; there is model.py"),
    "a folder": (f"{COMPILE} ./:normal", "is not a file"),
    "no such function": (f"{COMPILE} model.py:norml", "'norml'; did you mean 'normal'"),
    "far from any": (f"{COMPILE} model.py:zzz", "no function 'zzz'; it has normal, broken, other"),
    "not callable": (f"{COMPILE} model.py:number", "model.py:number is not a function but of"),
    "no such module": (f"{COMPILE} no.such:normal", "no module 'no.such'"),
    "a syntax error": (f"{COMPILE} syntax.py:normal", "syntax.py failed at line 1: SyntaxError"),
    "a missing import": (f"{COMPILE} needs.py:normal", "line 2: ModuleNotFoundError: No module"),
    "a file that exits": (f"{COMPILE} exits.py:normal", "exits.py failed at line 1: SystemExit"),
    "a model that raises": (f"{COMPILE} model.py:broken", "pump is on fire.*model.py, line 14"),
    "an unknown site": ("graph model.py:normal --observed q", "'q', which is not a sample site"),
    "kwargs not JSON": (f"{COMPILE} model.py:normal --kwargs n=1", "--kwargs is not JSON"),
    "kwargs no object": (f"{COMPILE} model.py:normal --kwargs [1]", "--kwargs: expected an object"),
    "kwargs unknown": (COMPILE + """ model.py:normal --kwargs '{"m": 1}'""", "unexpected keyword"),
    "kwargs of words": (COMPILE + """ model.py:normal --kwargs '{"n": ["a"]}'""", "n: a list must"),
    "kwargs no file": (f"{COMPILE} model.py:normal --kwargs @no.json", "no.json: No such file"),
    "no such folder": ("compile model.py:normal --observed y -o no/x.rd", "there is no folder no"),
    "over a model": ("compile model.py:normal --observed y -o model.py", "exists .* --force"),
    "report no HTML": (f"{COMPILE} model.py:normal --report x.pdf", "must end in .html"),
    "no artefact": ("infer no.rd data.json", "no.rd: not loaded: there is no such file"),
    "damaged artefact": ("infer damaged.rd data.json", "damaged.rd is damaged: it is truncated"),
    "not an artefact": ("check model.py", "model.py is not a retrodict file"),
    "another model": (f"{INFER} --model model.py:other", "normal.rd was made from another model"),
    "no data": ("infer normal.rd no.json", "there is no data file no.json"),
    "data of another shape": ("infer normal.rd short.json", r"\(4,\), found \(2,\).*--kwargs"),
    "null": ("infer normal.rd null.json", r"site 'y': the value at \[2\] is null"),
    "over the data": (f"{INFER} -o data.json", "the data file itself"),
    "unknown output": (f"{INFER} -o x.xls", "must end in .nc, .json, .csv, found '.xls'"),
    "output a folder": ("check normal.rd -o folder.html", "it is a folder"),
    "no such method": (f"{INFER} --method divide", "'divide'; for this model there are 'auto'"),
    "unwritable": ("graph model.py:normal --observed y -o /proc/x.svg", "error: /proc/x.svg: "),
}  # fmt: skip


@pytest.mark.parametrize(("command", "message"), BAD.values(), ids=BAD.keys())
def test_wrong_input_is_one_line_and_exit_status_2(command, message, capsys, folder):
    (folder / "folder.html").mkdir(exist_ok=True)
    if "/proc" in command and not Path("/proc").is_dir():
        pytest.skip("a place that even root cannot write to is needed")
    said = refused(capsys, *shlex.split(command))
    assert re.search(message, said), said
    assert not Path("x.rd").exists()


def test_debug_shows_where(capsys):
    status, _, err = run(capsys, "graph", "model.py:zzz", "--observed", "y", "--debug")
    assert status == 2
    assert "Traceback" in err and err.splitlines()[-1].startswith("retrodict: error: model.py has")


def test_help_has_examples(capsys):
    for command in ("", *commands.COMMANDS):
        status, out, _ = run(capsys, *filter(None, [command]), "--help")
        assert status == 0
        assert f"retrodict {command}" in out and "--help" in out
        assert "examples:" in out
    status, out, _ = run(capsys, "--version")
    assert status == 0 and out.startswith("retrodict ")


def test_an_error_of_ours_is_not_called_the_users(capsys, monkeypatch):
    def fail(options, say):
        raise RuntimeError("lost")

    monkeypatch.setitem(commands.COMMANDS, "graph", fail)
    status, out, err = run(capsys, "graph", "model.py:normal", "--observed", "y")
    assert (status, out) == (3, "")
    assert err == "retrodict: error: this is an error in retrodict; --debug shows where: RuntimeError: lost\n"  # fmt: skip  # noqa: E501


def test_interrupted_training_is_saved(capsys, monkeypatch, folder):
    class Impatient(Interruption):
        def __enter__(self):
            entered = super().__enter__()
            signal.raise_signal(signal.SIGINT)
            return entered

    monkeypatch.setattr(retrodict.compiled, "Interruption", Impatient)
    call = ("model.py:normal", "--observed", "y", *SMALL[:-1], "5000", "-o", "early.rd")
    status, _, err = run(capsys, "compile", *call)
    assert status == 0
    assert "note: training was interrupted" in err and "saved to early.rd" in err
    (before,) = artefact.read("early.rd")[0]["history"].values()
    assert before["steps"][-1:] < [5000]

    monkeypatch.undo()
    monkeypatch.chdir(folder)
    again = ("compile", "model.py:normal", "--observed", "y", "--resume", "early.rd")
    status, _, err = run(capsys, *again, "-o", "late.rd", "--steps", "20")
    assert status == 0 and "note" not in err
    (after,) = artefact.read("late.rd")[0]["history"].values()
    assert after["steps"][-1] == (before["steps"] or [0])[-1] + 20
    assert "keeps --kwargs" in refused(capsys, *again, "-o", "x.rd", "--hidden", "8")
    other = ("compile", "model.py:normal", "--observed", "mu", "--resume", "early.rd")
    assert "for the data y, not for mu" in refused(capsys, *other, "-o", "x.rd")


def test_interrupted_before_training_is_exit_status_130(capsys, monkeypatch):
    def interrupt(options, say):
        raise KeyboardInterrupt

    monkeypatch.setitem(commands.COMMANDS, "graph", interrupt)
    status, _, err = run(capsys, "graph", "model.py:normal", "--observed", "y")
    assert status == 130 and err == "retrodict: error: interrupted, and nothing was written\n"


def test_an_artefact_is_replaced_and_says_so_in_json(capsys, folder):
    old = (folder / "normal.rd").read_bytes()
    (folder / "again.rd").write_bytes(old)
    call = ("compile", "model.py:normal", "--observed", "y", *SMALL, "--seed", "1", "--json")
    status, out, _ = run(capsys, *call, "-o", "again.rd")
    found = json.loads(out)
    assert status == 0 and found["path"] == "again.rd" and found["plan"]["method"] == "importance"
    assert found["networks"]["mu | y"]["steps"] == 20 and found["simulated"] > 0
    assert (folder / "again.rd").read_bytes() != old


def moved(folder, tmp_path, origin):
    """A copy of the artefact elsewhere that says its model is somewhere else."""
    header, arrays = artefact.read(folder / "normal.rd")
    header = {k: v for k, v in header.items() if k not in ("format", "versions")}
    return str(artefact.write(tmp_path / "moved.rd", header | {"model": origin}, arrays))


def test_the_artefact_knows_its_model(folder):
    header, _ = artefact.read(folder / "normal.rd")
    assert header["model"] == {"module": "model", "name": "normal", "file": "model.py"}


def test_the_model_is_found_beside_the_artefact(folder, tmp_path, monkeypatch, capsys):
    path = moved(folder, tmp_path, {"module": "m", "name": "normal", "file": "models/model.py"})
    monkeypatch.chdir(tmp_path)
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    said = refused(capsys, "infer", path, str(folder / "data.json"))
    for place in ("models/model.py", "../models/model.py", "../model.py", "--model"):
        assert place in said
    (tmp_path / "model.py").write_text(MODEL)
    status, _, err = run(capsys, "infer", path, str(folder / "data.json"))
    assert status < 2 and "the model is ../model.py:normal" in err


@pytest.mark.slow
def test_the_model_is_found_in_a_package(folder, tmp_path, monkeypatch, capsys):
    """A module with relative imports is imported as one, from where its package is."""
    package = tmp_path / "src" / "plant"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "sizes.py").write_text("N = 4\n")
    text = MODEL.replace("n=4", "n=N").replace("import numpyro\n", "import numpyro\nfrom .sizes import N\n", 1)  # fmt: skip  # noqa: E501
    (package / "models.py").write_text(text)
    origin = {"module": "plant.models", "name": "normal", "file": "src/plant/models.py"}
    path = moved(folder, tmp_path, origin)
    monkeypatch.chdir(tmp_path)
    status, _, err = run(capsys, "infer", path, str(folder / "data.json"), "--particles", "100")
    assert status < 2 and "the model is plant.models:normal" in err
    monkeypatch.chdir(tmp_path / "src")
    status, out, _ = run(capsys, "graph", "plant.models:normal", "--observed", "y")
    assert status == 0 and "Normal [4]" in out


@pytest.mark.parametrize(
    ("origin", "message"),
    [
        ({}, "does not say where its model is"),
        ({"module": "m", "name": "a.<locals>.b", "file": "m.py"}, "does not say where"),
        ({"module": "__main__", "name": "f", "file": "model.py"}, "say --model model.py:f"),
        ({"module": "os", "name": "system", "file": "../../lib/os.py"}, "outside of its folder"),
        ({"module": "os", "name": "system", "file": "/usr/lib/os.py"}, "outside of its folder"),
        ({"module": "os", "name": "system", "file": "os.py"}, "looked for"),
        ({"module": "model", "name": "gone", "file": "model.py"}, "has no function 'gone'"),
    ],
)  # fmt: skip
def test_an_artefact_cannot_have_other_code_run(origin, message, folder, tmp_path, capsys):
    path = moved(folder, tmp_path, origin)
    assert message in refused(capsys, "infer", path, "data.json")


def test_check_reports_and_judges(capsys, monkeypatch):
    """With a calibration made up here: what is asked of it, and what is made of it."""
    asked = []

    def calibrate(rng_key, compiled, num_datasets, num_particles):
        asked.append((num_datasets, num_particles, compiled.graph.observed))
        rng = np.random.default_rng(0)
        return types.SimpleNamespace(
            passed=num_datasets > 50,
            # a lean that 40 data sets are enough to see
            ranks={"mu": rng.uniform(size=num_datasets) ** (1 if num_datasets > 50 else 4)},
            ess=np.full(num_datasets, 0.6 * num_particles),
            pareto_k=np.full(num_datasets, 0.1),
            trust=np.full(num_datasets, "good"),
            num_particles=num_particles,
            summary=lambda: "a table",
        )

    stub = types.SimpleNamespace(calibrate=calibrate)
    monkeypatch.setitem(sys.modules, "retrodict.evaluation.calibrate", stub)
    status, out, err = run(capsys, "check", "normal.rd", "-o", "report.html")
    assert status == 0
    assert out.startswith("a table\n") and "These answers can be relied on\n  - " in out
    assert "reported to report.html" in err
    assert "These answers can be relied on" in Path("report.html").read_text(encoding="utf-8")
    few = ("--datasets", "40", "--particles", "100")
    status, out, _ = run(capsys, "check", "normal.rd", *few, "--json")
    found = json.loads(out)
    assert status == 1 and found["passed"] is False
    assert found["verdict"] == "Do not rely on these answers" and len(found["reasons"]) == 4
    call = ("compile", "model.py:normal", "--observed", "y", *SMALL, "-o", "again.rd", *few)
    status, out, err = run(capsys, *call, "--report", "after.html", "--json")
    found = json.loads(out)
    assert status == 1 and found["path"] == "again.rd" and found["passed"] is False
    assert "Do not rely on these answers" in Path("after.html").read_text(encoding="utf-8")
    assert asked == [(200, 1000, ("y",)), (40, 100, ("y",)), (40, 100, ("y",))]


def test_demo(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "retrodict.demos", None)
    assert "has no demonstrations" in refused(capsys, "demo")
    calls = []
    stub = types.SimpleNamespace(
        NAMES=("first", "second"), run=lambda *a, **k: calls.append((*a, k))
    )
    monkeypatch.setitem(sys.modules, "retrodict.demos", stub)
    assert "no demonstration 'third'; there are first, second" in refused(capsys, "demo", "third")
    assert run(capsys, "demo", "-o", str(tmp_path / "new" / "out"))[0] == 0
    assert run(capsys, "demo", "second", "-o", str(tmp_path))[0] == 0
    quiet = {"progress_bar": False, "minutes": None}
    assert calls == [("first", tmp_path / "new" / "out", quiet), ("second", tmp_path, quiet)]
    assert (tmp_path / "new" / "out").is_dir()
    (tmp_path / "file").touch()
    assert "is not a folder" in refused(capsys, "demo", "-o", str(tmp_path / "file"))


GRAPH = (sys.executable, "-m", "retrodict", "graph", "model.py:talker", "--observed", "y")


def test_from_a_shell():
    done = subprocess.run([*GRAPH, "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert json.loads(done.stdout)["inverse"] == "faithful"
    assert set(done.stderr.splitlines()) == {"this is no answer"}


def test_a_closed_pipe_is_no_error():
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as pipe:
        done = subprocess.run(GRAPH, stdout=pipe, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr and "Broken" not in done.stderr
