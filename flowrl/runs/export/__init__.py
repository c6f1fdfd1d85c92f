"""Trained weights as files for other programs, with a model card."""
