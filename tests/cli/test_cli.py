"""The command line: output, files and exit status of every command, for valid and invalid input."""

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


def printing():
    print("printed by the model")
    normal()


number = 3
"""
SMALL = ("--hidden", "8", "--components", "2", "--steps", "20")
DATA = {"y": [0.5, 1.5, 2.5, 0.0]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with models, data, and an artefact compiled by the command line."""
    path = tmp_path_factory.mktemp("cli")
    (path / "model.py").write_text(MODEL)
    (path / "syntax.py").write_text("def normal(:\n")
    (path / "needs.py").write_text("import os\nimport no_such_module\n")
    (path / "exits.py").write_text("raise SystemExit(0)\n")
    (path / "data.json").write_text(json.dumps(DATA))
    (path / "short.json").write_text('{"y": [1, 2]}')
    (path / "null.json").write_text('{"y": [1, 2, null, 4]}')
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        patch.setattr(sys, "path", [*sys.path])
        call = ["compile", "model.py:normal", "--observed", "y", "-o", "normal.rd", *SMALL]
        assert main(call) == 0
    content = (path / "normal.rd").read_bytes()
    (path / "damaged.rd").write_bytes(content[:-100])
    return path


@pytest.fixture(autouse=True)
def run_in_folder(folder, monkeypatch):
    """Run each test in the folder, and remove the modules that it imports from there."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    modules = set(sys.modules)
    yield
    for name in set(sys.modules) - modules:
        if getattr(sys.modules[name], "__file__", None) and str(folder) in sys.modules[name].__file__:  # fmt: skip  # noqa: E501
            del sys.modules[name]


def run(capsys, *arguments):
    capsys.readouterr()
    status = main(arguments)
    out, err = capsys.readouterr()
    return status, out, err


def input_error(capsys, *arguments):
    """Run a command that fails with exit status 2, and return its line on standard error."""
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("retrodict: error: ") and err.count("\n") == 1, err
    return err


def test_graph_prints_the_structure_and_draws_it(capsys):
    status, out, err = run(
        capsys, "graph", "model.py:normal", "--observed", "y", "--kwargs", '{"n": 7}', "-o", "g.svg"
    )
    assert (status, err) == (0, "retrodict: wrote the picture g.svg\n")
    assert "y   observed  Normal [7] in n" in out
    assert "mu given y" in out
    picture = Path("g.svg").read_text()
    assert picture.startswith("<svg") and "n: 7" in picture and "φ" not in picture
    status, out, _ = run(
        capsys, "graph", "model.py:normal", "--observed", "y", "--inverse", "blanket",
        "-o", "i.dot", "--json", "--quiet",
    )  # fmt: skip
    record = json.loads(out)
    assert record["inverse"] == "blanket"
    assert record["edges"] == [["mu", "y"]]
    assert record["factors"][0] == {
        "latents": ["mu"], "context": ["y"], "plates": [], "time": False, "network": "mu | y"
    }  # fmt: skip
    assert "φ" in Path("i.dot").read_text()


def test_infer_gives_the_same_posterior_in_every_format(capsys):
    status, out, err = run(capsys, "infer", "normal.rd", "data.json", "-o", "posterior.nc")
    assert "mu" in out and "log evidence" in out and "of 1000 particles" in out
    trust = out.split("trust")[1].split()[0]
    assert status == (1 if trust == "poor" else 0)
    assert "using the model model.py:normal" in err
    assert "wrote the posterior to posterior.nc" in err
    groups = {g: xarray.open_dataset("posterior.nc", group=g) for g in ("posterior", "sample_stats", "observed_data")}  # fmt: skip  # noqa: E501
    assert groups["posterior"]["mu"].shape == (1, 1000)
    assert groups["sample_stats"].attrs["trust"] == trust
    np.testing.assert_allclose(groups["observed_data"]["y"], DATA["y"])
    assert groups["observed_data"]["y"].dims == ("n",)
    assert arviz.from_netcdf("posterior.nc")["posterior"]["mu"].shape == (1, 1000)

    json_status, out, _ = run(capsys, "infer", "normal.rd", "data.json", "-o", "s.json", "--json")
    record = json.loads(out)
    assert record == json.loads(Path("s.json").read_text())
    assert (json_status, record["trust"], record["num_particles"]) == (status, trust, 1000)
    # The model is conjugate.
    exact_mean = (1 / 4 + sum(DATA["y"]) / 2.25) / (1 / 4 + 4 / 2.25)
    row = record["summary"]["mu"]
    assert abs(row["mean"] - exact_mean) < 5 * row["mcse_mean"]
    stats = groups["sample_stats"]
    assert record["log_evidence"] == pytest.approx(float(stats["log_evidence"]), abs=1e-5)


def test_posterior_as_data_tree_is_written(tmp_path):
    """From ArviZ 1.0 on, `to_arviz` returns xarray's DataTree; the file is the same."""
    tree = xarray.DataTree.from_dict({"posterior": xarray.Dataset({"mu": ("draw", [1.0, 2.0])})})
    stub = types.SimpleNamespace(batched=False, to_arviz=lambda: tree)
    write_posterior(tmp_path / "p.nc", stub)
    assert xarray.open_dataset(tmp_path / "p.nc", group="posterior")["mu"].shape == (2,)
    assert [path.name for path in tmp_path.iterdir()] == ["p.nc"]


def test_infer_several_data_sets_of_another_size(capsys):
    np.savez("many.npz", y=np.array([[0.0, 1.0], [2.0, 3.0], [8.0, 9.0]]))
    size = ("--kwargs", '{"n": 2}', "--particles", "20")
    status, out, _ = run(capsys, "infer", "normal.rd", "many.npz", *size, "-o", "many.csv")
    # "fair" needs an effective sample size of at least 30.
    assert status == 1 and "data set" in out and "trust  3 poor" in out
    table = pd.read_csv("many.csv")
    assert table["dataset"].tolist() == [0, 1, 2] and set(table["parameter"]) == {"mu"}
    assert table["mean"].is_monotonic_increasing
    status, out, _ = run(capsys, "infer", "normal.rd", "many.npz", *size, "-o", "many.nc", "--json")
    records = json.loads(out)["datasets"]
    assert [record["num_particles"] for record in records] == [20, 20, 20]
    stats = xarray.open_dataset("many.nc", group="sample_stats")
    assert stats["trust"].values.tolist() == [record["trust"] for record in records]
    assert xarray.open_dataset("many.nc", group="posterior")["mu"].shape == (3, 1, 20)
    assert "--plot draws one data set" in input_error(
        capsys, "infer", "normal.rd", "many.npz", *size, "--plot", "x.png"
    )


def test_infer_plots_the_posterior(capsys):
    status, _, err = run(capsys, "infer", "normal.rd", "data.json", "--plot", "p.png", "--quiet")
    assert status < 2 and "retrodict:" not in err
    assert Path("p.png").read_bytes().startswith(b"\x89PNG")


def test_untrustworthy_posterior_is_exit_status_1(capsys):
    """The effective sample size is below 30, the least for "fair"."""
    status, out, _ = run(capsys, "infer", "normal.rd", "data.json", "--particles", "20")
    assert status == 1
    assert (
        "trust         poor\n  - " in out and "To improve the result, use more --particles" in out
    )


COMPILE = "compile --observed y -o x.rd"
INFER = "infer normal.rd data.json"
INVALID_INPUT = {
    "no command": ("", "name a command: graph, compile, infer, check, demo"),
    "unknown command": ("guess", "invalid choice: 'guess'"),
    "missing argument": ("infer normal.rd", "required: data; see retrodict infer --help"),
    "not a number": (f"{INFER} --particles many", "a positive integer, found 'many'"),
    "no minutes": (f"{COMPILE} model.py:normal --minutes 0", "a positive number, found '0'"),
    "no function named": (f"{COMPILE} model.py", "expected file.py:function .* model.py:normal"),
    "no model file": (f"{COMPILE} modle.py:normal", "modle.py does not exist; there is model.py"),
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
    "no artefact": ("infer no.rd data.json", "no.rd: not loaded: No such file"),
    "damaged artefact": ("infer damaged.rd data.json", "damaged.rd is damaged: its checksum"),
    "not an artefact": ("check model.py", "model.py is not a retrodict file"),
    "another model": (f"{INFER} --model model.py:other", "normal.rd was made from another model"),
    "no data": ("infer normal.rd no.json", "there is no data file no.json"),
    "data of another shape": ("infer normal.rd short.json", r"\(4,\), found \(2,\).*--kwargs"),
    "null": ("infer normal.rd null.json", r"site 'y': the value at \[2\] is null"),
    "over the data": (f"{INFER} -o data.json", "data.json is the data file; name"),
    "unknown output": (f"{INFER} -o x.xls", "must end in .nc, .json, .csv, found '.xls'"),
    "output a folder": ("check normal.rd -o folder.html", "it is a folder"),
    "no such method": (f"{INFER} --method divide", "'divide'; for this model there are 'auto'"),
    "unwritable": ("graph model.py:normal --observed y -o /proc/x.svg", "error: /proc/x.svg: "),
}  # fmt: skip


@pytest.mark.parametrize(("command", "message"), INVALID_INPUT.values(), ids=INVALID_INPUT.keys())
def test_invalid_input_is_exit_status_2_and_one_line(command, message, capsys, folder):
    (folder / "folder.html").mkdir(exist_ok=True)
    if "/proc" in command and not Path("/proc").is_dir():
        pytest.skip("needs a path that even root cannot write")
    error = input_error(capsys, *shlex.split(command))
    assert re.search(message, error), error
    assert not Path("x.rd").exists()


def test_debug_prints_the_traceback(capsys):
    status, _, err = run(capsys, "graph", "model.py:zzz", "--observed", "y", "--debug")
    assert status == 2
    assert "Traceback" in err and err.splitlines()[-1].startswith("retrodict: error: model.py has")


def test_help_of_every_command_has_examples(capsys):
    for command in ("", *commands.COMMANDS):
        status, out, _ = run(capsys, *filter(None, [command]), "--help")
        assert status == 0
        assert f"retrodict {command}" in out and "--help" in out
        assert "examples:" in out
    status, out, _ = run(capsys, "--version")
    assert status == 0 and out.startswith("retrodict ")


def test_internal_error_is_exit_status_3(capsys, monkeypatch):
    def fail(options, note):
        raise RuntimeError("lost")

    monkeypatch.setitem(commands.COMMANDS, "graph", fail)
    status, out, err = run(capsys, "graph", "model.py:normal", "--observed", "y")
    assert (status, out) == (3, "")
    assert err == "retrodict: error: error in retrodict (--debug prints the traceback): RuntimeError: lost\n"  # fmt: skip  # noqa: E501


def test_interrupted_training_is_saved_and_can_be_resumed(capsys, monkeypatch, folder):
    class InterruptedAtOnce(Interruption):
        def __enter__(self):
            interruption = super().__enter__()
            signal.raise_signal(signal.SIGINT)
            return interruption

    monkeypatch.setattr(retrodict.compiled, "Interruption", InterruptedAtOnce)
    call = ("model.py:normal", "--observed", "y", *SMALL[:-1], "5000", "-o", "early.rd")
    status, _, err = run(capsys, "compile", *call)
    assert status == 0
    assert "note: training was interrupted" in err and "saved the compiled model to early.rd" in err
    (before,) = artefact.read("early.rd")[0]["history"].values()
    assert before["steps"][-1:] < [5000]

    monkeypatch.undo()
    monkeypatch.chdir(folder)
    again = ("compile", "model.py:normal", "--observed", "y", "--resume", "early.rd")
    status, _, err = run(capsys, *again, "-o", "late.rd", "--steps", "20")
    assert status == 0 and "note" not in err
    (after,) = artefact.read("late.rd")[0]["history"].values()
    assert after["steps"][-1] == (before["steps"] or [0])[-1] + 20
    assert "--resume does not allow --kwargs" in input_error(
        capsys, *again, "-o", "x.rd", "--hidden", "8"
    )
    other = ("compile", "model.py:normal", "--observed", "mu", "--resume", "early.rd")
    assert "for the data y, not for mu" in input_error(capsys, *other, "-o", "x.rd")


def test_interrupted_command_is_exit_status_130(capsys, monkeypatch):
    def interrupt(options, note):
        raise KeyboardInterrupt

    monkeypatch.setitem(commands.COMMANDS, "graph", interrupt)
    status, _, err = run(capsys, "graph", "model.py:normal", "--observed", "y")
    assert status == 130 and err == "retrodict: error: interrupted, nothing was written\n"


def test_compile_replaces_an_artefact_and_prints_json(capsys, folder):
    old = (folder / "normal.rd").read_bytes()
    (folder / "again.rd").write_bytes(old)
    call = ("compile", "model.py:normal", "--observed", "y", *SMALL, "--seed", "1", "--json")
    status, out, _ = run(capsys, *call, "-o", "again.rd")
    record = json.loads(out)
    assert status == 0 and record["path"] == "again.rd"
    assert record["plan"]["method"] == "importance"
    assert record["networks"]["mu | y"]["steps"] == 20 and record["simulated"] > 0
    assert (folder / "again.rd").read_bytes() != old


def copy_with_origin(folder, tmp_path, origin):
    """Copy the artefact to another folder and change the recorded origin of its model."""
    header, arrays = artefact.read(folder / "normal.rd")
    header = {k: v for k, v in header.items() if k not in ("format", "versions")}
    return str(artefact.write(tmp_path / "copy.rd", header | {"model": origin}, arrays))


def test_artefact_records_the_origin_of_its_model(folder):
    header, _ = artefact.read(folder / "normal.rd")
    assert header["model"] == {"module": "model", "name": "normal", "file": "model.py"}


def test_model_is_found_in_the_folder_of_the_artefact(folder, tmp_path, monkeypatch, capsys):
    origin = {"module": "m", "name": "normal", "file": "models/model.py"}
    path = copy_with_origin(folder, tmp_path, origin)
    monkeypatch.chdir(tmp_path)
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    message = input_error(capsys, "infer", path, str(folder / "data.json"))
    for text in ("models/model.py", "../models/model.py", "../model.py", "--model"):
        assert text in message
    (tmp_path / "model.py").write_text(MODEL)
    status, _, err = run(capsys, "infer", path, str(folder / "data.json"))
    assert status < 2 and "using the model ../model.py:normal" in err


@pytest.mark.slow
def test_model_is_found_in_a_package(folder, tmp_path, monkeypatch, capsys):
    """A module with relative imports is imported as part of its package."""
    package = tmp_path / "src" / "plant"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "sizes.py").write_text("N = 4\n")
    text = MODEL.replace("n=4", "n=N").replace("import numpyro\n", "import numpyro\nfrom .sizes import N\n", 1)  # fmt: skip  # noqa: E501
    (package / "models.py").write_text(text)
    origin = {"module": "plant.models", "name": "normal", "file": "src/plant/models.py"}
    path = copy_with_origin(folder, tmp_path, origin)
    monkeypatch.chdir(tmp_path)
    status, _, err = run(capsys, "infer", path, str(folder / "data.json"), "--particles", "100")
    assert status < 2 and "using the model plant.models:normal" in err
    monkeypatch.chdir(tmp_path / "src")
    status, out, _ = run(capsys, "graph", "plant.models:normal", "--observed", "y")
    assert status == 0 and "Normal [4]" in out


@pytest.mark.parametrize(
    ("origin", "message"),
    [
        ({}, "does not record where its model is"),
        ({"module": "m", "name": "a.<locals>.b", "file": "m.py"}, "does not record where"),
        ({"module": "__main__", "name": "f", "file": "model.py"}, "give --model model.py:f"),
        ({"module": "os", "name": "system", "file": "../../lib/os.py"}, "outside of its folder"),
        ({"module": "os", "name": "system", "file": "/usr/lib/os.py"}, "outside of its folder"),
        ({"module": "os", "name": "system", "file": "os.py"}, "looked for"),
        ({"module": "model", "name": "gone", "file": "model.py"}, "has no function 'gone'"),
    ],
)  # fmt: skip
def test_artefact_cannot_choose_code_outside_of_its_folder(
    origin, message, folder, tmp_path, capsys
):
    path = copy_with_origin(folder, tmp_path, origin)
    assert message in input_error(capsys, "infer", path, "data.json")


def test_check_writes_a_report_and_sets_the_exit_status(capsys, monkeypatch):
    """A stub replaces the calibration; it passes for more than 50 data sets."""
    calls = []

    def calibrate(rng_key, compiled, num_datasets, num_particles):
        calls.append((num_datasets, num_particles, compiled.graph.observed))
        rng = np.random.default_rng(0)
        return types.SimpleNamespace(
            passed=num_datasets > 50,
            # Not uniform, as a test on 40 data sets detects.
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
    assert out.startswith("a table\n") and "These results can be relied on\n  - " in out
    assert "wrote the report report.html" in err
    assert "These results can be relied on" in Path("report.html").read_text(encoding="utf-8")
    few = ("--datasets", "40", "--particles", "100")
    status, out, _ = run(capsys, "check", "normal.rd", *few, "--json")
    record = json.loads(out)
    assert status == 1 and record["passed"] is False
    assert record["verdict"] == "Do not rely on these results" and len(record["reasons"]) == 4
    call = ("compile", "model.py:normal", "--observed", "y", *SMALL, "-o", "again.rd", *few)
    status, out, err = run(capsys, *call, "--report", "after.html", "--json")
    record = json.loads(out)
    assert status == 1 and record["path"] == "again.rd" and record["passed"] is False
    assert "Do not rely on these results" in Path("after.html").read_text(encoding="utf-8")
    assert calls == [(200, 1000, ("y",)), (40, 100, ("y",)), (40, 100, ("y",))]


def test_demo_runs_the_demonstration_by_name(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "retrodict.demos", None)
    assert "has no demonstrations" in input_error(capsys, "demo")
    calls = []
    stub = types.SimpleNamespace(
        NAMES=("first", "second"), run=lambda *a, **k: calls.append((*a, k))
    )
    monkeypatch.setitem(sys.modules, "retrodict.demos", stub)
    assert "no demonstration 'third'; there are first, second" in input_error(
        capsys, "demo", "third"
    )
    assert run(capsys, "demo", "-o", str(tmp_path / "new" / "out"))[0] == 0
    assert run(capsys, "demo", "second", "-o", str(tmp_path))[0] == 0
    quiet = {"progress_bar": False, "minutes": None}
    assert calls == [("first", tmp_path / "new" / "out", quiet), ("second", tmp_path, quiet)]
    assert (tmp_path / "new" / "out").is_dir()
    (tmp_path / "file").touch()
    assert "is not a folder" in input_error(capsys, "demo", "-o", str(tmp_path / "file"))


GRAPH = (sys.executable, "-m", "retrodict", "graph", "model.py:printing", "--observed", "y")


def test_output_of_the_model_goes_to_standard_error():
    process = subprocess.run([*GRAPH, "--json"], capture_output=True, text=True, check=False)
    assert process.returncode == 0
    assert json.loads(process.stdout)["inverse"] == "faithful"
    assert set(process.stderr.splitlines()) == {"printed by the model"}


def test_closed_pipe_is_not_an_error():
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as pipe:
        process = subprocess.run(GRAPH, stdout=pipe, stderr=subprocess.PIPE, text=True, check=False)
    assert process.returncode == 0
    assert "Traceback" not in process.stderr and "Broken" not in process.stderr
