"""Mutated model files: bytes changed at random, and files forged with care, whose digest is right.

A model that still loads must predict probabilities, and do whatever else a model does; one that does not load must say
so in one line. Forged files change one to three places: a value of the metadata, a name, the shape, type or numbers of
a tensor, the announced sizes.
"""

import copy
import hashlib
import json
import math
import random
import struct
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

import viper
from hostile.harness import SilentlyWrong, choose, outcome_of, outcome_of_command, run_command
from viper.errors import StorageError

STORED = Path(__file__).parents[1] / "data" / "models"
TEXTS = [
    *[
        "",
        "x",
        "no",
        "\0",
        "\n",
        "\x1b[31mred",
        "é" * 50,
        "\ud800",
        "__class__",
        "<script>",
        "a" * 100_000,
        "-1",
        "1e3",
    ],
    *[
        "y ~ a",
        "__import__('os').abort()",
        "../../etc/passwd",
        "object",
        "<U500000000",
        "<M8[s]",
        "O",
        "float64",
        "cuda:7",
    ],
]
NUMBERS = [0, 1, -1, 2, 3, 7, 0.5, -0.5, 1e-300, 1e300, 1e308, 5e-324, 2**31, 2**53, 2**63, 2**64, 10**30, 2 * 10**8]
ODD_NUMBERS = ["1e999", "-1e999", "NaN", "Infinity", "9" * 400, "9" * 5000, "-0.0"]  # as JSON
VALUES: list[Any] = [*TEXTS, *NUMBERS, None, True, False, [], {}, [[]], [{}], {"": None}, [0] * 1000, {"a": {"b": [1]}}]


class Parts(NamedTuple):
    """A model file in parts: the document, the entries of the tensors, and their bytes."""

    document: dict[str, Any]
    entries: dict[str, Any]
    data: bytearray


class Material(NamedTuple):
    files: dict[str, bytes]
    tables: dict[str, pd.DataFrame]  # rows to predict; the columns of arrays are numbered


def prepare(folder: Path) -> Material:
    """All stored model files, and new ones of every kind."""
    import viper.cli.app

    expected = json.loads((STORED / "expected.json").read_text(encoding="utf-8"))
    files = {name: (STORED / f"{name}.viper").read_bytes() for name in expected}
    tables = {name: pd.DataFrame(rows["rows"]) for name, rows in expected.items()}
    rng = np.random.default_rng(0)
    table = pd.DataFrame(
        {"age": rng.normal(50, 9, 60), "dose": rng.uniform(1, 2, 60), "ward": rng.choice(list("abc"), 60)}
    )
    table["died"] = np.where(rng.random(60) < 0.5, "yes", "no")
    table.to_csv(folder / "table.csv", index=False)
    code, _, err = run_command(
        "fit", folder / "table.csv", "--target", "died", "--out", folder / "cli.viper", "--force"
    )
    assert code == 0, err
    holes = table.copy()
    holes.loc[::7, "age"] = np.nan
    formulas = {
        "splines": ("died ~ bs(age, df=4) + poly(dose, 2) + center(age):C(ward)", table, {}),
        "multiple": ("died ~ age + dose + ward", holes, {"missing": "multiple", "imputations": 2}),
        "indicator": ("died ~ age + dose + ward", holes, {"missing": "indicator"}),
        "positive": ("died ~ age + log(dose)", table, {"positive": "no", "prior_scale": "auto"}),
    }
    models = {"cli": viper.load(folder / "cli.viper")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, (formula, rows, options) in formulas.items():
            models[name] = viper.VariationalLogisticRegression.from_formula(formula, rows, **options)
        matrix = np.eye(3) + 0.1
        X = table[["age", "dose"]].assign(z=1.0 * (table["ward"] == "a"))
        models["matrix"] = viper.VariationalLogisticRegression(prior_scale=matrix).fit(X, table["died"])
        models["classes"] = viper.VariationalLogisticRegression.from_formula("ward ~ age + dose", table)
        few = viper.VariationalLogisticRegression(covariance="diagonal").partial_fit(X, table["ward"])
        models["added"] = few.partial_fit(X, table["ward"])
        grades = pd.Categorical(table["ward"], ["c", "a", "b"], ordered=True)
        models["ordinal"] = viper.VariationalOrdinalRegression.from_formula(
            "grade ~ age + dose", table.assign(grade=grades)
        )
        levels = viper.VariationalOrdinalRegression(categories=["c", "a", "b"], class_weight={"a": 2.0})
        models["levels"] = levels.partial_fit(X, table["ward"]).partial_fit(X, table["ward"])
        models["mixture"] = viper.VariationalLogisticRegression.from_formula("died ~ age + dose", table, components=2)
        models["process"] = viper.VariationalGPClassifier.from_formula(
            "died ~ age + dose", table, n_inducing=5, n_starts=1
        )
    for name, model in models.items():
        model.save(folder / f"{name}.viper", overwrite=True)
        files[name], tables[name] = (folder / f"{name}.viper").read_bytes(), holes if name == "multiple" else table
    tables["matrix"] = tables["added"] = tables["levels"] = X
    return Material(files, tables)


def run_case(material: Material, seed: int) -> tuple[str, str]:
    """Mutate one file, load it and use it."""
    generator = random.Random(seed)
    name = generator.choice(sorted(material.files))
    contents = material.files[name]
    changed = damaged(contents, generator) if generator.random() < 0.2 else forged(contents, generator)
    path = Path("model.viper")
    path.write_bytes(changed)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = viper.load(path)
            if changed != contents or seed % 50 == 0:
                return use(model, path, material.tables[name], seed)
    except StorageError as error:
        return outcome_of(error)
    return "right", ""


# --- damage ---


def damaged(contents: bytes, generator: random.Random) -> bytes:
    """Bytes changed as a bad disk or copy changes them; the digest stays as it was."""
    changed = bytearray(contents)
    start, length = generator.randrange(len(contents)), generator.choice([1, 2, 8, 64, 512])
    match generator.randrange(6):
        case 0:
            changed[start] ^= 1 << generator.randrange(8)
        case 1:
            del changed[start:]
        case 2:
            changed[start : start + length] = generator.randbytes(length)
        case 3:
            changed[start : start + length] = bytes(length)
        case 4:
            changed[start:start] = changed[start : start + length]
        case 5:
            changed[:8] = struct.pack("<Q", generator.choice([0, 1, len(contents), 2**20, 2**40, 2**63, 2**64 - 1]))
    return bytes(changed)


# --- forgery ---


def forged(contents: bytes, generator: random.Random) -> bytes:
    """The file with one to three changes, and the digest that belongs to it."""
    parts = taken_apart(contents)
    for _ in range(generator.choice([1, 1, 1, 2, 3])):
        attack = choose(generator, ATTACKS)
        parts = attack(parts, generator) or parts
    return put_together(parts, generator)


def taken_apart(contents: bytes) -> Parts:
    end = 8 + int.from_bytes(contents[:8], "little")
    entries = json.loads(contents[8:end])
    document = json.loads(entries.pop("__metadata__")["viper"])
    return Parts(document, entries, bytearray(contents[end:]))


def put_together(parts: Parts, generator: random.Random) -> bytes:
    document = parts.document | {"sha256": "0" * 64}
    document = {"sha256": document.pop("sha256"), **document}
    text = json.dumps(document)
    if generator.random() < 0.1:  # a number that Python would not write
        at = [i for i in range(len(text) - 3) if text[i : i + 2] == ": " and (text[i + 2].isdigit())]
        if at:
            i = generator.choice(at) + 2
            end = next(j for j in range(i, len(text)) if text[j] in ",}]")
            text = text[:i] + generator.choice(ODD_NUMBERS) + text[end:]
    header = json.dumps({"__metadata__": {"viper": text}, **parts.entries}).encode()
    header += b" " * (-len(header) % 8)
    whole = len(header).to_bytes(8, "little") + header + bytes(parts.data)
    return whole.replace(b"0" * 64, hashlib.sha256(whole).hexdigest().encode(), 1)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths to all values inside a value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inner for place in places(item, (*path, key)))]


def holder(value: Any, place: tuple[Any, ...]) -> Any:
    for key in place[:-1]:
        value = value[key]
    return value


def pick_place(document: dict[str, Any], generator: random.Random) -> tuple[Any, ...]:
    """A place in the document; the names of long lists do not crowd out the rest."""
    every = [place for place in places(document) if place and place[0] != "sha256"]
    depth = generator.choice(sorted({len(place) for place in every}))
    return generator.choice([place for place in every if len(place) == depth])


def sane_entries(parts: Parts) -> list[str]:
    """The tensors whose entries no attack has changed beyond use."""
    return [
        name
        for name, entry in parts.entries.items()
        if isinstance(entry.get("shape"), list)
        and isinstance(entry.get("data_offsets"), list)
        and [type(x) for x in entry["data_offsets"]] == [int, int]
        and all(type(n) is int for n in entry["shape"])
    ]


def replace_value(parts: Parts, generator: random.Random) -> None:
    place = pick_place(parts.document, generator)
    holder(parts.document, place)[place[-1]] = copy.deepcopy(generator.choice(VALUES))


def nudge_value(parts: Parts, generator: random.Random) -> None:
    """A value of the same kind that is not the same."""
    place = pick_place(parts.document, generator)
    value = holder(parts.document, place)[place[-1]]
    changed: Any = value
    if type(value) in (int, float):
        changed = generator.choice([value + 1, -value, value * 1e9, 0, value / 3])
    elif isinstance(value, str):
        changed = generator.choice([value + "x", value[:-1], value.upper(), value * 2, f"`{value}`", f"{value}\n"])
    elif isinstance(value, bool):
        changed = not value
    elif isinstance(value, list):
        changed = generator.choice([value[:-1], value + value, value[::-1], [value]])
    elif isinstance(value, dict):
        changed = generator.choice([dict(list(value.items())[:-1]), value | {"more": 1}, list(value)])
    holder(parts.document, place)[place[-1]] = changed


def remove_value(parts: Parts, generator: random.Random) -> None:
    place = pick_place(parts.document, generator)
    del holder(parts.document, place)[place[-1]]


def rename_key(parts: Parts, generator: random.Random) -> None:
    keyed = [place for place in places(parts.document) if place and isinstance(place[-1], str) and place[0] != "sha256"]
    place = generator.choice(keyed)
    holding = holder(parts.document, place)
    holding[generator.choice(["predict", "__class__", "posterior_", "_fit", place[-1] + "_", ""])] = holding.pop(
        place[-1]
    )


def set_attribute(parts: Parts, generator: random.Random) -> None:
    """Another attribute of the model, such as a method."""
    metadata = parts.document.get("metadata")
    fit = metadata.get("fit") if isinstance(metadata, dict) else None
    if isinstance(fit, dict):
        fit[generator.choice(["predict", "coef_", "__dict__", "classes_", "_open_rows", "save"])] = generator.choice(
            VALUES
        )


def swap_values(parts: Parts, generator: random.Random) -> None:
    one, other = pick_place(parts.document, generator), pick_place(parts.document, generator)
    if one[: len(other)] == other or other[: len(one)] == one:
        return
    a, b = holder(parts.document, one), holder(parts.document, other)
    a[one[-1]], b[other[-1]] = b[other[-1]], a[one[-1]]


def change_numbers(parts: Parts, generator: random.Random) -> None:
    """Numbers of a tensor become special, or all of it random."""
    if not (names := sane_entries(parts)):
        return
    start, end = parts.entries[generator.choice(names)]["data_offsets"]
    if not 8 <= end - start <= len(parts.data):
        return
    if generator.random() < 0.2:
        parts.data[start:end] = generator.randbytes(end - start)
        return
    special = [math.nan, math.inf, -math.inf, 0.0, -1.0, 1.0, 1e308, -1e308, 1e-308, 710.0, -750.0, 1e15, 0.5]
    every, value = generator.random() < 0.3, generator.choice(special)
    for at in range(start, end - 7, 8):
        if every or generator.random() < 0.2:
            parts.data[at : at + 8] = struct.pack("<d", value)


def change_shape(parts: Parts, generator: random.Random) -> None:
    if not (names := sane_entries(parts)):
        return
    entry = parts.entries[generator.choice(names)]
    shape = list(entry["shape"])
    others: list[Any] = [
        shape[::-1],
        [1, *shape],
        [*shape, 1],
        [math.prod(shape)],
        [],
        [0],
        [2**31],
        [2**62, 4],
        [-1],
        "x",
    ]
    others += [[n + 1 for n in shape], [2 * n for n in shape], [1] * 100, None, [1.5], [True]]
    entry["shape"] = generator.choice(others)


def change_entry(parts: Parts, generator: random.Random) -> None:
    if not (names := sane_entries(parts)):
        return
    entry = parts.entries[generator.choice(names)]
    start, end = entry["data_offsets"]
    match generator.randrange(3):
        case 0:
            entry["dtype"] = generator.choice(
                ["F32", "I64", "BOOL", "U8", "F16", "BF16", "C64", "F8_E4M3", "x", None, 8]
            )
        case 1:
            offsets = [[start + 8, end + 8], [start, end + 8], [end, start], [start], [-8, 0], [start + 4, end + 4]]
            entry["data_offsets"] = generator.choice([*offsets, [0, 2**63], [start, 10**30], None, "x", [0.0, 8.0]])
        case 2:
            entry[generator.choice(["more", "dtype", "shape", "data_offsets"])] = generator.choice(VALUES)


def add_or_drop_tensor(parts: Parts, generator: random.Random) -> Parts | None:
    """A tensor more, one less, or one of another name; its bytes come and go with it."""
    names = sane_entries(parts)
    match generator.randrange(3):
        case 0:
            name = generator.choice(
                ["more", "option.prior_mean", "option.tol", "posterior.variance", "model.x", "", "a.b"]
            )
            count = generator.choice([0, 1, 4, 5])
            end = len(parts.data)
            parts.entries[name] = {"dtype": "F64", "shape": [count], "data_offsets": [end, end + 8 * count]}
            parts.data.extend(bytes(8 * count))
            parts.document["data_bytes"] = len(parts.data)
            return None
        case 1 if names:
            parts.entries[generator.choice(["x", "mean", "prior", "posterior.x"])] = parts.entries.pop(
                generator.choice(names)
            )
            return None
        case _ if names:
            gone = generator.choice(names)
            entries, data = {}, bytearray()
            for name in names:
                entry = parts.entries[name]
                start, end = entry["data_offsets"]
                if name != gone:
                    entries[name] = {**entry, "data_offsets": [len(data), len(data) + end - start]}
                    data += parts.data[start:end]
            return Parts(parts.document | {"data_bytes": len(data)}, entries, data)
    return None


def change_sizes(parts: Parts, generator: random.Random) -> Parts:
    """The data are longer or shorter than announced."""
    match generator.randrange(3):
        case 0:
            parts.data.extend(bytes(generator.choice([1, 8, 10**6])))
        case 1:
            del parts.data[-generator.choice([1, 8, 100]) :]
        case 2:
            parts.document["data_bytes"] = generator.choice(NUMBERS)
    return parts


def widen_model(parts: Parts, generator: random.Random) -> None:
    """A few bytes that ask for many: classes, features, levels."""
    metadata = parts.document.get("metadata")
    if not isinstance(metadata, dict):
        return
    match generator.randrange(5):
        case 0:
            metadata["classes"] = {
                "dtype": f"<U{generator.choice([10**5, 10**8, 5 * 10**8, 10**9])}",
                "values": ["a", "b"],
            }
        case 1:
            metadata["features"] = generator.choice([10**6, 2 * 10**8, 2**40])
        case 2:
            formula = metadata.get("formula")
            if isinstance(formula, dict) and isinstance(formula.get("levels"), dict):
                for name in formula["levels"]:
                    formula["levels"][name] = [f"{name}{i}" for i in range(generator.choice([10**3, 10**4, 10**5]))]
        case 3:
            metadata["more"] = [[[]]] * 200_000
        case 4:
            metadata["names"] = ["x" * 10] * generator.choice([10**4, 10**5, 5 * 10**5])


ATTACKS = {
    replace_value: 6,
    nudge_value: 6,
    remove_value: 3,
    rename_key: 2,
    set_attribute: 1,
    swap_values: 2,
    change_numbers: 5,
    change_shape: 3,
    change_entry: 2,
    add_or_drop_tensor: 2,
    change_sizes: 1,
    widen_model: 1,
}


# --- what a model does ---


def use(model: Any, path: Path, table: pd.DataFrame, seed: int) -> tuple[str, str]:
    """Predict with the model, describe it, save it again; nothing of it may be silently wrong."""
    try:
        use_in_python(model, table)
        if seed % 5 == 0 and model._kind != "gp":
            model.to_onnx()
    except ValueError as error:
        return outcome_of(error)
    outcome = use_on_the_command_line(model, path, table, seed)
    again = Path("again.viper")
    model.save(again, overwrite=True)
    state, other = model._pack(), viper.load(again)._pack()
    if state.metadata != other.metadata:
        raise SilentlyWrong("the model is saved as another one")
    return outcome


def use_in_python(model: Any, table: pd.DataFrame) -> None:
    rows = table if hasattr(model, "formula_") or hasattr(model, "feature_names_in_") else table.to_numpy()
    probability, interval = model.predict_proba(rows), model.predict_interval(rows)
    if probability.shape != (len(table), len(model.classes_)) or not ((probability >= 0) & (probability <= 1)).all():
        raise SilentlyWrong("probabilities that are none")
    if not (interval[..., 0] <= interval[..., 1]).all() or np.abs(probability.sum(1) - 1.0).max() > 1e-9:
        raise SilentlyWrong("intervals or probabilities that cannot be")
    if not set(model.predict(rows)) <= set(model.classes_.tolist()):
        raise SilentlyWrong("labels of no class")
    model.summary()
    model._repr_html_()
    draws = model.sample(rows, 2, random_state=0) if model._kind == "gp" else model.sample(2, random_state=0)
    if not np.isfinite(draws).all():
        raise SilentlyWrong("draws that are not finite")


def use_on_the_command_line(model: Any, path: Path, table: pd.DataFrame, seed: int) -> tuple[str, str]:
    commands: list[tuple[Any, ...]] = [("summary", path), ("summary", path, "--json")]
    if hasattr(model, "formula_"):
        table.to_csv("rows.csv", index=False)
        commands += [("predict", path, "rows.csv", "--out", "out.csv", "--force"), ("evaluate", path, "rows.csv")]
        if seed % 10 < 2:
            commands.append(("effects", path, "rows.csv", "--json"))
        if seed % 10 == 0:
            commands.append(("report", path, "rows.csv", "--out", "out.html", "--force"))
    for command in commands:
        code, _, err = run_command(*command)
        if code not in (0, 5):  # 5: some rows have no prediction, and a note says why
            return outcome_of_command(code, err)
    return "right", ""
