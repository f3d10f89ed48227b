"""The shape of the library: imports point downward, importing is free of side effects, files name no machine."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "viper"

# A module may import the modules before it, never itself or a later one. Packages count as one module.
LAYERS = [
    # numerics: tensors in, tensors out
    *(
        NUMERICS := [
            *["mixture", "normal", "moments", "series", "quadrature", "heat", "limit", "jaakkola_jordan"],
            *["nodes", "bounds", "softplus", "terms"],
        ]
    ),
    # inference: the one solver
    *[
        "native",
        "accelerator",
        "fused_moments",
        "fused_kernel",
        "fused_narrow",
        "fused",
        "compiled",
        "problem",
        "arrays",
        "threads",
        "steps",
        "mode",
        "anderson",
        "solver",
        "adam",
        "posterior",
    ],
    "importance",
    # estimators: arrays in, fitted attributes out
    *[
        "grammar",
        "columns",
        "design",
        "progress",
        "cluster_calls",
        "cluster",
        "cluster_rows",
        "csv_text",
        "tables",
        "sources",
        "streaming",
        "rows",
        "fitting",
        "scales",
    ],
    *["storage", "prediction_file", "prediction", "arviz", "corrected", "encoding", "formula"],
    *["state", "checkpoint", "onnx", "notebook", "logistic_state", "logistic"],
    *["reference", "lbfgs", "gp_kernels", "gp_model", "gp_rows", "gp_arrays", "gp_dense", "gp_profile", "gp_screen"],
    *["gp_narrow"],
    *["gp_starts", "gp_race", "gp_natural_adam", "gp_search", "gp_state", "gp_stream", "gp", "gpytorch", "models"],
    # applications: these may also import the public names, `from viper import ...`
    *(
        APPLICATIONS := [
            *["files", "output", "metrics", "datasets", "views", "plot", "report", "demo_bound", "demo"],
            *["paper", "cli", "__main__"],
        ]
    ),
]
NUMERICS_MAY_IMPORT = {"torch", "numpy", *sys.stdlib_module_names}


# --- imports point downward ---


def imported(module: str, source: str) -> Iterator[str]:
    """Dotted names of everything `source` imports, at any depth, with relative imports made absolute.

    `from viper import x` yields "viper.x", and so does `from . import x` in a module of the package.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            here = ["viper", *module.split(".")][: -node.level] if node.level else []
            origin = ".".join([*here, *([node.module] if node.module else [])])
            yield from ([f"viper.{n.name}" for n in node.names] if origin == "viper" else [origin])


def complaint(module: str, name: str) -> str | None:
    """Why `module` may not import `name`, or None if it may."""
    layer = module.split(".")[0]
    top, *rest = name.split(".")
    if top != "viper":
        allowed = layer not in NUMERICS or top in NUMERICS_MAY_IMPORT
        rule = "numerics import only torch, numpy and the standard library"
    elif not rest or rest[0] not in LAYERS:
        allowed = layer in APPLICATIONS
        rule = "below the applications, a name is imported from the module that defines it"
    else:
        inside_a_package = rest[0] == layer and "." in module
        allowed = LAYERS.index(rest[0]) < LAYERS.index(layer) or inside_a_package
        rule = "a module imports only modules before it in LAYERS"
    return None if allowed else f"{rule}; got {name} in {module}"


def violations(module: str, source: str) -> list[str]:
    """Every broken import rule in `source`, the text of `module` ("solver", "paper.bounds")."""
    if module == "__init__":
        return []
    if module.split(".")[0] not in LAYERS:
        return [f"every module has a place in LAYERS; got {module}. Add it, after everything that it imports."]
    return [c for name in imported(module, source) if (c := complaint(module, name))]


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=dotted)
def test_imports_point_downward(path):
    assert violations(dotted(path), path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("normal", "from viper.softplus.expectation import f", "only modules before it in LAYERS; got viper."),
        ("normal", "import viper.normal", "only modules before it in LAYERS; got viper."),
        ("normal", "from .softplus import f", "only modules before it in LAYERS; got viper."),
        ("solver", "from viper import normal, logistic", "got viper.logistic"),
        ("solver", "def late():\n    from viper.gp.classifier import f", "got viper.gp"),
        ("paper.bounds", "from ..cli import main", "got viper.cli"),
        ("solver", "from viper import Bound", "from the module that defines it"),
        ("solver", "import viper", "from the module that defines it"),
        ("softplus", "import scipy.special", "got scipy.special"),
        ("helpers", "", "every module has a place in LAYERS; got helpers"),
    ],
)
def test_a_broken_rule_is_reported(module, source, expected):
    (message,) = violations(module, source)
    assert expected in message


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "softplus",
            "import math, torch\nimport numpy as np\nfrom viper import normal\nfrom .mixture import MIXTURES",
        ),
        ("gpytorch", "import gpytorch\nfrom viper.softplus.expectation import f"),
        ("plot", "from viper import VariationalLogisticRegression"),
        ("paper.bounds", "from viper.paper.tables import row\nfrom . import tables\nfrom .. import plot"),
        ("paper.__init__", "from viper.paper.bounds import run"),
        ("__init__", "from viper.cli import main"),
    ],
)
def test_a_kept_rule_is_not(module, source):
    assert violations(module, source) == []


# --- importing changes nothing ---

IMPORT_VIPER = """
import json, random, sys
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
print(json.dumps({"before": before, "after": state(), "modules": sorted(sys.modules)}))
"""


@pytest.fixture(scope="module")
def fresh_import():
    """What a new interpreter looks like before and after `import viper`."""
    done = subprocess.run([sys.executable, "-c", IMPORT_VIPER], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_import_changes_no_global_state(fresh_import):
    assert fresh_import["after"] == fresh_import["before"]


@pytest.mark.parametrize("library", ["matplotlib", "pandas", "dask", "gpytorch", "jax"])
def test_import_is_light(fresh_import, library):
    assert library not in fresh_import["modules"]


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
