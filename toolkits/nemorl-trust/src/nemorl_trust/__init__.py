"""Trust around runs and plugins: isolation, locks, signatures, site policy, audit, and every server's front door."""
