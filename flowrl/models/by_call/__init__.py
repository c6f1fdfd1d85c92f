"""A FlowModel over any pipeline of diffusers by the pipeline's own ``__call__``: no adapter."""
