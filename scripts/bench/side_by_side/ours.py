"""Train a config with flowrl for as long as `watch.py` lets it.

python ours.py CONFIG [KEY=VALUE...]
"""

from __future__ import annotations

import sys

from flowrl import Trainer, load_config


def main() -> None:
    """Train until something ends this process."""
    trainer = Trainer(load_config(sys.argv[1], sys.argv[2:]))
    while True:
        trainer.step()


if __name__ == "__main__":
    main()
