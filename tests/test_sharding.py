"""What a shard is, in numbers; and sharding_cases.py, in a process that has eight virtual CPU devices."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxserve.errors import ConfigError
from jaxserve.models.registry import resolve
from jaxserve.sharding import cut, shard_of

HERE = Path(__file__).parent
HF = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 50, "hidden_size": 32, "intermediate_size": 60,
    "num_hidden_layers": 1, "num_attention_heads": 12, "num_key_value_heads": 4,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_on_eight_devices():
    command = [sys.executable, "-m", "pytest", "-q", "-x", str(HERE / "sharding_cases.py")]
    # LLVM need not optimize what is compared with itself on one device: that is a third of the time.
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=HERE.parent, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2000:]


@pytest.mark.parametrize(
    ("shards", "heads", "kv_heads", "ffn", "rows"), [(1, 12, 4, 60, 50), (2, 6, 2, 30, 25), (4, 3, 1, 15, 13), (12, 1, 1, 5, 5)]
)  # fmt: skip
def test_a_shard_is_a_smaller_decoder(shards: int, heads: int, kv_heads: int, ffn: int, rows: int):
    config = resolve(HF)[0]
    shard = shard_of(config, shards)
    assert (shard.num_heads, shard.num_kv_heads, shard.ffn_size, shard.vocab_rows) == (heads, kv_heads, ffn, rows)
    assert (shard.vocab_size, shard.head_dim, shard.hidden_size) == (50, config.head_dim, 32)
    assert (shard is config) == (shards == 1)


@pytest.mark.parametrize("shards", [3, 5, 6, 8, 24])  # kv heads, all, kv heads, heads, heads
def test_what_cannot_be_split_is_told_what_can(shards: int):
    message = rf"12 query heads and its ffn of 60.* 4 kv heads .*\(1, 2, 4, 12 can be\), got {shards}$"
    with pytest.raises(ConfigError, match=message) as caught:
        shard_of(resolve(HF)[0], shards)
    assert caught.value.param == "tensor_parallel_size"


def test_each_shard_of_a_tensor():
    tensor = np.arange(24).reshape(8, 3)
    assert [cut(tensor, (2, 3), 4, i)[0, 0] for i in range(4)] == [0, 6, 12, 18]
    assert [cut(tensor, (4, 3), 4, i)[0, 0] for i in range(4)] == [0, 0, 12, 12]  # two kv heads on four devices
    assert [cut(tensor, (8, 3), 4, i)[0, 0] for i in range(4)] == [0] * 4
    assert [cut(tensor, (8, 1), 3, i)[0, 0] for i in range(3)] == [0, 1, 2]
    filled = [cut(tensor, (3, 3), 3, i) for i in range(3)]  # a vocabulary of 8 on three devices
    np.testing.assert_array_equal(np.concatenate(filled), np.pad(tensor, ((0, 1), (0, 0))))
    np.testing.assert_array_equal(cut(np.ones(5), (2,), 4, 3), [0, 0])  # all of it beyond the end
