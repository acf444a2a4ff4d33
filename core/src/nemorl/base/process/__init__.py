"""This process: deadlines, signals, logs, timing and variables."""
