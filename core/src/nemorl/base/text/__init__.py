"""Text in and out: YAML, mappings, numbers, names, secrets and near misses."""
