"""Every option, declared once: the CLI, `--config FILE.yaml`, `LLM(...)` keywords and the docs derive from here.

The environment is read here and nowhere else.
"""

import argparse
import dataclasses
import difflib
import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.errors import ConfigError

DEMO_MODEL = "demo"  # MODEL of `jaxserve serve` without one: SmolLM2-135M-Instruct from a wheel on PyPI

# Options that people bring from vLLM and that jaxserve does not have, so that they are refused by name.
NOT_YET = frozenset(
    "pipeline_parallel_size data_parallel_size enable_expert_parallel kv_cache_dtype "
    "trust_remote_code enable_lora lora_modules max_loras max_lora_rank speculative_config speculative_model "
    "num_speculative_tokens swap_space cpu_offload_gb ssl_keyfile ssl_certfile limit_mm_per_prompt rope_scaling "
    "hf_overrides distributed_executor_backend".split()
)
SHORT_FORMS = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "dp": "data_parallel_size",
               "q": "quantization"}  # fmt: skip

ENVIRONMENT = """\
environment:
  JAXSERVE_CACHE_DIR  where compiled programs and the demo model are kept (default: ~/.cache/jaxserve)
  JAXSERVE_API_KEY    keys, comma-separated: those that `serve` asks for; our clients send the first
  HF_TOKEN            for private and gated Hugging Face repos"""


UNLIMITED = 2**31  # max_queue_len and max_num_mixed_tokens of an engine that nobody watches
AUTO_OR_NONE = ("auto", "none")
TOOL_CALL_PARSERS = (
    "deepseek_v3", "deepseek_v31", "granite", "hermes", "llama3_json", "mistral", "openai", "phi4_mini_json",
    "pythonic", "qwen3_coder", "qwen3_xml",
)  # fmt: skip
QUANTIZATIONS = ("int8", "fp8")
REASONING_PARSERS = ("deepseek_r1", "granite", "mistral", "openai", "openai_gptoss", "qwen3")


def option(
    default: Any,
    doc: str,
    *,
    group: str,
    parse: Any = None,
    choices: tuple | None = None,
    many: bool = False,
    **limits: Any,
) -> Any:
    """Declares one option: default, help and its heading, how text becomes a value, and its `ge`/`gt`/`le` limits.

    A list option is repeatable; with `many` one flag also takes several values.
    """
    metadata = {"doc": doc, "group": group, "parse": parse, "choices": choices, "many": many, **limits}
    if isinstance(default, list):
        return dataclasses.field(default_factory=list, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def parse_size(text: str | int) -> int:
    """A number with an optional suffix: 4096, 4k, 4Ki, 2.5G, 8GiB. k/M/G are powers of ten, Ki/Mi/Gi powers of two."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKmMgGtT]?)(i?)[bB]?", str(text).strip())
    if not match:
        raise ConfigError(f"{text!r} is not a size: write it as 4096, 4k, 4Ki or 8GiB")
    number, unit, binary = match.groups()
    scale = (1024 if binary else 1000) ** " kmgt".index(unit.lower() or " ")
    return int(float(number) * scale)


def size_text(size_bytes: int) -> str:
    """A size as logs and errors show it, in the largest unit of which there is one: 1.50 GiB, 20.25 MiB, 512 bytes."""
    for exponent, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(size_bytes) >= 1024**exponent:
            return f"{size_bytes / 1024**exponent:.2f} {unit}"
    return f"{size_bytes} bytes"


def parse_max_model_len(text: str | int) -> int | str:
    """A length in tokens, or 'auto' (also -1): the longest that fits the KV cache."""
    if str(text) in ("auto", "-1"):
        return "auto"
    try:
        return parse_size(text)
    except ConfigError:
        raise ConfigError(f"{text!r} is not a length: write it as 4096, 4k or 4Ki, or auto") from None


def parse_list(text: str) -> list[str]:
    """One value, or several as vLLM takes them: a JSON list. Raises ValueError."""
    return json.loads(text) if text.startswith("[") else [text]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Options of the engine, offline and served. Values may be given as text; raises ConfigError naming the option."""

    model: str = option(
        DEMO_MODEL,
        "Hugging Face repo id, directory of safetensors, or .gguf file; demo: a tiny model to try",
        group="model",
    )
    revision: str | None = option(None, "branch, tag or commit of the Hugging Face repo", group="model")
    tokenizer: str | None = option(None, "repo id or directory of the tokenizer, if not the model's own", group="model")
    chat_template: str | None = option(None, "file with a Jinja chat template, if not the model's own", group="model")
    reasoning_parser: str = option(
        "auto",
        "how the model writes its reasoning; auto: what its chat template shows, if that is clear",
        group="model",
        choices=(*AUTO_OR_NONE, *REASONING_PARSERS),
    )
    generation_config: str = option(
        "auto",
        "default sampling values; auto: the model's generation_config.json; none: jaxserve's own; or a directory",
        group="model",
    )
    load_format: str = option(
        "auto",
        "auto: real weights; dummy: random weights made on the device",
        group="model",
        choices=("auto", "dummy"),
    )
    dtype: str = option(
        "auto",
        "type of weights and activations; auto: bfloat16, or float32 on a CPU that does not compute in bfloat16",
        group="model",
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    quantization: str | None = option(
        None,
        "weights kept in 8 bits and multiplied so, activations too, quantized on the way; int8: TPU v4 to v6e, NVIDIA "
        "from Ampere on, CPU; fp8: NVIDIA from Ada on, TPU 7x (if not given: as the dtype says)",
        group="model",
        choices=QUANTIZATIONS,
    )
    max_model_len: int | str | None = option(
        None,
        "longest prompt + output in tokens; auto: the longest that fits (if not given: the model's own)",
        group="memory",
        parse=parse_max_model_len,
        ge=1,
    )
    gpu_memory_utilization: float = option(
        0.9, "share of a GPU's or TPU's memory that jaxserve may take", group="memory", gt=0, le=1
    )
    kv_cache_memory_bytes: int | None = option(
        None,
        "size of the KV cache on each device, e.g. 8GiB; wins over the share",
        group="memory",
        parse=parse_size,
        gt=0,
    )
    page_size: int | None = option(
        None,
        "tokens of one KV page (if not given: 64 on GPU and TPU, 16 on CPU)",
        group="memory",
        choices=(16, 32, 64, 128, 256),
    )
    enable_prefix_caching: bool = option(True, "reuse the KV pages of equal prompt beginnings", group="memory")
    max_num_seqs: int | None = option(
        None,
        "sequences computed together at most (if not given: 256 on GPU, there 1024 when not serving with 2048 "
        "tokens of a step or more; 128 on TPU, 32 on CPU)",
        group="scheduling",
        ge=1,
        le=4096,
    )
    max_num_batched_tokens: int | None = option(
        None,
        "tokens of one step at most (if not given: 8192 on GPU, 2048 on TPU, 160 on CPU)",
        group="scheduling",
        parse=parse_size,
        ge=16,
    )
    max_num_mixed_tokens: int | None = option(
        None,
        "tokens of a step that takes prompts while others decode, at most; half as many while 64 or fewer do: fewer "
        "make streams steadier, more finish prompts sooner (if not given: 1024 or, for models of a hidden size below "
        "4096, 2048 when serving on GPU; no limit otherwise)",
        group="scheduling",
        parse=parse_size,
        ge=16,
    )
    scheduling_policy: str = option(
        "fcfs",
        "order of the waiting queue: first come, or lowest priority value first",
        group="scheduling",
        choices=("fcfs", "priority"),
    )
    max_queue_len: int = option(
        1024, "requests waiting at most; a further one is refused (429)", group="scheduling", ge=1
    )
    request_timeout: float | None = option(
        None, "seconds after which a request ends with an error (if not given: never)", group="scheduling", gt=0
    )
    tensor_parallel_size: int = option(
        1,
        "devices of this host to spread the model over; each holds a part of the weights and of the KV cache",
        group="execution",
        ge=1,
    )
    attention_backend: str = option(
        "auto",
        "attention kernels; auto: the best for the device",
        group="execution",
        choices=("auto", "reference", "mosaic_gpu", "triton", "mosaic_tpu"),
    )
    enforce_eager: bool = option(
        False, "start without compiling all steps ahead: ready at once, slow at first", group="execution"
    )
    seed: int = option(0, "seed of the engine's own random draws", group="execution", ge=0)

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            object.__setattr__(self, f.name, checked(f, getattr(self, f.name)))


@dataclass(frozen=True, kw_only=True)
class ServeConfig(EngineConfig):
    """Options of `jaxserve serve`."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0: all", group="HTTP server")
    port: int = option(8000, "port to listen on; 0: any free one", group="HTTP server", ge=0, le=65535)
    api_server_count: int = option(
        1,
        "processes that speak HTTP and turn text to tokens and back: more, if one core is not enough for that",
        group="HTTP server",
        ge=1,
        le=64,
    )
    api_key: list[str] = option(
        [],
        "key that clients must send; repeatable; also JAXSERVE_API_KEY, comma-separated",
        group="HTTP server",
    )
    served_model_name: list[str] = option(
        [], "name(s) of the model in the API (if not given: MODEL)", group="HTTP server", many=True
    )
    tool_call_parser: str = option(
        "auto",
        "how the model writes tool calls; auto: what its chat template shows, if that is clear",
        group="HTTP server",
        choices=(*AUTO_OR_NONE, *TOOL_CALL_PARSERS),
    )
    allowed_origins: list[str] = option(
        [],
        "origins whose pages may call from a browser (CORS), or * for any (if not given: no page may)",
        group="HTTP server",
        many=True,
        parse=parse_list,
    )
    allowed_methods: list[str] = option(
        [], "methods that they may use (if not given: all)", group="HTTP server", many=True, parse=parse_list
    )
    allowed_headers: list[str] = option(
        [], "headers that they may send (if not given: all)", group="HTTP server", many=True, parse=parse_list
    )
    allow_credentials: bool = option(False, "let them send cookies", group="HTTP server")
    disable_docs: bool = option(False, "serve neither /docs nor /openapi.json", group="HTTP server")
    max_body_bytes: int = option(16 * 2**20, "largest request body", group="HTTP server", parse=parse_size, ge=1024)
    ignore_unknown_fields: bool = option(
        False, "accept and drop request fields that jaxserve does not know", group="HTTP server"
    )
    response_store_size: int = option(
        1000, "responses of /v1/responses kept in memory at most; 0: none", group="HTTP server", ge=0, le=1_000_000
    )
    response_store_ttl: float = option(
        86_400, "seconds for which they are kept", group="HTTP server", gt=0, le=86_400 * 365
    )

    def __post_init__(self) -> None:
        EngineConfig.__post_init__(self)
        keys = [key.strip() for key in self.api_key]  # as a header's value arrives
        if not all(keys):
            raise ConfigError("--api-key may not be blank: anybody could send that", param="api_key")
        if not all(key.isprintable() for key in keys):
            raise ConfigError("--api-key may not hold control characters: no header could", param="api_key")
        object.__setattr__(self, "api_key", keys)
        if not all(name.strip() for name in self.served_model_name):
            raise ConfigError(
                "--served-model-name may not be blank: nobody could ask for it", param="served_model_name"
            )
        self._check_cors()

    def _check_cors(self) -> None:
        for name in ("allowed_methods", "allowed_headers", "allow_credentials"):
            if getattr(self, name) and not self.allowed_origins:
                raise ConfigError(f"--{name.replace('_', '-')} says nothing without --allowed-origins", param=name)
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ConfigError("--allow-credentials needs --allowed-origins by name, not *", param="allow_credentials")
        for origin in self.allowed_origins:
            if not re.fullmatch(r"\*|null|[\w+.-]+://[^/]+", origin):
                message = f"--allowed-origins must be like https://example.org, without a path, or *; got {origin!r}"
                raise ConfigError(message, param="allowed_origins")


def offline_config(owner: str, model: str, options: dict[str, Any]) -> EngineConfig:
    """The config of `owner(model, **options)`: queues all, watches no stream. Raises TypeError, ConfigError."""
    known = EngineConfig.__dataclass_fields__
    if unknown := [name for name in options if name not in known]:
        raise TypeError(f"{owner}(): {unknown_option(unknown[0], known)}; it knows {', '.join(known)}")
    return EngineConfig(model=model, **{"max_queue_len": UNLIMITED, "max_num_mixed_tokens": UNLIMITED, **options})


def flag_of(f: dataclasses.Field) -> str:
    return "--" + f.name.replace("_", "-")


def unknown_option(given: str, known: Iterable[str]) -> str:
    """What to say of an option (a flag or a key) that is none of `known`: written the same way, with a suggestion."""
    dashes, name = re.fullmatch(r"(-*)([^=]*).*", given, re.DOTALL).groups()  # type: ignore[union-attr] - matches all
    plain = name.replace("-", "_")
    plain = SHORT_FORMS.get(plain, plain) if dashes == "-" else plain
    if plain in NOT_YET:
        means = "" if plain == name.replace("-", "_") else f" (--{plain.replace('_', '-')})"
        return f"{dashes}{name}{means} is not supported yet"
    by_plain = {k.lstrip("-").replace("-", "_"): k for k in known if not re.fullmatch(r"-\w", k)}
    close = difflib.get_close_matches(plain, by_plain, n=1)
    if len(plain) == 1:  # no letter is an option of its own here
        close = [k for k in by_plain if k.startswith(plain)]
    hint = f": did you mean {' or '.join(by_plain[k] for k in close)}?" if close else ""
    return f"unknown option {(dashes + name)!r}{hint}"


def checked(f: dataclasses.Field, value: Any, *, show: Callable[[Any], str] = repr) -> Any:
    """The value of option `f`, given as text, from YAML or from Python. Raises ConfigError naming the flag.

    `show`: a value as who gave it writes it.
    """
    flag, kinds = flag_of(f), str(f.type)

    def got(bad: Any) -> str:
        return show(bad) + _leave_out(bad)

    if value is None and "None" in kinds:
        return None
    if f.default_factory is list:
        value = value if isinstance(value, (list, tuple)) else [value]
        if parse := f.metadata["parse"]:
            try:
                value = [each for v in value for each in (parse(v) if isinstance(v, str) else [v])]
            except ValueError:
                raise ConfigError(f"{flag}: not a JSON list of texts: {show(value)}", param=f.name) from None
        if bad := [v for v in value if not isinstance(v, str)]:
            raise ConfigError(f"{flag} must be text (in YAML: in quotes), got {got(bad[0])}", param=f.name)
        return list(value)
    if f.type is bool:
        if not isinstance(value, bool):
            raise ConfigError(f"{flag} must be true or false, got {got(value)}", param=f.name)
        return value
    if "int" in kinds or "float" in kinds:
        value = _number(f, value, got)
    elif not isinstance(value, str):
        raise ConfigError(f"{flag} must be text (in YAML: in quotes), got {got(value)}", param=f.name)
    _check_limits(f, value, show)
    return value


def _number(f: dataclasses.Field, value: Any, got: Callable[[Any], str]) -> Any:
    flag = flag_of(f)
    whole = "float" not in str(f.type)
    wanted = "a whole number" if whole else "a number"
    if value is None or isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ConfigError(f"{flag} must be {wanted}, got {got(value)}", param=f.name)
    if isinstance(value, str) or f.metadata["parse"]:
        try:
            value = _parser_of(f)(value)
        except ConfigError as error:
            raise ConfigError(f"{flag}: {error.message}{_leave_out(value)}", param=f.name) from None
        except ValueError:
            raise ConfigError(f"{flag} must be {wanted}, got {got(value)}", param=f.name) from None
    if whole and isinstance(value, float):
        raise ConfigError(f"{flag} must be {wanted}, got {got(value)}", param=f.name)
    return value


def _leave_out(value: Any) -> str:
    """What to do instead, for who writes an option to say that he does not want it."""
    asks_for_nothing = str(value).strip().lower() in ("", "none", "null", "default")
    return "; leave the option out for its default" if asks_for_nothing else ""


def _check_limits(f: dataclasses.Field, value: Any, show: Callable[[Any], str]) -> None:
    flag = flag_of(f)
    if (choices := f.metadata["choices"]) and value not in choices:
        raise ConfigError(f"{flag} must be one of {', '.join(map(str, choices))}, got {show(value)}", param=f.name)
    if isinstance(value, str):
        return
    for key, sign, holds in (
        ("ge", "at least", lambda v, x: v >= x),
        ("gt", "greater than", lambda v, x: v > x),
        ("le", "at most", lambda v, x: v <= x),
    ):
        if (limit := f.metadata.get(key)) is not None and not holds(value, limit):
            raise ConfigError(f"{flag} must be {sign} {limit}, got {show(value)}", param=f.name)


def _parser_of(f: dataclasses.Field) -> Any:
    if f.metadata["parse"]:
        return f.metadata["parse"]
    kinds = str(f.type)
    return float if "float" in kinds else int if "int" in kinds else str


class _HelpFormatter(argparse.HelpFormatter):
    """Keeps the lines of the epilog, which is a table."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


def add_arguments(parser: argparse.ArgumentParser, cls: type[EngineConfig], *, without: Collection[str] = ()) -> None:
    """Adds every option of `cls`, but those `without`, as a flag, by group, MODEL also as a positional, and --config.

    Unset flags stay absent, so that `from_arguments` can tell them from given ones. Parse with
    `parse_intermixed_args`: Python 3.12.1's `parse_args` loses a MODEL that stands after flags.
    """
    parser.add_argument(
        "model_positional", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help="same as --model"
    )
    groups: dict[str, argparse._ArgumentGroup] = {}
    for f in dataclasses.fields(cls):
        if f.name in without:
            continue
        name = f.metadata["group"]
        group = groups.get(name) or groups.setdefault(name, parser.add_argument_group(name))
        group.add_argument(flag_of(f), **_argument(f))
    groups["model"].add_argument(
        "--config",
        metavar="FILE.yaml",
        default=argparse.SUPPRESS,
        help="YAML file with any of these options; flags win over it",
    )
    parser.formatter_class, parser.epilog = _HelpFormatter, ENVIRONMENT


def _argument(f: dataclasses.Field) -> dict[str, Any]:
    """Keywords of `add_argument` for one option."""
    doc = (f.metadata["doc"] + _shown_default(f)).replace("%", "%%")
    kwargs: dict[str, Any] = {"default": argparse.SUPPRESS, "help": doc}
    if f.type is bool:
        return kwargs | {"action": argparse.BooleanOptionalAction}
    kwargs["metavar"] = _metavar(f)
    if f.default_factory is list:
        return kwargs | ({"action": "extend", "nargs": "+"} if f.metadata["many"] else {"action": "append"})
    return kwargs


def _shown_default(f: dataclasses.Field) -> str:
    return "" if f.default in (None, dataclasses.MISSING) else f" (default: {f.default})"


def _metavar(f: dataclasses.Field) -> str:
    if f.metadata["choices"]:
        return "{" + ",".join(map(str, f.metadata["choices"])) + "}"
    if f.name.endswith("_bytes"):
        return "SIZE"
    if f.metadata["parse"] is parse_max_model_len:
        return "N|auto"
    kinds = str(f.type)
    return "NUMBER" if "float" in kinds else "N" if "int" in kinds else "TEXT"


def from_arguments(args: argparse.Namespace, cls: type[EngineConfig]) -> Any:
    """The config of parsed flags, over the YAML file of --config, over the environment, over the defaults."""
    given = dict(vars(args))
    known = {f.name: f for f in dataclasses.fields(cls)}
    values: dict[str, Any] = {}
    if path := given.pop("config", None):
        values |= _read_yaml(Path(path), known)
    if "model_positional" in given:
        if given.get("model", given["model_positional"]) != given["model_positional"]:
            raise ConfigError("MODEL and --model name two different models: give one", param="model")
        given["model"] = given.pop("model_positional")
    values |= {k: v for k, v in given.items() if k in known}
    if "api_key" in known and not values.get("api_key"):
        values["api_key"] = _api_keys_of_the_server()
    return cls(**values)


def _read_yaml(path: Path, known: dict[str, dataclasses.Field]) -> dict[str, Any]:
    import yaml

    try:
        text = path.read_text("utf-8")
        loaded = yaml.safe_load(text) or {}
        node = yaml.compose(text, yaml.SafeLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path}{_why_not_yaml(error)}", param="config") from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"--config {path}: must hold `option: value` lines", param="config")
    keys = [key.value for key, _ in node.value] if isinstance(node, yaml.MappingNode) else []
    if twice := [key for key in keys if keys.count(key) > 1]:  # of which YAML would take the last
        raise ConfigError(f"--config {path}: option {twice[0]!r} is given twice", param="config")
    values = {}
    for key, value in loaded.items():
        key = key if isinstance(key, str) else _in_yaml(key)
        name = key.replace("-", "_")
        if name not in known:
            written = [k.replace("_", "-") for k in known] if "-" in key else known
            raise ConfigError(f"--config {path}: {unknown_option(key, written)}", param="config")
        if name in values:
            raise ConfigError(f"--config {path}: option {key!r} is given twice", param="config")
        try:
            values[name] = checked(known[name], value, show=_in_yaml)
        except ConfigError as error:
            raise ConfigError(f"--config {path}: {error.message}", param=name) from None
    return values


def _in_yaml(value: Any) -> str:
    """A value as YAML writes it: null, true."""
    import yaml

    if isinstance(value, str):
        return repr(value)
    return yaml.safe_dump(value, default_flow_style=True, width=math.inf).strip().removesuffix("\n...")


def _why_not_yaml(error: Exception) -> str:
    """What is wrong with a YAML file, and where, to stand behind its name."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if isinstance(error, OSError):
        return f": {error.strerror}"
    if mark and problem:
        return f", line {mark.line + 1}, column {mark.column + 1}: {problem}"
    return f" is not YAML: {' '.join(str(error).split())}"


def options_markdown(cls: type[EngineConfig]) -> str:
    """A Markdown table of the options of `cls` for each group, for the docs."""
    lines: list[str] = []
    group = None
    for f in dataclasses.fields(cls):
        if f.metadata["group"] != group:
            group = f.metadata["group"]
            lines += [
                "",
                f"## {group[0].upper()}{group[1:]}",
                "",
                "| option | value | default | meaning |",
                "|---|---|---|---|",
            ]
        default = "" if f.default in (None, dataclasses.MISSING) else f"`{f.default}`"
        shown = f"{_metavar(f)} [{_metavar(f)} ...]" if f.metadata["many"] else _metavar(f)  # as argparse does
        flag, value = f"`{flag_of(f)}`", f"`{shown}`".replace("|", "\\|")
        if f.type is bool:
            flag, value = f"{flag}, `--no-{flag_of(f)[2:]}`", ""
        lines.append(f"| {flag} | {value} | {default} | {f.metadata['doc']} |")
    return "\n".join(lines).strip() + "\n"


def api_keys_from_environment() -> list[str]:
    """Keys in JAXSERVE_API_KEY, comma-separated."""
    return [k.strip() for k in os.environ.get("JAXSERVE_API_KEY", "").split(",") if k.strip()]


def _api_keys_of_the_server() -> list[str]:
    """Raises ConfigError if JAXSERVE_API_KEY is set and holds no key: the server would be open, and nobody told."""
    keys = api_keys_from_environment()
    if not keys and "JAXSERVE_API_KEY" in os.environ:
        raise ConfigError("JAXSERVE_API_KEY is set and holds no key: give one, or unset it", param="api_key")
    return keys


def client_api_key() -> str | None:
    """The key that our own clients (chat, complete, bench serve) send: JAXSERVE_API_KEY, or OPENAI_API_KEY."""
    return next(iter(api_keys_from_environment()), None) or os.environ.get("OPENAI_API_KEY") or None


def cache_dir() -> Path:
    """Where compiled steps and the demo model are kept: JAXSERVE_CACHE_DIR, or ~/.cache/jaxserve."""
    return Path(os.environ.get("JAXSERVE_CACHE_DIR") or Path.home() / ".cache" / "jaxserve").expanduser()


def make_cache_dir(name: str) -> Path:
    """The folder `name` in the cache, which can be written to. Raises ConfigError if it cannot."""
    path = cache_dir() / name
    try:
        path.mkdir(parents=True, exist_ok=True)
        reason = None if os.access(path, os.W_OK | os.X_OK) else "it is read-only"
    except OSError as error:
        reason = error.strerror
    if reason:
        raise ConfigError(f"the cache {path} cannot be written to ({reason}): set JAXSERVE_CACHE_DIR to another folder")
    return path


def hf_token() -> str | None:
    """HF_TOKEN, for private and gated repos."""
    return os.environ.get("HF_TOKEN")


# glibc then asks for huge pages. On a CPU the step reads all weights each time, through half a million small ones:
# 5% faster at one row, 11% at 16 (docs/benchmarks.md). Read when a process starts, so that only a parent can set it.
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def engine_environment() -> dict[str, str]:
    """The environment of an engine's process: this one's, and huge pages unless the user has set glibc up himself."""
    return {**HUGE_PAGES, **os.environ}


def tracer_environment() -> dict[str, str]:
    """The environment of a process that traces programs: this one's, without accelerators."""
    return {**os.environ, "JAX_PLATFORMS": "cpu"}


REPORTED_PREFIXES = (
    "GLIBC_TUNABLES",
    "JAX_",
    "JAXSERVE_",
    "XLA_",
    "CUDA_",
    "NVIDIA_",
    "TPU_",
    "LIBTPU_",
    "HF_",
    "OMP_",
    "LD_LIBRARY_PATH",
)
SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL", "AUTH")


def reported_environment() -> dict[str, str]:
    """Variables that change how jaxserve runs, for `collect-env`. Of a secret only that it is set."""
    found = {k: v for k, v in sorted(os.environ.items()) if k.startswith(REPORTED_PREFIXES)}
    return {k: "(set, not shown)" if any(w in k.upper() for w in SECRET_WORDS) else v for k, v in found.items()}


def compile_only() -> None:
    """Sets libtpu up for compiling: it uses no chip and may be loaded twice, and asks no cloud what this machine is.

    The type and the name of the host only keep it from complaining that it does not know them.
    """
    for name in ("TPU_SKIP_MDS_QUERY", "ALLOW_MULTIPLE_LIBTPU_LOAD"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ["JAX_PLATFORMS"] = "cpu"


MEMORY_SHARE = "XLA_CLIENT_MEM_FRACTION"
OLD_MEMORY_SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # JAX refuses both together
JAX_MEMORY_SHARE = 0.75  # of a GPU, that JAX takes if nobody says how much


def set_memory_share(share: float, *, started: bool) -> tuple[float, str]:
    """Caps what JAX takes of a GPU's memory, unless the user did or JAX has `started`: then it is too late.

    Returns the share in force, and who set it if that was not us.
    """
    for name in (MEMORY_SHARE, OLD_MEMORY_SHARE):
        if text := os.environ.get(name):
            return float(text), f"{name}={text}"
    if started:
        return JAX_MEMORY_SHARE, "JAX was started before, with its default"
    os.environ[MEMORY_SHARE] = str(share)
    return share, ""
