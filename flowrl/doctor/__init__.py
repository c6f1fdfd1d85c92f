"""A preflight: is a config fit to be trained? What it finds says what to change."""
