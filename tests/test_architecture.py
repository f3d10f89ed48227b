"""The shape of the library: imports point downward, importing is free of side effects, files name no machine."""

import ast
import builtins
import importlib
import json
import pickle
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import viper

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "viper"

# A room imports only the rooms above it in this list, and `errors`.
ROOMS = {
    "errors": "exceptions, warnings, and how lists of names are worded",
    "softplus": "the expected softplus: formulas, bounds, autograd",
    "inference": "rows, sums, steps, the posterior",
    "data": "whatever a user passes, as a source of rows",
    "formula": "named columns",
    "models": "logistic regression, and what all estimators share",
    "gp": "Gaussian processes",
    "nn": "heads and layers of neural networks",
    "decisions": "bandits: which arm to try next",
    "report": "metrics, plots, the page",
    "datasets": "public data",
    "paper": "every table and figure of the paper",
    "cli": "the command line",
}
ORDER = list(ROOMS)
SOFTPLUS_MAY_IMPORT = {"torch", "numpy", "viper", *sys.stdlib_module_names}
MOST_SHARED_NAMES = 25  # constants that may stand in more than one module; functions and classes may not
MODULES = {path.relative_to(PACKAGE).with_suffix(""): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


# --- the tree ---


def test_the_door_has_few_entries():
    entries = {path.name for path in PACKAGE.iterdir() if not path.name.startswith("__")} - {"py.typed"}
    assert entries == {"errors.py", *ROOMS} - {"errors"}
    assert len(entries) <= 14


@pytest.mark.parametrize("room", [folder for folder in PACKAGE.rglob("*") if (folder / "__init__.py").is_file()])
def test_a_room_has_few_modules_and_no_families(room):
    names = [path.stem for path in room.glob("*.py") if path.stem != "__init__"]
    assert len(names) <= 17
    assert not [name for name in names if name.startswith(f"{room.name}_")]


# --- imports point downward ---


def imported(path: Path, tree: ast.Module) -> Iterator[tuple[str, ...]]:
    """The dotted names of everything a module imports, at any depth, with relative imports made absolute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (tuple(name.name.split(".")) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            here = ("viper", *path.parts)[: -node.level] if node.level else ()
            origin = (*here, *(node.module or "").split(".")) if node.module else here
            yield from ((*origin, name.name) for name in node.names)


def upward(path: Path, tree: ast.Module) -> list[str]:
    """What a module imports although its room may not: rooms below its own, or for softplus another library."""
    room = path.parts[0]
    found = []
    for top, *rest in imported(path, tree):
        if room == "softplus" and top not in SOFTPLUS_MAY_IMPORT:
            found.append(top)
        if top == "viper" and rest and rest[0] in ROOMS and ORDER.index(rest[0]) > ORDER.index(room):
            found.append(".".join(rest))
    return found


def test_imports_point_downward():
    found = {str(path): upward(path, tree_of(file)) for path, file in MODULES.items() if path.parts[0] in ROOMS}
    assert len(found) > 200
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        ("softplus/normal", "from viper.gp.classifier import f", "gp.classifier.f"),
        ("inference/newton", "def late():\n    from viper.models import logistic", "models.logistic"),
        ("data/open", "from ..cli import main", "cli.main"),
        ("softplus/normal", "import scipy.special", "scipy"),
    ],
)
def test_an_upward_import_is_found(path, source, expected):
    assert upward(Path(path), ast.parse(source)) == [expected]


def test_imports_have_no_cycles():
    graph = {}
    for path, file in MODULES.items():
        names = [Path(*rest) for top, *rest in imported(path, tree_of(file)) if top == "viper" and rest]
        graph[path] = {name if name in MODULES else name.parent for name in names} & MODULES.keys() - {path}
    list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the modules


# --- rules of single rooms ---


def names_in(node: ast.AST) -> set[str]:
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}


def classes(room: str) -> dict[str, set[str]]:
    """The classes of a room with the names of their bases."""
    trees = [tree_of(path) for key, path in MODULES.items() if key.parts[0] == room]
    found = [node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    return {node.name: {name for base in node.bases for name in names_in(base)} for node in found}


def test_only_data_asks_what_a_source_is():
    sources = {"RowSource", "BlockSource", "SourceWrapper"}
    for room in ("inference", "data", "gp"):
        sources |= {name for name, bases in classes(room).items() if bases & sources}
    assert {"Arrays", "Stream", "InducedSource"} <= sources
    asked = [
        f"{key}: {ast.unparse(node)}"
        for key, path in MODULES.items()
        if key.parts[0] != "data"
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", "") == "isinstance"
        and names_in(node.args[1]) & sources
    ]
    assert asked == []


def test_what_a_user_may_catch_is_in_errors():
    standard = {name for name in dir(builtins) if name.endswith(("Error", "Warning", "Exception"))}
    own = {
        room: {name for name, bases in classes(room).items() if bases & standard} for room in ROOMS if room != "errors"
    }
    assert {room: names for room, names in own.items() if names} == {}


# --- importing changes nothing ---

IMPORT_VIPER = """
import json, random, sys
import viper
light = sorted(sys.modules)
for name in [name for name in sys.modules if name.split(".")[0] == "viper"]:
    del sys.modules[name]
import numpy, torch

def state():
    return {
        "default dtype": str(torch.get_default_dtype()),
        "default device": str(torch.get_default_device()),
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "gradients": torch.is_grad_enabled(),
        "torch generator": torch.get_rng_state().tolist(),
        "numpy generator": str(numpy.random.get_state()),
        "python generator": str(random.getstate()),
    }

before = state()
import viper
print(json.dumps({"before": before, "after": state(), "modules": light}))
"""


@pytest.fixture(scope="module")
def fresh_import():
    """What a new interpreter looks like before and after `import viper`."""
    done = subprocess.run([sys.executable, "-c", IMPORT_VIPER], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_import_changes_no_global_state(fresh_import):
    assert fresh_import["after"] == fresh_import["before"]


@pytest.mark.parametrize("library", ["matplotlib", "pandas", "dask", "gpytorch", "jax", "torch"])
def test_import_is_light(fresh_import, library):
    assert library not in fresh_import["modules"]


# --- a command imports what it needs ---

RUN_COMMANDS = """
import contextlib, io, json, sys
from viper.cli import main
found = []
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main(arguments)
    found.append(sorted({name.split(".")[0] for name in sys.modules}))
print(json.dumps(found))
"""
SLOW_LIBRARIES = {"pandas", "scipy", "sklearn", "torch", "joblib", "pyarrow", "formulaic"}
RARE_LIBRARIES = {"arviz_stats", "xarray", "matplotlib", "gpytorch", "dask", "formulaic", "sympy"}


@pytest.fixture(scope="module")
def imported_by(tmp_path_factory):
    """What has been imported after each of several commands in one process."""
    folder = tmp_path_factory.mktemp("commands")
    table = "age,dose,died\n" + "".join(f"{k % 9},{k % 4},{'yes' if k % 3 else 'no'}\n" for k in range(24))
    folder.joinpath("rows.csv").write_text(table, encoding="utf-8")
    frame = {"age": np.arange(24.0) % 9, "dose": np.arange(24.0) % 4}
    died = ["yes" if k % 3 else "no" for k in range(24)]
    model = viper.VariationalLogisticRegression.from_formula("died ~ age + dose", pd.DataFrame({**frame, "died": died}))
    model.save(folder / "fitted.viper")
    commands = {
        "--version": ["--version"],
        "--help": ["--help"],
        "fit --help": ["fit", "--help"],
        "a missing file": ["fit", "nothing.csv", "--target", "died"],
        "a missing model": ["predict", "nothing.viper", "rows.csv"],
        "missing": ["missing", "rows.csv"],
        "predict": ["predict", "fitted.viper", "rows.csv"],
        "summary": ["summary", "fitted.viper"],
    }
    run = [sys.executable, "-c", RUN_COMMANDS, json.dumps([*commands.values()])]
    done = subprocess.run(run, capture_output=True, text=True, check=True, cwd=folder)
    return dict(zip(commands, map(set, json.loads(done.stdout)), strict=True))


@pytest.mark.parametrize("command", ["--version", "--help", "fit --help", "a missing file", "a missing model"])
def test_a_short_answer_waits_for_no_library(imported_by, command):
    assert not imported_by[command] & SLOW_LIBRARIES


def test_a_command_imports_only_what_it_uses(imported_by):
    assert "pandas" in imported_by["missing"]
    assert not imported_by["missing"] & {"torch", "sklearn", *RARE_LIBRARIES}
    assert "torch" in imported_by["predict"]
    assert not imported_by["predict"] & RARE_LIBRARIES
    assert not imported_by["summary"] & (RARE_LIBRARIES - {"formulaic"})


def test_the_expectation_imports_neither_pandas_nor_scikit_learn():
    program = "import sys, viper; viper.expected_softplus(0.3, 1.0); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {"pandas", "sklearn", "sympy", "scipy.stats"} & set(done.stdout.split())


# --- public modules live in rooms ---


@pytest.mark.parametrize(("public", "real"), viper.MODULES.items())
def test_a_public_module_is_the_real_one(public, real):
    module = importlib.import_module(public)
    assert module is importlib.import_module(real) is getattr(viper, public.removeprefix("viper."))
    assert module.__name__ == module.__spec__.name == real


def test_public_names_can_be_imported_and_listed():
    from viper.gpytorch import LogitLikelihood
    from viper.metrics import scores
    from viper.plot import forest
    from viper.reference import sample_posterior

    public = [getattr(viper, name) for name in viper.NAMES]
    for one in (LogitLikelihood, scores, forest, sample_posterior, *public):
        assert pickle.loads(pickle.dumps(one)) is one
    assert {*viper.__all__} == {*viper.NAMES} | {name.removeprefix("viper.") for name in viper.MODULES} <= {*dir(viper)}
    model = viper.VariationalLogisticRegression(prior_scale=2.0)
    assert pickle.loads(pickle.dumps(model)).get_params() == model.get_params()
    with pytest.raises(AttributeError, match="module 'viper' has no attribute 'plots'"):
        viper.plots  # noqa: B018


@pytest.mark.parametrize("use", ["viper.gpytorch", "viper.VariationalGPClassifier", "__import__('viper.gpytorch')"])
def test_without_gpytorch_the_extra_is_named(use):
    program = f"import sys; sys.modules['gpytorch'] = None; import viper; {use}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "needs GPyTorch. Run: pip install 'vi-per[gp]'" in done.stderr.splitlines()[-1]


# --- a name is defined once ---


def definitions(path: Path) -> Iterator[tuple[str, bool]]:
    """The names a module defines at its top level, and whether each is a function or class."""
    for node in tree_of(path).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, True
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((x.id, False) for target in targets for x in ast.walk(target) if isinstance(x, ast.Name))


def test_a_name_is_defined_in_one_module():
    modules, callables = defaultdict(set), set()
    for path, file in MODULES.items():
        for name, is_callable in definitions(file):
            modules[name].add(str(path))
            callables |= {name} if is_callable else set()
    shared = {name: sorted(paths) for name, paths in modules.items() if len(paths) > 1 and not name.startswith("__")}
    for name, paths in sorted(shared.items()):
        print(f"{name}: {', '.join(paths)}")  # noqa: T201
    assert len(shared) < MOST_SHARED_NAMES
    assert not [name for name in shared if name in callables and not name.startswith("_")]


# --- files name no machine ---

# Joined here, so that this file does not contain what it looks for.
MACHINE_PATHS = [f"/{part}" + "/" for part in ("work", "root", "home")] + ["/tmp" + "/venv"]


def machine_paths(text: bytes) -> list[str]:
    return [path for path in MACHINE_PATHS if path.encode() in text]


def test_no_file_names_a_machine():
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a git checkout, so there is no list of files that ship")
    files = [ROOT / name for name in done.stdout.split("\0") if name]
    found = {str(file): machine_paths(file.read_bytes()) for file in files if file.is_file()}
    assert {file: paths for file, paths in found.items() if paths} == {}


@pytest.mark.parametrize("path", MACHINE_PATHS)
def test_a_machine_path_is_found(path):
    assert machine_paths(f"read('{path}x')".encode()) == [path]
