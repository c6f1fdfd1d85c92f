"""The shapes benchmark: scenes, prompts, and a checker that reads pixels."""
