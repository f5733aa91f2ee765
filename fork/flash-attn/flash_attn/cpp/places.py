"""Where the C++ API's files lie in this installation. Nothing is imported but Python's standard library."""

import os

_HERE = os.path.dirname(os.path.abspath(__file__))


def _there(*names: str) -> str:
    path = os.path.join(_HERE, *names)
    if not os.path.exists(path):
        raise FileNotFoundError(
            f"{path} is missing: this flash_attn was not installed from a wheel that has the C++ API"
        )
    return path


def cmake_dir() -> str:
    """The folder of FlashAttentionV2Config.cmake, for -DFlashAttentionV2_DIR."""
    return _there("lib", "cmake", "FlashAttentionV2")


def include_dir() -> str:
    """The folder of flash_attention_v2.h and flash_attention_v2_c.h."""
    return _there("include")


def library() -> str:
    """The shared library."""
    return _there("lib", "libflash_attention_v2.so.1")


def pkg_config_dir() -> str:
    """The folder of flash_attention_v2.pc, for PKG_CONFIG_PATH."""
    return _there("lib", "pkgconfig")
