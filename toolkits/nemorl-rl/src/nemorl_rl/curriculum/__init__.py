"""Which prompts a rollout asks next: what became of each so far, and the samplers that choose by it."""
