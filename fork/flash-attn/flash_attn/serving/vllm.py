"""An attention backend for vLLM whose bits do not depend on the batch.

    vllm serve MODEL --attention-backend CUSTOM
    LLM(MODEL, attention_backend="CUSTOM")

vLLM finds ``register`` by the wheel's entry point ``vllm.general_plugins`` and calls it in each of its
processes. The backend itself, and with it vLLM, is imported where an engine chooses it:
``flash_attn.serving.vllm_backend``.
"""

from importlib.metadata import version

BACKEND = "flash_attn.serving.vllm_backend.Backend"
FITS: tuple[int, int] = (0, 26)  # releases that begin so: its classes are vLLM's, which change with each


class UnfitVersionError(RuntimeError):
    """A vLLM that the backend was not written for. No ImportError: vLLM hides the words of those."""


def check_version() -> None:
    """Raise UnfitVersionError unless the vLLM that is installed is one that the backend fits."""
    found = version("vllm")
    if found.split(".")[:2] != [str(number) for number in FITS]:
        series = ".".join(map(str, FITS))
        raise UnfitVersionError(
            f"flash_attn's attention backend fits vLLM {series}, and this is vLLM {found}: "
            f"pip install 'vllm=={series}.*', or choose another attention backend."
        )


def register() -> None:
    """Make the backend vLLM's ``CUSTOM``, unless another plugin was first. Again, it does nothing.

    It refuses no vLLM: vLLM would not start then, not even for somebody who asks for another backend. Where
    ``CUSTOM`` is chosen, an unfit one is refused by ``check_version``.
    """
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError:  # of before or after it had such a list: asked for CUSTOM, it says that there is none
        return
    if not AttentionBackendEnum.CUSTOM.is_overridden():
        register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
