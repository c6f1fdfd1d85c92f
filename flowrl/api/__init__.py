"""The Python door: what a script or a notebook calls. Every call goes through `arguments`."""
