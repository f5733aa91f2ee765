"""The deterministic mode's switch: one for this package and for flash_attn.

Where the flash_attn wheel of this project is installed, its functions are these functions, so both packages
obey one switch and one stack of scopes. ``import flash_attn.cute`` has then run ``flash_attn/__init__.py``,
which loads the extension that keeps the mode; nothing more is loaded here. Without it the same functions keep
the mode in this package.

Environment, read when ``flash_attn.cute`` is imported (a value that is none of these is a ``ValueError``):
    FA2_DETERMINISTIC: ``1`` or ``0``, the process-wide mode to start with. Default ``0``.
    FA2_SPLIT_SIZE: tokens, the default of ``split_size``. Default 2048.
    FA2_DEBUG: ``1`` prints a line to stderr for each call.
"""

__all__ = [
    "SHARED",
    "DeterministicMode",
    "deterministic_mode",
    "get_deterministic_mode",
    "set_deterministic_mode",
]

SHARED = True  # with flash_attn
try:
    from flash_attn.determinism import (
        DeterministicMode,
        deterministic_mode,
        get_deterministic_mode,
        set_deterministic_mode,
    )
except ModuleNotFoundError as error:
    # No flash_attn, or another one, such as upstream's: there is no mode to share.
    if error.name not in ("flash_attn.determinism", "flash_attn_2_cuda"):
        raise
    SHARED = False
    from flash_attn.cute.fork_own_mode import (
        DeterministicMode,
        deterministic_mode,
        get_deterministic_mode,
        set_deterministic_mode,
    )
