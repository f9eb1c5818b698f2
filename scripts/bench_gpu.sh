#!/usr/bin/env bash
# Offline throughput of the two shapes of docs/benchmarks.md on one GPU, with random weights: 512 tokens in, 256 out.
# Usage: scripts/bench_gpu.sh [SHAPE ...]     (default: qwen-1.5b llama-8b)     OUT: folder for JSON and logs
set -u
cd "$(dirname "$0")/.." || exit 1
out=${OUT:-/tmp/jaxserve-bench}
mkdir -p "$out"
for shape in "${@:-qwen-1.5b llama-8b}"; do
    for name in $shape; do
        case $name in
            qwen-1.5b) tokenizer=tests/goldens/vocab/qwen2.gguf ;;
            *) tokenizer=tests/goldens/vocab/llama-bpe.gguf ;;
        esac
        # shellcheck disable=SC2086  # BENCH_ARGS is meant to split
        timeout "${LIMIT_S:-280}" "${PYTHON:-python3}" -m jaxserve bench throughput \
            --model "scripts/shapes/$name" --load-format dummy --tokenizer "$tokenizer" --max-model-len 4096 \
            --input-len 512 --output-len 256 --num-prompts "${NUM_PROMPTS:-256}" --num-warmups "${NUM_WARMUPS:-256}" \
            --temperature 0 --disable-detokenize --output-json "$out/throughput-$name.json" ${BENCH_ARGS:-} \
            2> >(tr '\r' '\n' | tee "$out/throughput-$name.log" | grep -v "%|" >&2)
        echo "$name: exit code $?"
    done
done
