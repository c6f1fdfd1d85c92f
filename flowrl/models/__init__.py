"""Velocity fields over diffusers pipelines, and what they share."""
