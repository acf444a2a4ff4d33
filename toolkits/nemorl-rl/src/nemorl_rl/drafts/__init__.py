"""Draft models that learn beside the policy for which they guess tokens ahead."""
