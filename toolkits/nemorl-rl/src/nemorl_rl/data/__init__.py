"""Rows, from files to prompts and token ids."""
