"""`viper serve` as a real process that listens on a real socket."""

import asyncio
import http.client
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pandas as pd
import pytest

import viper
from viper.cli.commands import serve as service
from viper.cli.commands.serve import Limits, ServedColumns, answer_rows
from viper.errors import RequestError

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

GENERATOR = np.random.default_rng(0)
FRAME = pd.DataFrame(
    {
        "age": GENERATOR.normal(50.0, 10.0, 200).round(2),
        "<b>ward</b>": GENERATOR.choice(["north", "south", '"]<script>'], 200),
        "smoker": GENERATOR.random(200) < 0.3,
    }
)
FRAME["died"] = np.where(GENERATOR.random(200) < 1 / (1 + np.exp(-0.1 * (FRAME["age"] - 50))), "yes", "no")
ROWS = FRAME.drop(columns="died").to_dict("records")


@contextmanager
def serving(model, *options):
    """Start the service and yield its process and port."""
    command = [sys.executable, "-m", "viper", "serve", str(model), "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stderr.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)", line)
        assert found, line
        yield process, int(found[1])
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("serve") / "model.viper"
    fitted = viper.VariationalLogisticRegression.from_formula("died ~ age*`<b>ward</b>` + smoker", FRAME)
    fitted.save(path)
    return path


@pytest.fixture(scope="module")
def port(model):
    with serving(model, "--max-rows", "500", "--max-megabytes", "0.5") as (_, number):
        yield number


def ask(port, method, path, body=None):
    """Return status, headers and text of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode()
    finally:
        connection.close()


def predict(port, document):
    status, _, text = ask(port, "POST", "/predict", document if isinstance(document, bytes) else json.dumps(document))
    return status, json.loads(text)


def test_predictions_are_those_of_the_model(model, port):
    fitted = viper.load(model)
    status, answer = predict(port, {"rows": ROWS, "level": 0.8})
    assert status == 200
    assert answer["probability_of"] == "died = yes"
    assert answer["level"] == 0.8
    table = pd.DataFrame(answer["predictions"])
    assert np.array_equal(table["probability"], fitted.predict_proba(FRAME)[:, 1])
    np.testing.assert_allclose(table[["lower", "upper"]], fitted.predict_interval(FRAME, 0.8), rtol=1e-14)
    np.testing.assert_allclose(table["sd"], fitted.predict_std(FRAME), rtol=1e-12)
    assert table["label"].tolist() == fitted.predict(FRAME).tolist()


def test_many_clients_at_once_get_their_own_answers(model, port):
    expected = viper.load(model).predict_proba(FRAME)[:, 1]

    def client(k):
        status, answer = predict(port, {"rows": ROWS[k : k + 3]})
        found = [row["probability"] for row in answer["predictions"]]
        return (
            status == 200 and np.abs(found - expected[k : k + 3]).max() < 1e-14
        )  # a product of fewer rows rounds anew

    with ThreadPoolExecutor(16) as clients:
        assert all(clients.map(client, list(range(100)) * 2))


ROW = ROWS[0]
REFUSED = {
    "not JSON": (b"{rows:", 400, "must be JSON"),
    "not UTF-8": (b"\xff\xfe{}", 400, "must be JSON"),
    "NaN": (b'{"rows": [{"age": NaN}]}', 400, "write null for a missing value"),
    "deep brackets": (b"[" * 200_000, 400, "brackets too deep"),
    "half a character": (b'{"rows": [], "\\uD800": 1}', 400, "must be JSON in UTF-8"),
    "another encoding": ('{"rows": []}'.encode("utf-16"), 400, "must be JSON in UTF-8"),
    "a list": ([ROW], 422, 'must be {"rows":'),
    "no rows": ({"rows": []}, 422, "1 to 500 rows; got 0"),
    "too many rows": ({"rows": [{}] * 501}, 422, "1 to 500 rows; got 501"),
    "a row that is a list": ({"rows": [[1]]}, 422, "must be an object; got [1] in row 0"),
    "no column": ({"rows": [ROW, {"age": 1.0}]}, 422, "got no '<b>ward</b>' in row 1. Write null"),
    "text for a number": ({"rows": [ROW | {"age": "old"}]}, 422, "column 'age' must be a number; got 'old' in row 0"),
    "a boolean for a number": ({"rows": [ROW | {"age": True}]}, 422, "must be a number; got True"),
    "a number for text": ({"rows": [ROW | {"<b>ward</b>": 7}]}, 422, "must be text; got 7"),
    "an infinite number": ({"rows": [ROW | {"age": 1e999}]}, 400, "JSON"),
    "a level of two": ({"rows": [ROW], "level": 2}, 422, "between 0 and 1; got 2"),
    "another key": ({"rows": [ROW], "code": "1"}, 422, "got 'code' too"),
}


@pytest.mark.parametrize(("document", "status", "words"), REFUSED.values(), ids=REFUSED)
def test_a_bad_request_is_one_clear_line(port, document, status, words):
    found, answer = predict(port, document)
    assert found == status
    assert words in answer["error"]
    assert "\n" not in answer["error"]
    assert predict(port, {"rows": [ROW]})[0] == 200  # and the service goes on


def test_a_large_request_is_refused_before_it_is_read(port):
    """It announces a terabyte. The answer comes after half a megabyte."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000000\r\n\r\n")
        connection.sendall(b" " * 600_000)
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize("digits", [b"1e999", b"1e200", b"9" * 400, b"9" * 5000, b"-" + b"9" * 400])
def test_a_number_that_cannot_be_computed_with_costs_its_row_only(port, digits):
    first, second = json.dumps(ROW).encode(), json.dumps(ROW | {"age": 7654321}).encode()
    status, answer = predict(port, b'{"rows": [%s, %s]}' % (first, second.replace(b"7654321", digits)))
    assert status == 200
    good, empty = answer["predictions"]
    assert good == predict(port, {"rows": [ROW]})[1]["predictions"][0]
    assert empty["probability"] is None
    assert re.match("no prediction: age = .* is (not a number|too large to compute with)", empty["note"])


def test_headers_have_a_limit(port):
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 100_000)
        assert connection.recv(100).startswith(b"HTTP/1.1 400")
    assert ask(port, "GET", "/health")[0] == 200


def test_a_connection_that_asks_nothing_is_closed(monkeypatch):
    """One sends nothing, one half a header, one asks and keeps the connection; a slow request is answered."""
    import uvicorn

    monkeypatch.setattr(service, "IDLE_SECONDS", 0.05)

    async def slow_answer(scope, receive, send):
        await asyncio.sleep(0.3)
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    async def ask_in_three_ways():
        settings = uvicorn.Config(slow_answer, http=service.patient_protocol(), lifespan="off", log_level="error")
        settings.load()
        state = uvicorn.server.ServerState()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: settings.http_protocol_class(settings, state, {}), "127.0.0.1", 0)
        found = []
        async with server:
            for sent in (b"", b"GET / HTTP/1.1\r\nHo", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"):
                reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
                writer.write(sent)
                found.append(await asyncio.wait_for(reader.read(), 60))  # until it is closed
                writer.close()
        assert not state.connections
        return found

    nothing, half, whole = asyncio.run(ask_in_three_ways())
    assert nothing == half == b""
    assert whole.startswith(b"HTTP/1.1 204")


@pytest.mark.parametrize(("rest", "status"), [("nothing", 408), ("gone", 400)])
def test_a_request_that_does_not_arrive_is_given_up(rest, status, model, monkeypatch):
    """A client sends a part and then nothing, or goes away; the service answers the next one."""
    monkeypatch.setattr(service, "BODY_SECONDS", 0.05)
    answer = service.prediction_service(viper.load(model), Limits(rows=500, megabytes=0.5))
    scope = {"type": "http", "method": "POST", "path": "/predict", "headers": [], "query_string": b""}

    async def ask_with(messages):
        sent = []

        async def receive():
            if messages:
                return messages.pop(0)
            return await asyncio.Event().wait()

        async def send(message):
            sent.append(message)

        await asyncio.wait_for(answer(dict(scope), receive, send), 60)
        return sent[0]["status"], json.loads(sent[1]["body"])

    part = {"type": "http.request", "body": b"[", "more_body": True}
    gone = [{"type": "http.disconnect"}] if rest == "gone" else []
    found, document = asyncio.run(ask_with([part, *gone]))
    assert found == status
    assert "got a part of it" in json.dumps(document)
    whole = {"type": "http.request", "body": json.dumps({"rows": ROWS[:2]}).encode(), "more_body": False}
    assert asyncio.run(ask_with([whole]))[0] == 200


def test_unknown_columns_are_named(port):
    _, answer = predict(port, {"rows": [ROW | {"patient": 7, "died": "no"}]})
    assert answer["ignored"] == ["patient"]


def test_dates_are_written_as_dates():
    """As text, which the formula's functions read; the answer is that of the model for the same rows."""
    rows = FRAME.assign(seen=pd.date_range("2023-01-05", periods=len(FRAME), freq="3D").strftime("%Y-%m-%d"))
    model = viper.VariationalLogisticRegression.from_formula("died ~ age + days(seen)", rows)
    columns = ServedColumns(model)
    assert columns.kinds == {"age": "number", "seen": "date"}
    assert re.fullmatch(r"2023-\d\d-\d\d", columns.example()["seen"])
    asked = rows[["age", "seen"]].head(3).to_dict("records")
    body = json.dumps({"rows": asked}).encode()
    answer = answer_rows(model, columns, body, Limits(10, 1.0))
    found = [row["probability"] for row in answer["predictions"]]
    np.testing.assert_allclose(found, model.predict_proba(rows.head(3))[:, 1], rtol=1e-12)
    bad = json.dumps({"rows": [{"age": 50.0, "seen": 19500}]}).encode()
    with pytest.raises(RequestError, match="'seen' must be a date; got 19500 in row 0"):
        answer_rows(model, columns, bad, Limits(10, 1.0))


def test_other_paths_and_methods(port):
    assert ask(port, "GET", "/predict")[0] == 405
    assert ask(port, "GET", "/../etc/passwd")[0] == 404
    assert ask(port, "GET", "/health")[::2] == (200, '{"status":"ok"}')
    card = json.loads(ask(port, "GET", "/model")[2])
    assert card["formula"] == "died ~ age * `<b>ward</b>` + smoker"


def test_openapi_describes_what_is_accepted(model, port):
    """Its example is answered, and its columns and limits are those of the model and the options."""
    document = json.loads(ask(port, "GET", "/openapi.json")[2])
    assert document["openapi"].startswith("3.1")
    request = document["paths"]["/predict"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert request["properties"]["rows"]["maxItems"] == 500
    assert request["properties"]["rows"]["items"]["required"] == ["age", "<b>ward</b>", "smoker"]
    status, answer = predict(port, request["example"])
    assert status == 200
    fields = document["paths"]["/predict"]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert set(answer["predictions"][0]) <= set(fields["properties"]["predictions"]["items"]["properties"])


def test_names_in_the_page_are_text(port):
    status, headers, page = ask(port, "GET", "/")
    assert status == 200
    assert "&lt;b&gt;ward&lt;/b&gt;" in page
    assert "<b>ward" not in page
    assert page.count("<script>") == 1
    assert "script-src 'sha256-" in headers["Content-Security-Policy"]
    assert "unsafe" not in headers["Content-Security-Policy"]


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_it_in_order(model, sign):
    with serving(model) as (process, number):
        assert predict(number, {"rows": [ROW]})[0] == 200
        process.send_signal(sign)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0
        assert errors.splitlines() == ["note: stopped."]


def test_a_port_that_is_taken(model):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "viper", "serve", str(model), "--port", number]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert f"must be free to listen on; got 127.0.0.1:{number}: " in done.stderr


def test_the_page_works_in_a_browser(port):
    webdriver = pytest.importorskip("selenium.webdriver")
    if shutil.which("chromedriver") is None:
        pytest.skip("no chromedriver")
    settings = webdriver.ChromeOptions()
    for flag in ("--headless=new", "--no-sandbox"):
        settings.add_argument(flag)
    browser = webdriver.Chrome(settings)
    try:
        browser.get(f"http://127.0.0.1:{port}/")
        browser.find_element("id", "send").click()
        deadline = time.monotonic() + 30
        while (text := browser.find_element("id", "answer").text) in ("", "…") and time.monotonic() < deadline:
            time.sleep(0.1)
        assert json.loads(text)["predictions"][0]["probability"] > 0
        refused = [entry for entry in browser.get_log("browser") if "Content Security Policy" in entry["message"]]
        assert not refused
    finally:
        browser.quit()
