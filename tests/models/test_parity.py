"""Logits and greedy tokens of every architecture against Hugging Face Transformers (goldens of scripts/make_goldens.py).

The attention here is the plainest one: the whole sequence at once, no pages. Paged parity is the engine's test.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.tree_util import Partial

from jaxserve import LLM
from jaxserve.checkpoint import Checkpoint
from jaxserve.config import EngineConfig
from jaxserve.errors import RequestError
from jaxserve.models.layers import Decoder, Operations
from jaxserve.models.loading import LoadedModel, load_model
from jaxserve.models.registry import ARCHITECTURES, resolve
from jaxserve.pallas_kernels import reference

GOLDENS = Path(__file__).parent.parent / "goldens"
CASES = sorted(path.parent.name for path in GOLDENS.glob("*/config.json"))
PADDED = 96
CLEAR = 1e-3  # margins of the best two scores above this must give the same token


def attend_to_all(qkv, kv_l, rope, *, num_heads, scale, sliding_window, softcap, sinks, **projection):
    """Causal attention over one whole sequence, without pages."""
    assert softcap is None and sinks is None
    cos, sin = rope
    num_kv_heads = (qkv.shape[1] // (2 * cos.shape[1]) - num_heads) // 2
    q, k, v = reference.rope(qkv, cos, sin, num_heads=num_heads, num_kv_heads=num_kv_heads, **projection)
    T, N, _ = q.shape
    k, v = (jnp.repeat(x, N // x.shape[1], axis=1) for x in (k, v))
    scores = jnp.einsum("qnh,knh->nqk", q, k) * scale
    distance = jnp.arange(T)[:, None] - jnp.arange(T)
    seen = (distance >= 0) & (distance < (sliding_window or T))
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    return jnp.einsum("nqk,knh->qnh", weights, v), kv_l


OPS = Operations(Partial(attend_to_all), Partial(reference.add_norm), Partial(reference.parts))


def load(case: str) -> LoadedModel:
    checkpoint = Checkpoint.open(EngineConfig(model=str(GOLDENS / case)))
    config, _ = resolve(checkpoint.config)
    return load_model(checkpoint, config, jnp.float32, progress=False)


def logits_of(model: LoadedModel):
    @jax.jit
    def run(params, ids):
        decoder = nnx.merge(model.graphdef, params)
        hidden, _ = decoder.forward(ids, jnp.arange(len(ids)), [None] * model.config.num_layers, OPS)
        return decoder.logits(hidden)

    def padded(ids: list[int]) -> np.ndarray:  # what follows a token never reaches it: one length, one compilation
        return np.asarray(run(model.params, jnp.zeros(PADDED, jnp.int32).at[: len(ids)].set(jnp.asarray(ids))))[
            : len(ids)
        ]

    return padded


@pytest.mark.parametrize("case", CASES)
def test_hidden_states_of_wanted_tokens_are_those_of_all(case):
    """The last layer is worked out for the wanted tokens alone."""
    model, ids, wanted = load(case), jnp.arange(3, 23), jnp.asarray([19, 4, 4])
    decoder = nnx.merge(model.graphdef, model.params)
    run = jax.jit(lambda *wanted: decoder.forward(ids, jnp.arange(20), [None] * model.config.num_layers, OPS, *wanted))
    every, some = run()[0], run(wanted)[0]
    assert some.shape[0] == 3
    np.testing.assert_allclose(some, every[wanted], rtol=1e-4, atol=1e-5)


def test_every_architecture_has_a_golden():
    covered = {json.loads((GOLDENS / case / "config.json").read_text())["architectures"][0] for case in CASES}
    assert covered == set(ARCHITECTURES), "a new family needs a case in scripts/make_goldens.py"


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_tokens_equal_transformers(case):
    logits, golden = logits_of(load(case)), json.loads((GOLDENS / case / "golden.json").read_text())
    stored = np.load(GOLDENS / case / "logits.npz")
    for name in stored.files:
        got = logits(golden[int(name.removeprefix("prompt_"))]["prompt_ids"])
        np.testing.assert_allclose(got, stored[name], rtol=1e-3, atol=1e-3)
    for entry in golden:
        # All continuations at once: position p of the full text scores token p + 1.
        scores = logits([*entry["prompt_ids"], *entry["ids"]])[len(entry["prompt_ids"]) - 1 : -1]
        clear = np.array(entry["margins"]) > CLEAR
        assert clear.sum() > 16
        np.testing.assert_array_equal(scores.argmax(-1)[clear], np.array(entry["ids"])[clear])
        logprobs = jax.nn.log_softmax(scores, axis=-1)[np.arange(len(entry["ids"])), entry["ids"]]
        np.testing.assert_allclose(logprobs, entry["logprobs"], atol=1e-3)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_are_the_hidden_states_however_the_prompt_is_computed(pooling):
    """Against the decoder without pages; the third prompt takes several chunks, the second time its pages are cached."""
    model = load("llama")
    decoder = nnx.merge(model.graphdef, model.params)
    prompts = [[5], [9, 8, 7], [(7 * i) % 90 + 3 for i in range(70)]]
    llm = LLM(
        str(GOLDENS / "llama"), tokenizer=str(GOLDENS / "vocab" / "smollm.gguf"), dtype="float32", enforce_eager=True, kv_cache_memory_bytes=2**22, max_num_seqs=4,
        max_num_batched_tokens=40,
    )  # fmt: skip
    for _ in range(2):
        for prompt, output in zip(prompts, llm.embed(prompts, pooling=pooling, use_tqdm=False), strict=True):
            ids = jnp.asarray(prompt)
            hidden, _ = decoder.forward(ids, jnp.arange(len(ids)), [None] * model.config.num_layers, OPS)
            wanted = np.asarray(hidden[-1] if pooling == "last" else hidden.mean(0))
            np.testing.assert_allclose(output.outputs.embedding, wanted / np.linalg.norm(wanted), atol=2e-4)
            assert output.prompt_token_ids == prompt
    with pytest.raises(RequestError, match="pooling"):
        llm.embed([5], pooling="cls")
    with pytest.raises(RequestError, match="dimensions"):
        llm.embed([5], dimensions=2)


def test_a_decoder_with_sinks_hands_each_layer_its_own():
    config, _ = resolve(Checkpoint.open(EngineConfig(model=str(GOLDENS / CASES[0]))).config)
    decoder, shape = Decoder(config, jnp.float32), (config.num_layers, config.num_heads)
    decoder.sinks = nnx.Param(jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape))
    seen = []

    def attend(qkv, kv_l, rope, *, sinks, num_heads, **_):
        seen.append(np.asarray(sinks))
        return jnp.zeros((len(qkv), num_heads, config.head_dim)), kv_l

    with jax.disable_jit():
        ids = jnp.zeros(2, jnp.int32)
        decoder.forward(ids, ids, [None] * config.num_layers, OPS._replace(attend=Partial(attend)))
    np.testing.assert_array_equal(seen, decoder.sinks[...])
