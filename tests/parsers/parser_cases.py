"""What models of each family write, and the message that it is. Used by the tests of parsers and of grammars."""

import json
from dataclasses import dataclass, field
from typing import Any

from jaxserve.parsers import Tool

WEATHER = Tool(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "units": {"type": "string", "enum": ["metric", "imperial"]},
            "where": {"type": ["object", "null"]},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["city"],
    },
)
NOW = Tool("now", {"type": "object", "properties": {}})
TOOLS = [WEATHER, NOW]

PARIS = '{"city": "Paris", "days": 3}'
ODD = r'{"city":"a \"q\" } ] \\ é 日本 😀 <\/tool_call> \ud83d\ude00", "where": {"x": [1, 2.5e3, {}], "y": null}}'


@dataclass
class Case:
    """`text` of a model in format `name` -> content, reasoning, calls: (name, arguments as the client gets them)."""

    name: str
    text: str
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    reasoning: str = ""
    thinks: str = "none"  # the reasoning parser
    prompt: str = ""
    cut: bool = False  # the last call has no end
    id: str = ""


def hermes(arguments: str, name: str = "get_weather") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def before(text: str, piece: str) -> str:
    return text[: text.index(piece)]


def fenced(arguments: str, name: str = "get_weather") -> str:
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"


def listed(*arguments: str, key: str = "arguments") -> str:
    return "[" + ", ".join(f'{{"name": "get_weather", "{key}": {each}}}' for each in arguments) + "]"


CODER = """<tool_call>
<function=get_weather>
<parameter=city>
New "York"
two lines\\ é 😀
</parameter>
<parameter=days>
3
</parameter>
<parameter=where>
{"x": [1, 2]}
</parameter>
</function>
</tool_call>"""
CODER_ARGUMENTS = r'{"city": "New \"York\"\ntwo lines\\ é 😀", "days": 3, "where": {"x": [1, 2]}}'
F, N = "get_weather", "now"
AS_PYTHON = r"""{'name': 'get_weather', 'arguments': {'city': 'a "q" } it\'s', "days": 3, 'where': {'x': (1, -2.5e3, True), 'y': None}}}"""
FROM_PYTHON = r"""{"city": "a \"q\" } it's", "days": 3, "where": {"x": [1, -2500.0, true], "y": null}}"""
BLOCK, BLOCK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
ANALYSIS = "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant"

CASES = [
    Case("hermes", "Just text, with { and < and <tool.", "Just text, with { and < and <tool."),
    Case("hermes", "  spaces stay \n", "  spaces stay \n"),
    Case("hermes", hermes(PARIS), calls=[(F, PARIS)]),
    Case("hermes", hermes(ODD), calls=[(F, ODD)]),
    Case("hermes", f"Let me look.\n\n{hermes(PARIS)}\n{hermes('{}', N)}\n Done. ", "Let me look.\n\nDone. ", [(F, PARIS), (N, "{}")]),
    Case("hermes", f'<tool_call>{{"arguments": {PARIS}, "name": "get_weather"}}</tool_call>', calls=[(F, PARIS)]),
    Case("hermes", '<tool_call>{"name": "now"}</tool_call>', calls=[(N, "{}")]),
    Case("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', calls=[(N, "{}")]),
    Case("hermes", hermes(json.dumps(PARIS)), calls=[(F, PARIS)], id="JSON within JSON"),
    Case("hermes", hermes(json.dumps('{"city": "\u65e5 \U0001f600 \\n"}')), calls=[(F, '{"city": "日 😀 \\n"}')]),
    Case("hermes", hermes(PARIS).replace("\n</", "}\n</"), calls=[(F, PARIS)], id="a brace too many"),
    Case("hermes", hermes(PARIS)[: -len("\n</tool_call>")], calls=[(F, PARIS)], id="no end mark"),
    Case("hermes", hermes(PARIS)[:-12] + "\n" + hermes(ODD), calls=[(F, PARIS), (F, ODD)], id="one end mark for two"),
    Case("hermes", hermes(PARIS)[:-12] + hermes(ODD)[12:], calls=[(F, PARIS), (F, ODD)], id="two between the marks"),
    Case("hermes", f"So\n<tool_call>\n{hermes(PARIS)} then", "So\nthen", [(F, PARIS)], id="the begin mark twice"),
    Case("hermes", "<tool_call>\n<tool_call> {x", "<tool_call>\n<tool_call> {x"),
    Case("hermes", f"<tool_call>{listed(PARIS, ODD)}</tool_call>", calls=[(F, PARIS), (F, ODD)]),
    Case("hermes", 'In <tool_call> I write {"x": 1} and go on', 'In <tool_call> I write {"x": 1} and go on'),
    Case("hermes", '<tool_call>{"x": 1}</tool_call>', '<tool_call>{"x": 1}</tool_call>'),
    Case("hermes", before(hermes(PARIS), ' "Paris'), calls=[(F, '{"city":')], cut=True),
    Case("hermes", before(hermes(ODD), "2.5"), calls=[(F, before(ODD, "2.5"))], cut=True),
    Case("hermes", '<tool_call>\n{"name": "get_w', '<tool_call>\n{"name": "get_w'),
    Case("hermes", "a\n<tool_ca", "a\n<tool_ca"),
    Case("hermes", '<tool_call>{"name": "unknown", "arguments": {"a": 1}}</tool_call>', calls=[("unknown", '{"a": 1}')]),
    Case("hermes", f"<tool_call>\n{AS_PYTHON}\n</tool_call>\n<tool_call>{{'name': 'now'}}</tool_call> Done", "Done", [(F, FROM_PYTHON), (N, "{}")], id="Python dicts"),
    Case("hermes", f"<tool_call>[{AS_PYTHON}, {{'name': 'now', 'arguments': None}}]</tool_call>", calls=[(F, FROM_PYTHON), (N, "{}")], id="a list of Python dicts"),
    Case("hermes", "<tool_call>{'arguments': {'city': 'Paris', 'days': 3}, 'id': 'x', 'extra': [True, {}], 'name': 'get_weather'}</tool_call>", calls=[(F, PARIS)]),
    Case("hermes", hermes("{ 'city': 'Paris', 'days': 3}"), calls=[(F, PARIS)], id="a Python dict within JSON"),
    Case("hermes", hermes("None"), calls=[(F, "{}")], id="None within JSON"),
    Case("hermes", f"<tool_call>{{'name': 'get_weather', 'arguments': '{PARIS}'}}</tool_call>", calls=[(F, PARIS)], id="JSON within Python"),
    Case("hermes", "<tool_call>{'name': 'get_weather', 'arguments': {'city': 'Par", calls=[(F, '{"city": "Par')], cut=True, id="a Python dict, cut"),
    Case("hermes", "<tool_call>{'name': 'get_weather', 'arguments': '{\"city\": \"Par", calls=[(F, '{"city": "Par')], cut=True, id="JSON within Python, cut"),
    Case("hermes", "<tool_call>{'x': 1}</tool_call> and {'name': 'now'}", "<tool_call>{'x': 1}</tool_call> and {'name': 'now'}"),
    Case("hermes", "<tool_call>{'name': 'get_weather', 'arguments': {'city': " + "[" * 150, "[" * 51, [(F, '{"city": ' + "[" * 99)], cut=True, id="a Python dict without bottom"),
    Case("hermes", "<tool_call>{'name': 'now', 'arguments': {'a': " + "-" * 3000 + "1}}</tool_call>", calls=[(N, '{"a": ')], cut=True, id="a number of many signs"),
    Case("hermes", "<tool_call>{'name': 'now', 'arguments': {'a': " + "1+" * 3000 + "1}}</tool_call>", calls=[(N, '{"a": ')], cut=True, id="a long sum"),
    Case("hermes", r"<tool_call>{'name': 'now', 'arguments': {'a': '\d+\s\\\w\'\/\x41\n', 'b': -0x1f, 'c': +1_0, 'd': .5, 'e': 1e-3}}</tool_call>", calls=[(N, r'{"a": "\\d+\\s\\\\w' + "'" + r'/A\n", "b": -31, "c": 10, "d": 0.5, "e": 0.001}')], id="escapes and numbers of Python"),
    Case("granite", f"<|tool_call|>[{AS_PYTHON}]", calls=[(F, FROM_PYTHON)], id="a list of Python dicts"),
    Case("mistral", f"[TOOL_CALLS][{AS_PYTHON}]", calls=[(F, FROM_PYTHON)], id="a list of Python dicts"),
    Case("llama3_json", f'{{"type":"function","name":"get_weather","parameters":{PARIS}}}', calls=[(F, PARIS)], id="with its type"),
    Case("llama3_json", f'I look.\n{{"type": "function", "name": "get_weather", "parameters": {PARIS}}}\nMore?', "I look.\nMore?", [(F, PARIS)], id="with its type, on a line of its own"),
    Case("llama3_json", 'So\n{"type": "object", "name": "now"}\n{"type": "function"}\n{"type": "function", "name": "Bob"}', 'So\n{"type": "object", "name": "now"}\n{"type": "function"}\n{"type": "function", "name": "Bob"}'),
    Case("llama3_json", '{"type": "object", "name": "now"}', '{"type": "object", "name": "now"}'),
    Case("llama3_json", AS_PYTHON.replace("arguments", "parameters"), calls=[(F, FROM_PYTHON)], id="a Python dict"),
    Case("llama3_json", "So\n{'type': 'function', 'name': 'get_weather', 'parameters': {'city': 'Paris', 'days': 3}}; {'name': 'now', 'parameters': {}}", "So", [(F, PARIS), (N, "{}")], id="Python dicts on a line of their own"),
    Case("llama3_json", "{'name': 'Bob', 'parameters': {}}\n{'a': 1}", "{'name': 'Bob', 'parameters': {}}\n{'a': 1}"),
    Case("llama3_json", f'{{"name": "get_weather", "parameters": {PARIS}}}', calls=[(F, PARIS)]),
    Case("llama3_json", f'<|python_tag|>{{"type": "function", "name": "get_weather", "parameters": {ODD}}}', calls=[(F, ODD)]),
    Case("llama3_json", f'{{"name": "get_weather", "parameters": {PARIS}}}; {{"name": "now", "parameters": {{}}}}', calls=[(F, PARIS), (N, "{}")]),
    Case("llama3_json", f'{{"name": "now", "parameters": {{}}}}\n<|python_tag|>{{"name": "f", "parameters": {PARIS}}};\n{{"name": "get_weather", "parameters": {ODD}}}', calls=[(N, "{}"), ("f", PARIS), (F, ODD)]),
    Case("llama3_json", f'I look.\n\n{{"name": "get_weather", "parameters": {PARIS}}}\n\nMore?', "I look.\nMore?", [(F, PARIS)], id="on a line of its own"),
    Case("llama3_json", f'So:\n```json\n{{\n  "name": "get_weather",\n  "parameters": {PARIS}\n}}\n```', "So:\n```json\n```", [(F, PARIS)], id="fenced"),
    Case("llama3_json", '[{"name": "get_weather", "parameters": ' + PARIS + '}, {"name": "now", "parameters": {}}] ok', "ok", [(F, PARIS), (N, "{}")], id="a list"),
    Case("llama3_json", 'I say\n{"name": "Bob"}\n{"parameters": {}, "name": "now"}\n[{"name": "now"}]', 'I say\n{"name": "Bob"}\n{"parameters": {}, "name": "now"}\n[{"name": "now"}]'),
    Case("llama3_json", '[{"name": "Bob"}] [1]', '[{"name": "Bob"}] [1]'),
    Case("llama3_json", 'I say\n{"name": "get_weather", "parameters": {"city": "Pa', "I say", [(F, '{"city": "Pa')], cut=True),
    Case("llama3_json", '{"city": "Paris"} is JSON', '{"city": "Paris"} is JSON'),
    Case("llama3_json", '{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}'),
    Case("llama3_json", f'So: {{"name": "get_weather", "parameters": {PARIS}}}', f'So: {{"name": "get_weather", "parameters": {PARIS}}}'),
    Case("llama3_json", f'So <|python_tag|>{{"name": "get_weather", "parameters": {PARIS}}}', "So", [(F, PARIS)]),
    Case("llama3_json", "<|python_tag|>print(1)", "print(1)"),
    Case("llama3_json", '{"name": "get_weather", "parameters": {"city": "Pa', calls=[(F, '{"city": "Pa')], cut=True),
    Case("mistral", f"[TOOL_CALLS]{listed(PARIS, ODD)}", calls=[(F, PARIS), (F, ODD)]),
    Case("mistral", f"Hm. [TOOL_CALLS] {listed(PARIS)}", "Hm.", [(F, PARIS)]),
    Case("mistral", f"[TOOL_CALLS]get_weather[ARGS]{PARIS}[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{{}}", calls=[(F, PARIS), (N, "{}")]),
    Case("mistral", f"[TOOL_CALLS]get_weather{PARIS}", calls=[(F, PARIS)]),
    Case("mistral", f'[TOOL_CALLS] [{listed(PARIS)[1:-2]}, "id": "abcdefghi"}}, {listed(ODD)[1:-2]}, "id": "bcdefghij"}}]\nmore', "more", [(F, PARIS), (F, ODD)], id="ids of its own"),
    Case("mistral", f"So.[TOOL_CALLS]get_weather[ARGS]{PARIS[:20]}", "So.", [(F, PARIS[:20])], cut=True),
    Case("mistral", f"[TOOL_CALLS] [{before(listed(ODD), 'null')[1:]}", calls=[(F, before(ODD, "null"))], cut=True),
    Case("mistral", "[TOOL_CALLS]get_weather[ARGS]", calls=[(F, "")], cut=True),
    Case("mistral", "[TOOL_CALLS]get", "get"),
    Case("granite", f"<|tool_call|>{listed(PARIS, ODD)}", calls=[(F, PARIS), (F, ODD)]),
    Case("granite", f"Well <tool_call> {listed(PARIS)} so", "Well so", [(F, PARIS)]),
    Case("granite", '<|tool_call|>{"name": "now", "arguments": {}}', calls=[(N, "{}")]),
    Case("granite", f"Well {hermes(PARIS)}\n{hermes(ODD)} so", "Well so", [(F, PARIS), (F, ODD)], id="version 4"),
    Case("granite", f"<|tool_call|> {listed(PARIS)[:-1]}, {{\"arguments\": {ODD}, \"name\": \"get_weather\"}}]", calls=[(F, PARIS), (F, ODD)]),
    Case("granite", f"<|tool_call|>{before(listed(PARIS), 'aris')}", calls=[(F, before(PARIS, "aris"))], cut=True),
    Case("phi4_mini_json", f"I look.<|tool_call|>{listed(PARIS, ODD)}<|/tool_call|> so", "I look. so", [(F, PARIS), (F, ODD)]),
    Case("phi4_mini_json", f'<|tool_call|>{{"name": "now", "arguments": {{}}}}<|/tool_call|><|tool_call|>{listed(PARIS)[1:-1]}<|/tool_call|>', calls=[(N, "{}"), (F, PARIS)]),
    Case("phi4_mini_json", f"functools[\n  {listed(PARIS)[1:-1]},\n  {listed(ODD)[1:-1]}\n]\nMore?", "More?", [(F, PARIS), (F, ODD)]),
    Case("phi4_mini_json", f"functools{before(listed(PARIS), 'aris')}", calls=[(F, before(PARIS, "aris"))], cut=True),
    Case("phi4_mini_json", f"functools{listed(PARIS, ODD)}", calls=[(F, PARIS), (F, ODD)]),
    Case("phi4_mini_json", f"functools{listed(PARIS, key='parameters')}", calls=[(F, PARIS)]),
    Case("phi4_mini_json", "Use functools.cache or functools [1] here", "Use functools.cache or functools [1] here"),
    Case("deepseek_v3", f"Ok.{BLOCK}{fenced(PARIS)}\n{fenced('{}', N)}{BLOCK_END}", "Ok.", [(F, PARIS), (N, "{}")]),
    Case("deepseek_v3", f"{BLOCK}{fenced(ODD)}{BLOCK_END}", calls=[(F, ODD)]),
    Case("deepseek_v31", f"{BLOCK}<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{PARIS}<｜tool▁call▁end｜>{BLOCK_END}", calls=[(F, PARIS)]),
    Case("deepseek_v3", f"{BLOCK}{before(fenced(PARIS), 'days')}", calls=[(F, before(PARIS, "days"))], cut=True),
    Case("qwen3_coder", f"I look.\n{CODER}", "I look.", [(F, CODER_ARGUMENTS)]),
    Case("qwen3_coder", f"{CODER}\n<tool_call>\n<function=now>\n</function>\n</tool_call>", calls=[(F, CODER_ARGUMENTS), (N, "{}")]),
    Case("qwen3_coder", "<function=get_weather>\n<parameter=city>\n\nx\n\n</parameter>\n</function>", calls=[(F, r'{"city": "\nx\n"}')]),
    Case("qwen3_coder", "<function=get_weather>\n<parameter=city>\nx\n<parameter=days>\n5\n</function>", calls=[(F, '{"city": "x", "days": 5}')], id="no closing tags"),
    Case("qwen3_coder", "<function=get_weather>\n<parameter=days>\nmany\n</parameter>\n<parameter=where>\nNone\n</parameter>\n<parameter=tags>\n['a']\n</parameter>\n<parameter=new>\n7\n</parameter>\n</function>", calls=[(F, '{"days": "many", "where": null, "tags": ["a"], "new": "7"}')]),
    Case("qwen3_coder", before(CODER, 'rk"'), calls=[(F, r'{"city": "New \"Yo')], cut=True),
    Case("qwen3_coder", "Write <tool_call> or <function= here", "Write <tool_call> or <function= here"),
    Case("pythonic", "[get_weather(city='Paris', days=3), now()]", calls=[(F, PARIS), (N, "{}")]),
    Case("pythonic", r"""[get_weather(city="a \"q\" ) \x41\u00e9\U0001F600 \ud83d\ude00 '", where={'x': [1, -2.5e3, (True, None)], "y": false}, tags=[])] bye""", "bye",
         [(F, r'''{"city": "a \"q\" ) Aé😀 😀 '", "where": {"x": [1, -2500.0, [true, null]], "y": false}, "tags": []}''')]),
    Case("pythonic", "<|python_start|>[now()]<|python_end|>", calls=[(N, "{}")]),
    Case("pythonic", "[1, 2, 3] is a list", "[1, 2, 3] is a list"),
    Case("pythonic", "[link](http://x)", "[link](http://x)"),
    Case("pythonic", "[unknown(a=1)]", "[unknown(a=1)]"),
    Case("pythonic", " text", " text"),
    Case("pythonic", "[get_weather(city='Par", calls=[(F, '{"city": "Par')], cut=True),
    Case("openai", f"{ANALYSIS}<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{PARIS}", "", [(F, PARIS)], "Let me see."),
    Case("openai", f" to=functions.get_weather<|channel|>commentary json<|message|>{ODD}<|call|>", "", [(F, ODD)]),
    Case("openai", f"{ANALYSIS}<|channel|>final<|message|>Hello < you", "Hello < you", reasoning="Let me see."),
    Case("openai", "<|channel|>commentary<|message|>I call.<|end|><|start|>assistant<|channel|>commentary to=functions.now<|message|><|call|>", "I call.", [(N, "{}")]),
    Case("openai", f"{ANALYSIS} to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>{PARIS}<|call|>", "", [(F, PARIS)], "Let me see.", id="the recipient before the channel"),
    Case("openai", f"{ANALYSIS}<|channel|>analysis to=functions.get_weather code<|message|>{PARIS}<|call|>", "", [(F, PARIS)], "Let me see.", id="a call amid the analysis"),
    Case("openai", '<|channel|>final <|constrain|>json<|message|>{"a": 1}<|return|>', '{"a": 1}'),
    Case("openai", "<|channel|>analysis<|message|>cut he", reasoning="cut he"),
    Case("openai", "<|channel|>comm"),
    Case("openai", f"<|channel|>commentary to=functions.get_weather<|message|>{PARIS[:9]}", "", [(F, PARIS[:9])], cut=True),
    Case("none", "<think>\nHm, <b>.\n</think>\n\n Yes.\n", "Yes.\n", reasoning="Hm, <b>.", thinks="qwen3"),
    Case("none", "Hm.\n</think>\n\nYes.", "Yes.", reasoning="Hm.", thinks="qwen3", prompt="<|im_start|>assistant\n<think>\n"),
    Case("none", "Yes </think> <think>", "Yes </think> <think>", thinks="qwen3", prompt="<think>\n\n</think>\n\n"),
    Case("none", " Yes, no thinking. ", " Yes, no thinking. ", thinks="qwen3"),
    Case("none", "<think>cut </thi", reasoning="cut </thi", thinks="qwen3"),
    Case("none", "<think></think>Yes", "Yes", thinks="qwen3"),
    Case("none", "Hm.</think>Yes", "Yes", reasoning="Hm.", thinks="deepseek_r1"),
    Case("none", "<think>Hm.</think>Yes", "Yes", reasoning="Hm.", thinks="deepseek_r1", prompt="<think>"),
    Case("none", "Here's my thought process: Hm.\nHere is my response: Yes", "Yes", reasoning="Hm.", thinks="granite"),
    Case("none", "Here we are", "Here we are", thinks="granite"),
    Case("none", "<think>Hm.</think>\n<response>Yes, </resp>.\n</response>\n", "Yes, </resp>.", reasoning="Hm.", thinks="granite"),
    Case("none", "<think>Hm.</think> Write <response> and </response>", "Write <response> and </response>", reasoning="Hm.", thinks="granite"),
    Case("none", "<think>Hm.</think><response>A </response> amid it, cut </respon", "A </response> amid it, cut </respon", reasoning="Hm.", thinks="granite"),
    Case("granite", f"<think>Hm.</think><response>So <|tool_call|>{listed(PARIS)}</response>", "So", [(F, PARIS)], "Hm.", "granite"),
    Case("none", "[THINK]Hm.[/THINK]Yes", "Yes", reasoning="Hm.", thinks="mistral"),
    Case("hermes", f"<think>\nI could <tool_call>?\n</think>\n\n{hermes(PARIS)}", "", [(F, PARIS)], "I could <tool_call>?", "qwen3"),
    Case("mistral", f"[THINK]Hm.[/THINK]So[TOOL_CALLS]{listed(PARIS)}", "So", [(F, PARIS)], "Hm.", "mistral"),
    Case("mistral", f"[THINK]Hm.[/THINK][TOOL_CALLS]get_weather[ARGS]{PARIS}[TOOL_CALLS]now[ARGS]{{}}", "", [(F, PARIS), (N, "{}")], "Hm.", "mistral"),
    Case("qwen3_coder", f"<think>\nHm.\n</think>\n\n{CODER}", "", [(F, CODER_ARGUMENTS)], "Hm.", "qwen3"),
    Case("deepseek_v3", f"Hm.\n</think>\n\nOk.{BLOCK}{fenced(PARIS)}{BLOCK_END}", "Ok.", [(F, PARIS)], "Hm.", "deepseek_r1", prompt="<think>\n"),
    Case("granite", f"Here is my thought process:\n\nHm.\n\nHere is my response:\n\n<|tool_call|>{listed(PARIS)}", "", [(F, PARIS)], "Hm.", "granite"),
]  # fmt: skip


# Schemas that say odd things about a type: arguments must come out whatever they are.
ODD_TYPES = [
    True, {}, {"type": 5}, {"type": []}, {"type": ["integer", 5]}, {"enum": "abc"}, {"enum": [1, None]}, {"const": 2},
    {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/loop"}]}, {"$ref": "#/nowhere/at/all"}, {"$ref": 5}, {"allOf": 5},
]  # fmt: skip


def message_of(deltas: list[Any]) -> tuple[str, str, list[tuple[str, str]]]:
    """Content, reasoning and calls of joined deltas, checked for their shape."""
    calls: list[list[str]] = []
    for delta in deltas:
        for call in delta.tool_calls:
            if call.index == len(calls):
                assert call.id and call.name, "a call begins with its id and name"
                calls.append([call.name, ""])
            else:
                assert call.index == len(calls) - 1 and call.id is None and call.name is None
            calls[-1][1] += call.arguments
    return (
        "".join(delta.content for delta in deltas),
        "".join(delta.reasoning for delta in deltas),
        [(name, arguments) for name, arguments in calls],
    )
