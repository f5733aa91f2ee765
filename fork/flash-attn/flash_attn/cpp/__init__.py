"""Where the C++ API's files lie: headers, library, CMake's and pkg-config's.

``python -m flash_attn.cpp --cmake-dir`` says it where torch is missing, which importing this needs.
"""

from .places import cmake_dir, include_dir, library, pkg_config_dir

__all__ = ["cmake_dir", "include_dir", "library", "pkg_config_dir"]
