"""Structured outputs: what is refused at the door, and that every finished output matches, on every path."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from jaxserve import LLM, SamplingParams, StructuredOutputsParams
from jaxserve.errors import EngineError, RequestError
from jaxserve.gguf_file import GGUFFile
from jaxserve.gguf_tokenizer import tokenizer_from_gguf
from jaxserve.grammar import JUMP_FROM, GrammarCompiler
from jaxserve.parsers import REASONING_FORMATS, thinking_limiter
from jaxserve.parsers.reasoning import Thinking
from jaxserve.structured import MAX_GRAMMAR_CHARS, compile_grammar, from_request
from jaxserve.tokenizer import Vocabulary

GGUF = Path(__file__).parent / "goldens" / "vocab" / "smollm.gguf"
VOCAB_SIZE = 700
LONG = "a text that is long enough to be appended at once"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": [LONG]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}
TAG = {
    "structures": [{"begin": "<f>", "schema": {"type": "object", "properties": {"x": {"type": "boolean"}},
                    "required": ["x"], "additionalProperties": False}, "end": "</f>"}],
    "triggers": ["<f"],
}  # fmt: skip
TAGS = {
    "structures": [
        {"begin": "<n=", "schema": {"type": "integer"}, "end": ">"},
        {"begin": "<w=", "schema": {"type": "string"}, "end": "/>"},
    ],
    "triggers": ["<n", "<w"],
}


# ---- what is refused


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "exactly one of json, regex.*got none"),
        ({"json": {}, "regex": "a"}, "got json and regex"),
        ({"json_object": False}, "json_object may only be true"),
        ({"choice": []}, "choice may not be empty"),
        ({"choice": ["a", ""]}, r"choice\[1\] may not be an empty string"),
        ({"choice": [1]}, r"choice\[0\] must be a string"),
        ({"regex": 5}, "regex must be a string, got 5"),
        ({"regex": ""}, "regex is bad: it is empty"),
        ({"regex": "a\0"}, "regex is bad: it contains a NUL"),
        ({"regex": "("}, "regex is bad: .*unclosed group"),
        ({"json": "{"}, "json is bad"),
        ({"json": '{"const": NaN}'}, "json is bad: JSON is malformed"),
        ({"structural_tag": '{"structures": [NaN]}'}, "structural_tag is bad: JSON is malformed"),
        ({"json": "[]"}, "json is bad: a schema is an object"),
        ({"json": {"type": "strin"}}, "json is bad: Invalid type: strin"),
        ({"json": {"type": "array", "uniqueItems": True}}, "json is bad: .*uniqueItems"),
        ({"json": {"minimum": 5, "maximum": 3, "type": "integer"}}, "json is bad: Unsatisfiable"),
        ({"json": {"$ref": "http://example.com/schema"}}, "json is bad"),
        ({"grammar": "start: nothing"}, "grammar is bad: .*nothing"),
        ({"grammar": "root ::= ("}, "grammar is bad"),
        ({"grammar": " "}, "grammar is bad: it is empty"),
        ({"structural_tag": {}}, "structural_tag is bad: it needs structures"),
        ({"structural_tag": {"structures": [{"begin": "<a>", "end": ""}], "triggers": ["b"]}}, "none of the triggers"),
        ({"structural_tag": "{"}, "structural_tag is bad"),
        ({"structural_tag": {**TAG, "triggers": ["<f", "<g"]}}, "no structure begins with the trigger '<g'"),
        ({"structural_tag": {**TAG, "at_least_one": True}}, "structural_tag is bad: unknown field 'at_least_one'"),
        (
            {"structural_tag": {**TAG, "structures": [{**TAG["structures"][0], "strict": True}]}},
            "unknown field 'strict' in structures.0",
        ),
        ({"regex": "a", "whitespace_pattern": " ", "disable_any_whitespace": True}, "not both"),
        ({"jsn": {}}, "unknown field 'jsn'"),
        ({"regex": "a" * (MAX_GRAMMAR_CHARS + 1)}, "at most"),
    ],
)
def test_a_bad_one_is_refused_by_name(given, words):
    with pytest.raises(RequestError, match=words) as error:
        params = from_request(None, given)
        assert params is not None
        compile_grammar(params)
    assert error.value.param and error.value.param.startswith("structured_outputs")
    assert len(error.value.message) < 500


def formatted(**json_schema) -> dict:
    return {"type": "json_schema", "json_schema": json_schema}


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({}, "response_format.type"),
        ({"type": "xml"}, "response_format.type"),
        ({"type": ["text"]}, "response_format.type"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        (formatted(name="x"), "response_format.json_schema.schema"),
        (formatted(schema={}), "response_format.json_schema.name"),
        (formatted(name=5, schema={}), "response_format.json_schema.name"),
        (formatted(name="x", schema={}, strickt=True), "response_format.json_schema"),
        ({"type": "json_object", "schema": {}}, "response_format"),
    ],
)
def test_a_bad_response_format_is_refused_by_place(given, param):
    with pytest.raises(RequestError) as error:
        from_request(given, None)
    assert error.value.param == param


def test_response_format_takes_the_place_of_its_kind_and_no_other():
    schema = {"type": "integer"}
    wanted = formatted(name="n", schema=schema, strict=True)
    assert from_request({"type": "text"}, None) is None
    assert from_request({"type": "json_object"}, None) == StructuredOutputsParams(json_object=True)
    assert from_request(wanted, {"json": {}, "disable_any_whitespace": True}) == StructuredOutputsParams(
        json=schema, disable_any_whitespace=True
    )
    assert from_request({"type": "text"}, {"regex": "a"}) == StructuredOutputsParams(regex="a")
    with pytest.raises(RequestError, match="response_format asks for json, structured_outputs for regex"):
        from_request(wanted, {"regex": "a"})


# ---- what the grammar lets through


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_from_gguf(GGUFFile(GGUF))


@pytest.fixture(scope="module")
def compiler(tokenizer) -> GrammarCompiler:
    return GrammarCompiler(Vocabulary(tokenizer.to_json(), tokenizer.eos_token_ids), VOCAB_SIZE)


def accepts(compiler, tokenizer, params: StructuredOutputsParams, text: str) -> bool:
    state = compiler.compile(compile_grammar(params)).result().copy()
    return all(state.accept(i) for i in tokenizer.encode(text)) and state.matcher.is_accepting()


@pytest.mark.parametrize(
    ("given", "good", "bad"),
    [
        ({"json": {"type": "object"}}, '{"a": [1, null],\n  "b": {}}', '{"a":1'),
        ({"json": {"type": "object"}}, "{}", '{"a":' + " " * 50 + "1}"),
        ({"json": {"type": "object"}, "disable_any_whitespace": True}, '{"a":1}', '{"a": 1}'),
        ({"json": {"type": "object"}, "whitespace_pattern": "[ ]{2}"}, '{"a":  1}', '{"a": 1}'),
        ({"json": {"properties": {"a": {}}, "type": "object"}}, '{"b":1}', "[]"),
        ({"json": {"properties": {"a": {}}, "type": "object"}, "disable_additional_properties": True}, "{}", '{"b":1}'),
        ({"json": '{"type": "integer"}'}, "-5", "5.5"),
        ({"json": "true"}, '[1, "a"]', "[1"),
        ({"json_object": True}, '{"é": "😀"}', '"a"'),
        ({"regex": "[0-9]{3}"}, "123", "12"),
        ({"choice": ['say "é"', "no"]}, 'say "é"', "yes"),
        ({"grammar": 'start: "a" B\nB: /b+/'}, "abb", "a"),
        ({"grammar": 'root ::= "a" [bc]+'}, "abc", "a"),
        ({"structural_tag": TAG}, 'so: <f>{"x":true}</f> ok', "<f>{}</f>"),
        ({"structural_tag": TAG}, '<f>{"x":true}</f><f>{"x": false}</f> <g', '<f>{"x":true}</f><f>{}</f>'),
        ({"structural_tag": TAGS}, 'a <n=5> b <w="é"/> <n=-1>', '<n="5">'),
        ({"structural_tag": TAGS}, "a < b", "<w=5/>"),
    ],
)
def test_a_grammar_takes_what_it_should(compiler, tokenizer, given, good, bad):
    params = StructuredOutputsParams(**given)
    assert accepts(compiler, tokenizer, params, good)
    assert not accepts(compiler, tokenizer, params, bad)


def test_masks_are_those_of_the_states_and_of_the_models_width(tokenizer):
    grammar = compile_grammar(StructuredOutputsParams(choice=["yes", "need"]))
    for vocab_size in (650, 700, 1000):  # the tokenizer has 700
        it = GrammarCompiler(Vocabulary(tokenizer.to_json(), tokenizer.eos_token_ids), vocab_size)
        state, words = it.compile(grammar).result(), -(-vocab_size // 32)
        masks = it.masks([state, state.copy()])
        allowed = np.flatnonzero(np.unpackbits(masks[0].copy().view(np.uint8), bitorder="little"))
        assert masks.shape == (2, words) and (masks[0] == masks[1]).all() and it.masks([]).shape == (0, words)
        assert {tokenizer.token_bytes(int(i)) for i in allowed} == {b"y", b"n", b"ne"}


def test_a_grammar_is_compiled_once(compiler):
    assert compiler.compile("start: /a+/") is compiler.compile("start: /a+/")


# ---- on every path


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> LLM:
    folder = tmp_path_factory.mktemp("model")
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return LLM(
        str(folder), load_format="dummy", tokenizer=str(GGUF), max_num_seqs=6, max_num_batched_tokens=38,
        kv_cache_memory_bytes=18 * 4128, page_size=16, max_model_len=256, dtype="float32",
    )  # fmt: skip


def params(**given) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=5, max_tokens=160, structured_outputs=StructuredOutputsParams(**given))


def is_valid(text: str) -> bool:
    value = json.loads(text)
    return (
        set(value) == {"name", "kind", "sizes"}
        and value["kind"] == LONG
        and len(value["name"]) <= 12
        and len(value["sizes"]) <= 3
        and all(0 <= size <= 99 for size in value["sizes"])
    )


CASES = {
    "schema": (params(json=SCHEMA), is_valid),
    "regex": (params(regex="[A-Z][a-z]{2,9} [0-9]{4}"), re.compile("[A-Z][a-z]{2,9} [0-9]{4}").fullmatch),
    "choice": (params(choice=[LONG, LONG + ", or longer"]), [LONG, LONG + ", or longer"].__contains__),
    "grammar": (params(grammar='start: "x = " /[1-9]+/ ";"'), re.compile("x = [1-9]+;").fullmatch),
}
FREE = SamplingParams(temperature=1.0, seed=7, max_tokens=40, ignore_eos=True)


def texts(llm: LLM, wanted: list[SamplingParams]) -> list[list[str]]:
    prompts = [f"The answer number {i}, as JSON:" for i in range(len(wanted))]
    return [[o.text for o in out.outputs] for out in llm.generate(prompts, wanted, use_tqdm=False)]


def test_each_finished_output_matches_and_neighbours_do_not_notice(llm):
    """Mixed in one batch, with more sequences than slots and a pool that preempts: the same texts as each alone."""
    wanted = [p for p, _ in CASES.values()] + [FREE] * 2
    wanted = wanted * 2
    before = llm.get_metrics()
    together = llm.generate([f"The answer number {i}, as JSON:" for i in range(len(wanted))], wanted, use_tqdm=False)
    after = llm.get_metrics()
    assert after.preemptions > before.preemptions, "the pool should be too small for all"
    assert after.compiles_after_warmup == 0
    checks = [check for _, check in CASES.values()] + [None] * 2
    for out, check in zip(together, checks * 2, strict=True):
        one = out.outputs[0]
        if check and one.finish_reason == "stop":
            assert check(one.text), one.text
        assert one.finish_reason == "stop" if check else one.finish_reason == "length"
    for i in range(len(wanted)):
        prompt = [f"The answer number {i}, as JSON:"]
        alone = llm.generate(prompt, wanted[i], use_tqdm=False)[0].outputs[0]
        assert alone.text == together[i].outputs[0].text and alone.token_ids == together[i].outputs[0].token_ids


def test_each_of_n_has_its_own_state(llm):
    wanted = SamplingParams(
        n=4, temperature=1.5, seed=1, max_tokens=160, structured_outputs=StructuredOutputsParams(json=SCHEMA)
    )
    outputs = llm.generate(["As JSON:"], wanted, use_tqdm=False)[0].outputs
    assert all(is_valid(one.text) for one in outputs if one.finish_reason == "stop")
    assert {one.finish_reason for one in outputs} == {"stop"} and len({one.text for one in outputs}) > 1


def test_what_is_forced_costs_no_step_each(llm):
    before = llm.get_metrics()
    (output,) = llm.generate(["Say it:"], params(choice=[LONG]), use_tqdm=False)[0].outputs
    steps, tokens = llm.get_metrics().steps - before.steps, len(output.token_ids)
    assert output.text == LONG and tokens > JUMP_FROM
    assert steps < tokens / 2, f"{steps} steps for {tokens} tokens"
    # Where each token's step has a result that is asked for, each token gets one.
    with_logprobs = params(choice=[LONG])
    with_logprobs.logprobs = 1
    (slow,) = llm.generate(["Say it:"], with_logprobs, use_tqdm=False)[0].outputs
    assert slow.text == LONG and slow.logprobs is not None and len(slow.logprobs) == len(slow.token_ids)


def test_a_cut_output_says_length(llm):
    cut = params(json=SCHEMA)
    cut.max_tokens = 12
    (output,) = llm.generate(["As JSON:"], cut, use_tqdm=False)[0].outputs
    assert output.finish_reason == "length" and len(output.token_ids) == 12


def test_options_that_contradict_the_grammar_end_the_request_alone(llm):
    ids = llm.get_tokenizer().encode("no")
    contradiction = params(choice=["yes"])
    contradiction.allowed_token_ids = ids
    bad, good = llm.generate(["a", "b"], [contradiction, params(choice=["yes"])], use_tqdm=False)
    assert bad.outputs[0].finish_reason == "error"
    assert (good.outputs[0].text, good.outputs[0].finish_reason) == ("yes", "stop")


@pytest.mark.parametrize("given", [{"json": {"$ref": "#"}}, {"grammar": "start: start"}, {"grammar": "root ::= root"}])
def test_a_grammar_that_matches_nothing_is_told_so_and_not_how_the_parser_sees_it(compiler, given):
    future = compiler.compile(compile_grammar(StructuredOutputsParams(**given)))
    with pytest.raises(RequestError) as error:
        future.result()
    assert error.value.message == "the grammar is bad: it matches nothing"


def test_min_tokens_and_ignore_eos_do_not_outlast_a_complete_output(llm):
    wanted = params(choice=["yes"])
    wanted.min_tokens, wanted.ignore_eos = 50, True
    (output,) = llm.generate(["a"], wanted, use_tqdm=False)[0].outputs
    assert (output.text, output.finish_reason) == ("yes", "stop")


def test_a_bad_grammar_computes_nothing(llm):
    before = llm.get_metrics().prompt_tokens
    with pytest.raises(RequestError, match="regex is bad"):
        llm.generate(["a", "b"], [FREE, params(regex="(")], use_tqdm=False)
    assert llm.get_metrics().prompt_tokens == before


class Panic(BaseException):
    """As a panic in Rust comes to Python: not even an Exception."""


@pytest.mark.parametrize("error", [TypeError("a list is no integer"), Panic("index out of bounds")])
def test_a_vocabulary_that_no_grammar_can_be_compiled_for_fails_requests_with_one_alone(
    llm, monkeypatch, error, caplog
):
    made = []

    def no_compiler(*_) -> None:
        made.append(1)
        raise error

    monkeypatch.setattr("jaxserve.engine.GrammarCompiler", no_compiler)
    monkeypatch.setattr(llm._engine, "_grammars", None)
    monkeypatch.setattr(llm._engine, "_no_grammars", "")
    for _ in range(2):
        with pytest.raises(EngineError, match=f"no grammar can be compiled .*: {type(error).__name__}: {error}"):
            llm.generate(["a", "b"], [FREE, params(regex="[0-9]")], use_tqdm=False)
    assert made == [1] and caplog.text.count("requests with a grammar will fail") == 1
    assert texts(llm, [FREE])[0][0]


@pytest.mark.parametrize("error", [RuntimeError("too deep"), Panic("index out of bounds")])
def test_a_grammar_that_llguidance_dies_of_is_an_error_of_the_engine(compiler, monkeypatch, error):
    def no_matcher(*_, **__) -> None:
        raise error

    monkeypatch.setattr("jaxserve.grammar.LLMatcher", no_matcher)
    future = compiler.compile(f"start: /{type(error).__name__}/")
    with pytest.raises(EngineError, match=f"the grammar cannot be compiled: {type(error).__name__}: {error}"):
        future.result()


# ---- a budget of reasoning


@pytest.fixture
def thinker(llm, monkeypatch) -> LLM:
    """The same model, that always reasons: up to <|im_start|>."""
    monkeypatch.setitem(REASONING_FORMATS, "qwen3", Thinking(("<|bos|>",), ("<|im_start|>",), always=True))
    monkeypatch.setattr(llm._frontend, "_limit_thinking", thinking_limiter(llm.get_tokenizer(), "qwen3"))
    return llm


def thought_of(llm: LLM, token_ids: list[int]) -> int | None:
    """Tokens before the end of the reasoning; None: it goes on."""
    begin, end = map(llm.get_tokenizer().added_token_id, ("<|bos|>", "<|im_start|>"))
    before = token_ids[: token_ids.index(end)] if end in token_ids else None
    return None if before is None else len(before) - (before[:1] == [begin])


@pytest.mark.parametrize("more", [{}, {"logprobs": 1}, {"presence_penalty": 0.5}, {"n": 3}])
def test_reasoning_keeps_its_budget_in_a_mixed_batch(thinker, more):
    """With more sequences than slots and a pool that preempts: the same tokens as each alone."""
    budgets = [0, 1, 7, 30, 100, None, 5, 64]
    base = {"temperature": 1.0, "seed": 7, "max_tokens": 120, "ignore_eos": True, **more}
    wanted = [SamplingParams(**base, thinking_token_budget=budget) for budget in budgets]
    prompts = [f"The same long beginning of a prompt, number {i}:" for i in range(len(wanted))]
    before = thinker.get_metrics()
    together = thinker.generate(prompts, wanted, use_tqdm=False)
    after = thinker.get_metrics()
    assert after.preemptions > before.preemptions and after.compiles_after_warmup == 0
    for prompt, given, out in zip(prompts, wanted, together, strict=True):
        budget = given.thinking_token_budget
        for one in out.outputs:
            assert len(one.token_ids) == 120 and one.finish_reason == "length", "the answer goes on"
            thought = thought_of(thinker, one.token_ids)
            assert budget is None or thought is not None and thought <= budget
            assert one.logprobs is None or len(one.logprobs) == 120
        alone = thinker.generate([prompt], given, use_tqdm=False)[0]  # also a prefix hit
        assert [one.token_ids for one in alone.outputs] == [one.token_ids for one in out.outputs]
    thoughts = [thought_of(thinker, out.outputs[0].token_ids) for out in together]
    assert thoughts[:3] == [0, 1, 7], "it is used up: a random model does not end on its own so soon"


def test_a_form_begins_after_the_reasoning(thinker):
    wanted = params(choice=["yes", "no"])
    wanted.thinking_token_budget, wanted.skip_special_tokens = 4, False
    (output,) = thinker.generate(["Is it?"], wanted, use_tqdm=False)[0].outputs
    assert output.finish_reason == "stop" and re.search("<\\|im_start\\|>\\s{0,4}(yes|no)$", output.text)
    assert thought_of(thinker, output.token_ids) in range(5)


@pytest.mark.parametrize("budget", [-1, 1.5, True, "5"])
def test_a_bad_budget_is_refused(budget):
    with pytest.raises(RequestError, match="thinking_token_budget must be") as caught:
        SamplingParams(thinking_token_budget=budget)
    assert caught.value.param == "thinking_token_budget"


def test_a_budget_needs_a_model_that_is_known_to_reason(llm):
    with pytest.raises(RequestError, match="thinking_token_budget.*--reasoning-parser"):
        llm.generate(["a"], SamplingParams(thinking_token_budget=5), use_tqdm=False)
