"""The wheel suite's harness on kernels that run on the CPU: ``nox -s emulate``."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from typing import Any

import flash_attn
import flash_attn_2_cuda
import harness
import parts
import pytest
import steady  # noqa: F401 - loads the profile of hypothesis
import torch
from flash_attn import fork_straight
from hypothesis import HealthCheck, Phase, settings

harness.DEVICE = "cpu"
DIM = min(int(name.split("hdim")[1].split("_")[0]) for name in harness.KERNELS)  # the smallest that was built
HALF_NAME = "fp16" if any("fp16" in name for name in harness.KERNELS) else "bf16"
HALF = harness.DTYPES[HALF_NAME]


def pytest_addoption(parser: pytest.Parser) -> None:
    parts.add_option(parser, "the cases")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    parts.deselect(config, items, items)


def built(**options: Any) -> harness.Config:
    """Calls of kernels that were built."""
    return harness.Config(**({"head_dim": DIM, "dtype": HALF_NAME} | options))


def problems(examples: int) -> settings:
    """How many problems hypothesis draws: the same in every run, and not shrunk, which would take hours."""
    phases = [Phase.explicit, Phase.generate]
    return settings(
        max_examples=examples, derandomize=True, phases=phases, suppress_health_check=list(HealthCheck)
    )


for operator in (
    "_flash_attn_forward",
    "_flash_attn_varlen_forward",
    "_flash_attn_backward",
    "_flash_attn_varlen_backward",
):
    custom = getattr(flash_attn.flash_attn_interface, operator)
    custom.register_kernel("cpu")(custom._init_fn)
for custom in (
    *(flash_attn.fork_bias_forward.forward, flash_attn.fork_bias_backward.backward_operator),
    *(flash_attn.fork_cache.reading, flash_attn.fork_cache.appending),
):
    custom.register_kernel("cpu")(custom._init_fn)


drawn_numbers = 0  # of the emulated GPU's one generator, whose seed is 1


def draw(_: Any, __: torch.device, increment: int) -> tuple[int, int, None, None]:
    """Random state as a GPU's generator gives it; there is none here."""
    global drawn_numbers  # noqa: PLW0603 - a generator's state
    offset = drawn_numbers
    drawn_numbers += (increment + 3) // 4 * 4
    return 1, offset, None, None


flash_attn_2_cuda.random_state.draw = draw
flash_attn_2_cuda.NEEDS_GPU = False
# It was imported before that: here, too, it allocates past torch's dispatcher.
fork_straight._needs_gpu = False
fork_straight._strided, fork_straight._current_device = torch._C._dynamo.guards._empty_strided_cpu, lambda: -1


# Whether a thread block has 99 KiB of shared memory, and not 163 or more.
SMALL = os.environ["FORK_EMULATED_GPU"] in ("86", "89", "120", "121")


class Machine:
    """The emulated GPU: how many multiprocessors it claims, and in which order blocks and warps run."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(flash_attn_2_cuda._LIBRARY))
        for name in ("launches", "instructions", "largest"):
            getattr(self._library, f"emulator_{name}").restype = ctypes.c_ulonglong

    def set(self, processors: int = 132, order: int = 0, races: bool = True, resident: int = 1) -> None:
        """Set it up.

        Args:
            processors: multiprocessors that it claims to have.
            order: of blocks and warps; 0: as they come, else the seed of a random one.
            races: look for races in shared memory.
            resident: blocks that run side by side, in turns.
        """
        self._library.emulator_set(processors, order, int(races), resident)

    @property
    def launches(self) -> int:
        return int(self._library.emulator_launches())

    def watch_memory(self) -> None:
        """Forget the largest allocation."""
        self._library.emulator_forget_largest()

    @property
    def largest_allocation(self) -> int:
        """In bytes, of torch's since then."""
        return int(self._library.emulator_largest())

    @property
    def instructions(self) -> int:
        """Of a warp each."""
        return int(self._library.emulator_instructions())


MACHINE = Machine()


@pytest.fixture
def machine() -> Machine:
    return MACHINE


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    MACHINE.set()
    flash_attn.set_deterministic_mode(False)
    yield
    flash_attn.set_deterministic_mode(False)


EMULATED: list[tuple[int, int]] = []  # launches and instructions of each process that ended


def pytest_sessionfinish(session: pytest.Session) -> None:
    EMULATED.append((MACHINE.launches, MACHINE.instructions))
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["emulated"] = EMULATED[0]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    if "emulated" in getattr(node, "workeroutput", {}):
        EMULATED.append(node.workeroutput["emulated"])


def pytest_terminal_summary(terminalreporter: Any) -> None:
    launches, instructions = map(sum, zip(*EMULATED, strict=True))
    terminalreporter.write_line(
        f"emulated: {launches} launches, {instructions / 1e6:.1f} million instructions of a warp"
    )
