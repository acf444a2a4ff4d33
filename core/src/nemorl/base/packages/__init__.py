"""Installed distributions, their plugins, and who may use them."""
