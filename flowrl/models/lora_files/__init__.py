"""LoRA files of other programs: what they call layers, and how they are read."""
