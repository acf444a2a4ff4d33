"""Learning from preferences: DPO and its kin, reward models."""
