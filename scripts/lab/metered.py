"""Run a command and write what it took: ``metered.py RECORD COMMAND...``.

It is run by path, one process a command.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path


def main() -> int:
    """Write the CPU seconds of a command that succeeds; return its status.

    What the command's own children took counts where they were waited for, as compilers' drivers do.
    """
    record, *command = sys.argv[1:]
    code = subprocess.run(command, check=False).returncode
    if code == 0:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        part = Path(record + ".part")
        part.write_text(json.dumps({"cpu_seconds": used.ru_utime + used.ru_stime}), encoding="utf-8")
        part.replace(record)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
