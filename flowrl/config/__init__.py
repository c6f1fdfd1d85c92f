"""From YAML to checked values: sections, calls of functions, overrides."""
