"""A line to stderr for each call, with FA2_DEBUG=1."""

import sys
from typing import Any

from flash_attn.cute.fork_environment import env_switch
from flash_attn.cute.fork_mode import get_deterministic_mode

DEBUG = env_switch("FA2_DEBUG")


def log_call(function: str, **tensors: Any) -> None:
    """Tell a call's shapes and the mode it runs under; None is left out."""
    if not DEBUG:
        return
    mode = get_deterministic_mode()
    shapes = [f"{name}={tuple(t.shape)}" for name, t in tensors.items() if t is not None]
    words = [f"[flash-attn] cute.{function}:", *shapes]
    words += [f"deterministic_mode={int(mode.enabled)}", f"split_size={mode.split_size}"]
    # Written whole, so that the lines of two threads do not mix.
    sys.stderr.write(" ".join(words) + "\n")
