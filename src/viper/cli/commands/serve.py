"""`viper serve`: a model as a small HTTP service. JSON comes in; probabilities with intervals and notes go out."""

import asyncio
import base64
import hashlib
import json
import re
import socket
from collections.abc import Awaitable, Callable
from html import escape
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from viper.cli import options
from viper.cli.signals import RECEIVED
from viper.cli.terminal import json_ready, note

if TYPE_CHECKING:
    import pandas
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

BODY_SECONDS = 30  # for a request to arrive completely
IDLE_SECONDS = 30  # until an idle connection is closed, or up to twice that
BUSIEST = 200  # connections at a time; further ones get a 503
PREDICTING = 4  # requests predicted at a time; others wait
WORDED_KINDS = {"number": "a number", "date": "a date", "text": "text", "boolean": "true or false"}
SECURITY = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}


class Limits(NamedTuple):
    rows: int
    megabytes: float


def serve_model(
    model: options.ModelPath,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 for any that is free.", min=0, max=65535)] = 8000,
    max_rows: Annotated[int, typer.Option(help="Largest number of rows in a request.", min=1)] = 10_000,
    max_megabytes: Annotated[float, typer.Option(help="Largest size of a request in megabytes.", min=0.001)] = 10.0,
) -> None:
    """Answer HTTP requests for predictions until stopped. The page at / describes the service.

    Send rows as JSON to /predict. The answer has each row's probability, its interval, and a note if the row is
    unusual. There is no password and no encryption: keep the service behind a proxy that provides them.

    Examples
    --------
    viper serve model.viper
    viper serve model.viper --port 9000 --max-rows 100000 --max-megabytes 100
    """
    from viper.data.table_file import check_input

    check_input(model)
    try:
        import uvicorn
    except ImportError:
        raise ImportError("viper serve needs uvicorn and starlette. Run: pip install 'vi-per[serve]'") from None
    try:
        listening = socket.create_server((host, port))
    except OSError as error:
        raise ValueError(
            f"--host and --port must be free to listen on; got {host}:{port}: {error.strerror or error}. Choose others."
        ) from None
    import torch

    import viper

    torch.set_num_threads(1)  # requests run side by side instead
    application = prediction_service(viper.load(model), Limits(max_rows, max_megabytes))
    settings = uvicorn.Config(
        application,
        http=patient_protocol(),
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=BUSIEST,
    )
    note(f"serving {model} at http://{host}:{listening.getsockname()[1]}; Ctrl-C stops it.")
    try:
        uvicorn.Server(settings).run(sockets=[listening])
    except KeyboardInterrupt:  # uvicorn has finished its requests and raised the signal again
        RECEIVED.clear()
    note("stopped.")


def patient_protocol() -> type[asyncio.Protocol]:
    """Return uvicorn's protocol by h11, which limits headers, and close idle connections."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class PatientProtocol(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.wait_after(self.cycle)

        def wait_after(self, last: Any) -> None:
            self.loop.call_later(IDLE_SECONDS, self.close_if_idle, last)

        def close_if_idle(self, last: Any) -> None:
            if self.transport.is_closing():
                return
            if self.cycle is last and (last is None or last.response_complete):
                self.transport.close()
            else:
                self.wait_after(self.cycle)

    return PatientProtocol


# --- requests and answers ---


def prediction_service(model: Any, limits: Limits) -> "Starlette":
    """Return the application: a page, its description as OpenAPI, the model card, and predictions."""
    from anyio import CapacityLimiter, to_thread
    from starlette.applications import Starlette
    from starlette.responses import HTMLResponse, JSONResponse
    from starlette.routing import Route

    from viper.cli.model_card import model_document
    from viper.errors import RequestError

    columns = ServedColumns(model)
    description = openapi_document(columns, limits)
    page, policy = service_page(columns, limits)
    waiting = CapacityLimiter(PREDICTING)

    def guarded(answer: Callable[["Request"], Awaitable[Any]]) -> Callable[["Request"], Awaitable["Response"]]:
        async def respond(request: "Request") -> "Response":
            try:
                return JSONResponse(json_ready(await answer(request)), headers=SECURITY)
            except RequestError as error:
                return JSONResponse({"error": str(error)}, error.status, headers=SECURITY)

        return respond

    async def predict(request: "Request") -> Any:
        body = await read_body(request, limits)
        return await to_thread.run_sync(answer_rows, model, columns, body, limits, limiter=waiting)

    async def show_page(request: "Request") -> "Response":
        return HTMLResponse(page, headers=SECURITY | {"Content-Security-Policy": policy})

    async def health(request: "Request") -> Any:
        return {"status": "ok"}

    async def describe(request: "Request") -> Any:
        return description

    async def card(request: "Request") -> Any:
        return model_document(model, 0.95)

    return Starlette(
        routes=[
            Route("/", show_page),
            Route("/predict", guarded(predict), methods=["POST"]),
            Route("/model", guarded(card)),
            Route("/health", guarded(health)),
            Route("/openapi.json", guarded(describe)),
        ]
    )


def refusal(status: int, message: str) -> Exception:
    from viper.errors import RequestError

    return RequestError(status, message)


async def read_body(request: "Request", limits: Limits) -> bytes:
    """Read the request until it ends, is too large or too slow."""
    from starlette.requests import ClientDisconnect

    largest = int(1e6 * limits.megabytes)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > largest:
                    raise refusal(413, f"a request must have at most {limits.megabytes:g} MB; got more. Split it.")
    except TimeoutError:
        raise refusal(408, f"a request must arrive within {BODY_SECONDS} s; got a part of it.") from None
    except ClientDisconnect:
        raise refusal(400, "the request must arrive whole; got a part of it.") from None
    return bytes(body)


def answer_rows(model: Any, columns: "ServedColumns", body: bytes, limits: Limits) -> dict[str, Any]:
    """Predict the rows of a request."""
    rows, level = parse_request(body, limits)
    frame = columns.frame(rows)
    try:
        table = model.predict_table(frame, level)
    except ValueError as error:
        raise refusal(422, " ".join(str(error).split())) from None
    unknown = sorted({name for row in rows for name in row} - {*columns.kinds, columns.target})
    answer = {"probability_of": columns.positive, "level": level, "predictions": table.to_dict("records")}
    return answer | ({"ignored": unknown} if unknown else {})


def parse_request(body: bytes, limits: Limits) -> tuple[list[dict[str, Any]], float]:
    """Return the rows and the level of the intervals."""
    try:
        text = body.decode("utf-8-sig")
        document = json.loads(text, parse_constant=refuse_number_word, parse_int=whole_number)
        if "\\ud" in text.lower():  # half of a surrogate pair is not valid text
            json.dumps(document, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        reason = "brackets too deep" if isinstance(error, RecursionError) else error
        raise refusal(400, f"a request must be JSON in UTF-8; got {reason}.") from None
    if not isinstance(document, dict) or not isinstance(document.get("rows"), list):
        raise refusal(422, 'a request must be {"rows": [{"column": value, …}, …]}; got something else.')
    rows, level = document["rows"], document.get("level", 0.95)
    if extra := sorted({*document} - {"rows", "level"}):
        raise refusal(422, f"a request may have only rows and level; got {extra[0]!r:.60} too.")
    if not 0 < len(rows) <= limits.rows:
        raise refusal(422, f"a request must have 1 to {limits.rows:,} rows; got {len(rows):,}.")
    if isinstance(level, bool) or not isinstance(level, int | float) or not 0 < level < 1:
        raise refusal(422, f"level must be a number between 0 and 1; got {level!r:.60}.")
    for i, row in enumerate(rows):
        if not isinstance(row, dict):
            raise refusal(422, f"every row must be an object; got {row!r:.60} in row {i}.")
    return rows, float(level)


def whole_number(digits: str) -> int | float:
    """Return an integer, or infinity if it is too large to compute with, like 1e999."""
    return int(digits) if len(digits) < 300 else float(digits)


def refuse_number_word(word: str) -> None:
    raise ValueError(f"{word}, which JSON does not have; write null for a missing value")


class ServedColumns:
    """The columns that a request must have, each with its kind: number, date, text or boolean."""

    def __init__(self, model: Any) -> None:
        from viper.cli.classes import probability_columns, what_is_predicted
        from viper.cli.preparing import input_columns, target_of, text_inputs

        encoding = getattr(model, "formula_", None)
        self.training = None if encoding is None else encoding.training
        self.levels: dict[str, list[Any]] = {}
        if encoding is not None:
            self.levels = {name: levels for name, levels in encoding.levels.items() if name not in encoding.means}
        self.texts = text_inputs(model)
        self.dates = {} if encoding is None else encoding.date_functions
        self.kinds = {name: self.kind(name) for name in input_columns(model)}
        self.target = target_of(model)
        self.positive = what_is_predicted(model, self.target)
        several = len(model.classes_) > 2 or getattr(model, "multilabel_", False)
        self.title = f"Probability of {self.positive}" if several else f"Probability that {self.positive}"
        self.numbers = [
            f"{part}{name.removeprefix('probability')}"
            for name in probability_columns(model)
            for part in ("probability", "sd", "lower", "upper")
        ]

    def kind(self, name: str) -> str:
        if name in self.dates:
            return "date"
        if name in self.texts:
            return "text"
        first = self.levels.get(name, [0.0])[0]
        return "boolean" if isinstance(first, bool) else "text" if isinstance(first, str) else "number"

    def frame(self, rows: list[dict[str, Any]]) -> "pandas.DataFrame":
        """Return the rows as a table; raises RequestError for a value of the wrong kind."""
        import pandas

        found = {
            name: [self.value(row, i, name, kind) for i, row in enumerate(rows)] for name, kind in self.kinds.items()
        }
        types = {name: float if kind == "number" else object for name, kind in self.kinds.items()}
        return pandas.DataFrame(found).astype(types)

    def value(self, row: dict[str, Any], i: int, name: str, kind: str) -> Any:
        if name not in row:
            rule = "every row must have all columns of the model"
            raise refusal(422, f"{rule}; got no {name!r} in row {i}. Write null for a missing value.")
        value = row[name]
        fits = {"boolean": bool, "text": str, "date": str, "number": int | float}[kind]
        if value is not None and (not isinstance(value, fits) or (kind == "number" and isinstance(value, bool))):
            raise refusal(422, f"column {name!r} must be {WORDED_KINDS[kind]}; got {value!r:.60} in row {i}.")
        return value

    def example(self) -> dict[str, Any]:
        """Return a typical row of the training data, as far as that is known."""
        import numpy as np

        columns = {} if self.training is None else self.training.columns
        means = {name: column.mean for name, column in columns.items() if column.mean is not None}
        shown: dict[str, Any] = {
            name: float(f"{means.get(name, 0.0):.3g}") for name, kind in self.kinds.items() if kind == "number"
        }
        shown |= {name: str(np.datetime64(int(means.get(name, 0.0)), "D")) for name in self.dates}
        return {name: shown.get(name, self.levels.get(name, [0.0])[0]) for name in self.kinds}


# --- the description ---


def openapi_document(columns: ServedColumns, limits: Limits) -> dict[str, Any]:
    """Describe the service by OpenAPI 3.1."""
    types = {"number": "number", "text": "string", "date": "string", "boolean": "boolean"}
    cell = {name: {"type": [types[kind], "null"]} for name, kind in columns.kinds.items()}
    numbers = {name: {"type": ["number", "null"]} for name in (*columns.numbers, "distance")}
    row = {"type": "object", "properties": cell, "required": list(cell)}
    request = {
        "type": "object",
        "required": ["rows"],
        "additionalProperties": False,
        "properties": {
            "rows": {"type": "array", "items": row, "minItems": 1, "maxItems": limits.rows},
            "level": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1, "default": 0.95},
        },
        "example": {"rows": [columns.example()]},
    }
    prediction = {"type": "object", "properties": numbers | {"label": {}, "note": {"type": ["string", "null"]}}}
    answer = {
        "type": "object",
        "properties": {
            "probability_of": {"type": "string"},
            "level": {"type": "number"},
            "predictions": {"type": "array", "items": prediction},
            "ignored": {"type": "array", "items": {"type": "string"}},
        },
    }
    error = {"type": "object", "properties": {"error": {"type": "string"}}}
    content = lambda schema: {"application/json": {"schema": schema}}  # noqa: E731
    refusals = {"400": "not JSON", "408": "too slow", "413": "too large", "422": "rows that cannot be predicted"}
    plain = lambda text: {"get": {"summary": text, "responses": {"200": {"description": text}}}}  # noqa: E731
    return {
        "openapi": "3.1.0",
        "info": {"title": columns.title, "version": "1"},
        "paths": {
            "/predict": {
                "post": {
                    "summary": "Predict rows: probability, its standard deviation and interval, label, and notes",
                    "requestBody": {"required": True, "content": content(request)},
                    "responses": {"200": {"description": "One prediction for each row", "content": content(answer)}}
                    | {code: {"description": text, "content": content(error)} for code, text in refusals.items()},
                }
            },
            "/model": plain("The model card"),
            "/health": plain("Whether the service is up"),
        },
    }


def service_page(columns: ServedColumns, limits: Limits) -> tuple[str, str]:
    """Return the page, and the content security policy that allows only its own script and style."""
    example = json.dumps({"rows": [columns.example()]}, indent=2, ensure_ascii=False)
    cells = (
        f"<tr><td><code>{escape(name)}</code></td><td>{kind}</td><td>{escape(seen_values(columns, name))}</td></tr>"
        for name, kind in columns.kinds.items()
    )
    template = (files("viper.cli.commands") / "service.html").read_text(encoding="utf-8")
    page = Template(template).substitute(
        title=escape(columns.title),
        rows=f"{limits.rows:,}",
        megabytes=f"{limits.megabytes:g}",
        columns="\n".join(cells),
        example=escape(example),
        lines=min(20, example.count("\n") + 2),
    )
    script, style = (inline_digest(page, tag) for tag in ("script", "style"))
    rules = f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'"
    return page, f"{rules}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


def inline_digest(page: str, tag: str) -> str:
    """Return the hash by which a content security policy allows the page's one element of that kind."""
    (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def seen_values(columns: ServedColumns, name: str) -> str:
    """Describe the range or the levels of a column in the training data."""
    if levels := columns.levels.get(name):
        return ", ".join(map(str, levels[:8])) + (" …" if len(levels) > 8 else "")
    known = None if columns.training is None or name in columns.dates else columns.training.columns.get(name)
    return "" if known is None or known.low is None else f"{known.low:.4g} to {known.high:.4g}"
