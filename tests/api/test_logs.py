"""What the service writes to stderr."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from relax_server.api.keys import KeyRing
from relax_server.api.logs import TextLines
from relax_server.journal.sql import SqlJournal
from service_process import Service, start

HELLO = [{"role": "user", "content": "hello"}]


def engine(service: Service) -> str:
    with service.client() as client:
        return client.get("/v1/models").json()["engines"][0]["url"]


def follow(it: Service, path: str) -> None:
    """Read events until they end."""
    headers = {"Authorization": f"Bearer {it.key}"}
    with httpx.stream("GET", f"{it.url}{path}/events", headers=headers, timeout=60) as stream:
        assert "finished" in "".join(stream.iter_lines())


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, service: Service) -> Iterator[dict[str, Any]]:
    """The lines of a service after a session, two rollouts and some wrong requests; ids; and secrets that were used."""
    folder = tmp_path_factory.mktemp("logged")
    journal = SqlJournal(folder / "journal.db")
    secret, key = KeyRing(journal).create("root", ["admin"])
    journal.close()
    options = ("--log-format", "json", "--log-level", "debug", "--drain-seconds", "0")
    it = start(folder, "--engine", engine(service), *options, key=secret)
    session = it.open(env="tone-v0", sampling={"max_new_tokens": 1})
    with it.client(session["key"]) as client:
        body = {"messages": session["observation"]}
        message = client.post(f"{session['base_url']}/chat/completions", json=body).json()["choices"][0]["message"]
        assert client.post(f"/v1/sessions/{session['id']}/step", json={"action": message}).status_code == 200
    with it.client() as client:
        assert client.post(f"/v1/sessions/{session['id']}/finish").status_code == 200
        small = {"env": "tone-v0", "n": 1, "sampling": {"max_new_tokens": 1}}
        rollout = client.post("/v1/rollouts", json=small).json()["id"]
        long = {"sampling": {"max_new_tokens": 512}, "limits": {"episode_timeout": 0.01}, "max_retries": 0}
        late = client.post("/v1/rollouts", json=small | long).json()["id"]
        for id in (rollout, late):
            follow(it, f"/v1/rollouts/{id}")
        assert client.get(f"/v1/nothing%0a{{}}?key={secret}").status_code == 404
    with it.client("") as client:
        assert client.get("/v1/envs").status_code == 401
    it.stop()
    text = (folder / "serve.log").read_text()
    yield {
        "text": text,
        "lines": [json.loads(line) for line in text.splitlines()],
        "secrets": [secret, session["key"]],
        "key": key.id,
        "session": session,
        "rollout": rollout,
        "late": late,
    }


def test_every_line_is_an_object(written: dict[str, Any]) -> None:
    for line in written["lines"]:
        assert {"time", "level", "logger", "message"} <= set(line)
        assert datetime.fromisoformat(line["time"]).utcoffset() is not None
    said = [line["message"] for line in written["lines"] if line["logger"] == "relax_server.life"]
    assert any(text.startswith("ready at http") for text in said) and said[-1].startswith("ended")


def test_a_line_for_each_request(written: dict[str, Any]) -> None:
    requests = [line for line in written["lines"] if line["logger"] == "relax_server.requests"]
    found = {(line["method"], line["path"], line["status"]) for line in requests}
    id = written["session"]["id"]
    for line in [
        ("POST", "/v1/sessions", 201),
        ("POST", f"/v1/sessions/{id}/openai/v1/chat/completions", 200),
        ("POST", f"/v1/sessions/{id}/step", 200),
        ("POST", "/v1/rollouts", 202),
        ("GET", "/v1/nothing%0a%7B%7D", 404),
        ("GET", "/v1/envs", 401),
    ]:
        assert line in found, (line, found)
    for line in requests:
        assert line["level"] == "info" and line["ms"] >= 0
        if line["path"].startswith("/v1/") and line["status"] < 300:
            assert line["key"] == written["key"], line
        if id in line["path"]:
            assert line["session"] == id and line["trajectory"] == written["session"]["trajectory_id"]


def test_lines_about_an_episode_say_whose(written: dict[str, Any]) -> None:
    id, trajectory = written["session"]["id"], written["session"]["trajectory_id"]
    told = [line for line in written["lines"] if line["logger"] == "relax_server.api.events"]
    mine = [line for line in told if line.get("session") == id]
    assert [line["message"] for line in mine] == [f"session {kind}" for kind in ("opened", "turn", "step", "finished")]
    assert all(line["trajectory"] == trajectory and line["key"] == written["key"] for line in mine)
    assert {"queued", "running", "group", "finished"} == {
        line["message"].split()[1] for line in told if line.get("rollout") == written["rollout"]
    }
    (late,) = [line for line in written["lines"] if line["logger"] == "relax_server.rollout.episode"]
    assert "timed_out, attempt 1" in late["message"] and late["rollout"] == written["late"]
    assert late["trajectory"].startswith(f"{written['late']}/")


def test_no_secret_is_written(written: dict[str, Any]) -> None:
    for secret in written["secrets"]:
        assert secret not in written["text"]


def test_lines_for_people(tmp_path: Path, service: Service) -> None:
    it = start(tmp_path / "service", "--engine", engine(service), "--log-level", "info", "--drain-seconds", "0")
    with it.client() as client:
        client.get("/v1/nothing%0aINFO")
        id = it.open()["id"]
    it.stop()
    log = (tmp_path / "service" / "serve.log").read_text()
    assert "relax serve: ready at http" in log and "relax serve: ended" in log
    (line,) = [line for line in log.splitlines() if "/v1/nothing" in line and "relax_server.requests" in line]
    assert " INFO relax_server.requests request method=GET path=/v1/nothing%0aINFO status=404 ms=" in line
    (line,) = [line for line in log.splitlines() if "session opened" in line]
    assert f"session={id}" in line and "env=none" in line and "key=local" in line


def test_lines_for_people_steer_no_terminal() -> None:
    record = logging.LogRecord("relax", logging.WARNING, "", 0, "an environment said %s", ("\x1b]0;owned\x07\x1b[2J",), None)
    assert TextLines().format(record).endswith("an environment said \\x1b]0;owned\\x07\\x1b[2J")


def test_by_default_there_are_no_lines_for_requests(service: Service) -> None:
    with service.client() as client:
        assert client.get("/v1/envs").status_code == 200
    assert "relax_server.requests" not in (service.folder / "serve.log").read_text()


@pytest.mark.parametrize("wrong", [("--log-format", "xml"), ("--log-level", "loud")])
def test_what_there_is_not_is_refused(tmp_path: Path, wrong: tuple[str, str]) -> None:
    command = [sys.executable, "-m", "relax_sdk.cli", "serve", "--folder", str(tmp_path), *wrong]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and wrong[1] in done.stderr and "allowed: " in done.stderr
