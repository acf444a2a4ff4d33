"""Folders of models: where they come from, their geometry and how they are exported."""
