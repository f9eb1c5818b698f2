"""Which kernels of this package a module for CUDA holds."""

import re
from pathlib import Path

_FOLDER = Path(__file__).parent.parent / "jaxserve" / "pallas_kernels"

# The names of all Mosaic GPU kernels, as their source has them.
MOSAIC_GPU = {
    name for path in _FOLDER.glob("*_mosaic_gpu.py") for name in re.findall(r'\bkernel_name="(\w+)"', path.read_text())
}
TRITON = {"rope_and_write", "paged_decode", "combine_decode", "paged_prefill"}


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
