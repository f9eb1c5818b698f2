"""Benchmarks: `jaxserve bench latency | throughput | serve`. Flags and JSON keys are those of vLLM's commands."""
