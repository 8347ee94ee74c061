"""`relax.host`: a connection that is lost is made again, for as long as there is hope."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from hosted_envs import Echo

import relax_sdk as relax
from relax_sdk.hosting import client as hosting

Connect = Callable[[hosting.Hosting], None]


def welcomed(host: hosting.Hosting) -> None:
    """A connection that breaks off as soon as it is welcomed."""
    if not host._ready.done():
        host._ready.set_result(None)


def away(host: hosting.Hosting) -> None:
    raise hosting._Lost("it answers 503")


def refused(host: hosting.Hosting) -> None:
    raise relax.ServiceError("the name is taken", 409, "refused")


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[Connect]:
    """What comes of each connection; the last one is repeated, and those that were made are taken away."""
    script: list[Connect] = []

    async def connected(self: hosting.Hosting, *_: Any) -> None:
        (script.pop(0) if script[1:] else script[0])(self)

    monkeypatch.setattr(hosting.Hosting, "_connected", connected)
    monkeypatch.setattr(hosting, "FIRST_PAUSE", 0.002)
    monkeypatch.setattr(hosting, "LONGEST_PAUSE", 0.004)
    return script


def test_a_service_that_is_not_there_at_first_is_an_error_at_once(connections: list[Connect]) -> None:
    connections += [away, welcomed]
    with pytest.raises(relax.ServiceUnavailable, match=r"cannot be reached \(it answers 503\)"):
        hosting.host(Echo, id="acme/echo-v0")
    assert connections == [welcomed]


def test_a_lost_connection_is_made_again_until_the_service_refuses(connections: list[Connect]) -> None:
    connections += [welcomed, away, away, away, welcomed, welcomed, away, refused]
    with pytest.raises(relax.ServiceError, match="the name is taken"):
        hosting.host(Echo, id="acme/echo-v0").wait(30.0)
    assert connections == [refused]


def test_a_service_that_stays_away_is_given_up(connections: list[Connect], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosting, "GIVE_UP_SECONDS", 0.05)
    connections += [welcomed, away]
    with pytest.raises(relax.ServiceUnavailable, match=r"cannot be reached \(it answers 503\)"):
        hosting.host(Echo, id="acme/echo-v0").wait(30.0)


def test_a_host_can_be_closed_while_the_service_is_away(connections: list[Connect], monkeypatch: pytest.MonkeyPatch) -> None:
    waits = threading.Event()

    def away_for_long(host: hosting.Hosting) -> None:
        monkeypatch.setattr(hosting, "LONGEST_PAUSE", 60.0)
        waits.set()
        raise hosting._Lost("away")

    connections += [welcomed, away_for_long]
    with hosting.host(Echo, id="acme/echo-v0") as hosted:
        assert waits.wait(10.0)
    hosted.wait(0.0)
