"""The audit log: a chain of entries per user, who writes it and what checks it."""
