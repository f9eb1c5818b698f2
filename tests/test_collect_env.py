"""What `jaxserve collect-env` says of TPUs: hosts are folders that look like one, devices are stand-ins."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxserve import collect_env
from jaxserve.collect_env import _device_line, tpus
from jaxserve.tpu_topology import CHIPS, PCI_DEVICES, chips_of_host

GOOGLE, V5E, NETWORK = "0x1ae0", "0x0063", "0x0042"


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of a host with four chips of v5e, its network card of the same vendor, and a GPU."""
    monkeypatch.delenv("TPU_ACCELERATOR_TYPE", raising=False)
    monkeypatch.setattr(collect_env, "_version", lambda name: "0.0.50")
    for i in range(4):
        add_pci(tmp_path, f"0000:00:0{i + 4}.0", GOOGLE, V5E)
        (tmp_path / "dev/vfio").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"dev/vfio/{i}").touch()
    (tmp_path / "dev/vfio/vfio").touch()
    add_pci(tmp_path, "0000:00:02.0", GOOGLE, NETWORK)
    add_pci(tmp_path, "0000:00:03.0", "0x10de", "0x2330")
    add_pci(tmp_path, "0000:00:04.1", GOOGLE, V5E)  # another function of a chip
    huge_pages = tmp_path / "sys/kernel/mm/transparent_hugepage/enabled"
    huge_pages.parent.mkdir(parents=True)
    huge_pages.write_text("[always] madvise never\n")
    return tmp_path


def add_pci(root: Path, address: str, vendor: str, device: str) -> None:
    folder = root / "sys/bus/pci/devices" / address
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(f"{vendor}\n")
    (folder / "device").write_text(f"{device}\n")


def test_chips_their_files_and_the_slice_are_told(host: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    files = ", ".join(f"{host}/dev/vfio/{i}" for i in range(4))
    assert tpus(host) == [
        "4 x v5e (15.75 GiB for programs each)",
        f"device files: {files}: can be opened",
        "slice: v5litepod-4 (4 chips, 2x2x1, 1 host)",
    ]


def test_what_is_missing_or_slow_is_told(host: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).endswith("/2"))
    monkeypatch.setattr(collect_env, "_version", lambda name: None)
    (host / "sys/kernel/mm/transparent_hugepage/enabled").write_text("always [madvise] never\n")
    _, files, *rest = tpus(host)
    assert files.endswith(f": {host}/dev/vfio/2 cannot be opened by this user")
    assert rest == [
        "slice: TPU_ACCELERATOR_TYPE is not set",
        "libtpu is not installed: pip install 'jax[tpu]'",
        "transparent huge pages: always [madvise] never: starts are slower than with 'always'",
    ]


def test_older_drivers_and_containers_without_the_files(host: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v99-4")
    (host / "dev/accel0").touch()
    assert tpus(host)[1:] == [
        f"device files: {host}/dev/accel0: can be opened",
        "slice: v99-4, which jaxserve does not know",
    ]
    for file in (host / "dev/accel0", *(host / "dev/vfio").iterdir()):
        file.unlink()
    assert tpus(host)[1].startswith("device files: none")


def test_a_host_without_tpus_has_no_lines(host: Path):
    for device in (host / "sys/bus/pci/devices").iterdir():
        (device / "device").write_text(NETWORK)
    assert chips_of_host(host) == [] and tpus(host) == []
    assert tpus(host / "nothing") == []


def test_every_kind_of_chip_is_known_on_the_bus():
    assert set(CHIPS) <= set(PCI_DEVICES.values())


def test_a_tpu_as_jax_shows_it_has_its_place():
    device = SimpleNamespace(
        id=3, platform="tpu", device_kind="TPU v5 lite", coords=[1, 1, 0], process_index=0,
        memory_stats=lambda: {"bytes_limit": 15.75 * 2**30},
    )  # fmt: skip
    assert _device_line(device) == "3: tpu TPU v5 lite at (1, 1, 0) of host 0, 15.8 GiB"


def test_the_report_has_a_section_of_tpus(host: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(collect_env, "tpus", lambda: ["4 x v5e"])
    monkeypatch.setenv("TPU_WORKER_ID", "0")
    report = "\n".join(collect_env.lines(with_devices=False))
    assert "\ntpus:\n  4 x v5e\n" in report and "TPU_WORKER_ID=0" in report
    assert f"libtpu: {collect_env._version('libtpu')}" in report
