"""Variables of the environment that are switches."""

import os


def env_switch(name: str) -> bool:
    """A variable that is 0 or 1; an unset one and an empty one are 0.

    Raises:
        ValueError: it is neither.
    """
    text = os.environ.get(name) or "0"
    if text not in ("0", "1"):
        raise ValueError(f"{name}='{text}' is neither 0 nor 1")
    return text == "1"
