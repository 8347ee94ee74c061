"""The first signal asks a run to stop, the second one ends it at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from relax_sdk.stop_signals import Interrupted, StopSignals, exit_code


@pytest.fixture(autouse=True)
def usual_signals() -> Iterator[None]:
    """Signals as a program has them when it starts; Ray, which other tests use, takes SIGTERM for itself."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def test_the_first_signal_asks_the_second_one_insists_the_third_one_raises():
    asked: list[bool] = []
    with StopSignals(asked.append) as signals:
        send(signal.SIGINT)
        assert asked == [False] and signals.caught == signal.SIGINT
        send(signal.SIGINT)
        assert asked == [False, True]
        with pytest.raises(Interrupted) as raised:
            send(signal.SIGINT)
        assert exit_code(raised.value) == 130
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)


def test_a_closing_terminal_that_says_so_twice_has_said_it_once():
    asked: list[bool] = []
    before = signal.getsignal(signal.SIGHUP)
    with StopSignals(asked.append) as signals:
        for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):
            send(number)
    assert asked == [False] and signals.caught == signal.SIGHUP
    assert signal.getsignal(signal.SIGHUP) == before


def test_what_a_program_ignores_or_handles_stays_its_own():
    handled: list[int] = []
    before = [signal.signal(signal.SIGHUP, signal.SIG_IGN), signal.signal(signal.SIGTERM, lambda n, f: handled.append(n))]
    try:
        with StopSignals(lambda at_once: pytest.fail("it was asked to stop")):
            send(signal.SIGHUP)
            send(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGHUP, before[0])
        signal.signal(signal.SIGTERM, before[1])
    assert handled == [signal.SIGTERM]


def test_in_another_thread_nothing_is_changed():
    seen = []

    def enter() -> None:
        with StopSignals(lambda at_once: None):
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join(10)
    assert seen == [signal.getsignal(signal.SIGINT)]
