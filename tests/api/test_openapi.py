"""Requests made from the published OpenAPI, right and wrong ones, are answered in time, without a 5xx and in OpenAI's shape.

Schemathesis runs as a process of its own, as its fixtures do not work with this pytest, and with the same seed each time: the
edges of every field, and random requests.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from openapi_hooks import LIMIT
from relax_server.api.keys import KeyRing
from relax_server.journal.schema import trainings
from relax_server.journal.sql import SqlJournal
from service_process import MANY_REFUSALS, Service, start
from sqlalchemy import insert

HELLO = [{"role": "user", "content": "hello"}]
EXAMPLES = 8
"""Random requests for each operation."""
MANY = 250
"""The same at night: more than 10,000 requests in all."""
CHECKS = "not_a_server_error,errors_have_openai_s_shape"


@pytest.fixture
def fuzzed(tmp_path: Path, service: Service) -> Iterator[Service]:
    """A service with an administrator's key."""
    journal = SqlJournal(tmp_path / "journal.db")
    admin, _ = KeyRing(journal).create("root", ["admin"])
    journal.close()
    with service.client() as client:
        engine = client.get("/v1/models").json()["engines"][0]["url"]
    it = start(tmp_path, "--engine", engine, "--drain-seconds", "0", *MANY_REFUSALS, key=admin)
    yield it
    it.stop()


def use_up_runs(path: Path, key: str) -> None:
    """Give a key a run that only another server can go on with: its own are checked and refused, and never begin."""
    row = dict(id="t_elsewhere", key=key, step=1, state="running", request={}, server="another server", created_at=0.0)
    journal = SqlJournal(path)
    with journal.writing("a run of another server") as connection:
        connection.execute(insert(trainings).values(row))
    journal.close()


@pytest.mark.parametrize(
    ("examples", "seconds"), [(EXAMPLES, 280), pytest.param(MANY, 3000, marks=[pytest.mark.nightly, pytest.mark.timeout(3100)])]
)
def test_whatever_is_sent_is_answered(fuzzed: Service, examples: int, seconds: float) -> None:
    with fuzzed.client() as client:
        wanted = {"name": "anybody", "episodes": 100_000, "tokens_per_minute": 1 << 40, "runs": 1}
        key = client.post("/v1/keys", json=wanted).json()
        use_up_runs(fuzzed.folder / "journal.db", key["id"])
        published = client.get("/openapi.json")
        operations = sum(len(methods) for methods in published.json()["paths"].values())
    schema = fuzzed.folder / "openapi.json"
    schema.write_bytes(published.content)
    hooks = Path(__file__).with_name("openapi_hooks.py")
    more = {"FUZZ_RUN_KEY": key["secret"], "FUZZ_ADMIN_KEY": fuzzed.key, "SCHEMATHESIS_HOOKS": str(hooks)}
    command = [sys.executable, "-m", "schemathesis.cli", "run", str(schema), "--url", fuzzed.url, "--checks", CHECKS]
    command += ["--phases", "examples,coverage,fuzzing", "--max-examples", str(examples), "--seed", "1"]
    command += ["--request-timeout", str(LIMIT), "--continue-on-failure", "--suppress-health-check", "all", "--no-color"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=os.environ | more, cwd=fuzzed.folder)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    generated = re.search(r"(\d+) generated", done.stdout)
    assert generated is not None and int(generated[1]) >= (10_000 if examples == MANY else operations), done.stdout[-4000:]
    tested = re.search(r"(\d+) selected / (\d+) total", done.stdout)
    assert tested is not None and int(tested[1]) == int(tested[2]) == operations, done.stdout[-4000:]

    with fuzzed.client(key["secret"]) as client:  # and it is well afterwards
        assert client.get("/healthz").json() == {"status": "ok"}
        session = client.post("/v1/sessions", json={"sampling": {"max_new_tokens": 1}}).json()
        answer = client.post(f"{session['base_url']}/chat/completions", json={"messages": HELLO})
        assert answer.status_code == 200, answer.text
        assert client.post(f"/v1/sessions/{session['id']}/finish").json()["status"] == "completed"
    log = (fuzzed.folder / "serve.log").read_text()
    assert "Traceback" not in log, log[-4000:]
