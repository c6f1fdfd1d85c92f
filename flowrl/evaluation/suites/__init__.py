"""Benchmarks: prompts and a checker for each."""
