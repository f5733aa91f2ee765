"""Programs that call ``flash_attn_2_cuda`` directly get what they get from upstream's."""

from __future__ import annotations

import callers
import pytest
from flash_attn import deterministic_mode
from harness import Config

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("enabled", [False, True], ids=["off", "on"])
@pytest.mark.parametrize("caller", callers.CALLERS)
def test_direct_callers_are_answered(caller: str, enabled: bool) -> None:
    config = Config(heads=4, heads_k=2)
    config.need("fwd", "split", "bwd")
    with deterministic_mode(enabled):
        callers.CALLERS[caller](config)
