"""Records, errors, files, processes, prompts: what every room uses."""
