"""What scripts that need a GPU say where there is none."""

import sys


def check_platform(platform: str) -> None:
    """Ends the script, with code 1, unless JAX's platform is a GPU's."""
    if platform != "gpu":
        sys.exit(f"{sys.argv[0]} needs a GPU: JAX finds a {platform}; with an NVIDIA GPU, pip install '.[cuda]'")
