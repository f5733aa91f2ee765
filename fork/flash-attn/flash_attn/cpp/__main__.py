"""Print where a file or folder of the C++ API lies.

    cmake -DFlashAttentionV2_DIR="$(python -m flash_attn.cpp --cmake-dir)" …

Neither torch nor the extension is imported. This folder also runs alone, as a script.
"""

import argparse
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # for what lies beside it

import places

_ASKED = {
    "--cmake-dir": (places.cmake_dir, "the folder of FlashAttentionV2Config.cmake"),
    "--include-dir": (places.include_dir, "the folder of the headers"),
    "--library": (places.library, "the shared library"),
    "--pkg-config-dir": (places.pkg_config_dir, "the folder of flash_attention_v2.pc"),
}


def main() -> int:
    """Print one path; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m flash_attn.cpp", description="Print where a file or folder of the C++ API lies."
    )
    which = parser.add_mutually_exclusive_group(required=True)
    for option, (function, what) in _ASKED.items():
        words = "print " + what
        which.add_argument(option, dest="function", action="store_const", const=function, help=words)
    try:
        print(parser.parse_args().function())
    except FileNotFoundError as error:
        print(f"flash_attn.cpp: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
