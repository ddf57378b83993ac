"""Parts of `benchmarks.serve_load`: requests and their bytes, prompts of a known length, and what the numbers mean."""
