"""`viper serve` under load, against a plain handler that calls scikit-learn's predict_proba on the same columns.

Each client keeps one connection open and sends its next request as soon as the last one is answered. The two services
are measured in turn, with the same requests, on the same machine as the clients.
"""

import http.client
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.table import Table, machine

CLIENTS, BATCHES = (1, 16), (1, 100)
SECONDS = 6.0  # length of each measurement, after a short warm-up
NAMES = [f"x{j}" for j in range(10)]


def sample_table(rows: int) -> pd.DataFrame:
    """Return ten numbers and two categories, with an outcome that depends on some of them."""
    generator = np.random.default_rng(0)
    table = pd.DataFrame(generator.normal(size=(rows, len(NAMES))).round(3), columns=NAMES)
    table["ward"] = generator.choice(["north", "south", "east", "west"], rows)
    table["sex"] = generator.choice(["f", "m"], rows)
    odds = np.exp(table["x0"] - table["x1"] + (table["ward"] == "south"))
    table["died"] = np.where(generator.random(rows) < odds / (1 + odds), "yes", "no")
    return table


def plain_service() -> Any:
    """Return a Starlette application whose only handler calls scikit-learn."""
    from sklearn.compose import make_column_transformer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    table = sample_table(2000)
    columns = make_column_transformer((OneHotEncoder(), ["ward", "sex"]), (StandardScaler(), NAMES))
    model = make_pipeline(columns, LogisticRegression()).fit(table, table["died"])

    async def predict(request: Any) -> JSONResponse:
        rows = pd.DataFrame((await request.json())["rows"])
        return JSONResponse({"probability": model.predict_proba(rows)[:, 1].tolist()})

    return Starlette(routes=[Route("/predict", predict, methods=["POST"])])


def serve_plain() -> None:
    """Run that application on any free port, and print its address as `viper serve` does."""
    import socket

    import uvicorn

    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(f"http://127.0.0.1:{listening.getsockname()[1]};", file=sys.stderr, flush=True)
        settings = uvicorn.Config(plain_service(), log_level="warning", access_log=False)
        uvicorn.Server(settings).run(sockets=[listening])


@contextmanager
def running(command: list[str]) -> Iterator[str]:
    """Start a service and yield its host and port."""
    service = subprocess.Popen([sys.executable, *command], stderr=subprocess.PIPE, text=True)
    assert service.stderr is not None
    try:
        lines = iter(service.stderr.readline, "")
        yield next(found[1] for line in lines if (found := re.search(r"http://([\d.:]+\d);", line)))
    finally:
        service.terminate()
        service.communicate()


def one_client(address: str, body: bytes, seconds: float) -> list[float]:
    """Send requests one after another, and return how long each took."""
    connection = http.client.HTTPConnection(address, timeout=60)
    taken, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        began = time.perf_counter()
        connection.request("POST", "/predict", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = response.read()
        assert response.status == 200, answer[:200]
        taken.append(time.perf_counter() - began)
    connection.close()
    return taken


def load(address: str, rows: int, clients: int, seconds: float) -> tuple[float, float, float]:
    """Return requests per second, and the median and 99 % quantile of their duration in milliseconds."""
    body = json.dumps({"rows": sample_table(rows).drop(columns="died").to_dict("records")}).encode()
    one_client(address, body, 0.1 * seconds)
    began = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        found = list(pool.map(lambda _: one_client(address, body, seconds), range(clients)))
    taken = np.concatenate(found)
    middle, worst = 1e3 * np.quantile(taken, [0.5, 0.99])
    return len(taken) / (time.perf_counter() - began), float(middle), float(worst)


def run(quick: bool, device: str) -> Table:
    """Measure both services, for single rows and batches, with one client and with many."""
    import viper

    seconds, rows = (0.5 if quick else SECONDS), []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.viper"
        formula = f"died ~ {' + '.join(NAMES)} + ward + sex"
        viper.VariationalLogisticRegression.from_formula(formula, sample_table(2000)).save(path)
        ours, plain = ["-m", "viper", "serve", str(path), "--port", "0"], ["-m", "benchmarks.serving"]
        with running(ours) as first, running(plain) as second:
            for clients in CLIENTS:
                for batch in BATCHES:
                    a, b = (load(address, batch, clients, seconds) for address in (first, second))
                    rows.append([f"{clients} × {batch}", a[0], b[0], a[0] / b[0], a[1], b[1], a[2], b[2]])
    return Table(
        "viper serve under load",
        ["clients × rows", "req/s", "plain", "ratio", "p50 ms", "plain", "p99 ms", "plain"],
        rows,
        [
            "Requests per second, and the median and 99 % quantile of their duration. `viper serve` checks every row, "
            "and answers with probabilities, intervals, distances from the training data and notes; `plain` is a "
            "Starlette handler that answers with the output of scikit-learn's predict_proba for the same ten numbers "
            "and two categories, unchecked.",
            "Clients and services share the cores. On a busy machine only the ratios mean something.",
            machine(device),
        ],
    )


if __name__ == "__main__":
    serve_plain()
