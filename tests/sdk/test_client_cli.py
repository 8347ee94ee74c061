"""The lists of a service: ids are whole, and the beginning of one will do."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from relax_sdk.client import cli
from relax_sdk.client.transport import Call, Event
from relax_sdk.errors import ConfigError

IDS = ["s_0123456789abcdef0123456789abcdef", "s_01ff456789abcdef0123456789abcdef"]
TRAJECTORY = "t_" + "c" * 60


class FakeClient:
    """A service with two sessions."""

    def __init__(self) -> None:
        self.followed: list[str] = []
        self.transport = self

    def __enter__(self) -> FakeClient:
        return self

    def __exit__(self, *_: object) -> None: ...

    def send(self, call: Call) -> Any:
        error = "EnvError: it raised something that takes many words to say"
        row = {"env": "tone-v0", "state": "failed", "turns": 1, "trajectory_id": TRAJECTORY, "error": error}
        return {"sessions": [{"id": id} | row for id in IDS]}

    def events(self, path: str, after: int) -> list[Event]:
        self.followed.append(path)
        return []


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    fake = FakeClient()
    monkeypatch.setattr(cli, "_client", lambda server, key: fake)
    return fake


def test_ids_are_not_cut(client: FakeClient) -> None:
    shown = CliRunner().invoke(cli.app, ["sessions"], env={"COLUMNS": "80"}).output
    assert IDS[0] in shown and IDS[1] in shown and TRAJECTORY in shown


def test_the_beginning_of_an_id_will_do(client: FakeClient) -> None:
    done = CliRunner().invoke(cli.app, ["follow", "s_012"])
    assert done.exit_code == 0 and client.followed == [f"/v1/sessions/{IDS[0]}/events"]
    done = CliRunner().invoke(cli.app, ["follow", "s_9"])
    assert client.followed[-1] == "/v1/sessions/s_9/events"  # the service says that there is none


def test_a_beginning_of_several_ids_names_them(client: FakeClient) -> None:
    done = CliRunner().invoke(cli.app, ["follow", "s_01"])
    assert isinstance(done.exception, ConfigError) and all(id in str(done.exception) for id in IDS)
