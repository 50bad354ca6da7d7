"""The log: lines of JSON that programs can read, and what is said of clients that come and go."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from maru_harness import Client, Server, chain

from maru_core.errors import ConfigError
from maru_core.session import Session
from maru_server.diary import AGAIN_S, LINES_MAX
from maru_server.logs import JsonFormatter, set_up_log
from support import await_condition, namespace, running_server


def events(caplog: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    return [record.fields for record in caplog.records if hasattr(record, "fields")]


def test_a_server_s_log_is_one_object_a_line(tmp_path: Path) -> None:
    with running_server(tmp_path, "--log-format", "json") as server:
        session = Session(server.endpoint, name='a "name"\nof two lines', timeout_s=60)
        session.open_namespace(namespace().record())
        session.close()
        await_condition(lambda: "session-went" in server.log.read_text(), "the server has heard the farewell")
        server.stop()
        lines = [json.loads(line) for line in server.log.read_text().splitlines()]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    assert all(line["time"].endswith("+00:00") for line in lines)
    told = {line["event"]: line for line in lines if "event" in line}
    assert told["session-came"]["name"] == 'a "name"\nof two lines'
    assert {"session-came", "session-went", "namespace-opened"} <= told.keys()


def test_a_traceback_is_one_field() -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        import sys

        record = logging.LogRecord("maru.x", logging.ERROR, "f", 1, "no %s", ("luck",), sys.exc_info())
    line = json.loads(JsonFormatter().format(record))
    assert line["message"] == "no luck"
    assert "ValueError: broken" in line["error"]


def test_fields_never_hide_what_a_line_must_have() -> None:
    record = logging.LogRecord("maru.x", logging.INFO, "f", 1, "said", (), None)
    record.fields = {"message": "other", "level": "other", "object": object()}
    line = json.loads(JsonFormatter().format(record))
    assert (line["message"], line["level"]) == ("said", "info")
    assert line["object"].startswith("<object")


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ConfigError, match="--log-format is 'xml'"):
        set_up_log("info", "xml")


def test_what_comes_often_is_said_now_and_then(
    server: Server, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "maru.server")
    server.checked = False
    for number in range(200):
        client.store(chain(number, 1))
        server.wait(0.1, alive=(client,))
    said = [event["count"] for event in events(caplog) if event["event"] == "evicted"]
    assert 1 < len(said) <= 1 + 20 / AGAIN_S
    server.wait(AGAIN_S, alive=(client,))
    total = sum(event["count"] for event in events(caplog) if event["event"] == "evicted")
    assert total == server.stats["evicted_pages"] > 0


def test_a_client_that_ends_is_told_once(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "maru.server")
    client = server.client("worker")
    client.connect()  # the same client again
    client.goodbye()
    assert [event["event"] for event in events(caplog) if event.get("name") == "worker"] == [
        "session-came",
        "session-went",
    ]


def test_clients_that_come_and_go_as_they_like_do_not_fill_the_log(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "maru.server")
    server.checked = False
    server.wait(1)

    def come_and_go(times: int) -> list[str]:
        caplog.clear()
        for number in range(times):
            server.client(f"worker {number}").goodbye()
        return [str(event["event"]) for event in events(caplog) if str(event["event"]).startswith("session-")]

    assert len(come_and_go(5)) == 10, "each is told"
    assert len(come_and_go(500)) == LINES_MAX - 10
    assert come_and_go(10) == []
    caplog.clear()
    server.wait(AGAIN_S + 1)
    untold = [event["count"] for event in events(caplog) if event["event"] == "sessions-untold"]
    assert untold == [2 * 515 - LINES_MAX]
    assert len(come_and_go(5)) == 10, "and again"
    caplog.clear()
    server.wait(3 * AGAIN_S)
    assert events(caplog) == []
