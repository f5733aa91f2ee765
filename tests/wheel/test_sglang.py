"""SGLang's backend on a GPU: its metadata and its pools, without an engine around."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from harness import Config, Mismatch, Sequence, assert_same_bits, seed_of
from serving import DECODERS, LENGTHS
from serving import requests as drawn

pytestmark = pytest.mark.gpu

configs = pytest.mark.parametrize("config", DECODERS, ids=str)


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What both engines' steps share; in a fixture, so that the suite has these cases where SGLang is missing too."""
    pytest.importorskip("sglang", reason="SGLang is not installed")
    import serving

    serving.use_small_splits(monkeypatch)
    return serving


@pytest.fixture
def sglang(serving: Any) -> Iterator[Any]:
    import serving_sglang
    from flash_attn.serving import sglang as plugin

    plugin.register()
    with serving_sglang.arguments():
        yield serving_sglang


def requests(config: Config) -> list[Sequence]:
    config.need("fwd", "split")
    return drawn(config, LENGTHS, seed_of(config))


@pytest.mark.parametrize("page", [16, 48, 256])
@configs
def test_rows_of_steps_are_those_of_requests_alone(
    serving: Any, sglang: Any, config: Config, page: int, control: Callable[..., None]
) -> None:
    engine = sglang.Engine(config, requests(config), page)
    serving.assert_steps(engine, serving.mixed_steps(LENGTHS))
    engine.backend.scope = (False, 0)
    try:
        serving.assert_steps(engine, serving.mixed_steps(LENGTHS))
    except Mismatch:
        control(True)
    else:
        control(False)


@configs
def test_a_graph_serves_whatever_its_pages_hold(serving: Any, sglang: Any, config: Config) -> None:
    """Captured on short requests, replayed on long ones."""
    engine = sglang.Engine(config, requests(config), 16)
    backend = engine.backend
    backend.init_cuda_graph_state(2, 2)
    batch, rows = (make([serving.Part(n, 29, 30) for n in range(2)]) for make in (engine.batch, engine.rows))
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        engine.attend(rows, batch)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=aside):
        output = engine.attend(rows, batch)
    for lengths in ((LENGTHS[0], LENGTHS[2]), (30, LENGTHS[2] - 500), (LENGTHS[0] - 3, 257)):
        parts = [serving.Part(n, length - 1, length) for n, length in zip((0, 2), lengths, strict=True)]
        now = engine.batch(parts)
        for name in ("req_pool_indices", "seq_lens", "out_cache_loc", "positions"):
            getattr(batch, name).copy_(getattr(now, name))
        for static, new in zip(rows, engine.rows(parts), strict=True):
            static.copy_(new)
        backend.init_forward_metadata_out_graph(now)
        graph.replay()
        for n, part in enumerate(parts):
            expected = serving.alone(config, engine.requests[part.request])[part.start : part.stop]
            assert_same_bits(output[n : n + 1], expected, f"{part} of {lengths}")
