"""Programs that call ``flash_attn_2_cuda`` directly get what they get from upstream's."""

from __future__ import annotations

import callers
import pytest
import torch
from conftest import built
from flash_attn import deterministic_mode

callers.DEVICE = "cpu"


@pytest.mark.parametrize("enabled", [False, True], ids=["off", "on"])
@pytest.mark.parametrize("caller", callers.CALLERS)
def test_direct_callers_are_answered(caller: str, enabled: bool) -> None:
    with torch.enable_grad(), deterministic_mode(enabled):
        callers.CALLERS[caller](built(heads=4, heads_k=2))
