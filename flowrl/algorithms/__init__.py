"""The axes of a method: pure functions of tensors."""
