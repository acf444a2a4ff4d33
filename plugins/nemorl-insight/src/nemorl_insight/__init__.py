"""Looking into runs: view, diff, replay, doctor, plan, further loggers and hooks."""
