"""An attention backend for SGLang whose bits do not depend on the batch.

    python -m sglang.launch_server --model-path MODEL --attention-backend flash_attn_deterministic

SGLang finds ``register`` by the wheel's entry point ``sglang.srt.plugins`` and calls it in each of its
processes. The backend itself is imported where an engine chooses it: ``flash_attn.serving.sglang_backend``.
"""

from importlib.metadata import version
from typing import Any

NAME = "flash_attn_deterministic"
FITS = "0.5.16"  # its classes are SGLang's, which change with each release
PAGE_SIZE = 16  # tokens, where the user names no other


class UnfitVersionError(RuntimeError):
    """An SGLang that the backend was not written for."""


def check_version() -> None:
    """Raise UnfitVersionError unless the SGLang that is installed is the one that the backend fits."""
    found = version("sglang")
    if found != FITS:
        raise UnfitVersionError(
            f"flash_attn's attention backend fits SGLang {FITS}, and this is SGLang {found}: "
            f"pip install 'sglang=={FITS}', or choose another attention backend."
        )


def register() -> None:
    """Add the backend to SGLang's lists. Again, it does nothing.

    It refuses no SGLang: where the backend is chosen, an unfit one is refused by ``check_version``.
    """
    try:
        from sglang.srt import server_args
        from sglang.srt.layers.attention.attention_registry import (
            ATTENTION_BACKENDS,
            register_attention_backend,
        )
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    except ImportError:  # an SGLang without such lists: asked for the backend, it says that there is none
        return
    if NAME in ATTENTION_BACKENDS:
        return
    register_attention_backend(NAME)(_make)
    server_args.add_attention_backend_choices([NAME])
    server_args.add_deterministic_attention_backend_choices([NAME])
    # It keeps the cache of prefixes in deterministic inference: what of a prompt is cached changes no bit.
    server_args.add_radix_supported_deterministic_attention_backend_choices([NAME])
    HookRegistry.register("sglang.srt.server_args.ServerArgs.__post_init__", _give_page_size, HookType.BEFORE)


def _make(runner: Any) -> Any:
    check_version()  # before its classes are imported, which another release may not have
    from flash_attn.serving.sglang_backend import Backend

    return Backend(runner)


def _give_page_size(arguments: Any) -> None:
    """SGLang's own default is pages of one token, which no kernel here reads."""
    chosen = (
        arguments.attention_backend,
        arguments.prefill_attention_backend,
        arguments.decode_attention_backend,
    )
    if NAME in chosen and arguments.page_size is None:
        arguments.page_size = PAGE_SIZE
