"""Processes of their own that begin with the modules of the tests: importing them would take most of the time."""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

# One server starts all, so it has what each of them needs.
_MODULES = ["tests.unit.test_cluster", "tests.unit.test_edit", "tests.unit.test_rebase"]


def context() -> ForkServerContext:
    """What starts them."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(_MODULES)
    forkserver.ensure_running()
    return found
