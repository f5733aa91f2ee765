"""The choice of kernels, in a wheel that has no others beside it; tests/wheel4/test_front.py has both."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import flash_attn
import pytest
from mode_rules import VARIABLES


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        check=False,
        env={**os.environ, **dict.fromkeys(VARIABLES, ""), **environment},
        capture_output=True,
        text=True,
    )


def test_kernels_are_this_wheel_s_until_somebody_asks_for_others() -> None:
    assert flash_attn.get_kernels() == ("fa2", "fa2")
    assert flash_attn.fork_info()["runs_on"] == {
        "family": "fa2",
        "otherwise": "fa2",
        "calls": {},
        "flash_attn_4": None,
    }
    done = run_python("import flash_attn, sys; print(flash_attn.fork_kernels.ON, 'cutlass' in sys.modules)")
    assert done.stdout.strip() == "False False", done.stderr


def test_the_environment_s_variables_are_known() -> None:
    """-W error: a variable of another name is warned about."""
    code = "import flash_attn; print(*flash_attn.get_kernels())"
    done = run_python(code, FA2_KERNELS="fa2", FA2_KERNELS_OTHERWISE="error")
    assert done.stdout.strip() == "fa2 error", done.stderr


@pytest.mark.parametrize(("name", "value"), [("FA2_KERNELS", "fa3"), ("FA2_KERNELS_OTHERWISE", "1")])
def test_bad_environment_is_an_error_at_import_that_names_it(name: str, value: str) -> None:
    done = run_python("import flash_attn", **{name: value})
    assert f"ValueError: {name}='{value}' is neither" in done.stderr


@pytest.mark.skipif(
    importlib.util.find_spec("flash_attn.cute") is not None, reason="the other wheel is installed"
)
def test_kernels_that_are_not_installed_are_one_error_that_says_what_to_install() -> None:
    with pytest.raises(
        RuntimeError, match=r"flash_attn\.cute, which is not installed: install the flash_attn_4"
    ):
        flash_attn.set_kernels("fa4")
    done = run_python("import flash_attn", FA2_KERNELS="fa4")
    assert "RuntimeError: kernels 'fa4' need flash_attn.cute, which is not installed" in done.stderr
