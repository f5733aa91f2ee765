"""Interrupts that come while a program starts."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from scripts.base.process import interrupts_later


@pytest.fixture(autouse=True)
def _terminated_as_ctrl_c() -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGINT)  # the latter is ignored in a job of the background
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("asked_for", [True, False])
def test_an_interrupt_waits_until_it_is_asked_for_or_the_block_ends(
    number: signal.Signals, asked_for: bool
) -> None:
    steps, before = [], signal.getsignal(number)

    def start() -> None:
        with interrupts_later() as now:
            os.kill(os.getpid(), number)
            steps.append("started")
            if asked_for:
                now()
            steps.append("ended")

    with pytest.raises(KeyboardInterrupt):
        start()
    assert steps == (["started"] if asked_for else ["started", "ended"])
    assert signal.getsignal(number) is before


def test_without_an_interrupt_or_in_a_thread_nothing_happens() -> None:
    steps = []

    def run() -> None:
        with interrupts_later() as now:
            now()
            steps.append("ran")

    thread = threading.Thread(target=run)
    for start in (run, thread.start):
        start()
    thread.join()
    assert steps == ["ran", "ran"]
