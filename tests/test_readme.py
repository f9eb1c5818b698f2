"""README's offline examples run as they stand, on a tiny model in place of the demo model."""

import functools
import json
import re
from pathlib import Path

import pytest

import jaxserve

ROOT = Path(__file__).parent.parent
SECTION = re.search(r"^## Offline\n(.*?)^## ", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
BLOCKS = re.findall(r"^```python\n(.*?)^```", SECTION[1] if SECTION else "", re.DOTALL | re.MULTILINE)
SHAPE = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 1024, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip


def test_there_are_three_examples():
    assert [sum(name in block for block in BLOCKS) for name in ("generate(", "beam_search(", "AsyncLLM(")] == [2, 1, 1]
    assert len(BLOCKS) == 3


@pytest.mark.parametrize("block", BLOCKS, ids=["generate", "beam_search", "async"][: len(BLOCKS)])
def test_it_runs(block, tmp_path, monkeypatch, capsys):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    tokenizer = str(ROOT / "tests" / "goldens" / "vocab" / "smollm.gguf")
    for name in ("LLM", "AsyncLLM"):
        tiny = functools.partial(
            getattr(jaxserve, name), str(tmp_path), load_format="dummy", tokenizer=tokenizer, enforce_eager=True,
            kv_cache_memory_bytes=2**22, max_num_seqs=4, max_num_batched_tokens=24,
        )  # fmt: skip
        monkeypatch.setattr(jaxserve, name, tiny, raising=False)
    exec(compile(block, "README.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip()
