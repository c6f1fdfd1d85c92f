"""Which prompts an iteration gets: each is a class that is made once and called every iteration."""
