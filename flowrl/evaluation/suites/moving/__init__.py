"""Moving shapes: the smallest task of video, an object that moves as told."""
