"""vLLM's backend on a GPU: its metadata and its cache, without an engine around. prove_vllm.py runs engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import Config, Mismatch, Sequence, assert_same_bits, seed_of
from serving import DECODERS, LENGTHS
from serving import requests as drawn

pytestmark = pytest.mark.gpu

CONFIGS = [
    *DECODERS,
    Config(heads=4, heads_k=2, causal=True, head_dim=72, alibi=True),
]
configs = pytest.mark.parametrize("config", CONFIGS, ids=str)


@pytest.fixture
def serving() -> Any:
    """What stands for an engine; in a fixture, so that the suite has these cases where vLLM is missing too."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    import serving

    return serving


@pytest.fixture
def backend(serving: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    return serving.chosen_backend(monkeypatch)


def requests(config: Config) -> list[Sequence]:
    config.need("fwd", "split")
    return drawn(config, LENGTHS, seed_of(config))


@pytest.mark.parametrize(("page", "layout"), [(16, "NHD"), (48, "HND"), (256, "NHD")])
@configs
def test_rows_of_steps_are_those_of_requests_alone(
    serving: Any, backend: Any, config: Config, page: int, layout: str, control: Callable[..., None]
) -> None:
    engine = serving.Engine(backend, config, requests(config), page, layout)
    serving.assert_steps(engine, serving.mixed_steps(LENGTHS))
    engine.layer.scope = (False, 0)
    try:
        serving.assert_steps(engine, serving.mixed_steps(LENGTHS))
    except Mismatch:
        control(True)
    else:
        control(False)


@pytest.mark.parametrize("rows", [1, 4], ids=["decode", "drafts"])
@configs
def test_a_graph_serves_whatever_its_pages_hold(
    serving: Any, backend: Any, config: Config, rows: int
) -> None:
    """Captured on short requests and padding, replayed on long ones."""
    engine = serving.Engine(backend, config, requests(config), 16)
    short = [serving.Part(n, 30 - rows, 30) for n in range(2)]
    padding = rows * 2
    metadata = engine.metadata(short, padding, captured=True)
    query = engine.queries(short, padding).contiguous()
    output = torch.zeros_like(query)
    arguments = (None, query, query, query, engine.cache, metadata, output)
    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        engine.layer.forward(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=aside):
        engine.layer.forward(*arguments)
    for lengths in ((LENGTHS[0], LENGTHS[2]), (30, LENGTHS[2] - 500), (LENGTHS[0] - 3, 257)):
        parts = [
            serving.Part(request, length - rows, length)
            for request, length in zip((0, 2), lengths, strict=True)
        ]
        now = engine.metadata(parts, padding)
        for name in ("query_start_loc", "seq_lens", "block_table"):
            getattr(metadata, name).copy_(getattr(now, name))
        query.copy_(engine.queries(parts, padding))
        graph.replay()
        for n, part in enumerate(parts):
            expected = serving.alone(config, engine.requests[part.request])[part.start : part.stop]
            assert_same_bits(output[n * rows : (n + 1) * rows], expected, f"{part} of {lengths}")


def test_new_keys_are_written_where_rows_read_them(serving: Any, backend: Any) -> None:
    """By vLLM's own kernel, in its strides."""
    config = CONFIGS[0]
    engine = serving.Engine(backend, config, requests(config), 16)
    kept = engine.cache.clone()
    own = engine.requests[0]
    positions = torch.arange(len(own.k), device="cuda")
    slots = engine.table[0][positions // 16].long() * 16 + positions % 16
    pages = engine.table[0][: -(-len(own.k) // 16)].long()
    engine.cache[pages] = 0
    one = torch.ones(1, device="cuda")
    layer = type("Layer", (), {"_k_scale": one, "_v_scale": one})()
    engine.layer.do_kv_cache_update(layer, own.k, own.v, engine.cache, slots)
    written = engine.cache[pages].transpose(1, 2).flatten(0, 1)[: len(own.k)]
    expected = kept[pages].transpose(1, 2).flatten(0, 1)[: len(own.k)]
    assert_same_bits(written.contiguous(), expected.contiguous(), "keys and values")
