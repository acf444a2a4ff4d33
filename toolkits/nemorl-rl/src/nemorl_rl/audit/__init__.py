"""Numbers beside numbers: where sampler, trainer and float32 part."""
