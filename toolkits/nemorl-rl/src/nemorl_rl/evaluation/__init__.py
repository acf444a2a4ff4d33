"""Held-out rows: generating, scoring, voting and suites."""
