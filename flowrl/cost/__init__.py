"""What a config takes: memory, work, time, and whether it fits a card."""
