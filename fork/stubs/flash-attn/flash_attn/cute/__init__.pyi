# Of another wheel: all of it is Any.
from typing import Any

def __getattr__(name: str) -> Any: ...
