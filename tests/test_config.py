"""Options: declared once, and the same value and the same error as a flag, as YAML and as a keyword."""

import argparse
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxserve import config
from jaxserve.config import EngineConfig, ServeConfig, parse_size, size_text
from jaxserve.errors import ConfigError

DOCS = Path(__file__).parent.parent / "docs" / "options.md"


def parsed(*argv: str, cls: type[EngineConfig] = ServeConfig) -> ServeConfig:
    parser = argparse.ArgumentParser()
    config.add_arguments(parser, cls)
    return config.from_arguments(parser.parse_intermixed_args(argv), cls)


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("JAXSERVE_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        (4096, 4096),
        ("4k", 4000),
        ("4Ki", 4096),
        ("2.5G", 2_500_000_000),
        ("8GiB", 8 * 2**30),
        ("1 MB", 10**6),
    ],
)
def test_sizes(text: str | int, size: int):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.00 KiB"), (3 * 2**19, "1.50 MiB"), (2**40, "1024.00 GiB")],
)
def test_sizes_are_shown_in_a_unit_that_suits_them(size_bytes: int, text: str):
    assert size_text(size_bytes) == text


@pytest.mark.parametrize("text", ["", "k", "-4", "4x", "4 4", "1e9", "4Kib4", "nan"])
def test_what_is_not_a_size(text: str):
    with pytest.raises(ConfigError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize(
    "argv",
    [["m"], ["--model", "m"], ["m", "--model", "m"], ["--port", "1", "m"], ["--api-key", "k", "m", "--seed", "1"]],
)
def test_model_may_stand_anywhere(argv: list[str]):
    assert parsed(*argv).model == "m"


def test_two_different_models_are_refused():
    with pytest.raises(ConfigError, match="two different models"):
        parsed("a", "--model", "b")


def test_without_flags_everything_is_the_default():
    assert parsed() == ServeConfig()
    assert ServeConfig().model == config.DEMO_MODEL


def test_flags_become_typed_values():
    got = parsed(
        *"--max-model-len 4k --kv-cache-memory-bytes 2GiB --page-size 32 --no-enable-prefix-caching --enforce-eager".split(),
        *"--request-timeout 1.5 --served-model-name a b --api-key x --api-key y --gpu-memory-utilization 0.5".split(),
    )
    assert (got.max_model_len, got.kv_cache_memory_bytes, got.page_size) == (4000, 2 * 2**30, 32)
    assert (got.enable_prefix_caching, got.enforce_eager, got.request_timeout) == (False, True, 1.5)
    assert (got.served_model_name, got.api_key, got.gpu_memory_utilization) == (["a", "b"], ["x", "y"], 0.5)


@pytest.mark.parametrize("text", ["auto", "-1"])
def test_longest_length_that_fits(text: str):
    assert parsed(f"--max-model-len={text}").max_model_len == "auto"


BAD = [
    ("port", "65536", "at most 65535"),
    ("port", "-1", "at least 0"),
    ("port", "x", "whole number"),
    ("port", "80.5", "whole number"),
    ("max_model_len", "0", "at least 1"),
    ("max_model_len", "long", "not a length: write it as 4096, 4k or 4Ki, or auto$"),
    ("max_model_len", "none", "not a length: .*; leave the option out for its default"),
    ("port", "default", "whole number, got 'default'; leave the option out"),
    ("gpu_memory_utilization", "0", "greater than 0"),
    ("gpu_memory_utilization", "1.1", "at most 1"),
    ("gpu_memory_utilization", "nan", "greater than 0"),
    ("kv_cache_memory_bytes", "0", "greater than 0"),
    ("page_size", "24", "one of 16, 32, 64, 128, 256"),
    ("dtype", "int8", "one of auto, bfloat16"),
    ("load_format", "pt", "one of auto, dummy"),
    ("max_num_seqs", "0", "at least 1"),
    ("request_timeout", "0", "greater than 0"),
    ("seed", "-1", "at least 0"),
    ("tensor_parallel_size", "0", "at least 1"),
]


@pytest.mark.parametrize(("name", "value", "message"), BAD)
def test_a_bad_value_is_refused_everywhere_with_its_name(name: str, value: str, message: str, tmp_path: Path):
    flag = "--" + name.replace("_", "-")
    file = tmp_path / "options.yaml"
    file.write_text(f"{name}: {value}\n")
    ways = (
        lambda: parsed(f"{flag}={value}"),
        lambda: ServeConfig(**{name: value}),
        lambda: parsed("--config", str(file)),
    )
    for way in ways:
        with pytest.raises(ConfigError, match=message) as caught:
            way()
        assert flag in caught.value.message and caught.value.param == name


@pytest.mark.parametrize("field", dataclasses.fields(ServeConfig), ids=lambda f: f.name)
def test_every_option_refuses_a_value_of_the_wrong_kind(field: dataclasses.Field):
    with pytest.raises(ConfigError, match=config.flag_of(field)):
        ServeConfig(**{field.name: {"a": 1}})


@pytest.mark.parametrize("field", dataclasses.fields(ServeConfig), ids=lambda f: f.name)
def test_every_option_is_a_flag_with_help_and_a_line_in_the_docs(field: dataclasses.Field):
    parser = argparse.ArgumentParser()
    config.add_arguments(parser, ServeConfig)
    action = next(a for a in parser._actions if config.flag_of(field) in a.option_strings)
    assert field.metadata["doc"] in action.help.replace("%%", "%")
    assert f"| `{config.flag_of(field)}`" in config.options_markdown(ServeConfig)


def test_keywords_may_be_text():
    assert EngineConfig(max_model_len="4k", kv_cache_memory_bytes="8GiB").kv_cache_memory_bytes == 8 * 2**30


def test_none_is_only_for_options_without_a_value():
    assert EngineConfig(max_model_len=None).max_model_len is None
    with pytest.raises(ConfigError, match="--seed must be a whole number"):
        EngineConfig(seed=None)


def test_yaml_values_and_flags_over_them(tmp_path: Path):
    file = tmp_path / "options.yaml"
    file.write_text(
        "model: m\nmax-model-len: 4k\nport: 9\nenforce_eager: true\napi-key: [a, b]\nserved-model-name: n\n"
    )
    got = parsed("--config", str(file), "--port", "10")
    assert (got.model, got.max_model_len, got.port, got.enforce_eager) == ("m", 4000, 10, True)
    assert (got.api_key, got.served_model_name) == (["a", "b"], ["n"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 1", "unknown option 'prot': did you mean port?"),
        ("serve-model-name: m", "did you mean served-model-name?"),
        ("zzz: 1", "unknown option 'zzz'$"),
        ("data-parallel-size: 2", "data-parallel-size is not supported yet"),
        ("- a\n- b", "must hold `option: value` lines"),
        ("port: 1\na: [", r"options.yaml, line \d, column \d: expected the node content"),
        ("a: b: c", "options.yaml, line 1, column 5: mapping values are not allowed here"),
        ("a: \x00", "options.yaml is not YAML: "),
        ("enforce-eager: sometimes", "must be true or false"),
        ("port: true", "whole number"),
        ("api-key: [1234]", "in quotes"),
        ("revision: 1.0", "in quotes"),
        ("gpu-memory-utilization: .nan", r"must be greater than 0, got \.nan$"),
        ("page-size: 32\npage_size: 64", "given twice"),
        ("port: 1\nport: 2", "option 'port' is given twice"),
        ("port: 1\n'port': 1", "option 'port' is given twice"),
    ],
)
def test_bad_yaml_names_the_file(text: str, message: str, tmp_path: Path):
    file = tmp_path / "options.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        parsed("--config", str(file))
    assert str(file) in caught.value.message


@pytest.mark.parametrize("value", [None, [None], True, {"a": False}])
@pytest.mark.parametrize("field", dataclasses.fields(ServeConfig), ids=lambda f: f.name)
def test_errors_of_a_file_speak_yaml_and_those_of_keywords_python(field: dataclasses.Field, value: Any, tmp_path: Path):
    file = tmp_path / "options.yaml"
    file.write_text(yaml.safe_dump({field.name: value}))
    try:
        config.checked(field, value)
    except ConfigError as error:
        in_python = error.message
    else:
        return  # it may be that
    inner = value[0] if isinstance(value, list) and field.default_factory is list else value
    assert f"got {inner!r}" in in_python
    with pytest.raises(ConfigError) as caught:
        parsed("--config", str(file))
    in_yaml = {"None": "null", "True": "true", "[None]": "[null]", "{'a': False}": "{a: false}"}
    assert f"got {in_yaml[str(inner)]}" in caught.value.message
    assert not re.search(r"None|True|False", caught.value.message.replace(str(file), ""))
    assert ("leave the option out for its default" in caught.value.message) == (inner is None)


@pytest.mark.parametrize(("key", "shown"), [("null", "null"), ("~", "null"), ("yes", "true")])
def test_a_key_that_is_no_text_is_shown_as_yaml_writes_it(key: str, shown: str, tmp_path: Path):
    file = tmp_path / "options.yaml"
    file.write_text(f"? {key}\n: 1")
    with pytest.raises(ConfigError, match=re.escape(f"unknown option {shown!r}")):
        parsed("--config", str(file))


@pytest.mark.parametrize("names", [[""], [" "], ["m", "\t"]])
def test_a_blank_name_of_the_model_is_refused(names: list[str]):
    with pytest.raises(ConfigError, match="--served-model-name may not be blank"):
        ServeConfig(served_model_name=names)


@pytest.mark.parametrize("text", ["", "{}", "# nothing", "---"])
def test_an_empty_yaml_file_says_nothing(text: str, tmp_path: Path):
    (tmp_path / "options.yaml").write_text(text)
    assert parsed("--config", str(tmp_path / "options.yaml")) == ServeConfig()


def test_a_missing_yaml_file_is_named(tmp_path: Path):
    file = tmp_path / "nothing.yaml"
    with pytest.raises(ConfigError) as caught:
        parsed("--config", str(file))
    assert caught.value.message == f"--config {file}: No such file or directory"


def test_keys_come_from_the_environment_unless_given(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAXSERVE_API_KEY", "a, b,")
    assert parsed().api_key == ["a", "b"]
    assert parsed("--api-key", "c").api_key == ["c"]


def test_the_key_that_clients_send(monkeypatch: pytest.MonkeyPatch):
    assert config.client_api_key() is None
    monkeypatch.setenv("OPENAI_API_KEY", "o")
    assert config.client_api_key() == "o"
    monkeypatch.setenv("JAXSERVE_API_KEY", "a,b")
    assert config.client_api_key() == "a"


def test_the_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("JAXSERVE_CACHE_DIR", str(tmp_path))
    assert config.cache_dir() == tmp_path
    monkeypatch.setenv("JAXSERVE_CACHE_DIR", "")
    assert config.cache_dir() == Path.home() / ".cache" / "jaxserve"


@pytest.mark.parametrize("kind", ["file in the way", "read-only"])
def test_a_cache_that_cannot_be_written_is_one_error(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("JAXSERVE_CACHE_DIR", str(tmp_path / "cache"))
    assert config.make_cache_dir("models") == tmp_path / "cache" / "models"
    if kind == "read-only":
        monkeypatch.setattr(config.os, "access", lambda path, mode: False)  # root may write anywhere
    else:
        monkeypatch.setenv("JAXSERVE_CACHE_DIR", str(tmp_path / "file"))
        (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="the cache .*models cannot be written to .*: set JAXSERVE_CACHE_DIR"):
        config.make_cache_dir("models")


KNOWN = [
    "--port",
    "--tensor-parallel-size",
    "--page-size",
    "--model",
    "--served-model-name",
    "--max-model-len",
    "-h",
    "--help",
]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--prot", "unknown option '--prot': did you mean --port?"),
        ("--prot=80", "unknown option '--prot': did you mean --port?"),
        ("--max_model_len", "unknown option '--max_model_len': did you mean --max-model-len?"),
        ("--model-name", "unknown option '--model-name': did you mean --served-model-name?"),
        ("-p", "unknown option '-p': did you mean --port or --page-size?"),
        ("-port", "unknown option '-port': did you mean --port?"),
        ("--zzz", "unknown option '--zzz'"),
        ("--data-parallel-size", "--data-parallel-size is not supported yet"),
        ("--data_parallel_size=2", "--data_parallel_size is not supported yet"),
        ("-dp", "-dp (--data-parallel-size) is not supported yet"),
        ("-tp", "unknown option '-tp': did you mean --tensor-parallel-size?"),
        ("kv-cache-dtype", "kv-cache-dtype is not supported yet"),
    ],
)
def test_what_is_said_of_an_unknown_option(given: str, said: str):
    assert config.unknown_option(given, KNOWN) == said


def test_what_is_not_supported_yet_is_no_option():
    options = {f.name for f in dataclasses.fields(ServeConfig)}
    assert not options & config.NOT_YET and set(config.SHORT_FORMS.values()) <= config.NOT_YET | options


@pytest.mark.parametrize("field", dataclasses.fields(ServeConfig), ids=lambda f: f.name)
def test_none_in_the_help_is_a_value_that_can_be_given(field: dataclasses.Field):
    if "none:" in field.metadata["doc"]:
        assert getattr(parsed(f"{config.flag_of(field)}=none"), field.name) == "none"


@pytest.mark.parametrize("field", dataclasses.fields(ServeConfig), ids=lambda f: f.name)
def test_the_docs_show_a_flag_as_the_help_does(field: dataclasses.Field):
    parser = argparse.ArgumentParser()
    config.add_arguments(parser, ServeConfig)
    action = next(a for a in parser._actions if config.flag_of(field) in a.option_strings)
    shown = parser._get_formatter()._format_action_invocation(action)
    (line,) = [x for x in DOCS.read_text().splitlines() if x.startswith(f"| `{config.flag_of(field)}`")]
    flags, value = [cell.strip().replace("`", "").replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:3]]
    assert f"{flags} {value}".strip() == shown


def test_the_yaml_of_the_docs_can_be_used(tmp_path: Path):
    (example,) = re.findall(r"```yaml\n(.*?)```", DOCS.read_text(), re.DOTALL)
    file = tmp_path / "options.yaml"
    file.write_text(example)
    assert parsed("--config", str(file)).served_model_name == ["qwen", "gpt-4"]


def test_the_docs_are_made_from_the_options():
    page = DOCS.read_text()
    assert config.options_markdown(ServeConfig) in page, "run scripts/make_options_page"


@pytest.mark.parametrize("keys", [[""], ["good", " "]])
def test_a_blank_api_key_is_refused(keys):
    with pytest.raises(ConfigError, match="--api-key may not be blank"):
        ServeConfig(api_key=keys)


def test_a_key_is_what_a_header_can_bring():
    assert ServeConfig(api_key=["k2 ", "\tk3\n"]).api_key == ["k2", "k3"]
    with pytest.raises(ConfigError, match="--api-key may not hold control characters"):
        ServeConfig(api_key=["a\nb"])


@pytest.mark.parametrize("text", ["", ",", " ", " , "])
def test_a_variable_for_keys_without_a_key_does_not_open_the_server(text: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAXSERVE_API_KEY", text)
    with pytest.raises(ConfigError, match="JAXSERVE_API_KEY is set and holds no key"):
        parsed()
    assert parsed("--api-key", "k").api_key == ["k"]


@pytest.mark.parametrize(
    "flags",
    [("http://a", "http://b"), ('["http://a", "http://b"]',), ("http://a", "--allowed-origins", "http://b")],
)
def test_origins_come_one_by_one_or_as_vllm_takes_them(flags: tuple[str, ...]):
    assert parsed("--allowed-origins", *flags).allowed_origins == ["http://a", "http://b"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"allowed_methods": ["GET"]}, "--allowed-methods says nothing without --allowed-origins"),
        ({"allow_credentials": True}, "--allow-credentials says nothing without --allowed-origins"),
        ({"allow_credentials": True, "allowed_origins": "*"}, "by name"),
        ({"allowed_origins": ["https://a.b/"]}, "without a path"),
        ({"allowed_origins": "a.b"}, "like https://example.org"),
        ({"allowed_origins": '["https://a.b'}, "--allowed-origins: not a JSON list"),
        ({"allowed_origins": "[1]"}, "--allowed-origins must be text"),
    ],
)
def test_origins_that_cannot_be_meant_are_refused(options: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        ServeConfig(**options)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("max_model_length", "LLM(): unknown option 'max_model_length': did you mean max_model_len?; it knows model, "),
        ("data_parallel_size", "LLM(): data_parallel_size is not supported yet; it knows model, "),
    ],
)
def test_a_wrong_keyword_is_told_the_same(name: str, said: str):
    with pytest.raises(TypeError) as caught:
        config.offline_config("LLM", "m", {name: 1})
    assert str(caught.value).startswith(said)
