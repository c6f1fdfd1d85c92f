"""Files of weights: which a part of a model has, single ones, and LoRA of other programs."""
