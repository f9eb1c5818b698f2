"""Which kernels of this package a module for CUDA holds."""

import re
from pathlib import Path

_FOLDER = Path(__file__).parent.parent / "jaxserve" / "pallas_kernels"


def _names(files: str, pattern: str) -> set[str]:
    return {name for path in _FOLDER.glob(files) for name in re.findall(pattern, path.read_text())}


# The names of all kernels, as their source has them.
MOSAIC_GPU = _names("*_mosaic_gpu.py", r'\bkernel_name="(\w+)"')
TRITON = _names("*_triton.py", r'(?:\bname=|_body, )"(\w+)"')


def kernels_of(module: str) -> dict[str, set[str]]:
    """The kernels of each name: by the hash under which jaxlib looks a Mosaic GPU kernel up; a Triton one by its code.

    `module`: StableHLO with its locations, as exported. Those alone have a Mosaic GPU kernel's name.
    """
    names = dict(re.findall(r'^(#loc\d+) = loc\("(\w+)/', module, re.MULTILINE))
    found: dict[str, set[str]] = {}
    for call in re.findall(r"^.*custom_call @(?:mosaic_gpu_v2|__gpu\$xla\.gpu\.triton).*$", module, re.MULTILINE):
        if "@mosaic_gpu_v2" in call:
            name = names[call[call.rindex("#loc") : -1]]
            (code,) = re.findall(r'kernel_hash = "([^"]*)"', call)
        else:
            (code,) = re.findall(r"backend_config = \{(.*)\}, operand_layouts", call)
            (name,) = re.findall(r'\bname = "(\w+)"', code)
        found.setdefault(name, set()).add(code)
    return found
