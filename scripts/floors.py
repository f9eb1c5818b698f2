"""The least time that a GPU could take for a model's steps: what the tables call the floor.

Each step reads the weights once, and multiplies them with every token (2 operations for each weight): the longer of
the two counts. Besides, attention of rows that decode reads K and V. The ceilings are what a card was measured to
reach, not its data sheet. Not counted: the head for tokens that nothing is drawn after, an embedding that is only
looked up, attention among a prompt's own tokens (1% of its products at 512), activations, launches.
"""

import argparse
from typing import NamedTuple

from jaxserve.models.base import ModelConfig


class Card(NamedTuple):
    """What one GPU reaches at best."""

    read_tb_s: float = 4.3
    matrix_tflops: float = 790


def add_card_arguments(parser: argparse.ArgumentParser) -> None:
    card = Card()
    parser.add_argument("--read-tb-s", type=float, default=card.read_tb_s, help="memory's best (default: %(default)s)")
    parser.add_argument(
        "--matrix-tflops", type=float, default=card.matrix_tflops, help="products' best (default: %(default)s)"
    )


def card_of(args: argparse.Namespace) -> Card:
    return Card(args.read_tb_s, args.matrix_tflops)


class Weights(NamedTuple):
    """Of a decoder, as a step meets them."""

    nbytes: int  # that every step reads
    in_layers: int  # numbers that each token is multiplied with
    in_head: int  # numbers that a token is multiplied with which another one is drawn after
    kv_bytes: int  # of one token, over all layers


def weights_of(model: ModelConfig, itemsize: int = 2) -> Weights:
    """Of a dense decoder; biases and norms, less than 1 in 10,000, are left out."""
    attention = model.hidden_size * (model.qkv_size + model.num_heads * model.head_dim)
    in_layers = model.num_layers * (attention + 3 * model.hidden_size * model.ffn_size)
    in_head = model.vocab_size * model.hidden_size
    return Weights((in_layers + in_head) * itemsize, in_layers, in_head, model.kv_bytes_per_token(itemsize))


def least_s(card: Card, weights: Weights, *, steps: int = 1, tokens: int, drawn: int, kv_tokens: int = 0) -> float:
    """Seconds of so many steps, which together compute and draw so many tokens, and read K and V of `kv_tokens`."""
    read_s = steps * weights.nbytes / card.read_tb_s / 1e12
    products_s = 2 * (weights.in_layers * tokens + weights.in_head * drawn) / card.matrix_tflops / 1e12
    return max(read_s, products_s) + kv_tokens * weights.kv_bytes / card.read_tb_s / 1e12


def decode_s(card: Card, weights: Weights, rows: int, context: int) -> float:
    """Seconds of a step in which each row computes one token and reads `context` tokens."""
    return least_s(card, weights, tokens=rows, drawn=rows, kv_tokens=rows * context)


def output_tokens_per_s(
    card: Card, weights: Weights, rows: int, input_len: int, output_len: int, *, cached: float = 0
) -> float:
    """Of rows that each take a prompt, a share of which is in the prefix cache, and decode; prompts ride with other
    rows' decode steps.
    """
    decoded = rows * (output_len - 1)
    seconds = least_s(
        card, weights, steps=output_len, tokens=round(rows * input_len * (1 - cached)) + decoded,
        drawn=rows * output_len, kv_tokens=decoded * (input_len + output_len // 2),
    )  # fmt: skip
    return rows * output_len / seconds
