"""Runs live in a browser, and votes of people on their images."""
