"""Annotated shapes are checked in tests (conftest.py): a wrong one is an error, also while a step is traced."""

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

from jaxserve import sampling_inputs, step

TABLE = jnp.zeros((2, 3), jnp.int32)


@pytest.mark.parametrize(
    "writes", [jnp.zeros((4, 1), jnp.int32), jnp.zeros(3, jnp.int32), jnp.zeros((3, 1), jnp.float32)], ids=str
)
@pytest.mark.parametrize("traced", [False, True])
def test_a_wrong_shape_or_type_is_an_error(writes: jax.Array, traced: bool):
    write = jax.jit(step._write_pages) if traced else step._write_pages
    write(TABLE, jnp.zeros((3, 1), jnp.int32))
    with pytest.raises(TypeCheckError):
        write(TABLE, writes)


def test_a_plain_annotation_is_checked_too():
    with pytest.raises(TypeCheckError):
        sampling_inputs.set_slot("extras", jnp.int32(0), None)  # type: ignore[arg-type]
