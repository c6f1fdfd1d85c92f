"""Signals: the first is a wish, the second ends the process at once."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from flowrl.runs.stop import SIGNALS, StopSignal


def heard_by(stop: StopSignal) -> None:
    """Wait for a signal: where another thread gets it, the main one hears of it a little later."""
    until = time.monotonic() + 10
    while not stop.asked and time.monotonic() < until:
        time.sleep(0.01)
    assert stop.asked


@pytest.mark.parametrize("number", SIGNALS)
def test_every_signal_that_ends_a_job_is_heard_at_once(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    found = signal.getsignal(number)
    if found is signal.SIG_IGN:  # nohup may have started these tests
        signal.signal(number, signal.SIG_DFL)
    before = signal.getsignal(number)
    try:
        with StopSignal() as stop:
            os.kill(os.getpid(), number)
            heard_by(stop)
        assert "stopping after this iteration, with a checkpoint" in capfd.readouterr().err
        assert signal.getsignal(number) is before
    finally:
        signal.signal(number, found)


def test_what_is_ignored_stays_ignored() -> None:
    """nohup ignores SIGHUP for the program that it starts."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignal() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.asked
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_a_wish_the_second_is_not(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), StopSignal() as stop:  # noqa: PT012
        os.kill(os.getpid(), number)
        heard_by(stop)
        os.kill(os.getpid(), number)
        time.sleep(10)  # another thread may get it first and hand it on
        pytest.fail("the second signal must stop at once")
    assert signal.getsignal(number) is before


def test_signals_are_left_alone_outside_the_main_thread() -> None:
    before, failed = signal.getsignal(signal.SIGINT), []

    def work() -> None:
        try:
            with StopSignal() as stop:
                assert not stop.asked
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failed and signal.getsignal(signal.SIGINT) is before
