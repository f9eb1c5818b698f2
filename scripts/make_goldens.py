"""Makes tests/goldens: what Hugging Face Transformers (torch, float32, CPU) answers, for the parity tests to equal.

    python scripts/make_goldens.py --demo-gguf SmolLM2-135M-Instruct.Q4_1.gguf      (all)
    python scripts/make_goldens.py tiny                                             (one part: tiny, vocab, demo, lm_eval)

Needs torch, transformers, accelerate, gguf, safetensors and sentencepiece, lm_eval for its part, and nothing of jaxserve: weights, permutations, chat
templates and token ids of the goldens come from other people's code. Seeds are fixed, so a run changes nothing.

    tests/goldens/<case>/         a tiny random checkpoint of one architecture, with golden.json and logits.npz
    tests/goldens/vocab/          tiny vocabularies as .gguf and .json: ids of TEXTS by the reference tokenizers
    tests/goldens/demo.json       greedy continuations of the demo model
    tests/goldens/demo_ids.json   ids of TEXTS by the demo model's tokenizer
    tests/goldens/lm_eval/demo.json   what lm-eval's Hugging Face backend answers to the tasks beside it, with the demo model
"""

import argparse
import contextlib
import json
import tempfile
from pathlib import Path

import gguf
import numpy as np
import sentencepiece
import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2Tokenizer,
    Qwen3Config,
)

GOLDENS = Path(__file__).resolve().parent.parent / "tests" / "goldens"

TINY = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}

# case -> (config, dtype of the stored weights)
CASES = {
    "llama": (LlamaConfig(**TINY), torch.float32),
    "llama3_bias_tied": (
        LlamaConfig(**TINY, rope_parameters=LLAMA3_ROPE, attention_bias=True, mlp_bias=True, head_dim=32,
                    tie_word_embeddings=True),
        torch.bfloat16,
    ),
    "llama_linear": (LlamaConfig(**TINY, rope_parameters=LINEAR, rms_norm_eps=1e-5), torch.float16),
    "mistral": (MistralConfig(**TINY, sliding_window=8), torch.bfloat16),
    "qwen2_tied": (Qwen2Config(**TINY, tie_word_embeddings=True), torch.bfloat16),
    "qwen2_window_yarn": (
        Qwen2Config(**TINY, rope_parameters=YARN, use_sliding_window=True, sliding_window=8, max_window_layers=1),
        torch.bfloat16,
    ),
    "qwen3": (Qwen3Config(**TINY, head_dim=32), torch.bfloat16),
    "qwen3_tied": (Qwen3Config(**TINY, head_dim=16, tie_word_embeddings=True), torch.bfloat16),
}  # fmt: skip
PROMPT_LENGTHS = (3, 17, 33, 50)
LOGITS_OF = (0, 1)  # prompts of which every position's logits are kept

TEXTS = [
    "", " ", "  ", "a", "Hello, world!", " Hello", "Hello ", "The quick brown fox jumps over the lazy dog.",
    "I'm sure they'll say it's fine; we've SEEN it, I'D say. You'RE right.", "naïve café résumé Ångström",
    "e\u0301 and n\u0303 and \u1100\u1161 decomposed", "ﬁne ligatures ① ½ ²", "Straße, Größe, Übermut", "¿Qué tal? ¡Muy bien!",
    "Ça va très bien, merci.", "Привет, мир! Как дела?", "Γειά σου Κόσμε", "שלום עולם", "مرحبا بالعالم، كيف حالك؟",
    "नमस्ते दुनिया, आप कैसे हैं?", "สวัสดีชาวโลก", "你好，世界！今天天气怎么样？", "こんにちは世界。カタカナとひらがな", "안녕하세요 세계",
    "Tiếng Việt có dấu", "😀👍🏽🇺🇸 ❤️ 👩‍👩‍👧‍👦", "a😀b 🙂c", "1", "12", "1234567890", "3.14159 and 1,000,000", " 2024-11-29 07:05",
    "x  42   7", "٣٤٥ १२३ ４２", "def f(x):\n    return x ** 2  # square\n", "for (int i = 0; i < n; ++i) { a[i] += 1; }\n\t}",
    "<div class=\"a\">text</div>", "{\"key\": [1, 2.5, null]}", "https://example.org/path?q=1&r=%20", "\n", "\n\n\n", "a\n\n b\r\n\tc",
    "tabs\t\there", "    four\n        eight\n", "trailing   \n   ", "zero\u200bwidth nbsp\u00a0here\u3000wide", "\u2581already\u2581",
    "...!!!???", "--- *** ===", "a_b_c __init__", "CamelCaseIdentifiers HTTPServer2", "\x00\x01 control \x7f",
]  # fmt: skip
SPECIAL_TEXTS = ["{a}", "x{a}y", "{a}\nuser{b} hi", " {a} {b}", "{a}{b}{a}", "{half}", "end {b}\n"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], "tiny", "vocab", "demo", "lm_eval"])
    parser.add_argument("--demo-gguf", type=Path, help="file of the demo model, for the parts demo and lm_eval")
    args = parser.parse_args()
    parts = args.parts or ["tiny", "vocab", "demo", "lm_eval"]
    torch.set_grad_enabled(False)
    if "tiny" in parts:
        for case, (config, dtype) in CASES.items():
            make_tiny(case, config, dtype)
    if "vocab" in parts:
        make_vocabularies(GOLDENS / "vocab")
    if "demo" in parts:
        make_demo(args.demo_gguf)
    if "lm_eval" in parts:
        make_lm_eval(args.demo_gguf)


# ---- tiny random checkpoints


def make_tiny(case: str, config, dtype: torch.dtype) -> None:
    """A checkpoint whose logits are spread like a trained model's, so that greedy choices have clear margins."""
    torch.manual_seed(sum(case.encode()))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight"):
            weight.copy_(1 + 0.2 * torch.randn_like(weight))
        elif name.endswith("bias"):
            weight.copy_(0.2 * torch.randn_like(weight))
        else:
            weight.copy_(torch.randn_like(weight) * (1.0 if "embed" in name else 1.5 * weight.shape[1] ** -0.5))
        weight.copy_(weight.to(dtype))  # what is stored is what is computed with, in float32
    folder = GOLDENS / case
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {n: w.to(dtype).contiguous() for n, w in model.state_dict().items()}
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    save_tensors(folder, tensors, shards=2 if case == "qwen3" else 1)
    written = config.to_dict() | {"architectures": [type(model).__name__]}
    (folder / "config.json").write_text(json.dumps(written, indent=1, sort_keys=True) + "\n")
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, config.vocab_size, n).tolist() for n in PROMPT_LENGTHS]
    logits = {f"prompt_{i}": model(torch.tensor([prompts[i]])).logits[0].numpy() for i in LOGITS_OF}
    np.savez_compressed(folder / "logits.npz", **logits)
    golden = [{"prompt_ids": p, **greedy(model, p, 32)} for p in prompts]
    write_json(folder / "golden.json", golden)
    least = min(min(g["margins"]) for g in golden)
    print(f"{case}: {sum(t.nbytes for t in tensors.values())} bytes of weights, smallest margin {least:.4f}")


def save_tensors(folder: Path, tensors: dict[str, torch.Tensor], shards: int) -> None:
    if shards == 1:
        return save_file(tensors, folder / "model.safetensors")
    names = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    weight_map = {tensor: names[i % shards] for i, tensor in enumerate(tensors)}
    for name in names:
        save_file({t: w for t, w in tensors.items() if weight_map[t] == name}, folder / name)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map}, indent=1)
    )


def greedy(model, prompt_ids: list[int], count: int) -> dict[str, list]:
    """`count` greedy tokens, past any end token; each one's log-probability, and its lead over the second best."""
    cache, ids = DynamicCache(config=model.config), torch.tensor([prompt_ids])
    chosen, logprobs, margins = [], [], []
    for _ in range(count):
        scores = model(ids, past_key_values=cache, use_cache=True).logits[0, -1].float()
        best = torch.topk(scores, 2)
        chosen.append(int(best.indices[0]))
        logprobs.append(round(float(torch.log_softmax(scores, -1)[chosen[-1]]), 6))
        margins.append(round(float(best.values[0] - best.values[1]), 6))
        ids = torch.tensor([[chosen[-1]]])
    return {"ids": chosen, "logprobs": logprobs, "margins": margins}


# ---- tiny vocabularies: one GGUF file and one list of ids for each way to cut text

LLAMA3_CUT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN_CUT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def digits_then_gpt2():
    """The pre-tokenizer of SmolLM2's tokenizer.json (and StarCoder's)."""
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)])


def split_by(regex: str):
    """The pre-tokenizer of Llama 3's, Qwen2's and Mistral Nemo's tokenizer.json."""
    split = pre_tokenizers.Split(Regex(regex), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


CUTS = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": digits_then_gpt2(),
    "llama-bpe": split_by(LLAMA3_CUT),
    "qwen2": split_by(LLAMA3_CUT.replace("{1,3}", "")),
    "tekken": split_by(TEKKEN_CUT),
}
CORPUS = [text for text in TEXTS for _ in range(4)]
SPECIAL = {"{a}": "<|im_start|>", "{b}": "<|im_end|>", "{half}": "<|im_sta"}


def texts_with(special: dict[str, str]) -> list[str]:
    filled = []
    for text in SPECIAL_TEXTS:
        for mark, token in special.items():
            text = text.replace(mark, token)
        filled.append(text)
    return TEXTS + filled


def make_vocabularies(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for pre in CUTS:
        byte_level_vocabulary(folder, pre)
    sentencepiece_vocabulary(folder)


def byte_level_vocabulary(folder: Path, pre: str) -> None:
    """Trains a small byte-level BPE, writes it as GGUF, and encodes TEXTS with the same parts as the real tokenizers."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = CUTS[pre]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = [SPECIAL["{a}"], SPECIAL["{b}"], "<|bos|>"]
    trained.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=700, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    model = json.loads(trained.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    whole_words = pre in ("llama-bpe", "tekken")
    if whole_words:  # words that merges do not reach: only ignore_merges finds them
        tokens += ["Ġexample", "Ġdoubly"]
    vocab, merges = {t: i for i, t in enumerate(tokens)}, [tuple(m) for m in model["merges"]]
    if pre == "qwen2":
        backend = Qwen2Tokenizer(vocab=vocab, merges=merges).backend_tokenizer
    else:
        backend = Tokenizer(models.BPE(vocab, merges, ignore_merges=whole_words))
        backend.pre_tokenizer, backend.decoder = CUTS[pre], decoders.ByteLevel()
    backend.add_special_tokens(special)
    adds_bos = pre in ("llama-bpe", "tekken")
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", special_tokens=[("<|bos|>", vocab["<|bos|>"])]
        )
    writer = vocabulary_writer(folder / f"{pre}.gguf", "gpt2", tokens)
    writer.add_tokenizer_pre(pre)
    writer.add_token_types([3 if t in special else 1 for t in tokens])
    writer.add_token_merges([" ".join(m) for m in merges])
    writer.add_bos_token_id(vocab["<|bos|>"])
    writer.add_eos_token_id(vocab[SPECIAL["{b}"]])
    finish(writer)
    texts = [*texts_with(SPECIAL), " example doubly examples"]
    write_json(folder / f"{pre}.json", [{"text": t, "ids": backend.encode(t).ids} for t in texts])
    print(f"vocab {pre}: {len(tokens)} tokens")


def sentencepiece_vocabulary(folder: Path) -> None:
    """Trains SentencePiece BPE with byte fallback; the ids are those of the sentencepiece library itself."""
    with tempfile.TemporaryDirectory() as temporary:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([t for t in CORPUS if t.strip() and "\n" not in t]),
            model_prefix=f"{temporary}/spm", vocab_size=700, model_type="bpe", byte_fallback=True,
            normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=True,
            character_coverage=0.98, minloglevel=2,
        )  # fmt: skip
        processor = sentencepiece.SentencePieceProcessor(model_file=f"{temporary}/spm.model")
    size = processor.vocab_size()
    writer = vocabulary_writer(folder / "spm.gguf", "llama", [processor.id_to_piece(i) for i in range(size)])
    writer.add_token_scores([processor.get_score(i) for i in range(size)])
    kinds = [(processor.is_unknown, 2), (processor.is_control, 3), (processor.is_byte, 6), (lambda i: True, 1)]
    writer.add_token_types([next(kind for test, kind in kinds if test(i)) for i in range(size)])
    writer.add_bos_token_id(processor.bos_id())
    writer.add_eos_token_id(processor.eos_id())
    writer.add_unk_token_id(processor.unk_id())
    finish(writer)
    bos = processor.bos_id()
    # sentencepiece reads "\u2581" in a text as a space, and so do the Hugging Face tokenizers made from its models
    ids = [{"text": t, "ids": [bos, *processor.encode(t)]} for t in TEXTS]
    write_json(folder / "spm.json", ids)
    print(f"vocab spm: {size} tokens")


def vocabulary_writer(path: Path, kind: str, tokens: list[str]) -> gguf.GGUFWriter:
    """A GGUF file of a one-layer llama without layers' tensors: enough to make a tokenizer of."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_context_length(64)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_tensor("token_embd.weight", np.zeros((1, 32), np.float32))
    return writer


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# ---- the demo model

CHATS = [
    [("user", "What is the capital of France?")],
    [("system", "Answer in one sentence."), ("user", "Why is the sky blue?")],
    [("user", "Write a Python function that adds two numbers.")],
    [("user", "Wie heißt die Hauptstadt von Deutschland?")],
    [("user", "请用中文介绍一下北京。")],
    [("user", "Hi!"), ("assistant", "Hello! How can I help?"), ("user", "Tell me a joke about cats 🐱.")],
]
COMPLETIONS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "La ville de Paris est connue pour",
    "Москва — это",
    "1, 2, 3, 4, 5, 6, 7,",
]


def make_demo(path: Path | None) -> None:
    if path is None:
        raise SystemExit("the part demo needs --demo-gguf FILE")
    tokenizer, template = demo_tokenizer(path)
    ids = [{"text": t, "ids": tokenizer.encode(t)} for t in texts_with(SPECIAL)]
    write_json(GOLDENS / "demo_ids.json", ids)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    golden = []
    for chat in CHATS:
        messages = [{"role": role, "content": content} for role, content in chat]
        text = tokenizer.apply_chat_template(
            messages, chat_template=template, add_generation_prompt=True, tokenize=False
        )
        golden.append({"messages": messages, "prompt": text})
    golden += [{"prompt": text} for text in COMPLETIONS]
    for entry in golden:
        entry["prompt_ids"] = tokenizer.encode(entry["prompt"], add_special_tokens=False)
        entry |= greedy(model, entry["prompt_ids"], 48)
        print(f"demo: {tokenizer.decode(entry['ids'])[:90]!r}, smallest margin {min(entry['margins'])}")
    write_json(GOLDENS / "demo.json", golden)


def make_lm_eval(path: Path | None) -> None:
    if path is None:
        raise SystemExit("the part lm_eval needs --demo-gguf FILE")
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    path = path.resolve()
    tokenizer, _ = demo_tokenizer(path)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    tasks = ["jaxserve_choices", "jaxserve_prose", "jaxserve_continue"]
    with contextlib.chdir(GOLDENS / "lm_eval"):  # the tasks name their data so
        manager = TaskManager(include_path=".", include_defaults=False)
        found = lm_eval.simple_evaluate(HFLM(model, tokenizer=tokenizer), tasks=tasks, task_manager=manager)
    samples = {task: sorted(rows, key=lambda row: row["doc_id"]) for task, rows in found["samples"].items()}
    rows = [{"task": task, "answers": row["filtered_resps"]} for task in tasks for row in samples[task]]
    write_json(GOLDENS / "lm_eval" / "demo.json", rows)


def demo_tokenizer(path: Path) -> tuple[PreTrainedTokenizerFast, str]:
    """The tokenizer as SmolLM2's own tokenizer.json describes it, with the vocabulary out of the GGUF file."""
    fields = gguf.GGUFReader(path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(m.split(" ")) for m in fields["tokenizer.ggml.merges"].contents()]
    backend = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    backend.pre_tokenizer, backend.decoder = digits_then_gpt2(), decoders.ByteLevel()
    special = [t for t, kind in zip(tokens, fields["tokenizer.ggml.token_type"].contents(), strict=True) if kind == 3]
    backend.add_special_tokens(special)
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names), fields["tokenizer.chat_template"].contents()


def write_json(path: Path, rows: list[dict]) -> None:
    """One row a line: diffs stay readable."""
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
