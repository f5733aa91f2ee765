"""Every kernel that the GPU half calls compiles, without a GPU: tensors have shapes and no values here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import machine
import pytest
from calls import dense, dense_gradients
from cases import BACKWARD, CONFIGS, FORWARD, other_tiles, own
from flash_attn.cute import deterministic_mode
from problems import Config, draw
from test_chunks import CHUNKED, SPLIT, path

FOLDER = Path(__file__).resolve().parent
without_a_gpu = pytest.mark.skipif(machine.GPU, reason="the GPU half compiles these kernels, and runs them")


@without_a_gpu
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_kernels_of_forward_compile(config: Config) -> None:
    with machine.compiling():
        for layout in FORWARD.values():
            for alone, other in layout(config):
                assert alone.out.shape == other.out.shape
                assert alone.lse.shape == other.lse.shape
        if config.head_dim == 128:
            other_tiles(config, own(config))


@without_a_gpu
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_kernels_of_backward_compile(config: Config) -> None:
    with machine.compiling():
        for layout in BACKWARD.values():
            alone, other = layout(config)
            assert {name: t.shape for name, t in alone.items()} == {
                name: t.shape for name, t in other.items()
            }
        if config.head_dim == 128:
            dense_gradients(config, [own(config)], deterministic=False)


@without_a_gpu
@pytest.mark.parametrize("name", ["walked", "spread"])
@pytest.mark.parametrize("config", CHUNKED, ids=str)
def test_kernels_of_chunks_compile(config: Config, name: str) -> None:
    with machine.compiling(), path(name), deterministic_mode(split_size=SPLIT):
        for layout in FORWARD.values():
            for alone, other in layout(config):
                assert alone.out.shape == other.out.shape


OTHERS = {  # what their kernels take, of upstream's own checks
    "sm_80": ([Config(d, causal=c) for d in (64, 128) for c in (False, True)], False),
    "sm_100": ([Config(d, causal=c) for d in (64, 128) for c in (False, True)] + [Config(256)], True),
    "sm_120": ([Config(d, causal=c) for d in (64, 128) for c in (False, True)], False),
}


@without_a_gpu
@pytest.mark.skipif("FORK_OTHER_ARCHITECTURE" in os.environ, reason="is a process of this test")
@pytest.mark.parametrize("architecture", OTHERS)
def test_some_kernels_of_other_architectures_compile(architecture: str) -> None:
    """In a process of its own, because the architecture is read when CUTLASS is imported."""
    environment = {
        **os.environ,
        "FORK_OTHER_ARCHITECTURE": architecture,
        **machine.environment_for(architecture),
    }
    path = os.pathsep.join([str(FOLDER), str(FOLDER.parent / "wheel"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", "import test_compiles; test_compiles.compile_here()"]
    done = subprocess.run(
        command,
        env={**environment, "PYTHONPATH": path},
        cwd=FOLDER,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def compile_here() -> None:
    """Compile forward of this architecture's configurations, and backward where it is deterministic."""
    configs, backward = OTHERS[machine.architecture()]
    with machine.compiling():
        for config in configs:
            dense(config, [draw(config, 300, 300)])
            if backward:
                dense_gradients(config, [draw(config, 300, 300)], deterministic=True)
