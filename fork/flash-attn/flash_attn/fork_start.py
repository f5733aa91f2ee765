"""Run ``python -m flash_attn.doctor`` and ``… flash_attn.cpp`` before the package is imported.

Python imports a package before a module of it. So the doctor would not start where it is needed, to explain
an import that fails; and where C++ is compiled there may be no torch.
"""

import re
import sys

_ALONE = ("doctor", "cpp")  # folders that run without the package around them


def _asked() -> str:
    """Which of them Python was started with; empty for none."""
    if getattr(sys, "argv", [])[:1] != ["-m"]:  # what stands there while Python looks for the module
        return ""
    words = getattr(sys, "orig_argv", None)
    if words is None:  # before Python 3.10
        try:
            with open("/proc/self/cmdline", encoding="utf-8", errors="replace") as file:
                words = file.read().split("\0")
        except OSError:
            return ""
    package, _, name = _module(words[1:]).partition(".")
    return name if package == "flash_attn" and name in _ALONE else ""


def _module(words: "list[str]") -> str:
    """What follows Python's own -m, which may stand in one word with it or with other options."""
    for word, after in zip(words, [*words[1:], ""]):
        found = re.match("-[^-WXc]*?m(.*)", word)
        if found:
            return found.group(1) or after
    return ""


if _asked():
    import os
    import runpy

    runpy.run_path(os.path.join(os.path.dirname(os.path.abspath(__file__)), _asked()), run_name="__main__")
