"""The floors of the house (ARCHITECTURE.md), checked on the real import graph, and what must never import jax."""

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "jaxserve"

# A file imports from lower floors, or from its own floor inside its own folder. A folder stands for all its files.
FLOORS: dict[str, int] = {
    "child_process": 0,
    "config": 0,
    "errors": 0,
    "logs": 0,
    "shapes": 0,
    "tpu_topology": 1,
    "api_client": 1,
    "chat": 1,
    "chat_template": 1,
    "checkpoint": 1,
    "control": 1,
    "demo": 1,
    "device_memory": 1,
    "detokenize": 1,
    "fill_in_middle": 1,
    "gguf_file": 1,
    "gguf_tokenizer": 1,
    "metrics": 1,
    "request": 1,
    "structured": 1,
    "sampling_inputs": 1,
    "settings": 1,
    "sharding": 1,
    "state": 1,
    "tokenizer": 1,
    "beam_search": 2,
    "frontend": 2,
    "grammar": 2,
    "models": 2,
    "paging": 2,
    "pallas_kernels": 2,
    "parsers": 2,
    "sampling": 2,
    "batch": 3,
    "deployment": 3,
    "http": 3,
    "plan": 3,
    "scheduler": 3,
    "scheduler_check": 3,
    "sequence": 3,
    "step": 3,
    "step_cache": 3,
    "waiting_queue": 3,
    "controller": 4,
    "programs": 4,
    "tracers": 4,
    "fit": 5,
    "runner": 5,
    "engine": 6,
    "engine_process": 7,
    "llm": 7,
    "async_llm": 8,
    "bench": 8,
    "collect_env": 8,
    "compile_ahead": 8,
    "http_process": 8,
    "repl": 8,
    "run_batch": 8,
    "serve": 8,
    "__init__": 8,  # loads the public names when asked
    "cli": 9,
    "__main__": 10,
}
# Their tests run in milliseconds, and an HTTP process starts without an accelerator stack.
WITHOUT_JAX = (
    "api_client",
    "async_llm",
    "beam_search",
    "chat",
    "checkpoint",
    "child_process",
    "cli",
    "compile_ahead",
    "config",
    "control",
    "controller",
    "detokenize",
    "fill_in_middle",
    "frontend",
    "gguf_file",
    "grammar",
    "http",
    "http_process",
    "metrics",
    "paging.page_pool",
    "paging.page_table",
    "paging.prefix_cache",
    "parsers",
    "repl",
    "request",
    "run_batch",
    "structured",
    "scheduler",
    "serve",
    "settings",
    "tokenizer",
    "tpu_topology",
)


@functools.cache
def modules() -> dict[str, Path]:
    """Name (without `jaxserve.`) -> file; `models` is models/__init__.py and models.llama is a file in it."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts if parts[-1] != "__init__" or len(parts) == 1 else parts[:-1])
        found[name] = path
    return found


def floor(name: str) -> int:
    return FLOORS[name.split(".")[0]]


def folder(name: str) -> str:
    return name.split(".")[0] if "." in name or modules()[name].name == "__init__.py" and name != "__init__" else ""


def imports(path: Path, *, lazy: bool) -> Iterator[tuple[str, int]]:
    """(dotted name, line) of each import in a file; with `lazy` also those in functions and under TYPE_CHECKING."""
    nodes = list(ast.parse(path.read_text()).body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno
        elif lazy or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not _is_type_checking(node):
            nodes.extend(child for child in ast.walk(node) if isinstance(child, ast.Import | ast.ImportFrom))


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def inner(dotted: str) -> str | None:
    """The module of ours that an imported dotted name means; None for others' and for `jaxserve.__version__`."""
    parts = dotted.split(".")
    if parts[0] != "jaxserve" or parts[1:] == ["__version__"]:
        return None
    for end in range(len(parts), 1, -1):
        if (name := ".".join(parts[1:end])) in modules():
            return name
    return "__init__"


def breach(importer: str, imported: str) -> bool:
    if floor(imported) < floor(importer):
        return False
    return not (floor(imported) == floor(importer) and folder(imported) == folder(importer))


def test_every_module_has_a_floor():
    missing = sorted({name.split(".")[0] for name in modules()} - set(FLOORS))
    assert not missing, f"say on which floor these stand, in FLOORS and in ARCHITECTURE.md: {missing}"


def test_the_walk_sees_the_package():
    assert {"cli", "config", "bench.serve", "__init__"} <= set(modules())
    assert ("jaxserve.llm.LLM", True) in {(name, True) for name, _ in imports(PACKAGE / "__init__.py", lazy=True)}
    assert "jaxserve.llm.LLM" not in {name for name, _ in imports(PACKAGE / "__init__.py", lazy=False)}


@pytest.mark.parametrize("name", sorted(modules()))
def test_imports_go_down(name: str):
    wrong = [
        f"{modules()[name].name}:{line} imports {target} (floor {floor(target)}) from floor {floor(name)}"
        for dotted, line in imports(modules()[name], lazy=True)
        if (target := inner(dotted)) and breach(name, target)
    ]
    assert not wrong, "\n".join(wrong)


def test_a_breach_is_found():
    assert breach("config", "request")  # up
    assert breach("paging.page_pool", "models.registry")  # across folders of a floor
    assert not breach("paging.page_pool", "paging.page_pool")
    assert not breach("request", "errors")


def test_host_side_modules_never_import_jax():
    names = sorted(n for n in modules() if any(n == w or n.startswith(f"{w}.") for w in WITHOUT_JAX))
    assert {"config", "request"} <= set(names)
    code = f"""
import importlib, sys
for name in {names!r}:
    importlib.import_module("jaxserve." + name)
    heavy = sorted({{"jax", "jaxlib", "flax", "torch"}} & set(sys.modules))
    if heavy:
        sys.exit(f"jaxserve.{{name}} imports {{heavy}}")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_cli_starts_light():
    code = (
        "import sys, jaxserve.cli; print(*sorted({'jax','transformers','aiohttp','numpy','yaml'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_public_names_are_lazy():
    code = "import sys, jaxserve; jaxserve.SamplingParams(n=2); assert 'jax' not in sys.modules; print(jaxserve.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip()


def test_an_unknown_public_name_is_an_attribute_error():
    import jaxserve

    with pytest.raises(AttributeError, match="nothing_here"):
        _ = jaxserve.nothing_here


def test_the_environment_is_read_in_config_only():
    readers = []
    for name, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv") and name != "config":
                readers.append(f"{name}:{node.lineno}")
    assert not readers, f"the environment is read in config.py and nowhere else: {readers}"
