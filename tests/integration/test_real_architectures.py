"""A real kernel file, compiled with PTX of its own and with shared PTX."""

from __future__ import annotations

import pytest

from tests.integration.wheels import KERNELS, said

pytestmark = [pytest.mark.network, pytest.mark.nvcc]


@pytest.mark.in_turn(2)
def test_machine_code_from_shared_ptx_is_that_of_its_own() -> None:
    told = said("archs", "--kernels", KERNELS, "--arch", "90", "--source", "sdist")
    assert "13 kernels: the same machine code from shared PTX as from their own." in told
