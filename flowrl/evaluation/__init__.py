"""Images in, numbers with intervals out: rewards, held-out prompts, benchmarks."""
