"""Programs that torch.compile traces once, for all lengths, with the kernels and its own code around them."""

from __future__ import annotations

import pytest
import tracing
from flash_attn import set_deterministic_mode
from harness import Config

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("named", tracing.PROGRAMS)
def test_a_compiled_program_is_traced_once_and_gives_eager_s_bits(named: str) -> None:
    config = Config(heads=4, heads_k=2)
    config.need("fwd", "split", "bwd")
    set_deterministic_mode(True)  # else gradients are added up in whatever order
    tracing.assert_traced_once(config, named, "inductor", gradients=tracing.PROGRAMS[named].has_gradients)
