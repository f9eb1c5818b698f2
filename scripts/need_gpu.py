"""What scripts that need a GPU say where there is none."""

import subprocess
import sys

FIND_DEVICE = "import jax; device = jax.devices()[0]; print(device.platform, device.device_kind)"


def find_gpu() -> str:
    """The GPU's name. A process of its own asks JAX, which would keep the memory. Ends this one if there is none."""
    done = subprocess.run([sys.executable, "-c", FIND_DEVICE], capture_output=True, text=True, check=False)
    if done.returncode:
        said = [f"exit code {done.returncode}", *done.stderr.strip().splitlines()]
        sys.exit(f"{sys.argv[0]} needs a GPU, and JAX does not start: {said[-1]}")
    platform, _, kind = done.stdout.strip().partition(" ")
    check_platform(platform)
    return kind


def check_platform(platform: str) -> None:
    """Ends the script, with code 1, unless JAX's platform is a GPU's."""
    if platform != "gpu":
        sys.exit(f"{sys.argv[0]} needs a GPU: JAX finds a {platform}; with an NVIDIA GPU, pip install '.[cuda]'")
