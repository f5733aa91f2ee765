# Upstream's module, whose attributes are Any.
from typing import Any

def __getattr__(name: str) -> Any: ...
