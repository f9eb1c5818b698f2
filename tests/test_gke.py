"""docs/gke.yaml and gke-lws.yaml: each object against its schema, and what in them belongs together."""

import argparse
import copy
import math
import re
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from jaxserve.config import ServeConfig, add_arguments, from_arguments
from jaxserve.http.routes import ROUTES
from jaxserve.tpu_topology import CHIPS, slices

DOCS = Path(__file__).parent.parent / "docs"
VERSION = "1.33"


def objects(name: str) -> dict[str, dict[str, Any]]:
    """The objects of a manifest in docs, by kind."""
    return {each["kind"]: each for each in yaml.safe_load_all((DOCS / name).read_text())}


OBJECTS = objects("gke.yaml")
SET, SET_SERVICE = objects("gke-lws.yaml").values()
SET_SCHEMA = yaml.safe_load((Path(__file__).parent / "leaderworkerset.yaml").read_text())
POD: dict[str, Any] = OBJECTS["Deployment"]["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
# What GKE calls the chips, by the names of tpu_topology.
ACCELERATORS = {"v4": "tpu-v4-podslice", "v5e": "tpu-v5-lite-podslice", "v5p": "tpu-v5p-slice", "v6e": "tpu-v6e-slice"}


def table() -> list[list[str]]:
    """The rows of the table of slices in docs/tpu.md: slice, accelerator, topology, chips, machine type."""
    rows = [line.strip("| ").split(" | ") for line in (DOCS / "tpu.md").read_text().splitlines() if "| `tpu-" in line]
    return [[cell.strip("` ") for cell in row] for row in rows]


@pytest.mark.parametrize("kind", OBJECTS)
def test_the_schema_is_kept(kind: str):
    kubernetes_validate.validate(OBJECTS[kind], VERSION, strict=True)


def test_the_schema_finds_what_is_wrong():
    wrong = OBJECTS["Deployment"] | {"spec": OBJECTS["Deployment"]["spec"] | {"replica": 2}}
    with pytest.raises(kubernetes_validate.ValidationError, match="replica"):
        kubernetes_validate.validate(wrong, VERSION, strict=True)


def check_set(manifest: dict[str, Any]) -> None:
    """Against the fields of LeaderWorkerSet, and its pods against the schema of Kubernetes."""
    jsonschema.validate(manifest, SET_SCHEMA)
    pods = manifest["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    pod_template = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": pods}
    kubernetes_validate.validate(pod_template, VERSION, strict=True)


def test_the_schema_of_the_leader_worker_set_is_kept():
    jsonschema.Draft202012Validator.check_schema(SET_SCHEMA)
    check_set(SET)
    kubernetes_validate.validate(SET_SERVICE, VERSION, strict=True)


def names(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The paths of all fields whose names the API knows: not of labels, selectors and resources, which are free."""
    if isinstance(value, dict) and path[-1:] not in (("labels",), ("nodeSelector",), ("requests",), ("limits",)):
        for name, inner in value.items():
            yield (*path, name)
            yield from names(inner, (*path, name))
    if isinstance(value, list):
        for i, inner in enumerate(value):
            yield from names(inner, (*path, i))


@pytest.mark.parametrize("path", list(names(SET)), ids=lambda path: ".".join(map(str, path)))
def test_each_misspelt_name_of_the_leader_worker_set_is_found(path: tuple[str | int, ...]):
    wrong = copy.deepcopy(SET)
    place = reduce(lambda value, name: value[name], path[:-1], wrong)
    place[f"{path[-1]}s"] = place.pop(path[-1])
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        check_set(wrong)


@pytest.mark.parametrize(
    ("name", "value"), [("size", 0), ("size", "1"), ("restartPolicy", "Never"), ("restartPolicy", None)]
)
def test_wrong_values_of_the_leader_worker_set_are_found(name: str, value: Any):
    wrong = copy.deepcopy(SET)
    wrong["spec"]["leaderWorkerTemplate"][name] = value
    with pytest.raises(jsonschema.ValidationError):
        check_set(wrong)


def test_the_leader_worker_set_has_the_pods_of_the_deployment_on_one_host():
    template = SET["spec"]["leaderWorkerTemplate"]
    assert template["workerTemplate"] == OBJECTS["Deployment"]["spec"]["template"]
    assert template["size"] == 1, "jaxserve serves from one host"


def test_the_service_of_the_leader_worker_set_finds_its_leaders_and_has_a_name_of_its_own():
    label = "leaderworkerset.sigs.k8s.io"
    name = SET["metadata"]["name"]
    assert SET_SERVICE["spec"]["selector"] == {f"{label}/name": name, f"{label}/worker-index": "0"}
    assert SET_SERVICE["metadata"]["name"] == OBJECTS["Service"]["metadata"]["name"] != name
    assert SET_SERVICE["spec"]["ports"] == OBJECTS["Service"]["spec"]["ports"]


def test_chips_of_node_resources_and_options_are_the_same():
    options = from_arguments(parsed(CONTAINER["args"]), ServeConfig)
    assert options.host == "0.0.0.0" and options.port == CONTAINER["ports"][0]["containerPort"]
    selector, chips = POD["nodeSelector"], str(options.tensor_parallel_size)
    shape = selector["cloud.google.com/gke-tpu-topology"]
    assert str(math.prod(map(int, shape.split("x")))) == chips
    assert CONTAINER["resources"] == {"requests": {"google.com/tpu": chips}, "limits": {"google.com/tpu": chips}}
    accelerator = selector["cloud.google.com/gke-tpu-accelerator"]
    assert [accelerator, shape, chips] in [row[1:4] for row in table()]


def parsed(argv: list[str]) -> argparse.Namespace:
    command, *options = argv
    assert command == "serve"
    parser = argparse.ArgumentParser()
    add_arguments(parser, ServeConfig)
    return parser.parse_intermixed_args(options)


def test_the_table_of_slices_has_all_of_one_host():
    hosts = [topology for chip in CHIPS.values() for topology in slices(chip) if topology.num_hosts == 1]
    shown = {row[0]: row[1:4] for row in table()}
    assert set(shown) == {topology.name for topology in hosts}
    for topology in hosts:
        accelerator, shape, chips = shown[topology.name]
        wanted = "x".join(map(str, topology.shape if topology.chip.cores > 1 else topology.shape[:2]))
        assert (accelerator, shape, chips) == (ACCELERATORS[topology.chip.name], wanted, str(topology.num_chips))


def test_probes_ask_a_route_that_needs_no_key_and_the_service_finds_the_pod():
    paths = {CONTAINER[probe]["httpGet"]["path"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert paths == {"/health"} and "/health" in {route.path for route in ROUTES}
    labels = OBJECTS["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert OBJECTS["Service"]["spec"]["selector"] == labels == OBJECTS["Deployment"]["spec"]["selector"]["matchLabels"]


def test_the_secret_of_the_page_is_the_one_that_is_read():
    command = re.search(r"kubectl create secret generic (\S+)(.*?)\n```", (DOCS / "tpu.md").read_text(), re.DOTALL)
    assert command
    keys = set(re.findall(r"--from-literal=([\w-]+)=", command[2]))
    refs = [each["valueFrom"]["secretKeyRef"] for each in CONTAINER["env"] if "valueFrom" in each]
    assert {ref["name"] for ref in refs} == {command[1]} and {ref["key"] for ref in refs} == keys
