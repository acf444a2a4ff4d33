"""The base of the kernel: errors, text, files, deadlines. Nothing here knows what a run, a plugin or a model is."""
