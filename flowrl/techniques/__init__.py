"""Published techniques that no shipped config names, and the parts of the loop that they need."""
