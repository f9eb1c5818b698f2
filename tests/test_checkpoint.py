"""MODEL in all its forms: directories, files, and Hugging Face repos from a stand-in of the hub."""

import json
import math
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
import tokenizers

from jaxserve import demo
from jaxserve.checkpoint import Checkpoint, DirectoryCheckpoint, GGUFCheckpoint, eos_ids
from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError

GOLDENS = Path(__file__).parent / "goldens"
VOCAB = GOLDENS / "vocab"


def open_(model: object, **options) -> Checkpoint:
    return Checkpoint.open(EngineConfig(model=str(model), **options))


@pytest.fixture
def folder(tmp_path) -> Path:
    """A copy of the sharded golden checkpoint, with a generation_config.json."""
    shutil.copytree(GOLDENS / "qwen3", tmp_path / "tiny")
    (tmp_path / "tiny" / "generation_config.json").write_text('{"temperature": 0.7, "eos_token_id": [1, 2]}')
    return tmp_path / "tiny"


# ---- directories


def test_sharded_directory(folder):
    checkpoint = open_(folder)
    names = [name for name, _ in checkpoint.tensors()]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert isinstance(checkpoint, DirectoryCheckpoint)
    assert sorted(names) == sorted(index["weight_map"])
    assert checkpoint.config["architectures"] == ["Qwen3ForCausalLM"]


@pytest.mark.parametrize(
    ("case", "dtype"), [("llama", np.float32), ("llama_linear", np.float16), ("qwen3", ml_dtypes.bfloat16)]
)
def test_tensors_come_in_the_type_of_the_file(case, dtype):
    arrays = [read() for _, read in open_(GOLDENS / case).tensors()]
    assert {array.dtype for array in arrays} == {np.dtype(dtype)}
    assert all(np.isfinite(array.astype(np.float32)).all() for array in arrays)


def test_a_missing_shard_is_named(folder):
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"lacks model-00002-of-00002\.safetensors"):
        list(open_(folder).tensors())


def test_a_broken_shard_is_named(folder):
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ConfigError, match=r"model-00002-of-00002\.safetensors cannot be read"):
        list(open_(folder).tensors())


NOT_FILES = ["../x.safetensors", "/etc/passwd", "a/b", "", ".", "..", "x\0", "x" * 5000, 1, None, ["x"], {}]


@pytest.mark.parametrize("where", [[], ["a"], 5, "x", *({"a": name} for name in NOT_FILES)], ids=lambda x: str(x)[:30])
def test_an_index_that_lists_no_files_beside_it(folder, where):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    with pytest.raises(ConfigError, match="weight_map must"):
        list(open_(folder).tensors())


def test_an_index_that_lists_nothing(folder):
    (folder / "model.safetensors.index.json").write_text('{"weight_map": null}')
    with pytest.raises(ConfigError, match=r"has no \*\.safetensors"):
        list(open_(folder).tensors())


SIZES = {
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "I16": 2,
    "U16": 2,
    "I32": 4,
    "I64": 8,
    "C64": 8,
}


@pytest.mark.parametrize("kind", SIZES)
def test_tensors_that_are_no_plain_floats_are_refused_by_name(folder, kind):
    (folder / "model.safetensors.index.json").unlink()
    for file in folder.glob("*.safetensors"):
        file.unlink()
    size = 4 * SIZES[kind]
    header = json.dumps({"w": {"dtype": kind, "shape": [4], "data_offsets": [0, size]}}).encode()
    (folder / "m.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\1" * size)
    tensors = open_(folder).tensors()  # the file is open as long as this lives
    _, read = next(tensors)
    with pytest.raises(
        ConfigError, match=f"m.safetensors: w is {kind}, which is not supported: only F16, BF16, F32, F64"
    ):
        read()


def test_a_second_copy_of_the_weights_is_left_alone(folder, tmp_path):
    single = shutil.copytree(GOLDENS / "llama", tmp_path / "single")
    shutil.copy(single / "model.safetensors", single / "consolidated.safetensors")
    names = [name for name, _ in open_(single).tensors()]
    assert len(names) == len(set(names)) > 0


def test_pickles_are_refused_by_name(folder):
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(ConfigError, match=r"no \*\.safetensors .*pytorch_model\.bin would run code"):
        list(open_(folder).tensors())


@pytest.mark.parametrize(
    ("text", "message"), [(None, "No such file"), ("{", "not valid JSON"), ("[1]", "must hold a JSON object")]
)
def test_a_bad_config_json(tmp_path, text, message):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        open_(tmp_path)


# ---- other forms of MODEL


def test_a_gguf_file():
    checkpoint = open_(VOCAB / "smollm.gguf")
    assert isinstance(checkpoint, GGUFCheckpoint)
    assert checkpoint.name == "smollm"


@pytest.mark.parametrize("with_embedding", [True, False], ids=["an embedding", "nothing"])
def test_a_gguf_file_of_a_vocabulary_alone_is_said_to_hold_no_weights(with_embedding: bool, tmp_path):
    path = VOCAB / "qwen2.gguf"
    if not with_embedding:  # as llama.cpp's converter writes it
        path = tmp_path / "vocab.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_head_count(4)
        writer.add_embedding_length(64)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    with pytest.raises(ConfigError) as caught:
        list(open_(path).tensors())
    assert caught.value.message == (
        f"{path} holds no weights: a tokenizer is all that is in it, which --tokenizer takes"
    )


def test_no_model_is_the_demo_model(monkeypatch):
    monkeypatch.setattr(demo, "demo_model", lambda: VOCAB / "smollm.gguf")
    assert Checkpoint.open(EngineConfig()).name == "smollm"


@pytest.mark.parametrize("model", ["./nowhere", "/no/such/dir", "~/nothing-here", "missing.gguf", "a/b/c"])
def test_paths_that_are_not_there(model):
    with pytest.raises(ConfigError, match="no such file or directory"):
        open_(model)


@pytest.mark.parametrize("model", ["x" * 300, "/" + "x" * 300, "a/" + "b" * 5000, "x" * 300 + ".gguf"])
@pytest.mark.parametrize("option", ["model", "tokenizer"])
def test_paths_that_the_system_refuses(folder, model, option):
    config = EngineConfig(**{"model": str(folder), option: model})
    with pytest.raises(ConfigError, match="File name too long") as caught:
        Checkpoint.open(config).load_tokenizer(config)
    assert caught.value.param == option and len(caught.value.message) < 400


def test_a_file_that_is_no_model(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"neither a \.gguf file nor a directory"):
        open_(tmp_path / "model.safetensors")


# ---- sampling defaults, end tokens, tokenizer, template


def test_sampling_defaults(folder, tmp_path):
    own = {"temperature": 0.7, "eos_token_id": [1, 2]}
    (tmp_path / "generation_config.json").write_text('{"top_k": 3}')
    for given, expected in (("auto", own), ("none", {}), (str(tmp_path), {"top_k": 3})):
        config = EngineConfig(model=str(folder), generation_config=given)
        assert Checkpoint.open(config).sampling_defaults(config) == expected
    config = EngineConfig(model=str(folder), generation_config=str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"generation_config\.json: No such file") as caught:
        Checkpoint.open(config).sampling_defaults(config)
    assert caught.value.param == "generation_config"


def test_end_tokens_of_all_configs():
    assert eos_ids({"eos_token_id": [1, 2]}, {}, {"eos_token_id": 0}, {"eos_token_id": None}) == [1, 2, 0]


@pytest.mark.parametrize("value", ["x", -5, 1.5, math.nan, True, 10**30, {}, [None], [[1]], ["x"]])
def test_end_tokens_that_are_none(value):
    with pytest.raises(ConfigError, match="eos_token_id must be a token id or a list of them"):
        eos_ids({}, {"eos_token_id": value})


@pytest.mark.parametrize("case", ["qwen2_tied", "llama"])
def test_a_model_without_a_tokenizer_is_said_to_have_none(case):
    """transformers makes an empty one of a config.json alone, or asks for sentencepiece."""
    with pytest.raises(ConfigError, match="has no tokenizer: no tokenizer.json.*--tokenizer"):
        open_(GOLDENS / case).load_tokenizer(EngineConfig())


def test_another_tokenizer_and_template(folder, tmp_path):
    (tmp_path / "chat.jinja").write_text("{{ messages[0].content }}!")
    config = EngineConfig(
        model=str(folder), tokenizer=str(VOCAB / "spm.gguf"), chat_template=str(tmp_path / "chat.jinja")
    )
    tokenizer = Checkpoint.open(config).load_tokenizer(config)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}]) == "Hi!"
    assert {1, 2} <= set(tokenizer.eos_token_ids)  # the model's end tokens count, whoever cuts the text


@pytest.mark.parametrize(
    "template", ["{% oops %}", "{{", "{{ (" * 5000, 5, {"a": 1}, [{"name": "tool_use", "template": "{{"}]]
)
def test_a_bad_template_of_the_model_is_found_at_the_start_and_can_be_replaced(folder, tmp_path, template):
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a"))
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(ConfigError, match="chat.template|no tokenizer that can be loaded"):
        open_(folder).load_tokenizer(EngineConfig())
    if isinstance(template, str):
        (tmp_path / "good.jinja").write_text("{{ messages }}")
        config = EngineConfig(chat_template=str(tmp_path / "good.jinja"))
        assert open_(folder).load_tokenizer(config).chat_template == "{{ messages }}"


def test_a_template_file_that_is_not_there(folder):
    config = EngineConfig(model=str(folder), tokenizer=str(VOCAB / "spm.gguf"), chat_template="nowhere.jinja")
    with pytest.raises(ConfigError, match=r"--chat-template nowhere\.jinja: No such file"):
        Checkpoint.open(config).load_tokenizer(config)


def test_files_are_utf_8_whatever_the_locale_says(tmp_path):
    (tmp_path / "config.json").write_text('{"name": "Zoë"}', "utf-8")
    (tmp_path / "generation_config.json").write_text('{"name": "Zoë"}', "utf-8")
    (tmp_path / "chat.jinja").write_text("Zoë 😀", "utf-8")
    (tmp_path / "serve.yaml").write_text("served-model-name: Zoë", "utf-8")
    code = """
import argparse, sys
from jaxserve.checkpoint import Checkpoint
from jaxserve.config import EngineConfig, ServeConfig, add_arguments, from_arguments
folder, vocab = sys.argv[1:]
config = EngineConfig(model=folder, tokenizer=vocab, chat_template=folder + "/chat.jinja")
opened = Checkpoint.open(config)
parser = argparse.ArgumentParser()
add_arguments(parser, ServeConfig)
served = from_arguments(parser.parse_args(["--config", folder + "/serve.yaml"]), ServeConfig).served_model_name
names = opened.config["name"], opened.sampling_defaults(config)["name"], *served
print(ascii([*names, opened.load_tokenizer(config).chat_template]))
"""
    ascii_locale = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", code, str(tmp_path), str(VOCAB / "spm.gguf")]
    done = subprocess.run(command, capture_output=True, text=True, env=ascii_locale, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ascii(["Zoë", "Zoë", "Zoë", "Zoë 😀"])


# ---- the hub


@dataclass
class Hub:
    """The few endpoints of huggingface.co that a download needs, and what was asked of them."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    token: str = "hf_secret"
    asked: list[str] = field(default_factory=list)

    COMMITS = {"main": "a" * 40, "v2": "b" * 40}

    def answer(self, path: str, token: str | None) -> tuple[int, dict[str, str], bytes]:
        self.asked.append(path)
        parts = path.split("?")[0].strip("/").split("/")
        if parts[:4] == ["api", "models", "owner", "private"] and token != f"Bearer {self.token}":
            return 401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}, b""
        if parts[:2] == ["api", "models"]:
            if parts[2:4] not in (["owner", "tiny"], ["owner", "private"]):
                return 404, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}, b""
            return self._model(
                "/".join(parts[2:4]), parts[4] if len(parts) > 4 else "", parts[5] if len(parts) > 5 else "main"
            )
        if parts[2:3] == ["resolve"]:
            name = "/".join(parts[4:])
            headers = {"ETag": f'"{len(self.files[name])}-{name}"', "X-Repo-Commit": parts[3]}
            return 200, headers, self.files[name]
        return 404, {}, b""

    def _model(self, repo: str, kind: str, revision: str) -> tuple[int, dict[str, str], bytes]:
        commit = self.COMMITS.get(revision) or (revision if revision in self.COMMITS.values() else None)
        if commit is None:
            return 404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": f"Invalid rev id: {revision}"}, b""
        if kind == "tree":
            rows = [{"type": "file", "path": n, "size": len(b), "oid": f"{len(b)}-{n}"} for n, b in self.files.items()]
            return 200, {}, json.dumps(rows).encode()
        siblings = [{"rfilename": name} for name in self.files]
        return 200, {}, json.dumps({"id": repo, "sha": commit, "siblings": siblings}).encode()


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            status, headers, body = hub.answer(self.path, self.headers.get("Authorization"))
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    for file in (GOLDENS / "qwen3").iterdir():
        hub.files[file.name] = file.read_bytes()
    hub.files |= {
        "pytorch_model.bin": b"\x80",
        "original/params.json": b"{}",
        "consolidated.safetensors": b"",
        "README.md": b"",
    }
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield hub
    server.shutdown()
    server.server_close()


OPEN = """
import json, sys
from jaxserve.checkpoint import Checkpoint
from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
try:
    checkpoint = Checkpoint.open(EngineConfig(**json.loads(sys.argv[1])))
    print(json.dumps([checkpoint.name, str(checkpoint.path), sorted(p.name for p in checkpoint.path.rglob("*"))]))
except ConfigError as error:
    print(json.dumps({"error": error.message}))
"""


def open_in_a_process(hub_url: str, cache: Path, token: str | None = None, **options) -> list | dict:
    """The hub's address is read when its package is imported: so each download is a process."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    environment |= {
        "HF_ENDPOINT": hub_url,
        "HF_HOME": str(cache),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1",
    }
    environment |= {"HF_TOKEN": token} if token else {}
    done = subprocess.run(
        [sys.executable, "-c", OPEN, json.dumps(options)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_a_repo_is_downloaded_once_and_only_what_is_needed(hub, tmp_path):
    name, path, files = open_in_a_process(hub.url, tmp_path, model="owner/tiny")
    assert name == "owner/tiny"
    assert files == sorted(
        file.name for file in (GOLDENS / "qwen3").iterdir() if file.suffix in (".json", ".safetensors")
    )
    assert Hub.COMMITS["main"] in path
    again = open_in_a_process("http://127.0.0.1:9", tmp_path, model="owner/tiny")  # nothing listens there
    assert again == [name, path, files]


def test_a_revision(hub, tmp_path):
    _, path, _ = open_in_a_process(hub.url, tmp_path, model="owner/tiny", revision="v2")
    assert Hub.COMMITS["v2"] in path
    refused = open_in_a_process(hub.url, tmp_path, model="owner/tiny", revision="v3")
    assert refused == {"error": "owner/tiny has no revision 'v3'"}


def test_dummy_weights_need_no_weights(hub, tmp_path):
    _, _, files = open_in_a_process(hub.url, tmp_path, model="owner/tiny", load_format="dummy")
    assert files and not any(name.endswith(".safetensors") for name in files)


def test_a_private_repo_needs_the_token(hub, tmp_path):
    refused = open_in_a_process(hub.url, tmp_path / "a", model="owner/private")
    assert "no Hugging Face repo (a private one needs HF_TOKEN)" in refused["error"]
    assert open_in_a_process(hub.url, tmp_path / "b", token=hub.token, model="owner/private")[0] == "owner/private"


def test_repos_that_are_not_there(hub, tmp_path):
    assert "no Hugging Face repo" in open_in_a_process(hub.url, tmp_path, model="owner/nothing")["error"]
    assert "no name of a Hugging Face repo" in open_in_a_process(hub.url, tmp_path, model="-bad name-")["error"]
    unreachable = open_in_a_process("http://127.0.0.1:9", tmp_path, model="owner/tiny")
    assert unreachable["error"].startswith("owner/tiny is no local file or directory, not in the cache of Hugging Face")


@pytest.mark.parametrize("model", [GOLDENS / "llama", VOCAB / "qwen2.gguf"])
def test_a_revision_of_a_local_model_is_refused(model):
    with pytest.raises(ConfigError, match="--revision main is for Hugging Face repos"):
        open_(model, revision="main")
