"""Makes the compiled bytes of a Mosaic GPU kernel depend on the kernel only. Needed on jax 0.11 and older.

There a process-wide counter ("body_0", "body_1", ...: the base name of debug dumps) is part of the bytes that jaxlib
hashes to find a kernel it has compiled already. So the same kernel in another place, or traced in another order, is
compiled anew and misses the persistent cache: a warm start would be as slow as a cold one. jax 0.12 leaves it out.
"""

import logging

import jax

log = logging.getLogger(__name__)

FIXED_IN = (0, 12)
_ATTRIBUTE = "mosaic_gpu.dump_basename"


def is_needed() -> bool:
    return jax.__version_info__[:2] < FIXED_IN


def make_kernel_hashes_stable() -> bool:
    """Patches jax so that kernel hashes repeat; True if they will. Does nothing where jax does it itself.

    The patch is to a private function: if it has moved, kernels still work and only start-up is slower, so that is
    logged and not an error.
    """
    if not is_needed():
        return True
    from jax.experimental.mosaic.gpu import core
    from jaxlib.mlir import ir

    serialize_module = getattr(core, "_run_serde_pass", None)
    if serialize_module is None:
        log.warning("jax %s: kernel hashes could not be made stable; every start compiles all kernels", jax.__version__)
        return False
    if getattr(serialize_module, "is_stable", False):
        return True

    def stable(module, *, serialize, ir_version=None):
        out = serialize_module(module, serialize=serialize, ir_version=ir_version)
        if serialize and _ATTRIBUTE in out.operation.attributes:
            with out.context:
                out.operation.attributes[_ATTRIBUTE] = ir.StringAttr.get("kernel")
        return out

    stable.is_stable = True  # type: ignore[attr-defined]
    core._run_serde_pass = stable
    return True
