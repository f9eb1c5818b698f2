"""Names of TPU slices, and the devices that libtpu describes for them."""

import pytest

from jaxserve.errors import ConfigError
from jaxserve.tpu_topology import CHIPS, parse_topology, slices

SLICES = [topology for chip in CHIPS.values() for topology in slices(chip)]


@pytest.mark.parametrize(
    ("name", "kind", "shape", "hosts"),
    [
        ("v5e-1", "v5e", (1, 1, 1), 1),
        ("v5e-8", "v5e", (2, 4, 1), 1),
        ("v5litepod-8", "v5e", (2, 4, 1), 1),
        ("v6e-4", "v6e", (2, 2, 1), 1),
        ("v6e-16", "v6e", (4, 4, 1), 4),
        ("v5p-8", "v5p", (2, 2, 1), 1),  # counted in cores
        ("v5p-16", "v5p", (2, 2, 2), 2),
        ("v4-32", "v4", (2, 2, 4), 4),
    ],
)
def test_a_name_says_chips_and_hosts(name, kind, shape, hosts):
    topology = parse_topology(name)
    assert (topology.chip.name, topology.shape, topology.num_hosts) == (kind, shape, hosts)


def test_every_slice_is_found_by_its_name():
    assert [parse_topology(topology.name) for topology in SLICES] == SLICES
    assert len({topology.name for topology in SLICES}) == len(SLICES)


@pytest.mark.parametrize("name", ["", "v5e", "v9x-8", "h100-8", "v5e-", "v5e-8-1", "V5E-8", "v5e:2x4", "v5e-08888"])
def test_what_is_no_slice_is_refused_with_the_kinds(name):
    with pytest.raises(ConfigError, match=r"--topology must be a slice of v4, v5e, v5p, v6e, .*, got"):
        parse_topology(name)


@pytest.mark.parametrize(
    ("name", "known"), [("v5e-3", "v5e-1, v5e-4, v5e-8, "), ("v5p-7", "v5p-8, v5p-16, "), ("v6e-0", "v6e-1, ")]
)
def test_a_size_that_there_is_not_is_refused_with_those_there_are(name, known):
    with pytest.raises(ConfigError, match=f"--topology must be one of {known}.*got '{name}'"):
        parse_topology(name)


@pytest.mark.tpu_aot
@pytest.mark.parametrize("topology", [t for t in SLICES if t.num_chips <= 16], ids=str)
def test_libtpu_knows_the_slice(topology, tpu_chip):
    devices = topology.devices()
    assert {device.id for device in devices} == set(range(topology.num_chips))
    assert len({device.process_index for device in devices}) == topology.num_hosts
    assert {device.num_cores for device in devices} == {topology.chip.cores}
