"""Cloud TPU slices by the names that Google gives them (v5e-8, v5p-16): their chips, and how these are laid out.

Also which chips a host has. Importing this does not import jax; `Topology.devices` does.
"""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.errors import ConfigError

GiB, MiB = 2**30, 2**20


@dataclass(frozen=True)
class Chip:
    """One kind of chip. Figures are of one chip, which is one device of jax.

    HBM that programs may use: what libtpu 0.0.50 says when it refuses one that is too large. Bandwidth and peaks:
    docs.cloud.google.com/tpu/docs/v4, v5e, v5p, v6e; int8 on v5p: tpu_info.py of jax 0.12. VMEM of a TensorCore:
    docs.jax.dev, Pallas TPU hardware.
    """

    name: str
    hbm_bytes: int
    hbm_bytes_per_s: float
    bf16_flops_per_s: float
    int8_flops_per_s: float
    vmem_bytes: int
    cores: int = 1  # TensorCores; where there are two, names of slices count them
    config: str | None = None  # libtpu's name for how a Cloud host sets the chip up, where it is not the default


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v4", int(30.75 * GiB), 1.2e12, 275e12, 275e12, 16 * MiB, cores=2, config="megacore"),
        Chip("v5e", int(15.75 * GiB), 819e9, 197e12, 393e12, 128 * MiB),
        Chip("v5p", int(95.73 * GiB), 2.765e12, 459e12, 918e12, 64 * MiB, cores=2, config="megachip_tccontrol"),
        Chip("v6e", int(31.24 * GiB), 1.638e12, 918e12, 1836e12, 128 * MiB, config="megachip_tccontrol"),
    )
}
ALIASES = {"v5litepod": "v5e"}

PCI_VENDOR = "0x1ae0"  # Google; by its device ids jax (hardware_utils.py) tells TPUs from what else is of that vendor
PCI_DEVICES = {"0x005e": "v4", "0x0062": "v5p", "0x0063": "v5e", "0x006f": "v6e", "0x0076": "7x"}

# Chips of a slice -> how they are laid out.
SQUARES = {
    1: (1, 1, 1), 4: (2, 2, 1), 8: (2, 4, 1), 16: (4, 4, 1), 32: (4, 8, 1), 64: (8, 8, 1), 128: (8, 16, 1),
    256: (16, 16, 1),
}  # fmt: skip
CUBES = {4: (2, 2, 1), 8: (2, 2, 2), 16: (2, 2, 4), 32: (2, 4, 4), 64: (4, 4, 4), 128: (4, 4, 8)}


@dataclass(frozen=True)
class Topology:
    """A slice of TPUs."""

    name: str
    chip: Chip
    shape: tuple[int, int, int]  # chips

    @property
    def num_chips(self) -> int:
        x, y, z = self.shape
        return x * y * z

    @property
    def host_shape(self) -> tuple[int, int, int]:
        """Chips of one host: up to 8 of a square slice hang on one, otherwise 4 do."""
        return self.shape if self.num_chips <= 4 or self.num_chips == 8 and self.chip.cores == 1 else (2, 2, 1)

    @property
    def num_hosts(self) -> int:
        x, y, z = self.host_shape
        return self.num_chips // (x * y * z)

    def __str__(self) -> str:
        chips, hosts = _count(self.num_chips, "chip"), _count(self.num_hosts, "host")
        return f"{self.name} ({chips}, {'x'.join(map(str, self.shape))}, {hosts})"

    def devices(self) -> list[Any]:
        """Devices of jax to compile for, in the order of their ids. They run nothing.

        Described as jax's own tests (aot_test.py) describe a slice at hand, so that its compile cache finds on TPUs
        what was compiled for these. Raises ConfigError if libtpu, which has the compiler, is not installed.
        """
        from jax.experimental import topologies

        options: dict[str, Any] = {"chips_per_host_bounds": self.host_shape}
        if self.chip.config:
            options["chip_config_name"] = self.chip.config
        try:
            found = topologies.get_topology_desc(
                platform="tpu", topology_name=f"{self.chip.name}:{'x'.join(map(str, self.shape))}", **options
            )
        except RuntimeError as error:
            if "not installed" not in str(error):
                raise
            raise ConfigError("the TPU compiler is not installed: pip install 'jax[tpu]' brings libtpu") from None
        return list(found.devices)


def parse_topology(name: str) -> Topology:
    """The slice of that name. Raises ConfigError that lists the names there are."""
    match = re.fullmatch(r"(\w+)-(\d{1,4})", name)
    chip = CHIPS.get(ALIASES.get(match[1], match[1])) if match else None
    if match is None or chip is None:
        raise ConfigError(
            f"--topology must be a slice of {', '.join(CHIPS)}, such as v5e-8 or v5p-16, got {name!r}", param="topology"
        )
    shapes = SQUARES if chip.cores == 1 else CUBES
    shape = shapes.get(int(match[2]) // chip.cores) if int(match[2]) % chip.cores == 0 else None
    if shape is None:
        known = ", ".join(topology.name for topology in slices(chip))
        raise ConfigError(f"--topology must be one of {known}, got {name!r}", param="topology")
    return Topology(name, chip, shape)


def chips_of_host(root: Path = Path("/")) -> list[str]:
    """The kind of each TPU chip that hangs on the PCI bus of this host: a name in CHIPS, or 7x."""
    return list(_pci_chips(root / "sys/bus/pci/devices"))


def _pci_chips(devices: Path) -> Iterator[str]:
    for device in sorted(devices.glob("*.0")):
        with contextlib.suppress(OSError, KeyError):
            if (device / "vendor").read_text().strip() == PCI_VENDOR:
                yield PCI_DEVICES[(device / "device").read_text().strip()]


def device_files(root: Path = Path("/")) -> list[Path]:
    """What a process must be able to open to use the chips: one for each."""
    folder = root / "dev"
    return sorted(folder.glob("accel[0-9]*")) or sorted(folder.glob("vfio/[0-9]*"))


def slices(chip: Chip) -> list[Topology]:
    """All slices of a kind, smallest first."""
    shapes = SQUARES if chip.cores == 1 else CUBES
    return [Topology(f"{chip.name}-{count * chip.cores}", chip, shape) for count, shape in shapes.items()]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
