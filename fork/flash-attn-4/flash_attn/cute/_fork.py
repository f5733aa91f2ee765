"""What this fork's wheel was built from."""

import json
from pathlib import Path
from typing import Any


def fork_info() -> dict[str, Any]:
    """The provenance that the wheel carries: upstream's pin, and the patches by name and sha256.

    Raises:
        FileNotFoundError: the package was not installed from a wheel of this fork.
    """
    info: dict[str, Any] = json.loads(Path(__file__).with_name("_fork.json").read_text(encoding="utf-8"))
    return info
