"""Chat templates of the families, cut down to how each shows tools, calls, results and reasoning."""

# Qwen 2.5 and many fine-tunes.
HERMES = """{%- if tools %}<|im_start|>system
Tools: {{ tools | tojson }}. Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}{%- for message in messages %}
{%- if message.role == "tool" %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{% if message.content %}{{ message.content }}{% endif %}
{%- for tool_call in message.tool_calls %}{% set call = tool_call.function %}
<tool_call>
{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{%- endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# Qwen 3: the same, and reasoning that can be switched off.
QWEN3 = (
    HERMES.replace(
        "{% if message.content %}",
        "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
        "{% if message.content %}",
    ).replace("{{ call.arguments | tojson }}", "{% if call.arguments is string %}{{ call.arguments }}{% else %}{{ call.arguments | tojson }}{% endif %}")
    + "{% if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)  # fmt: skip

QWEN3_CODER = """{%- if tools %}<|im_start|>system
{% for tool in tools %}<function><name>{{ tool.function.name }}</name>
{% for name, field in tool.function.parameters.properties | items %}<parameter>{{ name }}: {{ field.type }}</parameter>
{% endfor %}</function>
{% endfor %}Answer with <tool_call><function=...><parameter=...></parameter></function></tool_call>, not with "name" and "arguments"<|im_end|>
{% endif %}{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or "" }}{% for tool_call in message.tool_calls %}
<tool_call>
<function={{ tool_call.function.name }}>
{% for name, value in tool_call.function.arguments | items %}<parameter={{ name }}>
{{ value if value is string else value | tojson }}
</parameter>
{% endfor %}</function>
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

LLAMA3 = """{%- if not tools is defined %}{% set tools = none %}{% endif %}<|start_header_id|>system<|end_header_id|>
{% if tools is not none %}Answer with {"name": function name, "parameters": dictionary}.
{% for tool in tools %}{{ tool | tojson(indent=4) }}
{% endfor %}{% endif %}<|eot_id|>
{%- for message in messages %}
{%- if message.role == "tool" %}<|start_header_id|>ipython<|end_header_id|>
{{ message.content }}<|eot_id|>
{%- elif "tool_calls" in message %}<|start_header_id|>assistant<|end_header_id|>
{% set call = message.tool_calls[0].function %}{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot_id|>
{%- else %}<|start_header_id|>{{ message.role }}<|end_header_id|>
{{ message.content }}<|eot_id|>
{%- endif %}{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>
{% endif %}"""

MISTRAL = """{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for message in messages %}
{%- if message.tool_calls is defined and message.tool_calls is not none %}[TOOL_CALLS][
{%- for call in message.tool_calls %}{% if call.id | length != 9 %}{{ raise_exception("ids have length 9") }}{% endif %}
{{- call.function | tojson }}{{ ", " if not loop.last }}{% endfor %}]</s>
{%- elif message.role == "tool" %}[TOOL_RESULTS]{{ message.content }}[/TOOL_RESULTS]
{%- else %}[INST]{{ message.content }}[/INST]{% endif %}{% endfor %}"""

MISTRAL_BY_NAME = MISTRAL.replace("{{- call.function | tojson }}", "{{- call.function.name + '[ARGS]' + call.function.arguments | tojson }}")  # fmt: skip

GRANITE = """{%- if tools %}<|start_of_role|>tools<|end_of_role|>{{ tools | tojson(indent=4) }}<|end_of_text|>
Answer with <|tool_call|> and a list.{% endif %}{% for message in messages %}<|start_of_role|>{{ message.role }}<|end_of_role|>
{{- message.content or "" }}{% for call in message.tool_calls %}<|tool_call|>[{{ call.function | tojson }}]{% endfor %}<|end_of_text|>
{% endfor %}{% if thinking %}Write 'Here is my thought process:' and 'Here is my response:'.{% endif %}
{%- if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"""

# It joins text, and asks whether content is none.
DEEPSEEK = """{% for message in messages %}{% if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}{% endif %}
{%- if message['role'] == 'assistant' and message['content'] is none %}{{ '<｜Assistant｜><｜tool▁calls▁begin｜>' }}
{%- for call in message['tool_calls'] %}{{ '<｜tool▁call▁begin｜>' + call['type'] + '<｜tool▁sep｜>' + call['function']['name'] + '\\n```json\\n' + call['function']['arguments'] + '\\n```<｜tool▁call▁end｜>' }}{% endfor %}
{{- '<｜tool▁calls▁end｜>' }}{% elif message['role'] == 'assistant' %}{{ '<｜Assistant｜>' + message['content'] }}{% endif %}
{%- if message['role'] == 'tool' %}{{ '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}{% endif %}
{%- endfor %}{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"""

# Reasoning is off unless asked for.
DEEPSEEK_V31 = (
    "{% if not thinking is defined %}{% set thinking = false %}{% endif %}"
    + DEEPSEEK.replace("call['type'] + '<｜tool▁sep｜>' + call['function']['name'] + '\\n```json\\n'", "call['function']['name'] + '<｜tool▁sep｜>'")
    .replace("\\n```<｜tool▁call▁end｜>", "<｜tool▁call▁end｜>")
    .replace("{{ '<｜Assistant｜><think>\\n' }}", "<｜Assistant｜>{% if thinking %}<think>{% else %}</think>{% endif %}")
)  # fmt: skip

PHI4 = """<|system|>{% if tools %}Answer with functools[{"name": ..., "arguments": ...}]. {{ tools | tojson }}{% endif %}<|end|>
{%- for message in messages %}<|{{ message.role }}|>{{ message.content or message.tool_calls | tojson }}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

HARMONY = """<|start|>system<|message|>Reasoning: {{ reasoning_effort or "medium" }}<|end|>
{%- if tools %}<|start|>developer<|message|>namespace functions. {{ tools | tojson }}<|end|>{% endif %}
{%- for message in messages %}{% if message.tool_calls %}
{%- if message.content and message.thinking %}{{ raise_exception("not both") }}{% endif %}
{%- if message.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>{% endif %}
{%- if message.content %}<|start|>assistant<|channel|>analysis<|message|>{{ message.content }}<|end|>{% endif %}
{%- set call = message.tool_calls[0].function %}<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>{{ call.arguments | tojson }}<|call|>
{%- else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""

PLAIN = "{% for message in messages %}{{ message.role + ': ' + message.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"

# template -> the parsers that it shows
SHOWN = {
    "hermes": (HERMES, "hermes", "none"),
    "qwen3": (QWEN3, "hermes", "qwen3"),
    "qwen3_coder": (QWEN3_CODER, "qwen3_coder", "none"),
    "llama3": (LLAMA3, "llama3_json", "none"),
    "mistral": (MISTRAL, "mistral", "none"),
    "granite": (GRANITE, "granite", "granite"),
    "deepseek": (DEEPSEEK, "deepseek_v3", "deepseek_r1"),
    "deepseek 3.1": (DEEPSEEK_V31, "deepseek_v31", "qwen3"),
    "escaped": (
        HERMES.replace('{"name"', '{{ "<tool_call>{\\"name\\": \\"f\\", \\"arguments\\": {}}" }}'),
        "hermes",
        "none",
    ),
    "granite 3.3": (
        GRANITE.replace(
            "'Here is my thought process:' and 'Here is my response:'",
            "between <think></think> and between <response></response>",
        ),
        "granite",
        "granite",
    ),
    "granite 4": (
        HERMES.replace("<|im_start|>", "<|start_of_role|>").replace("<|im_end|>", "<|end_of_text|>"),
        "hermes",
        "none",
    ),
    "phi4": (PHI4, "phi4_mini_json", "none"),
    "phi4 by its tokens": (
        PHI4.replace("functools[", "<|tool_call|>[").replace("]. {{", "]<|/tool_call|>. {{"),
        "phi4_mini_json",
        "none",
    ),
    "harmony": (HARMONY, "openai", "openai"),
    "plain": (PLAIN, "none", "none"),
    "two at once": (HERMES + MISTRAL, "none", "none"),
}
