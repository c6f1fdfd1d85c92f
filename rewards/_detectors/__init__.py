"""Detectors of transformers, and that of the shapes, for rewards that judge what stands where."""
