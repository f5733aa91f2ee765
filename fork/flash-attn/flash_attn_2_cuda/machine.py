"""Whether this machine's Python packages are such as the library was built for: said before it is loaded."""

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

PROVENANCE = Path(__file__).parent.parent / "flash_attn/_fork.json"

_EXCHANGE = "__dlpack_c_exchange_api__"  # of torch.Tensor: tensors go to the library without Python
_SPARE_TORCH = "TVM_FFI_DISABLE_TORCH_C_DLPACK"  # apache-tvm-ffi then leaves torch as it is


def _install(what: str) -> str:
    return f"{what} (pip install flash_attn asks for it; pip install --no-deps does not)"


def check() -> None:
    """Raise an ImportError that names what is missing or does not fit, and what to install."""
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(_install("flash_attn needs torch, built for CUDA")) from None
    _load_tvm_ffi(torch)
    if PROVENANCE.exists():  # else it was compiled by hand
        _check_cuda(json.loads(PROVENANCE.read_text(encoding="utf-8")), torch)


def _load_tvm_ffi(torch: Any) -> None:
    """Import apache-tvm-ffi, which loads what our library needs, and what torch before 2.10 gives tensors by.

    torch-c-dlpack-ext has that compiled, but not for the C++ ABI of before C++11, which torch's own wheels
    have up to 2.6. There apache-tvm-ffi compiles it, once for each user, unless it finds the other, which
    does not load.
    """
    compiles = not torch.compiled_with_cxx11_abi() and "torch_c_dlpack_ext" not in sys.modules
    if compiles:
        sys.modules["torch_c_dlpack_ext"] = None  # type: ignore[assignment]  # as if it were not installed
    # It adds nothing to a torch that has both, but asks whether there is a GPU: that takes 0.2 s, and
    # processes forked after it cannot use CUDA.
    has_both = hasattr(torch.Tensor, _EXCHANGE) and hasattr(torch.cuda.Stream, "__cuda_stream__")
    spared = has_both and _SPARE_TORCH not in os.environ
    if spared:
        os.environ[_SPARE_TORCH] = "1"
    try:
        import tvm_ffi  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "tvm_ffi":
            raise
        raise ImportError(_install("flash_attn needs the package apache-tvm-ffi")) from None
    finally:
        if compiles:
            del sys.modules["torch_c_dlpack_ext"]
        if spared:
            del os.environ[_SPARE_TORCH]
    if compiles and not hasattr(torch.Tensor, _EXCHANGE):
        lacks = (  # torch's own tools for extensions import it, and torch asks for it on Python 3.12 alone
            "setuptools is not installed (pip install setuptools)"
            if importlib.util.find_spec("setuptools") is None
            else "it needs setuptools, a C++ compiler, Python's headers and, beside a GPU, CUDA's (CUDA_HOME)"
        )
        raise ImportError(
            f"torch {torch.__version__} has the C++ ABI of before C++11, for which apache-tvm-ffi compiles a "
            f"library when it is first imported. That failed: {lacks}. Or install torch 2.7 or newer."
        )


def _check_cuda(built: Any, torch: Any) -> None:
    wanted, here = built["cuda"].split(".")[0], torch.version.cuda
    if here is None:
        raise ImportError(
            f"torch {torch.__version__} is built without CUDA; flash_attn needs one built for CUDA {wanted} "
            "(pytorch.org names the index that has it)."
        )
    if here.split(".")[0] != wanted:
        other = here.split(".")[0]
        raise ImportError(
            f"this flash_attn was built for CUDA {wanted}; torch {torch.__version__} is built for CUDA "
            f"{here}. Install the flash_attn wheel whose version ends in cu{other}, or a torch for CUDA "
            f"{wanted}."
        )
