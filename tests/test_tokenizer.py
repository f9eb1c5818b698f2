"""Token ids against the reference tokenizers, exact bytes of tokens, chat templates."""

import json
import threading
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

from jaxserve.chat_template import ChatTemplate
from jaxserve.errors import ConfigError, RequestError
from jaxserve.gguf_file import GGUFFile
from jaxserve.gguf_tokenizer import merges_from_scores, tokenizer_from_gguf
from jaxserve.tokenizer import Tokenizer, byte_map

GOLDENS = Path(__file__).parent / "goldens"
VOCABULARIES = sorted(path.stem for path in (GOLDENS / "vocab").glob("*.gguf"))
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well "}]


def gguf_tokenizer(name: str) -> Tokenizer:
    return tokenizer_from_gguf(GGUFFile(GOLDENS / "vocab" / f"{name}.gguf"))


def golden(name: str) -> list[dict]:
    return json.loads((GOLDENS / "vocab" / f"{name}.json").read_text())


@pytest.mark.parametrize("name", VOCABULARIES)
def test_ids_equal_the_reference_tokenizer(name):
    tokenizer = gguf_tokenizer(name)
    wrong = {row["text"]: (tokenizer.encode(row["text"]), row["ids"]) for row in golden(name)}
    wrong = {text: pair for text, pair in wrong.items() if pair[0] != pair[1]}
    assert not wrong


@pytest.mark.parametrize("name", VOCABULARIES)
def test_bytes_of_the_tokens_are_the_text(name):
    """Joined bytes are the exact text (after a normal form, and with SentencePiece's first space)."""
    tokenizer = gguf_tokenizer(name)
    for row in golden(name):
        ids = tokenizer.encode(row["text"], add_special_tokens=False)
        joined = b"".join(map(tokenizer.token_bytes, ids)).decode()
        expected = tokenizer.decode(ids, skip_special_tokens=False)
        assert joined.removeprefix(" " if name == "spm" else "") == expected
        if name not in ("qwen2", "spm"):
            assert joined == row["text"]


@pytest.mark.parametrize("name", VOCABULARIES)
def test_bytes_of_any_id(name):
    tokenizer = gguf_tokenizer(name)
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""
    assert tokenizer.token_bytes(-1) == b""
    assert tokenizer.token_bytes(10**9) == b""
    assert {tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)} >= {bytes([b]) for b in range(0x80, 0xC0)}


@pytest.mark.parametrize("work", ["encode", "decode"])
def test_other_threads_run_while_a_long_text_is_worked_on(work):
    tokenizer = gguf_tokenizer("smollm")
    text = "hello world, this is text. " * 20_000
    ids = tokenizer.encode(text)
    ticks: list[float] = []
    done = threading.Event()

    def tick() -> None:
        while not done.is_set():
            ticks.append(time.monotonic())
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    begun = time.monotonic()
    tokenizer.encode(text) if work == "encode" else tokenizer.decode(ids * 5)
    ended = time.monotonic()
    done.set()
    thread.join()
    assert sum(begun < t < ended for t in ticks) > 10


def test_special_tokens_are_skipped_or_shown():
    tokenizer = gguf_tokenizer("smollm")
    ids = tokenizer.encode("<|im_start|>a<|im_end|>")
    assert [i in tokenizer.special_ids for i in ids] == [True, False, True]
    assert tokenizer.decode(ids) == "a"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>a<|im_end|>"
    assert tokenizer.token_bytes(ids[0]) == b"<|im_start|>"


@pytest.mark.parametrize(
    ("name", "adds"), [("llama-bpe", True), ("tekken", True), ("spm", True), ("qwen2", False), ("smollm", False)]
)
def test_bos_is_added_where_the_model_wants_it(name, adds):
    tokenizer = gguf_tokenizer(name)
    assert (tokenizer.encode("a")[0] == tokenizer.bos_token_id) == adds
    assert tokenizer.encode("a", add_special_tokens=False)[0] != tokenizer.bos_token_id


def test_byte_map_is_one_to_one():
    assert sorted(byte_map().values()) == list(range(256))
    assert byte_map()["Ġ"] == 0x20 and byte_map()["Ċ"] == 0x0A


def test_merges_come_best_score_first_and_never_make_special_pieces():
    vocab = {"a": 0, "b": 1, "ab": 2, "abb": 3, "bb": 4}
    merges = merges_from_scores(vocab, [0, 0, -2.0, -3.0, -1.0], [1, 1, 1, 1, 1])
    assert merges == [("b", "b"), ("a", "b"), ("ab", "b"), ("a", "bb")]
    assert ("b", "b") not in merges_from_scores(vocab, [0, 0, -2.0, -3.0, -1.0], [1, 1, 1, 1, 3])


# ---- a Hugging Face directory


def write_hf_tokenizer(folder: Path, **config) -> Path:
    vocab = {c: i for i, c in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġa", "<s>", "</s>"])}
    backend = Backend(models.BPE(vocab, [("Ġ", "a")]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocab["<s>"])])
    backend.add_special_tokens(["<s>", "</s>"])
    backend.enable_truncation(4)
    backend.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_directory_tokenizer(tmp_path):
    tokenizer = Tokenizer.from_directory(write_hf_tokenizer(tmp_path, chat_template=CHATML), eos_token_ids=[3, 258])
    assert tokenizer.encode("a a a a a a") == [257, *tokenizer.encode("a", add_special_tokens=False), *[256] * 5]
    assert tokenizer.bos_token_id == 257
    assert tokenizer.eos_token_ids == [258, 3]
    assert tokenizer.special_ids == {257, 258}
    assert tokenizer.special_tokens["eos_token"] == "</s>"
    assert tokenizer.chat_template == CHATML
    assert tokenizer.token_bytes(256) == b" a"


def test_template_in_a_file_of_its_own(tmp_path):
    write_hf_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    assert Tokenizer.from_directory(tmp_path).chat_template == CHATML


def test_directory_without_tokenizer_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="no tokenizer"):
        Tokenizer.from_directory(tmp_path)


# ---- chat templates


def render(template: str, messages: list[dict], **how) -> str:
    return gguf_tokenizer("smollm").apply_chat_template(messages, chat_template=template, **how)


def test_chat_ends_with_the_prompt_for_an_answer():
    assert render(CHATML, CHAT[:1]) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert render(CHATML, CHAT[:1], add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"


def test_final_message_is_continued_exactly_where_it_ended():
    how = {"add_generation_prompt": False, "continue_final_message": True}
    assert render(CHATML, CHAT, **how).endswith("<|im_start|>assistant\nWell ")
    assert render(CHATML.replace("m.content", "m.content | trim"), CHAT, **how).endswith("assistant\nWell")
    parts = [CHAT[0], {"role": "assistant", "content": [{"type": "text", "text": "Well"}]}]
    looping = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}END{% endfor %}"
    assert render(looping, parts[1:], **how) == "Well"


@pytest.mark.parametrize(
    ("template", "messages", "how"),
    [
        (CHATML, [], {}),
        (CHATML, [{"role": "user"}], {}),
        (CHATML, [{"role": "user", "content": None}], {}),
        (CHATML, [{"role": "user", "content": 5}], {}),
        ("{{ raise_exception('roles must alternate') }}", CHAT, {}),
        ("{{ messages[9].content.x.y }}", CHAT, {}),
        ("{{ ''.__class__.__mro__ }}", CHAT, {}),
        ("{{ messages.append(1) }}", CHAT, {}),
    ],
)
def test_what_a_template_refuses_is_a_request_error(template, messages, how):
    with pytest.raises(RequestError) as caught:
        render(template, messages, **how)
    assert caught.value.param == "messages"


def test_continuing_and_prompting_exclude_each_other():
    with pytest.raises(RequestError, match="exclude"):
        render(CHATML, CHAT, add_generation_prompt=True, continue_final_message=True)


def test_continuing_a_message_that_the_template_drops():
    with pytest.raises(RequestError, match="leaves out"):
        render("{{ messages[0].content }}", CHAT, add_generation_prompt=False, continue_final_message=True)


def test_without_a_template():
    with pytest.raises(RequestError, match="no chat template") as caught:
        gguf_tokenizer("smollm").apply_chat_template(CHAT)
    assert caught.value.param == "chat_template"


def test_bad_template_is_found_at_start():
    with pytest.raises(ConfigError, match="not valid Jinja"):
        gguf_tokenizer("smollm").with_chat_template("{% for %}")


def test_another_template_leaves_the_first_tokenizer_alone():
    first = gguf_tokenizer("smollm")
    second = first.with_chat_template(CHATML)
    assert (first.chat_template, second.chat_template) == (None, CHATML)
    assert second.encode("a b") == first.encode("a b")


def test_template_variables_and_helpers():
    text = render(
        "{{ eos_token }}|{{ mode }}|{{ tools | tojson }}|{{ strftime_now('%%') }}", CHAT, tools=[{"é": "<"}], mode="x"
    )
    assert text == '<|im_end|>|x|[{"é": "<"}]|%'
    assert render("{% for m in messages %}{% break %}{% endfor %}{% generation %}a{% endgeneration %}", CHAT) == "a"


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        (CHATML, False),
        ("{% for m in messages %}{% for p in m['content'] %}{{ p.text }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% for p in m.content if p.text %}{{ p.text }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% set c = m.content %}{% for p in c %}{{ p }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% for p in m.content | list %}{{ p }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% for t in m.tool_calls %}{{ t }}{% endfor %}{{ m.content }}{% endfor %}", False),
    ],
)
def test_templates_that_want_parts(template, wanted):
    assert ChatTemplate(template).wants_parts == wanted
    assert gguf_tokenizer("smollm").template_wants_parts(template) == wanted


def test_rendering_equals_transformers(tmp_path):
    from transformers import PreTrainedTokenizerFast

    template = (
        "{{ bos_token }}{%- for m in messages %}\n  {%- if m.role == 'system' %}\n[{{ m.content | trim }}]\n  {%- else %}"
        "{{ loop.index0 }}{{ m.content | tojson }}{{ eos_token }}\n{%- endif %}\n{% endfor %}\n"
    )
    chat = [{"role": "system", "content": " be <kind> "}, {"role": "user", "content": "é\n'\""}, CHAT[1]]
    write_hf_tokenizer(tmp_path, chat_template=template)
    ours, theirs = Tokenizer.from_directory(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for how in ({"add_generation_prompt": True}, {"add_generation_prompt": False, "continue_final_message": True}):
        assert ours.apply_chat_template(chat, **how) == theirs.apply_chat_template(chat, tokenize=False, **how)
